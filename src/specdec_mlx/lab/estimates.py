"""Estimates with 95% intervals: means, medians, ratios of totals, and shares."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, sqrt
from statistics import median
from typing import NamedTuple

import numpy as np

Z = 1.959964  # half-width of a 95% interval, in standard errors


class Estimate(NamedTuple):
    """A mean or a median with a 95% interval for independent observations."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def mean_of(values: np.ndarray) -> Estimate:
    """Mean of observations [n]. The interval of a single observation is infinite."""
    mean, count = float(values.mean()), len(values)
    # z s / sqrt(n)
    width = Z * float(values.std(ddof=1)) / sqrt(count) if count > 1 else inf
    return Estimate(mean, mean - width, mean + width)


def median_of(values: Sequence[float]) -> Estimate:
    """Median of observations. The interval comes from the normal approximation of ranks."""
    ordered, n = sorted(values), len(values)
    # The rank of the lower end is (n - z sqrt(n)) / 2, counted from 1.
    first = max(0, ceil((n - 1 - Z * sqrt(n)) / 2) - 1)
    return Estimate(median(ordered), ordered[first], ordered[-1 - first])


def ratio_of(
    ours: np.ndarray, others: np.ndarray, seed: int = 0, num_resamples: int = 4000
) -> Estimate:
    """Tokens per second of `ours` relative to `others`, [n, 2] tokens and seconds of texts.

    The interval is a percentile bootstrap over texts.
    """

    def pace(texts: np.ndarray) -> np.ndarray:
        total = texts.sum(axis=-2)
        return np.asarray(total[..., 0] / total[..., 1])

    # Texts are resampled in pairs, because both sides wrote the same texts.
    rows = np.random.default_rng(seed).integers(0, len(ours), (num_resamples, len(ours)))
    low, high = np.quantile(pace(ours[rows]) / pace(others[rows]), [0.025, 0.975])
    return Estimate(float(pace(ours) / pace(others)), float(low), float(high))


def wilson(successes: int, trials: int) -> Estimate:
    """Share of successes with Wilson's score interval (1927). (0, 0, 1) without trials."""
    if not trials:
        return Estimate(0.0, 0.0, 1.0)
    share, weight = successes / trials, Z**2 / trials
    # (s + z^2/2n +- z sqrt(s (1 - s) / n + z^2/4n^2)) / (1 + z^2/n)
    middle = share + weight / 2
    half = Z * sqrt((share * (1 - share) + weight / 4) / trials)
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    return Estimate(share, max(0.0, min(share, low)), min(1.0, max(share, high)))
