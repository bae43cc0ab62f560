"""Costs: of a pass by the number of its rows, a staircase; of drafting, by the number of steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

from specdec_mlx.draft_length.chips import MILDEST, WIDTHS, Curve

NUM_SAMPLES = 7
"""Measurements that a median is taken over: other programs use the machine too."""

NUM_PLAIN = NUM_SAMPLES // 2
"""Plain rounds that are measured before anything is drafted, and after `EXPIRES` without one."""

EXPIRES = 256
"""Rounds after which a measurement of the least recently used width is dropped."""

FIRST_ROWS = WIDTHS[3]
"""Rows of the widest pass at first: MLX's kernels for few rows read the weights once for 5."""

FIRST_EXCESS = 3.0
"""Bound of a width's first measurement, in the prior's excess over one row: kernels compile."""

MOST_EXPENSIVE = 1.5
"""Bound of a draft step's cost, in plain rounds: none pays above it."""

UNKNOWN_STEP = 0.25
"""Cost of a draft step that was not measured, in plain rounds."""

PRIOR_WEIGHT = 0.1
"""Weight of each point of the prior, in measurements."""


def new_samples() -> deque[float]:
    """The latest measurements of one thing."""
    return deque(maxlen=NUM_SAMPLES)


@dataclass
class Staircase:
    """Cost of a pass over m rows, in passes over one row.

    An isotonic fit (pool adjacent violators) through the measurements and the prior. The prior's
    excess over one row is scaled by what was measured, so that two widths correct all others.

    prior: the machine's. plain: seconds of passes over one row. ratios: rows -> measured costs.
    fitted: rows -> cost, of every width in `WIDTHS` and every measured one. seconds: of a pass over
    one row. needs_plain: True while plain rounds are to be measured before a ratio means
    anything. first_rows: of the widest pass at first.
    """

    prior: Curve = MILDEST
    plain: deque[float] = field(default_factory=new_samples)
    ratios: dict[int, deque[float]] = field(default_factory=dict)
    first_rows: int = FIRST_ROWS

    def __post_init__(self) -> None:
        """Fit the prior."""
        self.seconds = 0.0
        self.needs_plain = True
        self._num_rounds = 0
        self._saw_plain = True
        self._measured: dict[int, tuple[float, int, float]] = {}
        self._prior = {m: self.prior(m) for m in (1, *WIDTHS, *self.prior.steps())}
        self.fitted: dict[int, float] = {}
        self._fit()

    def add(self, rows: int, seconds: float) -> None:
        """Add a round whose seconds are those of one pass."""
        if seconds <= 0:
            return
        self._num_rounds += 1
        if self._num_rounds % EXPIRES == 0:
            self._forget()
        if rows == 1:
            self._saw_plain = True
            self.plain.append(seconds)
            self.seconds, self.needs_plain = median_low(self.plain), len(self.plain) < NUM_PLAIN
        elif self.plain:
            samples = self.ratios.pop(rows, None) or new_samples()
            samples.append(min(seconds / self.seconds, rows + 1.0))
            self.ratios[rows] = samples  # the latest stands last
            self._fit(rows)

    def _forget(self) -> None:
        """Drop the oldest measurement of the least recently used width, and stale plain rounds."""
        if not self._saw_plain:
            self.plain.clear()
            self.needs_plain = True
        self._saw_plain = False
        if self.ratios:
            rows = next(iter(self.ratios))
            self.ratios[rows].popleft()
            self._fit(rows)

    def most_rows(self) -> int:
        """Rows of the widest pass that may be tried.

        Few until two passes were measured, then four times the widest one; 1 while plain rounds
        are to be measured.
        """
        if self.needs_plain:
            return 1
        if sum(map(len, self.ratios.values())) < 2:
            return self.first_rows
        return max(self.first_rows, 4 * max(self.ratios))

    def __call__(self, rows: int) -> float:
        """Cost of a pass over `rows` >= 1, in passes over one; never falling."""
        if rows in self.fitted:
            return self.fitted[rows]
        known = list(self.fitted)
        i = min(bisect_left(known, rows), len(known) - 1)
        (m0, m1), (c0, c1) = known[i - 1 : i + 1], list(self.fitted.values())[i - 1 : i + 1]
        return c0 + (c1 - c0) * (rows - m0) / (m1 - m0)

    def _fit(self, *changed: int) -> None:
        """Fit anew, where that changes anything."""
        prior, weight, before = self._prior, PRIOR_WEIGHT, dict(self._measured)
        for rows in changed:
            samples = self.ratios.get(rows)
            if samples:
                ratio, excess = median_low(samples), (prior.get(rows) or self.prior(rows)) - 1.0
                if len(samples) == 1:
                    ratio = min(ratio, 1.0 + FIRST_EXCESS * excess)
                self._measured[rows] = ratio, len(samples), excess
            else:
                self.ratios.pop(rows, None)
                self._measured.pop(rows, None)
        if self.fitted and self._measured == before:
            return
        told = expected = weight * (prior[FIRST_ROWS] - 1.0)
        for ratio, num, excess in self._measured.values():
            told += num * (ratio - 1.0)
            expected += num * excess
        scale = max(0.0, told / expected) if expected > 0 else 1.0
        points = {m: (1.0 + scale * (cost - 1.0), weight) for m, cost in prior.items()}
        for rows, (ratio, num, excess) in self._measured.items():
            cost = weight * (1.0 + scale * excess) + num * ratio
            points[rows] = cost / (weight + num), weight + num
        known = sorted(points)
        self.fitted = dict(zip(known, isotonic([points[m] for m in known]), strict=True))

    def as_dict(self) -> dict[str, Any]:
        """The ratios, ready for JSON; seconds are of today's machine and stay here."""
        return {str(rows): list(samples) for rows, samples in self.ratios.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave. Raises ValueError for anything else."""
        for rows, ratios in saved.items():
            if ratios:
                self.ratios[int(rows)] = deque(finite(ratios), maxlen=NUM_SAMPLES)
        self._fit(*self.ratios)


@dataclass
class Steps:
    """Cost of drafting besides the target's passes, in plain rounds.

    first: up to the draft's first token, with no more to read than a round's tokens. further: of
    each token after it, next to nothing where a draft is one pass. reading: of a token of the text,
    the latest.
    """

    first: deque[float] = field(default_factory=new_samples)
    further: deque[float] = field(default_factory=new_samples)
    reading: deque[float] = field(default_factory=new_samples)

    def add(self, samples: deque[float], step: float) -> None:
        """Add a measurement, within bounds, so that one slow moment is outvoted soon."""
        samples.append(min(max(0.0, step), MOST_EXPENSIVE))

    @property
    def step(self) -> float:
        """Cost of a token after the first."""
        return median_low(self.further or self.first or (UNKNOWN_STEP,))

    def __call__(self, num_steps: int) -> float:
        """Cost of a draft of so many steps."""
        if not num_steps:
            return 0.0
        return median_low(self.first or (self.step,)) + (num_steps - 1) * self.step

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {name: list(samples) for name, samples in vars(self).items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave. Raises ValueError for anything else."""
        for name, samples in vars(self).items():
            samples.extend(finite(saved[name]))


def finite(values: Sequence[Any], length: int | None = None) -> list[float]:
    """Numbers out of a file. Raises ValueError for what is none, and for another number of them."""
    found = [float(value) for value in values]
    if not all(map(math.isfinite, found)) or length not in (None, len(found)):
        raise ValueError(f"expected {length or 'some'} finite numbers, got {found}")
    return found


def isotonic(points: Sequence[tuple[float, float]]) -> list[float]:
    """The never-falling costs, at least 1, nearest to points (cost, weight)."""
    blocks: list[tuple[float, float, int]] = []  # cost, weight, number of points
    for cost, weight in points:
        number = 1
        while blocks and blocks[-1][0] > cost:
            cost0, weight0, number0 = blocks.pop()
            cost = (cost0 * weight0 + cost * weight) / (weight0 + weight)
            weight, number = weight0 + weight, number0 + number
        blocks.append((cost, weight, number))
    return [max(1.0, cost) for cost, _, number in blocks for _ in range(number)]
