"""How often a guess among several at one place is right: a logistic regression, online.

A chain has one guess at each place; a tree has a first, a second, a third one. What speaks for a
guess is its drafter's evidence, its rank among that drafter's guesses, and its depth in the tree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from specdec_mlx.draft_length.acceptance import (
    FARTHEST,
    LARGEST_MATCH,
    MATCH_CLASSES,
    POSITION_CLASSES,
    RECENT_EDGES,
    RECENT_MEMORY,
    UNKNOWN,
    class_of,
)
from specdec_mlx.draft_length.priors import GUESSES
from specdec_mlx.types import Evidence, Guess

LEARNING_RATE = 0.035
"""Step of the log-odds towards an outcome."""

MOST_RANKS = 8
"""Guesses of one drafter at one place that are told apart by their rank; further ones are left."""

LEAST_ODDS = -5.0
"""Log-odds below which, and above the negative of which, chances are not told apart."""

LEAST_CHANCE = 1 / (1 + math.exp(-LEAST_ODDS))
"""The chance of these odds."""

POOL_RATE = 0.005
"""Step of the pool's weights towards an outcome."""

POOLED = (-0.79, 0.87, 0.12, -1.96)
"""What is believed of them at first; see `PooledChances`."""


@dataclass
class GuessHistory:
    """How often a drafter's guess at a place was right, given that the text got there.

    weights: feature -> log-odds by class, as in `AcceptanceHistory`. recent: share of the places
    lately at which the first guess was right.
    """

    weights: dict[str, list[float]] = field(default_factory=lambda: _prior(""))
    recent: float = UNKNOWN

    @classmethod
    def of(cls, kind: str) -> GuessHistory:
        """What is believed of a class of drafters before it was tried."""
        return cls(_prior(kind))

    def begin_text(self) -> None:
        """Forget how predictable the last text was."""
        self.recent = UNKNOWN

    def chances(self, guesses: Sequence[Guess], depth: int) -> list[float]:
        """Chance of each guess at a place, the likeliest by its drafter first.

        Args:
            guesses: of one drafter at one place, in its order; at most `MOST_RANKS` count.
            depth: how many tokens of the tree stand before the place.
        """
        weights = self.weights
        by_rank, by_match = weights["rank"], weights["match"]
        by_one, by_two = weights["after one"], weights["after two"]
        common = weights["recent"][class_of(self.recent, RECENT_EDGES)]
        common += weights["position"][POSITION_CLASSES[min(depth, FARTHEST)]]
        found = []
        for rank, (_, evidence) in enumerate(guesses[:MOST_RANKS]):
            match = evidence.match
            z = common + by_rank[rank] + by_one[evidence.after_one] + by_two[evidence.after_two]
            z += by_match[MATCH_CLASSES[match if match < LARGEST_MATCH else LARGEST_MATCH]]
            found.append(1 / (1 + math.exp(-z)))
        return found

    def learn(self, guesses: Sequence[Guess], depth: int, token: int) -> None:
        """Learn from the token that came at a place.

        Args:
            guesses: as given to `chances`.
            depth: the same.
            token: what the text went on with.
        """
        for rank, (guess, evidence) in enumerate(guesses[:MOST_RANKS]):
            active = self._active(rank, evidence, depth)
            z = sum([self.weights[name][index] for name, index in active])
            step = LEARNING_RATE * ((guess == token) - 1 / (1 + math.exp(-z)))
            for name, index in active:
                self.weights[name][index] += step
        if guesses:
            right = guesses[0].token == token
            self.recent = RECENT_MEMORY * self.recent + (1 - RECENT_MEMORY) * right

    def _active(self, rank: int, evidence: Evidence, depth: int) -> tuple[tuple[str, int], ...]:
        """The features that count, each with its class."""
        return (
            ("rank", rank),
            ("match", MATCH_CLASSES[min(evidence.match, LARGEST_MATCH)]),
            ("position", POSITION_CLASSES[min(depth, FARTHEST)]),
            ("recent", class_of(self.recent, RECENT_EDGES)),
            ("after one", evidence.after_one),
            ("after two", evidence.after_two),
        )


@dataclass
class PooledChances:
    """One chance for each token out of those that several drafters give it: logistic regression.

    weights: of 1, of the log-odds of the greatest chance, of those of the second greatest where two
    agree, and of the logarithm of what all greatest chances of a place add up to, above 1.
    """

    weights: list[float] = field(default_factory=lambda: list(POOLED))

    def chances(self, given: Mapping[int, Sequence[float]]) -> dict[int, float]:
        """Chance of each token at a place; given: what its drafters give it."""
        bias, of_best, of_second, of_excess = self.weights
        common = bias + of_excess * _excess(given)
        found = {}
        for token, chances in given.items():
            best, second = _greatest(chances)
            z = common + of_best * best + of_second * second
            found[token] = 1 / (1 + math.exp(-z))
        return found

    def learn(self, given: Mapping[int, Sequence[float]], token: int) -> None:
        """Learn from the token that came at a place."""
        excess = _excess(given)
        for guess, chances in given.items():
            best, second = _greatest(chances)
            active = (1.0, best, second, excess)
            z = sum([w * x for w, x in zip(self.weights, active, strict=True)])
            step = POOL_RATE * ((guess == token) - 1 / (1 + math.exp(-z)))
            for i, x in enumerate(active):
                self.weights[i] += step * x


def _greatest(chances: Sequence[float]) -> tuple[float, float]:
    """Log-odds of the greatest chance, and of the second one, from `LEAST_ODDS` on; else 0."""
    ordered = sorted(chances, reverse=True)
    best = _log_odds(ordered[0])
    return best, _log_odds(ordered[1]) - LEAST_ODDS if len(ordered) > 1 else 0.0


def _log_odds(chance: float) -> float:
    """Of a chance, within bounds."""
    if chance <= LEAST_CHANCE:
        return LEAST_ODDS
    return -LEAST_ODDS if chance >= 1 - LEAST_CHANCE else math.log(chance / (1 - chance))


def _excess(given: Mapping[int, Sequence[float]]) -> float:
    """Logarithm of the sum of the greatest chances, where it is more than 1."""
    return math.log(max(1.0, sum([max(chances) for chances in given.values()])))


def _prior(kind: str) -> dict[str, list[float]]:
    known = GUESSES.get(kind, GUESSES["NGramDrafter"])
    return {name: list(odds) for name, odds in known.items()}
