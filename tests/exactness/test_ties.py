"""`ties="plain"`: where rounding could exchange two tokens, a plain pass decides."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import specdec_mlx as sd
import tiny
from scripted import OracleDrafter, OracleTrees
from selection import FULL
from specdec_mlx.exactness.ties import lead, moved_filters, tie_bound
from specdec_mlx.loop import Token, speculate
from specdec_mlx.sampling import Sampling

VOCAB, SIZE, NUM_TOKENS = 128, 64, 32


def shortened(array: mx.array) -> mx.array:
    """Float32 numbers with 10 bits after the point, as TF32 has them."""
    bits = array.view(mx.uint32)
    return (((bits + 0x1000) >> 13) << 13).view(mx.float32)


class Rounding(nn.Module):  # type: ignore[misc]
    """A target whose next token follows from the last three. A GPU's kernels round its wide rows.

    Its cache holds tokens, which no kernel rounds.
    """

    def __init__(self, *, shortens: bool = True) -> None:
        super().__init__()
        keys = mx.random.split(mx.random.key(0), 4)
        self.layers = [nn.Identity()]
        self.tables = [mx.random.normal((VOCAB, SIZE), key=key) for key in keys[:3]]
        self.head = mx.random.normal((SIZE, VOCAB), key=keys[3])
        self.shortens = shortens

    def __call__(self, ids: mx.array, cache: Any) -> mx.array:
        entry = ids.astype(mx.float32)[:, None, :, None]
        tokens, _ = cache[0].update_and_fetch(entry, entry)
        tokens, num = tokens[:, 0, :, 0].astype(mx.uint32), ids.shape[1]
        tokens = mx.pad(tokens, [(0, 0), (2, 0)])
        states = mx.tanh(
            sum(self.tables[i][tokens[:, tokens.shape[1] - num - i :][:, :num]] for i in range(3))
        )
        # One product for each row, so that rows round alike unless they are shortened.
        head = shortened(self.head) if self.shortens and num > 1 else self.head
        rows = [states[:, i : i + 1] for i in range(num)]
        if self.shortens and num > 1:
            rows = [shortened(row) for row in rows]
        return mx.concatenate([row @ head for row in rows], axis=1)


@cache
def target(*, shortens: bool = True) -> nn.Module:
    return Rounding(shortens=shortens)


def written(number: int, ties: str | None, temp: float, **how: Any) -> tuple[list[int], Token]:
    """A text with drafts of which one token in five is wrong, and its last token."""
    text, how = plain(number, temp, **how), {"num_draft_tokens": 4, "probe": False} | how
    drafter = how.pop("drafter", None) or OracleDrafter(text, VOCAB, wrong=0.2, seed=number)
    tokens = list(generated(number, drafter, temp, ties=ties, **how))
    return [token.token for token in tokens], tokens[-1]


def generated(number: int, drafter: Any, temp: float, **how: Any) -> list[Token]:
    prompt = random.Random(number).choices(range(VOCAB), k=8)
    how = {"max_tokens": NUM_TOKENS, "sampler": Sampling(temp), "seed": number} | how
    return list(speculate(how.pop("model", None) or target(), prompt, drafter, **how))


def plain(number: int, temp: float, **how: Any) -> list[int]:
    how = {name: how[name] for name in ("sampler", "logits_processors", "model") if name in how}
    return [token.token for token in generated(number, None, temp, **how)]


@pytest.mark.parametrize("temp", [0.0, 0.8])
@pytest.mark.parametrize("numbers", [range(30), pytest.param(range(200), marks=FULL)])
def test_a_text_is_that_of_plain_decoding_where_wide_rows_are_rounded(
    numbers: range, temp: float
) -> None:
    """All of them, where fewer are without the option; and few rounds end at a tie."""
    same, ties = {None: 0, "plain": 0}, 0
    for number in numbers:
        for choice in same:
            text, last = written(number, choice, temp)
            same[choice] += text == plain(number, temp)
            ties += last.stats.ties
    assert same[None] < same["plain"] == len(numbers)
    assert 0 < ties < len(numbers) * NUM_TOKENS / 20
