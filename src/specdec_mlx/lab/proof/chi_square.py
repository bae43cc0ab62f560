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
    """Import scipy. MissingPackageError if it is not installed."""
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
        """Statistic of counts [cells]. Infinite if an impossible cell has a count.

        Several groups of draws may be concatenated. Each group after the first takes a degree of
        freedom that is not subtracted, so false alarms are slightly rarer than stated.
        """
        # Cells with small expectations are pooled, because the statistic follows the chi-square
        # distribution only where counts are large.
        possible = expected > 0
        pools = _pools(expected[possible])
        due, got = (np.bincount(pools, counts[possible]) for counts in (expected, seen))
        # chi^2 = sum (n - e)^2 / e over the pools
        statistic = np.inf if seen[~possible].any() else ((got - due) ** 2 / due).sum()
        return cls(float(statistic), len(due) - 1)

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least this large if nothing is wrong."""
        return float(scipy().special.chdtrc(max(1, self.freedom), self.statistic))


def power(faulty: Counts, right: Counts) -> float:
    """Probability that faulty counts [cells] are told from right counts.

    It uses the noncentral chi-square distribution, and the probability of an impossible cell.
    """
    # e^-n: the Poisson probability that no impossible cell is seen
    special, unseen = scipy().special, np.exp(-faulty[right == 0].sum())
    test = ChiSquare.of(np.where(right > 0, faulty, 0), right)
    if test.freedom < 1:
        return float(1 - unseen)
    # The noncentrality parameter is the statistic of the expected faulty counts.
    limit = special.chdtri(test.freedom, FALSE_ALARM)
    # Nothing is missed at 1e9, and scipy fails for much larger numbers.
    missed = special.chndtr(limit, test.freedom, min(test.statistic, 1e9))
    return float(1 - unseen * missed)


def growth_for(faulty: Counts, right: Counts, chance: float) -> float:
    """Factor by which the sample has to grow to find a fault with probability `chance`.

    Accurate to 0.2%, rounded up. At most 1e8.
    """

    def lacking(growth: float) -> float:
        return chance - power(growth * faulty, growth * right)

    # Power grows with the sample, so the factor is the single root of the difference.
    most = 1e8
    if lacking(most) > 0:
        return most
    return float(1.002 * scipy().optimize.brentq(lacking, 0.0, most, rtol=1e-3))


def _pools(expected: Counts) -> NDArray[np.int64]:
    """Pool number of each cell. Every pool has at least `LEAST_EXPECTED` expected counts."""
    pools = np.zeros(len(expected), np.int64)
    current, mass, left = 0, 0.0, float(expected.sum())
    for cell in np.argsort(-expected, kind="stable"):
        pools[cell] = current
        mass, left = mass + expected[cell], left - expected[cell]
        if mass >= LEAST_EXPECTED and left >= LEAST_EXPECTED:
            current, mass = current + 1, 0.0
    return pools
