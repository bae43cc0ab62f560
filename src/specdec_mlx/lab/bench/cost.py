"""c(m): the cost of a pass of the target over m positions; measured, or given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import cycle, islice
from math import inf

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream
from msgspec import Struct

from specdec_mlx.caches import Rollback, wait_for
from specdec_mlx.contracts import Draft
from specdec_mlx.draft_length.costs import CURVES, Curve
from specdec_mlx.lab.estimates import median_of
from specdec_mlx.options import Options
from specdec_mlx.target import Verifier

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 32, 33, 64)  # both sides of MLX's steps
MEASURED = "measured"
NUM_CACHED, PREFILL_STEP = 256, 512
RELATIVE_UNIT = 0.02  # seconds of c(1) where only ratios are known; of a small model on a laptop


class CostCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a pass over m positions.

    Attributes:
        name: of the curve.
        positions: [n] increasing from 1, at least two. Otherwise raises ValueError.
        seconds: [n] measured.
        low: [n] lower ends of 95% intervals, or ().
        high: [n] upper ends of 95% intervals, or ().
    """

    name: str
    positions: tuple[int, ...]
    seconds: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        positions, costs = list(self.positions), self.seconds
        is_sorted = positions == sorted({1, *positions}) and len(positions) == len(costs) > 1
        if not (is_sorted and all(0 < cost < inf for cost in costs)):
            raise ValueError(
                f"Cost curve {self.name!r}: got positions {self.positions} with costs {costs}, "
                "expected increasing positions from 1, two or more, finite costs > 0."
            )

    def __call__(self, num_positions: int) -> float:
        """Seconds of a pass over `num_positions` >= 1."""
        return Curve(tuple(zip(self.positions, self.seconds, strict=True)))(num_positions)

    def relative(self) -> tuple[float, ...]:
        """Costs [n] relative to the cost of one position."""
        return tuple(s / self.seconds[0] for s in self.seconds)


def linear_cost(slope: float, unit: float = RELATIVE_UNIT) -> CostCurve:
    """c(m) = 1 + slope * (m - 1), times `unit` seconds. Raises ValueError for a slope below 0."""
    if slope < 0:
        raise ValueError(f"Cost slope {slope}: expected a number >= 0.")
    return CostCurve(f"linear:{slope:g}", (1, 2), (unit, unit * (1 + slope)))


def parse_cost(text: str, measured: CostCurve | None) -> CostCurve:
    """Read a cost curve of the command line. Raises ValueError.

    Args:
        text: "measured", "linear:0.24", a chip, or the costs of 1, 2, ... positions.
        measured: the curve of the recorded texts, which is also the unit of relative costs.
    """
    unit = measured.seconds[0] if measured else RELATIVE_UNIT
    if text == MEASURED and measured is not None:
        return measured
    try:
        if text.startswith("linear:"):
            return linear_cost(float(text.removeprefix("linear:")), unit)
        points = CURVES[text].points if text in CURVES else enumerate(text.split(","), start=1)
        rows, costs = zip(*((m, float(cost)) for m, cost in points), strict=True)
        # Given costs are relative to the first.
        seconds = tuple(unit * cost / costs[0] for cost in costs)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"Cost {text!r}: expected measured (by a benchmark, whose file is given), "
            f"linear:SLOPE, costs as 1,1.1,1.3, or one of {', '.join(CURVES)}."
        ) from error
    return CostCurve(text, rows, seconds)


class CostMeter:
    """Measures c(m) of a model with a cache of `num_cached` tokens.

    The sweeps are spread over a benchmark. Each pass is divided by the passes over a single
    position before and after it, which cancels changes in the machine's speed.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Sequence[int],
        widths: Sequence[int] = WIDTHS,
        num_cached: int = NUM_CACHED,
    ) -> None:
        self._widths = tuple(widths)
        how, caches = Options(rule="match"), Rollback.of(model)
        self._verifier = Verifier(model, caches, how)
        # Real text, because it decides which experts a model with experts reads.
        self._tokens = list(islice(cycle(tokens), max(num_cached, *widths)))
        with mx.stream(generation_stream):
            for start in range(0, len(self._tokens), PREFILL_STEP):
                self._verifier.feed(mx.array(self._tokens[start : start + PREFILL_STEP]))
                wait_for(self._verifier.rollback.caches)
        self._single: list[float] = []
        self._ratios: dict[int, list[float]] = {width: [] for width in self._widths[1:]}
        self.sweep()
        # The first sweep compiles kernels, so its times are dropped.
        for samples in (self._single, *self._ratios.values()):
            samples.clear()

    def sweep(self) -> None:
        """Time a pass of every width, with a pass over a single position between them."""
        before = self._time(1)
        self._single.append(before)
        for width, ratios in self._ratios.items():
            seconds, after = self._time(width), self._time(1)
            # ratio = t / mean(t_before, t_after)
            ratios.append(2 * seconds / (before + after))
            self._single.append(after)
            before = after

    def curve(self) -> CostCurve:
        ratios = [median_of(samples) for samples in self._ratios.values()]
        # The median single pass sets the scale in seconds.
        columns = statistics.median(self._single) * np.array([(1, 1, 1), *ratios]).T
        return CostCurve(MEASURED, self._widths, *(tuple(column) for column in columns.tolist()))

    def _time(self, width: int) -> float:
        rollback = self._verifier.rollback
        start = rollback.position
        rollback.checkpoint()
        mx.synchronize(generation_stream)
        began = time.perf_counter()
        with mx.stream(generation_stream):
            block = self._verifier.launch(self._tokens[:1], Draft(self._tokens[1:width]), 0)
            block.read()
        seconds = time.perf_counter() - began
        # All widths are timed at the same length of the cache.
        rollback.rewind_to(start)
        rollback.drop_checkpoints()
        return seconds
