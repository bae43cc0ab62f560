"""Medusa: one small head for each of the next tokens, all from one state.

Cai et al. 2024, arXiv 2401.10774. Head i guesses the token i + 2 positions after the state's:
x + silu(W x + b), then a matrix of its own over the vocabulary. The heads do not see what the
others guess.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.drafters.heads.drafter import FinalStateHead
from specdec_mlx.drafters.heads.session import OnePassSession
from specdec_mlx.drafters.heads.target_ends import TargetEnds


class Medusa(FinalStateHead):
    """Medusa heads.

    Args:
        num_heads: how many tokens they guess.
        num_layers: blocks of each, below its matrix.
        ends: of the target.
        own_heads: rows of the matrix that each has; 0 for the target's head.
    """

    kind = "Medusa"
    session = OnePassSession

    def __init__(
        self, num_heads: int, num_layers: int, ends: TargetEnds, *, own_heads: int = 0
    ) -> None:
        """Random weights."""
        super().__init__()
        width = ends.width
        self.ends = ends
        self.most_drafted = num_heads
        self.blocks = [
            [nn.Linear(width, width) for _ in range(num_layers)] for _ in range(num_heads)
        ]
        if own_heads:
            self.lm_heads = [nn.Linear(width, own_heads, bias=False) for _ in range(num_heads)]

    def make_cache(self) -> list[Any]:
        """For the last state that was read."""
        return []

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Keep the last of the target's states [n, D]."""
        cache[:] = [rows[-1:]]

    def guesses(self, token: int, number: int, cache: list[Any]) -> mx.array:
        """Logits [n, V] of the first n heads, of the state that was read last."""
        states = [self.state(cache[0], i) for i in range(number)]
        if "lm_heads" not in self:
            return self.ends.logits(mx.concatenate(states))
        return mx.concatenate([self.lm_heads[i](state) for i, state in enumerate(states)])

    def state(self, state: mx.array, index: int) -> mx.array:
        """What a head makes [..., D] of the target's state [..., D], below its matrix."""
        for block in self.blocks[index]:
            state = state + nn.silu(block(state))
        return state

    def notes(self) -> list[str]:
        """How many heads."""
        return [f"{len(self.blocks)} heads", *super().notes()]
