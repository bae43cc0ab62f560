"""Chi-square tests: the chance of a false alarm, and the power to find what is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_mlx.errors import MissingPackageError

Counts = NDArray[np.float64]

FALSE_ALARM = 5e-5
"""Chance that one of the chi-square tests fails while nothing is wrong; a check has two of them."""

SURE = 0.9
"""Power from which a fault counts as one that would have been found."""

LEAST_EXPECTED = 8.0


def distributions() -> Any:
    """`scipy.stats`; raises MissingPackageError with the pip command where scipy is not there."""
    try:
        import scipy.stats
    except ImportError as error:
        raise MissingPackageError(
            "The check needs scipy for its chi-square tests: pip install 'specdec-mlx[check]'."
        ) from error
    return scipy.stats


@dataclass(frozen=True)
class ChiSquare:
    """Pearson's statistic, and its degrees of freedom."""

    statistic: float
    freedom: int

    @classmethod
    def of(cls, seen: Counts, expected: Counts) -> ChiSquare:
        """seen, expected: [cells] counts; infinite where the impossible was seen.

        Cells that expect less than `LEAST_EXPECTED` are joined.
        """
        possible = expected > 0
        if seen[~possible].any():
            return cls(np.inf, max(1, int(possible.sum()) - 1))
        pools = _pools(expected[possible])
        due = np.bincount(pools, expected[possible])
        got = np.bincount(pools, seen[possible])
        return cls(float(((got - due) ** 2 / due).sum()), len(due) - 1)

    @property
    def p_value(self) -> float:
        """Chance of a statistic as large as this if nothing is wrong."""
        if self.freedom == 0:
            return 1.0
        return float(distributions().chi2.sf(self.statistic, self.freedom))


def together(tests: Sequence[ChiSquare]) -> ChiSquare:
    """Independent tests as one: both numbers add up."""
    return ChiSquare(sum(t.statistic for t in tests), sum(t.freedom for t in tests))


def power(
    wrong: Sequence[Counts], right: Sequence[Counts], false_alarm: float = FALSE_ALARM
) -> float:
    """Chance that wrong counts are told from right ones.

    By the noncentral chi-square distribution, and by the chance that something impossible comes.

    Args:
        wrong: [cells] expected counts of a fault, for each group of draws.
        right: [cells] expected counts where nothing is wrong, for each group.
        false_alarm: chance that the test fails while nothing is wrong.
    """
    unseen = float(np.exp(-sum(w[r == 0].sum() for w, r in zip(wrong, right, strict=True))))
    test = together(
        [ChiSquare.of(np.where(r > 0, w, 0), r) for w, r in zip(wrong, right, strict=True)]
    )
    if test.freedom == 0:
        return 1 - unseen
    critical = distributions().chi2.isf(false_alarm, test.freedom)
    noncentrality = max(test.statistic, 1e-12)
    missed = float(distributions().ncx2.cdf(critical, test.freedom, noncentrality))
    return 1 - unseen * missed


def findings(powers: dict[str, float]) -> str | None:
    """What a test that passed would have found, in words; None if it would have found nothing."""
    unsure = [name for name, chance in powers.items() if chance < SURE]
    if not unsure:
        return f"each named fault would have been found, with a chance above {SURE}"
    return None if len(unsure) == len(powers) else f"not enough to be sure of: {', '.join(unsure)}"


def _pools(expected: Counts) -> NDArray[np.int64]:
    """Number of the pool of each cell [cells]; the small ones share pools that expect enough."""
    order = np.argsort(-expected, kind="stable")
    pools = np.zeros(len(expected), np.int64)
    current, mass, left = 0, 0.0, float(expected.sum())
    for cell in order:
        pools[cell] = current
        mass, left = mass + expected[cell], left - expected[cell]
        if mass >= LEAST_EXPECTED and left >= LEAST_EXPECTED:
            current, mass = current + 1, 0.0
    return pools
