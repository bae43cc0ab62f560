"""Means and shares, each with a 95% interval."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

Z = 1.959964
"""Half-width of a 95% interval, in standard errors."""


class Estimate(NamedTuple):
    """A mean, and the ends of its 95% interval, which takes observations for independent."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        """The mean, and its interval in brackets."""
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass
class Mean:
    """Running mean of one or several numbers."""

    count: int = 0
    total: Any = 0.0
    squares: Any = 0.0

    def add(self, value: Any) -> None:
        """Take one more."""
        self.count += 1
        self.total = self.total + value
        self.squares = self.squares + value**2

    def merge(self, other: Mean) -> None:
        """Take all that another one took."""
        self.count += other.count
        self.total = self.total + other.total
        self.squares = self.squares + other.squares

    def estimates(self) -> list[Estimate]:
        """One for each number; of a single observation the interval is everything."""
        mean = np.atleast_1d(self.total) / self.count
        if self.count == 1:
            return [Estimate(float(m), float("-inf"), float("inf")) for m in mean]
        variance = np.maximum(self.squares / self.count - mean**2, 0) / (self.count - 1)
        width = Z * np.sqrt(np.atleast_1d(variance))
        return [
            Estimate(float(m), float(m - w), float(m + w)) for m, w in zip(mean, width, strict=True)
        ]


def wilson(successes: int, trials: int) -> Estimate:
    """Share of successes, and the interval of Wilson's score test (1927): sound near 0 and 1 too.

    Without any trial the share is 0 and the interval everything, 0 to 1.
    """
    if not trials:
        return Estimate(0.0, 0.0, 1.0)
    share, weight = successes / trials, Z**2 / trials
    middle = share + weight / 2
    half = Z * sqrt((share * (1 - share) + weight / 4) / trials)
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    return Estimate(share, max(0.0, min(share, low)), min(1.0, max(share, high)))
