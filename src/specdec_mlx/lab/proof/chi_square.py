"""The chi-square test: the chance of a false alarm, and the power to find what is wrong."""

from __future__ import annotations

import math
from functools import cache
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
        return survival(max(1, self.freedom), self.statistic)


def power(wrong: Counts, right: Counts) -> float:
    """Chance that wrong counts [cells] are told from right ones.

    By the noncentral chi-square distribution, and by the chance that something impossible comes.
    """
    unseen = np.exp(-wrong[right == 0].sum())
    test = ChiSquare.of(np.where(right > 0, wrong, 0), right)
    if test.freedom < 1:
        return float(1 - unseen)
    missed = noncentral_cdf(_limit(test.freedom), test.freedom, test.statistic)
    return float(1 - unseen * missed)


def growth_for(wrong: Counts, right: Counts, chance: float) -> float:
    """How many times as many samples are needed to find wrong counts [cells] with this chance.

    The same cells are taken for more samples, which could be sorted into finer ones.
    """
    low, high = 0.0, 1.0
    while high < 1e8 and power(high * wrong, high * right) < chance:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        is_enough = power(middle * wrong, middle * right) >= chance
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def survival(freedom: int, statistic: float) -> float:
    r"""Chance of a chi-square statistic above this one, $Q(k/2, x/2)$ for k degrees of freedom."""
    return min(1.0, float(_tails(freedom, statistic)[-1]))


def noncentral_cdf(statistic: float, freedom: int, noncentrality: float) -> float:
    r"""Chance of a statistic up to x where the noncentral $\lambda$ is not 0.

    $\sum_j \mathrm{Pois}(j; \lambda/2) (1 - Q(k/2 + j, x/2))$; terms are left out where x is
    far below the degrees of freedom k + 2j.
    """
    num_terms = int(statistic / 2 + 10 * math.sqrt(statistic) + 50)
    tails = _tails(freedom + 2 * num_terms, statistic)[-1 - num_terms : -1]
    return float(_poisson(noncentrality / 2, 0, num_terms) @ (1 - tails))


def _tails(freedom: int, statistic: float) -> Counts:
    r"""Chances above a statistic for freedom % 2, freedom % 2 + 2, ... up to these degrees.

    $Q(a + 1, y) = Q(a, y) + y^a e^{-y} / \Gamma(a + 1)$, from $Q(1/2, y) = erfc(\sqrt y)$ or 0.
    """
    y, is_odd = statistic / 2, freedom % 2
    first = math.erfc(math.sqrt(y)) if is_odd else 0.0
    return np.cumsum([first, *_poisson(y, is_odd / 2, freedom / 2)])


def _poisson(mean: float, start: float, stop: float) -> Counts:
    r"""$y^a e^{-y} / \Gamma(a + 1)$ for a mean y and a = start, start + 1, ... below stop."""
    places: Counts = np.arange(start, stop)
    mean = min(max(mean, 1e-300), 1e300)  # the limits, without 0 * inf
    log_gammas = np.array([math.lgamma(place + 1) for place in places])
    chances: Counts = np.exp(places * math.log(mean) - mean - log_gammas)
    return chances


@cache
def _limit(freedom: int) -> float:
    """The statistic that FALSE_ALARM is the chance of being above, by bisection."""
    low, high = 0.0, 100 + 10.0 * freedom
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if survival(freedom, middle) > FALSE_ALARM:
            low = middle
        else:
            high = middle
    return high


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
