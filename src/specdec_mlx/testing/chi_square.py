"""Chi-square where scipy may be missing: the limit that something sound hardly ever exceeds."""

from __future__ import annotations

from statistics import NormalDist

FALSE_ALARM = 1e-6
"""Chance that something sound fails a test; seeds are fixed, so that it fails always or never."""


def limit(freedom: int, false_alarm: float = FALSE_ALARM) -> float:
    """What a chi-square statistic exceeds with chance `false_alarm`.

    Wilson and Hilferty's approximation of the quantile.
    """
    freedom = max(1, freedom)
    z = NormalDist().inv_cdf(1 - false_alarm)
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + z * spread**0.5) ** 3)
