"""The cost of a pass by its number of rows, and the cost of drafting by its number of steps.

The cost of a pass is a staircase. A quantized product reads the weights once for a few rows, and
then once for each tile of 32 or 64 rows.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low, mode
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

WIDTHS = (2, 3, 4, 5, 6, 9, 13, 20, 32, 48, 64)
"""Numbers of rows that are chosen from: the last before a step of some curve, and 20 and 48 for
machines without tiles. A draft of K tokens has K + 1 rows."""
NUM_SAMPLES = 7  # measurements that count: other programs use the machine too
# plain rounds whose median is the pace, and successive rounds that must contradict the measurements
# to be believed
NUM_PLAIN = NUM_SAMPLES // 2
MOVED = 1.7  # times that a plain round differs from the rounds before if the pace has changed
PLAIN_EVERY = 128  # rounds after which a plain round is measured anew
FIRST_ROWS = WIDTHS[3]  # of the widest pass at first; MLX's kernels for few rows take 5 at once


SINGLE = 2.0  # bound of a width that was measured once, in excesses of the prior over one row
MOST_EXPENSIVE = 1.5  # bound of a draft step's cost, in plain rounds: no draft pays above it
UNKNOWN_STEP = 0.25  # cost of a draft step before it was measured, in plain rounds
PRIOR_WEIGHT = 0.1  # of each point of the prior, in measurements
RIDGE = PRIOR_WEIGHT, 1.0, 10.0
"""Weights of the prior scale, of "copied rows cost the same" and of "depth changes nothing", in
measurements over five rows."""
new_samples = partial(deque[float], maxlen=NUM_SAMPLES)


class Curve(NamedTuple):
    """Costs of passes by rows, with straight lines between the points and beyond them.

    Attributes:
        points: rows and cost.
        fits: pattern of the chips that have this curve.
    """

    points: tuple[tuple[int, float], ...]
    fits: str = ""

    def __call__(self, rows: int) -> float:
        i = min(max(1, bisect_right(self.points, (rows, 0.0))), len(self.points) - 1)
        (m0, c0), (m1, c1) = self.points[i - 1 : i + 1]
        return c0 + (c1 - c0) * (rows - m0) / (m1 - m0)


def _read() -> dict[str, Curve]:
    curves = {}
    for line in Path(__file__).with_name("chips.tsv").read_text(encoding="utf-8").splitlines()[3:]:
        name, costs, tile, fits, *_ = line.split("\t")
        points = [(int(m), float(cost)) for m, cost in (pair.split(":") for pair in costs.split())]
        (_, most), size = points[-1], int(tile)
        for n in range(2, 5 if size else 2):
            # Each further tile costs as much as the first.
            points += [((n - 1) * size + 1, n * most), (n * size, n * most)]
        curves[name] = Curve(tuple(points), fits)
    return curves


CURVES = _read()  # by the names that `replay --cost` takes
MILDEST = CURVES["mildest"]  # on an unknown machine; two measurements correct it


def prior_for(model: nn.Module, kernels: str = "") -> Curve:
    """The curve of the most similar chip, for weights and layers like this model's.

    kernels: name of other kernels. If there is no curve for them, the curve is for MLX's own.
    """
    packed = [layer for layer in model.modules() if hasattr(layer, "bits")]
    kinds = [f"{layer.bits} {getattr(layer, 'mode', 'affine')}" for layer in packed]
    kind = mode(kinds) if kinds else "float"
    kind = "experts" if has_experts(model) else kind
    _, with_kernels = curve_for(f"{kind} on {kernels}")
    return with_kernels if with_kernels.fits else curve_for(kind)[1]


def copied_prior_for(model: nn.Module) -> Curve | None:
    """The curve for rows that copy text, on models with experts. None without such a curve."""
    _, curve = curve_for("experts copied") if has_experts(model) else ("", MILDEST)
    return curve if curve.fits else None


def has_experts(model: nn.Module) -> bool:
    return any("Switch" in type(layer).__name__ for layer in model.modules())


def curve_for(kind: str) -> tuple[str, Curve]:
    """Name and curve of the most similar chip, for weights such as "4 affine"."""
    machine = f"{mx.device_info().get('device_name', '')} {kind}".removeprefix("Apple ")
    fitting = (item for item in CURVES.items() if re.fullmatch(item[1].fits, machine))
    return next(fitting, ("mildest", MILDEST))


Samples = dict[int, deque[float]]  # rows -> latest measured costs of passes
Quantiles = dict[int, tuple[float, int]]  # rows -> a quantile of their costs, and their number


@dataclass
class CostModel:
    """Cost of a pass over m rows, in passes over one row, at one depth of the context.

    An isotonic fit through the measurements and the prior. The prior's excess over one row is
    scaled. A linear regression over all related measurements finds the scale by two features: the
    depth, and whether the rows copy text, where a model has experts (copied rows take the experts
    of their neighbours). Related measurements count half as much as this model's own.

    Attributes:
        first_rows: rows of the widest pass that may be tried at first.
        depth: doublings of the context, or of the number of texts that share passes.
        has_experts: measure rows that copy text apart from new rows.
        related: cost models of the same kind at all depths, this one included.
        copied_prior: the prior of rows that copy text, None for the same.
        plain: seconds of passes over one row. `seconds` is their median.
        ratios, copied: measured costs of rows, and of rows that copy text if has_experts.
        fitted: rows -> cost, for new rows and for rows that copy text.
        most_rows: rows of the widest pass that may be tried now, 4 times the widest so far.
        needs_plain: True if a plain round is due.
    """

    prior: Curve = MILDEST
    first_rows: int = FIRST_ROWS
    depth: int = 0
    has_experts: bool = False
    related: list[CostModel] = field(default_factory=list, repr=False, compare=False)
    copied_prior: Curve | None = None
    plain: deque[float] = field(default_factory=partial(deque[float], maxlen=NUM_PLAIN))
    ratios: Samples = field(default_factory=dict)
    copied: Samples = field(default_factory=dict)
    fitted: tuple[dict[int, float], dict[int, float]] = ({}, {})
    seconds: float = 0.0
    most_rows: int = 1
    needs_plain: bool = True
    _measured: list[Quantiles] = field(default_factory=list)
    _num_rounds: int = 0
    _due: int = 0
    _num_odd: int = 0
    _doubted: tuple[deque[float], float] | None = None

    def __post_init__(self) -> None:
        priors = self.prior, self.copied_prior or self.prior
        rows = (1, *WIDTHS, *dict(self.prior.points))
        self._excess = [{m: prior(m) - 1.0 for m in rows} for prior in priors]
        few = self.prior(self.first_rows)
        self.most_rows = max(m for m in WIDTHS if self.prior(m) <= few)
        self.related.append(self)
        for model in self.related:
            self.most_rows = max(self.most_rows, 4 * max(model.ratios, default=0))
        self.refit()

    def add(self, rows: int, seconds: float, *, is_copied: bool = False) -> None:
        """Add a round whose seconds are the time of one pass."""
        if seconds <= 0:
            return
        self._num_rounds += 1
        if rows == 1:
            self._add_plain(seconds)
        elif self.plain:
            ratios = self.copied if is_copied and self.has_experts else self.ratios
            samples = ratios.setdefault(rows, new_samples())
            known = self.fitted[is_copied].get(rows) or self(rows, is_copied=is_copied)
            self.measure(samples, seconds, rows, known)
        self.needs_plain = self._num_rounds >= self._due

    def _add_plain(self, seconds: float) -> None:
        """Add a plain pass. If it contradicts the passes before, another plain pass is due."""
        before = self.seconds or seconds
        self.plain.append(seconds)
        self.seconds = median_low(self.plain)
        spacing = PLAIN_EVERY // (4 if len(self.plain) < NUM_PLAIN else 1)
        if not before / MOVED < seconds < before * MOVED:
            spacing = 0
        elif self._num_odd:
            self._believe()
        self._doubted, self._num_odd = None, 0
        self._due = self._num_rounds + spacing

    def measure(
        self,
        samples: deque[float],
        seconds: float,
        rows: int,
        known: float,
        less: float = 0.0,
        shares: int = 1,
    ) -> None:
        """Add a round to the samples of a cost, unless it contradicts the known cost.

        Args:
            samples: samples to add to, in plain rounds.
            seconds: seconds of the round.
            rows: rows of its pass.
            known: expected cost of the round, in plain rounds.
            less: part of the cost that does not belong to the samples.
            shares: number of equal parts of the rest, such as draft steps.
        """
        ratio = seconds / self.seconds
        # No pass is quicker than a plain pass, so the plain pace must have changed.
        is_low = ratio * MOVED < 1.0
        self._num_odd = (self._num_odd + 1) * (is_low or known * MOVED < ratio)
        if self._num_odd > (0 if is_low else min(NUM_PLAIN, len(samples))):
            self._due = self._num_rounds
        # A contradiction is a bad moment of the machine, unless a plain round (which is then due)
        # takes as long as ever, or several rounds agree.
        self._doubted = samples, (ratio - less) / shares
        if not 0 < self._num_odd <= NUM_PLAIN:
            self._believe()
        # If the first passes are narrow, two measurements come before a wider pass.
        if self.first_rows == FIRST_ROWS or sum(map(len, self.ratios.values())) > 1:
            self.most_rows = max(self.most_rows, 4 * rows)

    def _believe(self) -> None:
        """Add the latest measurement to its samples."""
        if self._doubted is not None:
            samples, cost = self._doubted
            samples.append(cost)
            self.refit()

    def __call__(self, rows: int, *, is_copied: bool = False) -> float:
        """Cost of a pass over `rows` >= 1, in passes over one row. It never falls."""
        fitted = self.fitted[is_copied]
        if rows in fitted:
            return fitted[rows]
        return float(np.interp(rows, list(fitted), list(fitted.values())))

    def restore(self, *ratios: Mapping[int, Sequence[float]]) -> None:
        self.ratios, self.copied = (
            {rows: new_samples(costs) for rows, costs in kind.items() if costs} for kind in ratios
        )
        self.most_rows = max(self.most_rows, 4 * max(self.ratios, default=0))
        self.refit()

    def refit(self) -> None:
        """Fit the prior to all measurements."""
        measured = []
        both = (self.ratios, self.copied) if self.has_experts else (self.ratios,)
        for is_copied, ratios in enumerate(both):
            quantiles: Quantiles = {}
            for rows, samples in ratios.items():
                if rows not in self._excess[0]:
                    self._excess[0][rows] = self.prior(rows) - 1.0
                    self._excess[1][rows] = (self.copied_prior or self.prior)(rows) - 1.0
                if num := len(samples):
                    # Other programs use the machine too. A pass is slow by chance and never quick,
                    # so a width costs the lower quartile, and a single measurement has a bound.
                    most = 1.0 + (SINGLE * self._excess[is_copied][rows] if num == 1 else rows)
                    quantiles[rows] = min(sorted(samples)[num // 4], most), num
            measured.append(quantiles)
        if measured != self._measured:
            self._measured = measured
            scales = self._scales()
            new = self._curve(0, scales)
            self.fitted = new, self._curve(1, scales) if self.has_experts else new

    def _scales(self) -> list[tuple[float, float]]:
        """Scales of the prior's excess for new and copied rows, for each related model."""
        # Ridge regression. Without measurements the scale is 1 for all rows and at all depths.
        few = max(self._excess[0][FIRST_ROWS], 1e-6)
        left, right = few * np.diag(RIDGE), few * np.array([RIDGE[0], 0.0, 0.0])
        for model in self.related:
            for is_copied, quantiles in enumerate(model._measured):
                features = np.array([1.0, is_copied, model.depth])
                expected = sum(
                    num * model._excess[is_copied][rows] for rows, (_, num) in quantiles.items()
                )
                left += expected * np.outer(features, features)
                right += sum(num * (ratio - 1.0) for ratio, num in quantiles.values()) * features
        common, of_copied, of_depth = np.linalg.solve(left, right).tolist()
        new = [common + of_depth * model.depth for model in self.related]
        return [(max(0.0, scale), max(0.0, scale + of_copied)) for scale in new]

    def _curve(self, is_copied: int, scales: list[tuple[float, float]]) -> dict[int, float]:
        """The isotonic fit for new or copied rows."""
        scale, measurements = scales[self.related.index(self)][is_copied], self._measured[is_copied]
        # Wide passes use another kernel, and narrow passes say little about it.
        if self.prior.fits and max(measurements, default=0) <= FIRST_ROWS:
            believed = measured = PRIOR_WEIGHT * (1.0 + self._excess[is_copied][FIRST_ROWS])
            for rows, (ratio, num) in measurements.items():
                believed += num * (1.0 + self._excess[is_copied][rows])
                measured += num * ratio
            scale = min(scale, measured / believed)
        excess = self._excess[is_copied]
        points = {m: [(1.0 + scale * more, PRIOR_WEIGHT)] for m, more in excess.items()}
        for model, other in zip(self.related, scales, strict=True):
            for kind, quantiles in enumerate(model._measured):
                is_own = model is self and kind == is_copied
                times = scale / other[kind] if other[kind] > 0 and not is_own else 1.0
                for rows, (ratio, num) in quantiles.items():
                    # Related measurements count half.
                    weight = num if is_own else num / 2
                    # The kinds have priors of their own.
                    before = model._excess[kind][rows]
                    alike = excess.get(rows, before) / before if before else 1.0
                    cost = 1.0 + times * alike * (ratio - 1.0)
                    points.setdefault(rows, []).append((cost, weight))
        weighed = []
        for rows in sorted(points):
            weight = sum(weight for _, weight in points[rows])
            weighed.append((sum(cost * part for cost, part in points[rows]) / weight, weight))
        return dict(zip(sorted(points), isotonic(weighed), strict=True))


