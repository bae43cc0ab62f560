"""What a pass costs by the number of its rows, a staircase; and what the steps of a draft cost."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec_mlx.draft_length.chips import MILDEST, WIDTHS, Curve

NUM_SAMPLES = 7
"""Rounds that a median is taken over: other programs use the machine too."""

NUM_PLAIN = 3
"""Plain rounds that are measured before anything is drafted, and again after `EXPIRES` rounds."""

EXPIRES = 256
"""Rounds with a draft after which plain ones are measured again, and rounds after which the width
that was not used for longest loses a measurement: the machine's pace changes."""

FIRST_ROWS = 5
"""Rows of the widest pass at first: MLX's kernels for few rows read the weights once for 5."""

FIRST_EXCESS = 3.0
"""Most that a single measurement may cost beyond one row, in what the prior says."""

MOST_EXPENSIVE = 1.5
"""Cost of a draft step above which none pays, whatever it is: one slow draft is outvoted soon."""

UNKNOWN_STEP = 0.25
"""Cost of a draft step that was not measured, in plain rounds."""

PRIOR_WEIGHT = 0.5
"""Rounds that each point of the prior counts for."""


@dataclass
class Staircase:
    """Cost of a pass over m rows, in passes over one row.

    An isotonic fit (pool adjacent violators) through what was measured and the prior; the prior's
    excess over one row is scaled by what was measured, so that two widths say what all others cost.

    prior: points (rows, cost). plain: seconds of passes over one row. ratios: rows -> measured.
    """

    prior: Curve = MILDEST
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    ratios: dict[int, deque[float]] = field(default_factory=dict)
    _wanted: int = NUM_PLAIN
    _num_drafting: int = 0
    _num_rounds: int = 0
    _fitted: tuple[list[int], list[float]] | None = None
    _known: dict[int, float] = field(default_factory=dict)

    def add(self, rows: int, seconds: float) -> None:
        """Add a round whose seconds are those of one pass."""
        if seconds <= 0:
            return
        self._num_rounds += 1
        if self._num_rounds % EXPIRES == 0:
            self._forget()
        if rows == 1:
            if self._num_drafting >= EXPIRES:
                self.plain.clear()
            self.plain.append(seconds)
            self._num_drafting, self._wanted = 0, max(0, self._wanted - 1)
            return
        self._num_drafting += 1
        if self._num_drafting == EXPIRES:
            self._wanted = NUM_PLAIN
        if self.plain:
            samples = self.ratios.pop(rows, None) or deque(maxlen=NUM_SAMPLES)
            samples.append(min(seconds / median(self.plain), rows + 1.0))
            self.ratios[rows] = samples  # the latest stands last
            self._fitted = None

    def _forget(self) -> None:
        """Drop the oldest measurement of the width that was not used for longest."""
        if self.ratios:
            rows = next(iter(self.ratios))
            self.ratios[rows].popleft()
            if not self.ratios[rows]:
                del self.ratios[rows]
            self._fitted = None

    @property
    def needs_plain(self) -> bool:
        """True while plain rounds are to be measured before a ratio means anything."""
        return self._wanted > 0

    def most_rows(self) -> int:
        """Rows of the widest pass that may be tried: few until two were measured, then
        four times the widest one; 1 while plain rounds are to be measured."""
        if self.needs_plain:
            return 1
        if sum(map(len, self.ratios.values())) < 2:
            return FIRST_ROWS
        return max(FIRST_ROWS, 4 * max(self.ratios))

    def __call__(self, rows: int) -> float:
        """Cost of a pass over `rows` >= 1, in passes over one; never falling."""
        if self._fitted is None:
            self._fitted = self._fit()
            self._known = {}
        if rows not in self._known:
            self._known[rows] = _between(*self._fitted, rows)
        return self._known[rows]

    def _fit(self) -> tuple[list[int], list[float]]:
        prior, weight = self.prior, PRIOR_WEIGHT
        measured = {rows: (typical(samples), len(samples)) for rows, samples in self.ratios.items()}
        for rows, (ratio, num) in measured.items():
            if num == 1:  # the first pass at a new width may compile kernels
                measured[rows] = min(ratio, 1.0 + FIRST_EXCESS * (prior(rows) - 1.0)), 1
        told = expected = weight * (prior(5) - 1.0)
        for rows, (ratio, num) in measured.items():
            told += num * (ratio - 1.0)
            expected += num * (prior(rows) - 1.0)
        scale = max(0.0, told / expected)
        steps = {prior.tile + 1, 2 * prior.tile + 1} if prior.tile else set[int]()
        points = []
        for rows in sorted({*(rows for rows, _ in prior.points), *WIDTHS, *steps, *measured}):
            cost, sure = 1.0 + scale * (prior(rows) - 1.0), weight
            if rows in measured:
                ratio, num = measured[rows]
                cost, sure = (weight * cost + num * ratio) / (weight + num), weight + num
            points.append((rows, cost, sure))
        return isotonic(points)

    def as_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON; seconds are of today's machine and stay behind."""
        return {str(rows): list(samples) for rows, samples in self.ratios.items()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave."""
        for rows, ratios in saved.items():
            if ratios:
                self.ratios[int(rows)] = deque(finite(ratios), maxlen=NUM_SAMPLES)
        self._fitted = None


@dataclass
class Steps:
    """What drafting costs besides the target's passes, in plain rounds.

    at_once: True if a draft of any length is one step. price: of a step on nothing, None where it
    was not measured. measured: costs of a step in drafts. reading: of reading one token of the
    text, None where it is not known.
    """

    at_once: bool = False
    price: float | None = None
    reading: float | None = None
    measured: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))

    def add(self, num_steps: int, cost: float) -> None:
        """Add a draft of so many steps that read no more than a round's tokens."""
        step = cost / (1 if self.at_once else num_steps)
        self.measured.append(min(max(0.0, step), MOST_EXPENSIVE))

    @property
    def is_known(self) -> bool:
        """True if anything was measured."""
        return self.price is not None or bool(self.measured)

    @property
    def is_sure(self) -> bool:
        """True if more than one draft was measured, or a step on nothing."""
        return self.price is not None or len(self.measured) > 1

    @property
    def step(self) -> float:
        """Of a step; a guess where nothing is known. A single draft may have been slow."""
        if len(self.measured) > 1 or (self.measured and self.price is None):
            return typical(self.measured)
        return UNKNOWN_STEP if self.price is None else self.price

    def __call__(self, num_steps: int) -> float:
        """Of a draft of so many steps."""
        return (1 if self.at_once and num_steps else num_steps) * self.step


def finite(values: Sequence[Any]) -> list[float]:
    """Numbers out of a file. Raises ValueError for what is none."""
    found = [float(value) for value in values]
    if not all(map(math.isfinite, found)):
        raise ValueError(f"expected finite numbers, got {found}")
    return found


def typical(samples: Sequence[float]) -> float:
    """Median; of two the smaller: a round is more often disturbed than quicker than it can be."""
    return min(samples) if len(samples) == 2 else median(samples)


def median(samples: Sequence[float]) -> float:
    """Of one number at least; `statistics.median` takes three times as long."""
    ordered, half = sorted(samples), len(samples) // 2
    return ordered[half] if len(samples) % 2 else (ordered[half - 1] + ordered[half]) / 2


def isotonic(points: Sequence[tuple[int, float, float]]) -> tuple[list[int], list[float]]:
    """The never-falling costs nearest to points (rows, cost, weight), by pooling neighbours."""
    blocks: list[list[float]] = []  # [cost, weight, number of points]
    for _, cost, weight in points:
        blocks.append([max(1.0, cost), weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            cost, weight, number = blocks.pop()
            last = blocks[-1]
            last[0] = (last[0] * last[1] + cost * weight) / (last[1] + weight)
            last[1] += weight
            last[2] += number
    costs = [cost for cost, _, number in blocks for _ in range(int(number))]
    return [rows for rows, _, _ in points], costs


def _between(rows: Sequence[int], costs: Sequence[float], wanted: int) -> float:
    """Cost on the line between two neighbours; behind the last one its slope goes on."""
    i = min(max(1, bisect_left(rows, wanted)), len(rows) - 1)
    (m0, m1), (c0, c1) = rows[i - 1 : i + 1], costs[i - 1 : i + 1]
    return c0 + (c1 - c0) * (wanted - m0) / (m1 - m0)
