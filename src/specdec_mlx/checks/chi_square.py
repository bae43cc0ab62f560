"""The chi-square test: the chance of a false alarm, and the power to find what is wrong."""

from __future__ import annotations

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
        pools = _pools(expected[possible])
        due, got = (np.bincount(pools, counts[possible]) for counts in (expected, seen))
        statistic = np.inf if seen[~possible].any() else ((got - due) ** 2 / due).sum()
        return cls(float(statistic), len(due) - 1)

    @property
    def p_value(self) -> float:
        """Chance of a statistic as large as this if nothing is wrong."""
        from scipy.special import chdtrc

        return float(chdtrc(max(1, self.freedom), self.statistic))

    @property
    def is_alarm(self) -> bool:
        """True if the check fails on it."""
        return self.p_value < FALSE_ALARM

    def numbers(self) -> dict[str, float]:
        """The test's numbers for a report."""
        named = {"chi_square": self.statistic, "degrees_of_freedom": self.freedom}
        return named | {"p_value": self.p_value, "false_alarm": FALSE_ALARM}


def limit(freedom: int, false_alarm: float = RARE_ALARM) -> float:
    """Statistic that chi-square exceeds with chance `false_alarm`."""
    from scipy.special import chdtri

    return float(chdtri(max(1, freedom), false_alarm))


def together(tests: Iterable[ChiSquare]) -> ChiSquare:
    """Independent tests as one: both numbers add up."""
    statistics, freedoms = zip(*tests, strict=True)
    return ChiSquare(sum(statistics), sum(freedoms))


def power(wrong: Sequence[Counts], right: Sequence[Counts]) -> float:
    """Chance that wrong counts are told from right ones, each [cells] for each group of draws.

    By the noncentral chi-square distribution, and by the chance that something impossible comes.
    """
    from scipy.special import chndtr

    pairs = list(zip(wrong, right, strict=True))
    unseen = np.exp(-sum(w[r == 0].sum() for w, r in pairs))
    test = together(ChiSquare.of(np.where(r > 0, w, 0), r) for w, r in pairs)
    within = chndtr(limit(test.freedom, FALSE_ALARM), test.freedom, test.statistic)
    return float(1 - unseen * (within if test.freedom else 1))


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
