"""Rejection sampling, token by token."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_mlx.rules.arithmetic import (
    Array,
    Chances,
    Drawn,
    Ids,
    Law,
    Rows,
    acceptance_probability,
    residual,
    row,
    with_zero_row,
)
from specdec_mlx.rules.coins import CoinRule


@dataclass(frozen=True)
class Rejection(CoinRule):
    """Token by token (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

    name = "rejection"
    matches_greedy = True

    def accept_probs(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn
    ) -> Chances:
        """min(1, p/q) at each draft token; [K]."""
        return acceptance_probability(target_probs[:-1], draft_probs, draft_tokens)

    def next_probs(
        self,
        target_probs: Rows,
        draft_tokens: Ids,
        draft_probs: Drawn,
        num_accepted: Array | int,
    ) -> Law:
        """Residual at the rejected position, or p after the last draft token; [V]."""
        return residual(
            row(target_probs, num_accepted),
            row(with_zero_row(draft_probs), num_accepted),
        )
