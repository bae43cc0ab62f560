"""Contexts as numbers: the three tokens before a place in one integer, the nearest one on top.

Two contexts read backwards then compare as their numbers do, and bisection over sorted contexts
runs in C.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

SEPARATOR = -1
"""Stands between two texts of an index, where a token id would stand."""

BITS = 21
MAX_TOKEN = 2**BITS - 3
"""The largest token id that is indexed: 0 stands for what is outside of the text."""

PER_PACK = 3
LEVELS = 4
"""Packs that are compared, 12 tokens; longer agreement is read from the text itself."""

MAX_MATCH = 64
"""How far back a match is measured, tokens; what agrees for so long goes on in the same way."""


def push(pack: int, token: int) -> int:
    """The pack one token later: `token` comes nearest, the third one is dropped."""
    return (token + 1) << (2 * BITS) | pack >> BITS


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


def agreement(one: int, other: int) -> int:
    """In how many tokens two packs agree, counted from the nearest one, 0 to 3."""
    difference = one ^ other
    return PER_PACK - (difference.bit_length() + BITS - 1) // BITS


def bounds(pack: int, length: int) -> tuple[int, int]:
    """Packs p that agree with `pack` in `length` tokens, 1 to 3, are lower <= p < upper."""
    shift = BITS * (PER_PACK - length)
    lower = pack >> shift << shift
    return lower, lower + (1 << shift)


def check_tokens(tokens: Int[np.ndarray, " n"]) -> None:
    """Raise ValueError for what is no token id, or too large to be packed."""
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() <= MAX_TOKEN):
        wrong = int(tokens.min() if tokens.min() < 0 else tokens.max())
        raise ValueError(
            f"A memory got token {wrong}, expected ids from 0 to {MAX_TOKEN}. "
            "Tokenize the text with the target's tokenizer."
        )
