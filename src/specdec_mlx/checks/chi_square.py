"""The chi-square test: the chance of a false alarm, and the power to find what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]

FALSE_ALARM = 5e-5
"""Chance that one of the check's two chi-square tests fails while nothing is wrong."""

RARE_ALARM = 1e-6  # false alarms of conformance tests; with fixed seeds one fails always or never
LEAST_EXPECTED = 8.0  # expected count below which cells are joined


class ChiSquare(NamedTuple):
    """Pearson's statistic, and its degrees of freedom."""

    statistic: float
    freedom: int

    @classmethod
    def of(cls, seen: Counts, expected: Counts) -> ChiSquare:
        """Statistic of counts [cells]; infinite if the impossible was seen."""
        possible = expected > 0
        if seen[~possible].any():
            return cls(np.inf, max(1, int(possible.sum()) - 1))
        pools = _pools(expected[possible])
        due, got = (np.bincount(pools, counts[possible]) for counts in (expected, seen))
        return cls(float(((got - due) ** 2 / due).sum()), len(due) - 1)

    @property
    def p_value(self) -> float:
        """Chance of a statistic as large as this if nothing is wrong."""
        return float(chances_above(self.statistic, self.freedom)[0]) if self.freedom else 1.0

    def numbers(self) -> dict[str, float]:
        """The test's numbers for a report."""
        named = {"chi_square": self.statistic, "degrees_of_freedom": self.freedom}
        return named | {"p_value": self.p_value, "false_alarm": FALSE_ALARM}


def chances_above(statistic: float, freedom: int, n: int = 1) -> Counts:
    """Chance [n] that chi-square exceeds a statistic, at freedom, freedom + 2, ... degrees.

    Two degrees more add one term (Abramowitz and Stegun, 26.4.4 and 26.4.5).
    """
    if math.isinf(statistic):
        return np.zeros(n)
    half, odd = max(statistic, 1e-300) / 2, freedom % 2
    orders = np.arange(freedom // 2 + n - 1) + odd / 2
    terms = [math.exp(k * math.log(half) - half - math.lgamma(k + 1)) for k in orders]
    chances = odd * math.erfc(math.sqrt(half)) + np.cumsum([0.0, *terms])
    return np.minimum(chances[freedom // 2 :], 1.0)


def limit(freedom: int, false_alarm: float = RARE_ALARM) -> float:
    """Statistic that chi-square exceeds with chance `false_alarm`."""
    freedom = max(1, freedom)
    low, high = 0.0, 2.0 * freedom + 200  # whose chance is below any that is asked for
    for _ in range(60):
        middle = (low + high) / 2
        is_below = chances_above(middle, freedom)[0] > false_alarm
        low, high = (middle, high) if is_below else (low, middle)
    return high


def together(tests: Iterable[ChiSquare]) -> ChiSquare:
    """Independent tests as one: both numbers add up."""
    statistics, freedoms = zip(*tests, strict=True)
    return ChiSquare(sum(statistics), sum(freedoms))


def power(
    wrong: Sequence[Counts], right: Sequence[Counts], false_alarm: float = FALSE_ALARM
) -> float:
    """Chance that wrong counts are told from right ones, each [cells] for each group of draws.

    By the noncentral chi-square distribution, a Poisson mixture of central ones, and by the chance
    that something impossible comes.
    """
    pairs = list(zip(wrong, right, strict=True))
    unseen = math.exp(-sum(w[r == 0].sum() for w, r in pairs))
    test = together(ChiSquare.of(np.where(r > 0, w, 0), r) for w, r in pairs)
    if test.freedom == 0:
        return 1 - unseen
    mean = min(max(test.statistic, 1e-12) / 2, 1e5)  # beyond that the power is 1 in any case
    n = int(mean + 10 * math.sqrt(mean) + 30)
    weights = [math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(n)]
    found = chances_above(limit(test.freedom, false_alarm), test.freedom, n)
    return float(1 - unseen * (1 - np.dot(weights, found)))


def _pools(expected: Counts) -> NDArray[np.int64]:
    """Number of each cell's pool; every pool expects enough."""
    pools = np.zeros(len(expected), np.int64)
    current, mass, left = 0, 0.0, float(expected.sum())
    for cell in np.argsort(-expected, kind="stable"):
        pools[cell] = current
        mass, left = mass + expected[cell], left - expected[cell]
        if mass >= LEAST_EXPECTED and left >= LEAST_EXPECTED:
            current, mass = current + 1, 0.0
    return pools
