"""Contexts as numbers: the three tokens before a place in one integer, the nearest one on top.

Two contexts read backwards then compare as their numbers do, and bisection over sorted contexts
runs in C.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from specdec_mlx.options import wrong

SEPARATOR = -1
"""Stands between two texts of an index, where a token id would stand."""

BITS = 21
MAX_TOKEN = 2**BITS - 3
"""The largest token id that is indexed: 0 stands for what is outside of the text."""

PER_PACK = 3
LEVELS = 4
"""Packs that are compared, 12 tokens; longer agreement is read from the text itself."""

KNOWN = LEVELS * PER_PACK

NEAREST = BITS * (PER_PACK - 1)
"""By how many bits a pack is shifted to leave its nearest token, + 1."""

PACK = BITS * PER_PACK
MASK = (1 << PACK) - 1

MAX_MATCH = 64
"""How far back a match is measured, tokens; what agrees for so long goes on in the same way."""


def push(key: int, token: int) -> int:
    """The key of a context one token later: `token` comes nearest, the twelfth one is dropped."""
    return (token + 1) << (BITS * (KNOWN - 1)) | key >> BITS


def key_of(tokens: Sequence[int]) -> int:
    """The last 12 tokens as one number, the nearest one on top; what is not there counts as 0."""
    key = 0
    for token in tokens[-KNOWN:]:
        key = push(key, token)
    return key


def packs_of(key: int) -> tuple[int, ...]:
    """The packs [LEVELS] of a context, the nearest one first."""
    return key >> 3 * PACK, key >> 2 * PACK & MASK, key >> PACK & MASK, key & MASK


def pack_text(tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n+1"]:
    """The packs before each of the n tokens and behind the last one, int64.

    A separator and everything beyond it count as outside of the text, 0.
    """
    shifted = np.zeros(len(tokens) + PER_PACK, np.int64)
    shifted[PER_PACK:] = tokens.astype(np.int64) + 1
    first, second, third = (shifted[PER_PACK - 1 - i :][: len(tokens) + 1] for i in range(3))
    second = np.where(first == 0, 0, second)
    third = np.where(second == 0, 0, third)
    packs: Int[np.ndarray, " n+1"] = first << (2 * BITS) | second << BITS | third
    return packs


def agreement(
    keys: Sequence[int], key: int, start: int, low: int, high: int, of: int = PER_PACK
) -> int:
    """In how many tokens, from the nearest one on, the most alike of sorted keys agree with one.

    Args:
        keys: sorted, packs or keys of more tokens.
        key: what they are compared with.
        start: where it belongs among them, low <= start <= high.
        low: where they begin.
        high: where they end, exclusive, above `low`.
        of: tokens in each.
    """
    if start == high:
        difference = keys[start - 1] ^ key
    elif start == low:
        difference = keys[start] ^ key
    else:
        difference = min(keys[start] ^ key, keys[start - 1] ^ key)
    return of - (difference.bit_length() + BITS - 1) // BITS


def bounds(pack: int, length: int, of: int = PER_PACK) -> tuple[int, int]:
    """Packs, or keys of `of` tokens, that agree in `length` are lower <= p < upper; length >= 1."""
    shift = BITS * (of - length)
    lower = pack >> shift << shift
    return lower, lower + (1 << shift)


def check_tokens(given: Sequence[int]) -> Int[np.ndarray, " n"]:
    """Token ids as an array; ValueError for what is none, or too large to be packed."""
    tokens: Int[np.ndarray, " n"] = np.array(given)
    if tokens.ndim != 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise wrong("tokens", given, "token ids [n], ints. Tokenize a text first")
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() <= MAX_TOKEN):
        found = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ValueError(
            f"A memory got token {found}, expected ids from 0 to {MAX_TOKEN}. "
            "Tokenize the text with the target's tokenizer."
        )
    return tokens
