"""How likely a node of a drafted tree is right: a logistic regression, online.

What speaks for a node is the confidence in it, its rank among its siblings and its depth. Of a
point mass the confidence is the probability that the draft gives to the token; of a draw it is the
largest one at its place, which is known before the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

LEARNING_RATE = 0.1
"""Step of the log-odds towards an outcome."""

LARGEST_ODDS = 6.0
"""Log-odds of a confidence above which, and below the negative of which, none are told apart."""

DEPTHS = 5
"""Classes of depths; the last one is of all that are deeper."""

RANKS = 8
"""Classes of ranks; the last one is of all further ones."""

SLOPES = {False: 1.1, True: 0.2}
"""What is believed of the weight of the confidence, of point masses and of draws."""

BY_RANK = {
    False: (1.2, 0.1, -0.1, -0.4, -0.5, -0.6, -0.7, -0.8),
    True: (0.8, -2.0, -2.4, -2.6, -2.8, -3.0, -3.2, -3.4),
}
"""The same of the ranks."""


@dataclass
class NodeHistory:
    """Chance of a node given that the text gets to its place: 1 / (1 + exp(-z)).

    is_drawn: whether siblings are drawn, or the likeliest tokens. slope, by_rank, by_depth: weight
    of the confidence's log-odds, of each rank and of each depth; z is their sum.
    """

    is_drawn: bool = False
    slope: float = field(init=False)
    by_rank: list[float] = field(init=False)
    by_depth: list[float] = field(init=False)

    def __post_init__(self) -> None:
        """What is believed at first."""
        self.slope = SLOPES[self.is_drawn]
        self.by_rank = list(BY_RANK[self.is_drawn])
        self.by_depth = [0.0] * DEPTHS

    def chances(self, confidences: Sequence[float], depth: int) -> list[float]:
        """Of siblings, in their order; together at most 1.

        Args:
            confidences: in each.
            depth: how many tokens of the tree stand before them.
        """
        found = [self._chance(x, rank, depth) for rank, x in enumerate(confidences)]
        total = sum(found)
        return [chance / total for chance in found] if total > 1 else found

    def learn(self, confidences: Sequence[float], depth: int, right: int | None) -> None:
        """Learn from a place that the text came through.

        Args:
            confidences: as given to `chances`.
            depth: the same.
            right: rank of the sibling that the text went on with, None for another token.
        """
        for rank, confidence in enumerate(confidences):
            miss = (rank == right) - self._chance(confidence, rank, depth)
            step = LEARNING_RATE * miss
            self.slope += step * _log_odds(confidence) / LARGEST_ODDS
            self.by_rank[min(rank, RANKS - 1)] += step
            self.by_depth[min(depth, DEPTHS - 1)] += step

    def _chance(self, confidence: float, rank: int, depth: int) -> float:
        z = self.slope * _log_odds(confidence)
        z += self.by_rank[min(rank, RANKS - 1)] + self.by_depth[min(depth, DEPTHS - 1)]
        return 1 / (1 + math.exp(-z))


def _log_odds(chance: float) -> float:
    """Of a chance, within bounds."""
    least = 1 / (1 + math.exp(LARGEST_ODDS))
    chance = min(max(chance, least), 1 - least)
    return math.log(chance / (1 - chance))