@dataclass
class Steps:
    """Cost of drafting in plain rounds.

    Attributes:
        first: measured costs of the first token.
        further: measured costs of later tokens.
    """

    first: deque[float] = field(default_factory=new_samples)
    further: deque[float] = field(default_factory=new_samples)

    def add_round(self, cost_model: CostModel, seconds: float, num_steps: int) -> None:
        """Add a round that verified this number of tokens. Only its total time is known."""
        cost = cost_model(1 + num_steps)
        known = cost + self(num_steps)
        cost_model.measure(self.first, seconds, 1 + num_steps, known, cost, num_steps)

    def of(self, samples: Sequence[float]) -> float:
        """Cost of a step by its measurements and its prior."""
        # The prior counts as one measurement, so that the first measurement alone decides nothing.
        return sorted((0.0, median_low((UNKNOWN_STEP, *samples)), MOST_EXPENSIVE))[1]

    @property
    def step(self) -> float:
        """Cost of a token after the first."""
        first = self.of(self.first)
        # A later token never costs more than the first, which is measured more often.
        return min(first, self.of(self.further)) if self.further else first

    def __call__(self, num_steps: int) -> float:
        return self.of(self.first) + (num_steps - 1) * self.step if num_steps else 0.0


def isotonic(points: Sequence[tuple[float, float]]) -> list[float]:
    """The costs >= 1 that never fall and are nearest to the points (cost, weight)."""
    # Pool adjacent violators: neighbours that fall are merged to their weighted mean.
    blocks: list[tuple[float, float, int]] = []  # cost, weight, number of points
    for cost, weight in points:
        number = 1
        while blocks and blocks[-1][0] > cost:
            cost0, weight0, number0 = blocks.pop()
            cost = (cost0 * weight0 + cost * weight) / (weight0 + weight)
            weight, number = weight0 + weight, number0 + number
        blocks.append((cost, weight, number))
    return [max(1.0, cost) for cost, _, number in blocks for _ in range(number)]
