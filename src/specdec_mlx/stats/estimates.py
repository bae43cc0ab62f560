"""Means and shares, each with a 95% interval."""

from __future__ import annotations

from math import inf, sqrt
from typing import NamedTuple

import numpy as np

Z = 1.959964
"""Half-width of a 95% interval, in standard errors."""


class Estimate(NamedTuple):
    """A mean and its 95% interval, which takes observations for independent."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """Mean, and interval in brackets."""
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def mean_of(values: np.ndarray) -> Estimate:
    """Mean of observations [n]; the interval of a single one is everything."""
    mean, count = float(values.mean()), len(values)
    width = Z * float(values.std(ddof=1)) / sqrt(count) if count > 1 else inf
    return Estimate(mean, mean - width, mean + width)


def wilson(successes: int, trials: int) -> Estimate:
    """Share of successes with Wilson's score interval (1927); 0, and 0 to 1, without a trial."""
    if not trials:
        return Estimate(0.0, 0.0, 1.0)
    share, weight = successes / trials, Z**2 / trials
    middle = share + weight / 2
    half = Z * sqrt((share * (1 - share) + weight / 4) / trials)
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    return Estimate(share, max(0.0, min(share, low)), min(1.0, max(share, high)))
