"""Medusa: one small head for each of the next tokens, all from one state.

Cai et al. 2024, arXiv 2401.10774. Head i guesses the token i + 2 positions after the state's:
x + silu(W x + b), then a matrix of its own over the vocabulary. The heads do not see what the
others guess.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.drafters.heads.drafter import FinalStateHead
from specdec_mlx.drafters.heads.session import LastState, OnePassSession
from specdec_mlx.drafters.heads.target_ends import TargetEnds


class MedusaSession(LastState, OnePassSession):
    """Keeps the last state, and drafts as many tokens as there are heads; see `HeadSession`."""

    def all_logits(self, limit: int) -> mx.array | None:
        """Of as many heads as may draft; none before the prompt was read."""
        length = min(limit, len(self.head.blocks))
        if self.state is None or length == 0:
            return None
        logits: mx.array = self.head.first_logits(self.state, length)
        return logits


class Medusa(FinalStateHead):
    """Medusa heads.

    Args:
        num_heads: how many tokens they guess.
        num_layers: blocks of each, below its matrix.
        ends: of the target.
        own_heads: rows of the matrix that each has; 0 for the target's head.
    """

    kind = "Medusa"
    session = MedusaSession

    def __init__(
        self, num_heads: int, num_layers: int, ends: TargetEnds, *, own_heads: int = 0
    ) -> None:
        """Random weights."""
        super().__init__()
        width = ends.width
        self.ends = ends
        self.blocks = [
            [nn.Linear(width, width) for _ in range(num_layers)] for _ in range(num_heads)
        ]
        if own_heads:
            self.lm_heads = [nn.Linear(width, own_heads, bias=False) for _ in range(num_heads)]

    def logits(self, state: mx.array, index: int) -> mx.array:
        """Logits [1, V] of one head, of the target's state [1, D]."""
        own = self.state(state, index)
        return self.lm_heads[index](own) if "lm_heads" in self else self.ends.logits(own)

    def first_logits(self, state: mx.array, number: int) -> mx.array:
        """Logits [n, V] of the first n heads, of the target's state [1, D]."""
        if "lm_heads" in self:
            return mx.concatenate([self.logits(state, i) for i in range(number)])
        return self.ends.logits(mx.concatenate([self.state(state, i) for i in range(number)]))

    def state(self, state: mx.array, index: int) -> mx.array:
        """What a head makes [1, D] of the target's state [1, D], below its matrix."""
        for block in self.blocks[index]:
            state = state + nn.silu(block(state))
        return state

    def notes(self) -> list[str]:
        """How many heads."""
        return [f"{len(self.blocks)} heads", *super().notes()]
