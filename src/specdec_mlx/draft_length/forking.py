"""A drafter whose drafts fork by themselves: how large a tree to ask it for.

Trained heads and draft models grow their trees by their own confidences (`drafters.growing`), so
what is left to choose is the size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdec_mlx.draft_length.accounts import LENGTHS, ModelAccount
from specdec_mlx.types import RoundRecord


@dataclass
class ForkAccount(ModelAccount):
    """Such a drafter in one generation; it drafts on account, as `ModelAccount` does."""

    def best_length(
        self, chances: Iterable[float], whole: int, rate: float, plain_value: float
    ) -> int:
        """The size of the largest value that can be afforded; see `Account.best_length`."""
        costs = self.learned.costs
        best, best_value = 0, plain_value
        expected, shares = 1.0, [] if costs.needs_plain else self.learned.forks.shares
        for size, share in enumerate(shares, start=1):
            expected += share
            if size in LENGTHS:
                value = expected - rate * costs.optimistic_ratio(size)
                if value > best_value and self.can_afford(size, expected):
                    best, best_value = size, value
        self.gain = best_value - (1.0 - rate)
        return best

    def learn_acceptance(self, round_: RoundRecord) -> None:
        """Learn what its size brings."""
        super().learn_acceptance(round_)
        self.learned.forks.learn(round_.drafted, round_.accepted)
