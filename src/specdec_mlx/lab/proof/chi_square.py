"""The chi-square test: the chance of a false alarm, and the power to find what is wrong."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec_mlx.errors import MissingPackageError

Counts = NDArray[np.float64]

FALSE_ALARM = 5e-5
"""Chance that one of the check's two chi-square tests fails while nothing is wrong."""

RARE_ALARM = 1e-6  # false alarms of conformance tests; with fixed seeds one fails always or never
LEAST_EXPECTED = 8.0  # expected count below which cells are joined


def scipy() -> Any:
    """The library of the chances; MissingPackageError where it is not installed."""
    try:
        return import_module("scipy")
    except ImportError as error:
        raise MissingPackageError(
            "Proofs by sampling need scipy: pip install 'specdec-mlx[lab]'"
        ) from error


class ChiSquare(NamedTuple):
    """Pearson's statistic, and its degrees of freedom."""

    statistic: float
    freedom: int

    @classmethod
    def of(cls, seen: Counts, expected: Counts) -> ChiSquare:
        """Statistic of counts [cells]; infinite if the impossible was seen.

        Cells of several groups of draws stand one after the other. Each group takes a degree of
        freedom more than is subtracted, so that alarms are a little rarer than stated.
        """
        possible = expected > 0
        pools = _pools(expected[possible])
        due, got = (np.bincount(pools, counts[possible]) for counts in (expected, seen))
        statistic = np.inf if seen[~possible].any() else ((got - due) ** 2 / due).sum()
        return cls(float(statistic), len(due) - 1)

    @property
    def p_value(self) -> float:
        """Chance of a statistic as large as this if nothing is wrong."""
        return float(scipy().special.chdtrc(max(1, self.freedom), self.statistic))


def power(wrong: Counts, right: Counts) -> float:
    """Chance that wrong counts [cells] are told from right ones.

    By the noncentral chi-square distribution, and by the chance that something impossible comes.
    """
    special, unseen = scipy().special, np.exp(-wrong[right == 0].sum())
    test = ChiSquare.of(np.where(right > 0, wrong, 0), right)
    if test.freedom < 1:
        return float(1 - unseen)
    limit = special.chdtri(test.freedom, FALSE_ALARM)
    # nothing is missed at 1e9; for numbers far beyond there is no answer
    missed = special.chndtr(limit, test.freedom, min(test.statistic, 1e9))
    return float(1 - unseen * missed)


def growth_for(wrong: Counts, right: Counts, chance: float) -> float:
    """How many times as many samples are needed to find wrong counts [cells] with this chance.

    To 0.2%, and rather too many; at most 1e8.
    """

    def lacking(growth: float) -> float:
        return chance - power(growth * wrong, growth * right)

    most = 1e8
    if lacking(most) > 0:
        return most
    return float(1.002 * scipy().optimize.brentq(lacking, 0.0, most, rtol=1e-3))


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
