"""A wide pass next to the single passes that it replaces, module by module.

Logits cannot tell a fault from rounding, because each layer magnifies the rounding of the layers
before it. So every module of the wide pass is called with the rows that it got in the single
passes, and the rows that had arrived there are compared. No difference travels further than to the
next module, and a fault in one layer shows as clearly in a model of 80 layers as in a model of two.

The yardstick comes from the single passes: they are run again with all inputs of their modules
moved by a few last places. A correct wide pass is never further off than these passes are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.exactness.rounding import last_place
from specdec_mlx.models.anatomy import handing

Run = Callable[[], mx.array]
"""Runs one pass; logits [n, V]."""

Place = tuple[int, int]
"""Where rows arrive: a module's id, and the number of its call in the pass."""

States = dict[Place, mx.array]
"""The rows [1, n, D] that arrived at each place of a pass."""

Hand = Callable[[Place, mx.array], mx.array]
"""Returns the rows that a module gets in place of the rows that arrived at its place."""

LOGITS: Place = (0, 0)

SHAKEN_BY = 8.0
"""Last places between the most that a number is moved down, and up.

A heuristic. Correct passes of 123 tiny architectures are off as if moved by at most 3 if they only
multiply in another order, and by 7 if a model itself rounds to coarse steps.
"""

LEAST = 4e-3
"""Smallest relative difference of a row that counts. Angles far along a text are as coarse."""

FEW = 2
"""Single passes that are run again at first. Rows that are still off take all passes, twice."""

MASKED = 1e8  # numbers this large mask a token and are not compared


def arrivals(model: nn.Module, run: Run, hand: Hand | None = None) -> States:
    """Run a pass. Returns the rows that arrive at its modules, and its logits."""
    num_calls, arrived = Counter[int](), States()

    def seen(module: nn.Module, states: Any) -> Any:
        place = id(module), num_calls[id(module)]
        num_calls[id(module)] += 1
        is_rows = isinstance(states, mx.array) and states.ndim == 3 and len(states) == 1
        if not (is_rows and mx.issubdtype(states.dtype, mx.floating)):
            return states
        arrived[place] = states
        return states if hand is None else hand(place, states)

    with handing([part for part in model.modules() if part is not model], seen):
        logits = run()
    arrived[LOGITS] = logits[None]
    mx.eval(arrived)
    # Arrays with another number of rows have no row for each position.
    num_rows = logits.shape[0]
    return {place: s for place, s in arrived.items() if s.shape[1] == num_rows}


def instead(rows: States) -> Hand:
    """Hand modules these rows in place of their own, if the shapes agree."""

    def hand(place: Place, states: mx.array) -> mx.array:
        other = rows.get(place, states)
        return other.astype(states.dtype) if other.shape == states.shape else states

    return hand


def shaken(rows: States, size: float, key: int) -> Hand:
    """Move the rows at random, each number by up to half of `size` last places."""
    hand, keys = instead(rows), count(key << 20)

    def shake(place: Place, states: mx.array) -> mx.array:
        states = hand(place, states)
        key = mx.random.key(next(keys))
        noise = mx.random.uniform(-0.5, 0.5, states.shape, key=key)
        moved = states * (1 + size * last_place(states.dtype) * noise)
        return moved.astype(states.dtype)

    return shake


def deviations(arrived: States, expected: States) -> dict[Place, list[float]]:
    """Relative difference of each row, at the places that both passes have."""
    off = {
        place: _relative(arrived[place][0], rows[0])
        for place, rows in expected.items()
        if place in arrived and arrived[place].shape == rows.shape
    }
    mx.eval(off)
    return {place: rows.tolist() for place, rows in off.items()}  # type: ignore[misc]


def _relative(rows: mx.array, expected: mx.array) -> mx.array:
    """[n] root mean square of the difference of rows [n, D], relative to the expected rows."""
    rows, expected = rows.astype(mx.float32), expected.astype(mx.float32)
    counts = mx.abs(expected) < MASKED
    difference = mx.where(counts, rows - expected, 0).square().mean(axis=-1)
    size = mx.where(counts, expected, 0).square().mean(axis=-1)
    off = mx.sqrt(difference / mx.maximum(size, 1e-30))
    return mx.where(mx.isnan(off), mx.inf, off)


def largest_difference(logits: mx.array, expected: mx.array) -> float:
    """Largest difference of two arrays of logits, without logits that mask a token."""
    logits, expected = logits.astype(mx.float32), expected.astype(mx.float32)
    counts = mx.abs(expected) < MASKED
    return float(mx.where(counts, mx.abs(logits - expected), 0).max())


@dataclass
class SinglePasses:
    """Single passes that wide passes are compared with.

    Attributes:
        model: the model.
        start: caches at the beginning.
        alone: makes the passes from caches, which it copies. The last row of each pass counts.
    """

    model: nn.Module
    start: list[Any]
    alone: Callable[[list[Any]], Sequence[Run]]
    _off: list[dict[Place, float]] = field(default_factory=list, init=False)

    @cached_property
    def rows(self) -> list[States]:
        return [arrivals(self.model, run) for run in self.alone(self.start)]

    @cached_property
    def _runs_again(self) -> Sequence[Run]:
        return [*self.alone(self.start), *self.alone(self.start)]

    def joined(self, number: int) -> States:
        """The rows of the first passes, in the layout of one wide pass."""
        first, *others = self.rows[:number]
        return {
            place: mx.concatenate([row[place][:, -1:] for row in (first, *others)], axis=1)
            for place in first
            if all(place in row for row in others)
        }

    def off(self, wide: Run, width: int) -> dict[Place, list[float]]:
        """Differences of a wide pass whose modules get the rows of the first passes."""
        expected = self.joined(width)
        return deviations(arrivals(self.model, wide, instead(expected)), expected)

    def fault(self, off: dict[Place, list[float]]) -> Place | None:
        num_off = {}
        # Every further single pass costs time, so that they are run only for places that are still
        # off.
        for number in (0, FEW, len(self.rows), 2 * len(self.rows)):
            num_off = {place: self._num_off(place, rows, number) for place, rows in off.items()}
            off = {place: rows for place, rows in off.items() if num_off[place]}
        for place, rows in off.items():
            # Rounding may choose another expert for a few rows. Experts read no cache, so that this
            # is no fault of the pass.
            if 2 * num_off[place] > len(rows) or place in self.readers:
                return place
        return None

    def _num_off(self, place: Place, rows: list[float], number: int) -> int:
        """Number of rows at a place that are off by more than the shaken single passes."""
        by_rounding = [off.get(place, 0.0) for off in self._off_by_rounding(number)]
        most = max(LEAST, last_place(self.rows[0][place].dtype), *by_rounding)
        return sum(row > most for row in rows)

    def _off_by_rounding(self, number: int) -> list[dict[Place, float]]:
        for key in range(len(self._off), number):
            row = self.rows[key % len(self.rows)]
            hand = shaken(row, SHAKEN_BY, key)
            moved = arrivals(self.model, self._runs_again[key], hand)
            off = deviations(moved, row).items()
            self._off.append({place: rows[-1] for place, rows in off})
        return self._off[:number]

    @cached_property
    def readers(self) -> set[Place]:
        """Places where other rows arrive if the caches are empty: behind masks and states."""
        run, *_ = self.alone(make_prompt_cache(self.model))
        row = self.rows[0]
        off = deviations(arrivals(self.model, run, instead(row)), row).items()
        least = {place: SHAKEN_BY * last_place(row[place].dtype) for place in row}
        return {place for place, rows in off if rows[-1] > least[place]}
