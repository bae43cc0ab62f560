"""c(m): the cost of a pass of the target over m positions; measured, or given."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.contracts import Draft
from specdec_mlx.draft_length.costs import CURVES, Curve
from specdec_mlx.rules.match import Match
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.model_pass import ModelPass
from specdec_mlx.target.next_token import NextToken
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.verifier import Verifier

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 32, 33, 64)  # both sides of MLX's steps
MEASURED = "measured"
NUM_CACHED = 256
RELATIVE_UNIT = 0.02  # seconds of c(1) where only ratios are known; of a small model on a laptop


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a pass over m positions: a `Curve` through measured points, with a name.

    positions: [n] increasing from 1, else ValueError. low, high: [n] 95% interval of `seconds`, or
    ().
    """

    name: str
    positions: tuple[int, ...]
    seconds: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        ordered = list(self.positions) == sorted(set(self.positions))
        if not ordered or len(self.positions) != len(self.seconds) or self.positions[:1] != (1,):
            raise ValueError(
                f"Cost curve {self.name!r}: got positions {self.positions} with "
                f"{len(self.seconds)} costs, expected increasing positions from 1, one cost each."
            )
        if min(self.seconds) <= 0:
            raise ValueError(f"Cost curve {self.name!r}: costs must be > 0, got {self.seconds}.")

    @cached_property
    def _curve(self) -> Curve:
        points = list(zip(self.positions, self.seconds, strict=True))
        return Curve((*points, (2, self.seconds[0])) if len(points) == 1 else tuple(points))

    def __call__(self, num_positions: int) -> float:
        """Seconds of a pass over `num_positions` >= 1."""
        return self._curve(num_positions)

    def relative(self) -> tuple[float, ...]:
        """[n] costs over that of one position."""
        return tuple(s / self.seconds[0] for s in self.seconds)


def linear_cost(slope: float, unit: float = RELATIVE_UNIT) -> CostCurve:
    """c(m) = 1 + slope * (m - 1), times `unit` seconds. Raises ValueError for a slope below 0."""
    if slope < 0:
        raise ValueError(f"Cost slope {slope}: expected a number >= 0.")
    return CostCurve(f"linear:{slope:g}", (1, 2), (unit, unit * (1 + slope)))


def parse_cost(text: str, measured: CostCurve | None) -> CostCurve:
    """Curve out of a command line: "measured", "linear:0.24", a chip, or costs of 1, 2 ... rows.

    measured: the curve of the recorded texts, and the unit of relative ones. Raises ValueError.
    """
    unit = measured.seconds[0] if measured else RELATIVE_UNIT
    if text == MEASURED:
        if measured is None:
            raise ValueError("No measured cost curve in this file. Give linear:SLOPE or a list.")
        return measured
    if text in CURVES:
        rows, costs = zip(*CURVES[text].points, strict=True)
        return CostCurve(text, rows, tuple(unit * cost for cost in costs))
    kind, _, rest = text.partition(":")
    try:
        if kind == "linear":
            return linear_cost(float(rest), unit)
        costs = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"Cost {text!r}: expected measured, linear:SLOPE, costs as 1,1.1,1.3, or one of "
            f"{', '.join(CURVES)}."
        ) from error
    scaled = tuple(unit * cost / costs[0] for cost in costs)
    return CostCurve(text, tuple(range(1, len(costs) + 1)), scaled)


class CostMeter:
    """Measures c(m) of a model on a cache of a few hundred tokens, a sweep at a time.

    Sweeps are spread over a benchmark, and each pass is divided by those over one position before
    and after it, so that the machine's pace cancels out.
    """

    def __init__(
        self, model: nn.Module, tokens: Sequence[int], widths: Sequence[int] = WIDTHS
    ) -> None:
        """Fill the cache with a real text, since experts are chosen by it, and warm up."""
        self._widths = tuple(widths)
        target = ModelPass(model, Rollback(make_prompt_cache(model)))
        self._verifier = Verifier(target, NextToken(Sampling(), (), Noise(0)), Match())
        cached = max(NUM_CACHED, max(widths))
        self._tokens = (list(tokens) * (cached // len(tokens) + 1))[:cached]
        with mx.stream(generation_stream):
            self._verifier.feed(mx.array(self._tokens))
            mx.eval([cache.state for cache in self._verifier.rollback.caches])
        self._single: list[float] = []
        self._ratios: dict[int, list[float]] = {width: [] for width in self._widths[1:]}
        self.sweep()
        for samples in (self._single, *self._ratios.values()):
            samples.clear()

    def sweep(self) -> None:
        """Time one pass of every width, with one over a single position between any two."""
        before = self._time(1)
        self._single.append(before)
        for width, ratios in self._ratios.items():
            seconds, after = self._time(width), self._time(1)
            ratios.append(2 * seconds / (before + after))
            self._single.append(after)
            before = after

    def curve(self) -> CostCurve:
        """Medians so far, with their intervals."""
        single = statistics.median(self._single)
        rows = [(statistics.median(r), *median_interval(r)) for r in self._ratios.values()]
        seconds, low, high = zip(
            *([single * x for x in row] for row in [(1, 1, 1), *rows]), strict=True
        )
        return CostCurve(MEASURED, self._widths, seconds, low, high)

    def _time(self, width: int) -> float:
        """Seconds of one pass; afterwards the cache is as before."""
        rollback = self._verifier.rollback
        start = rollback.position
        rollback.checkpoint()
        mx.synchronize(generation_stream)
        began = time.perf_counter()
        with mx.stream(generation_stream):
            block = self._verifier.launch(self._tokens[:1], Draft(self._tokens[1:width]), 0)
            block.read()
        seconds = time.perf_counter() - began
        rollback.rewind_to(start)
        rollback.drop_checkpoints()
        return seconds


def median_interval(samples: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Interval that holds the median with at least this chance, by binomial (n, 1/2)."""
    ordered, n = sorted(samples), len(samples)
    tails = (sum(math.comb(n, i) for i in range(k + 1)) / 2**n for k in range(n // 2))
    first = max(0, sum(tail <= (1 - confidence) / 2 for tail in tails) - 1)
    return ordered[first], ordered[n - 1 - first]
