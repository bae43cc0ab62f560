"""Attention over 6 to 15 rows of a long context, cut into calls of at most 5 rows.

MLX's kernel for few rows takes a few of them. Above that number attention takes a slower path until
there are enough rows for a tile. Each row attends by itself, so that two calls over half of the
rows give the same values. A race on this machine decides for each shape of attention.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from statistics import median_low
from time import perf_counter
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from specdec_mlx.kernels.contract import Kernels
from specdec_mlx.models.anatomy import Function, replacing
from specdec_mlx.models.loading import PerModel

FEWEST, MOST = 6, 15  # rows of a pass that may be cut
MOST_IN_CALL = 5  # rows of each call
LONG = 4096  # positions from which a pass may be cut
CLASS = 2048  # positions of the first class of contexts; each doubling is a class
REPEATS = 5  # times that either way runs in a race
MARGIN = 1.05  # times that one call must take longer, so that the race is no accident
TOLERANCE = 0.02  # most that the two ways may differ, in the largest value
NAME = "scaled_dot_product_attention"  # of mlx-lm's function, in the modules that call it

Arguments = dict[str, Any]


@dataclass(eq=False)
class SplitAttention(Kernels):
    """Attention of wide passes, in several calls where a race finds this faster.

    A race runs once for each shape of attention and class of contexts: before it, passes run as
    without kernels.

    Attributes:
        clock: seconds.
        faster: results of the races.
    """

    name = "split"
    clock: Callable[[], float] = perf_counter
    faster: dict[Hashable, bool] = field(default_factory=dict)
    _races: dict[Hashable, Callable[[], bool]] = field(default_factory=dict)

    def around(
        self, model: nn.Module, rows: int, context: int
    ) -> AbstractContextManager[object, bool | None]:
        if rows < FEWEST or context < LONG:
            return nullcontext()
        return replacing(_places(model), self._attend)

    def active(self, model: nn.Module) -> str:
        """Nothing, because each race compares the values too."""
        return ""

    def measure(self) -> None:
        """Run the races of shapes that passes have met. Waits for the device."""
        while self._races:
            shape, race = self._races.popitem()
            self.faster[shape] = race()

    def report(self) -> str:
        return "can run; a race decides for each shape of attention"

    def _attend(self, function: Function, args: tuple[Any, ...], more: Arguments) -> Any:
        call = dict(zip(_parameters(function), args, strict=False)) | more
        shape = _shape_of(call)
        if shape is None:
            return function(**call)
        if shape not in self.faster:
            # The race makes its own arrays, so that it does not keep the caches' old buffers.
            self._races[shape] = partial(self._race, function, _stand_ins(call))
        return split(function, call) if self.faster.get(shape) else function(**call)

    def _race(self, function: Function, make: Callable[[], Arguments]) -> bool:
        """True if the call in parts is faster than the call as a whole, with the same values."""
        call = make()
        mx.eval(list(call.values()))
        # The pass under way must not count.
        mx.synchronize(mx.default_stream(mx.default_device()))
        ways = partial(_whole, function, call), partial(split, function, call)
        outputs = [way() for way in ways]  # also compiles kernels
        difference = mx.abs(outputs[0] - outputs[1]).max() / mx.abs(outputs[0]).max()
        if not float(difference) <= TOLERANCE:
            return False
        seconds: list[list[float]] = [[], []]
        for _ in range(REPEATS):
            for way, times in zip(ways, seconds, strict=True):
                started = self.clock()
                mx.eval(way())
                times.append(self.clock() - started)
        whole, parts = map(median_low, seconds)
        return whole > MARGIN * parts


@cache
def _parameters(function: Function) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@PerModel
def _places(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """Modules of the model's classes that call the attention of mlx-lm or mlx-vlm by its name."""
    names = sorted({type(module).__module__ for module in model.modules()} & sys.modules.keys())
    files = [sys.modules[name] for name in names]
    return [(file, NAME) for file in files if _is_known(inspect.unwrap(getattr(file, NAME, print)))]


def _is_known(function: Any) -> bool:
    expected = {"queries", "keys", "values", "cache", "scale", "mask"}
    return function is not print and expected <= {*_parameters(function)}


def _shape_of(call: Arguments) -> Hashable | None:
    """All that the time of this call depends on, or None if the call is not cut."""
    queries, mask, keys = call["queries"], call["mask"], _first(call["keys"])
    rows, length = queries.shape[-2], keys.shape[-2]
    if not (FEWEST <= rows <= MOST and length >= LONG):
        return None
    kind: Hashable = mask
    if isinstance(mask, mx.array):
        if mask.ndim < 2 or mask.shape[-2] not in (1, rows) or mask.shape[-1] != length:
            return None
        kind = str(mask.dtype), mask.ndim, mask.shape[-2]
    elif mask not in (None, "causal"):
        return None
    kinds = str(queries.dtype), str(keys.dtype), keys.shape[-1], _first(call["values"]).shape[-1]
    heads = queries.shape[:-1], queries.shape[-1], keys.shape[:-2]
    bits = getattr(call["cache"], "bits", None), getattr(call["cache"], "group_size", None)
    return heads, kinds, bits, kind, call.get("sinks") is None, (length // CLASS).bit_length()


def _first(keys: Any) -> mx.array:
    """The keys, or the packed part of quantized keys."""
    return keys if isinstance(keys, mx.array) else keys[0]


def _stand_ins(call: Arguments) -> Callable[[], Arguments]:
    """A function that makes arguments of the same shapes and types as these."""
    shapes = {
        name: tree_map(lambda array: (array.shape, array.dtype), call[name])
        for name in ("queries", "sinks")
        if call.get(name) is not None
    }
    width, cache = call["queries"].shape[-1], call["cache"]
    is_packed = not isinstance(call["keys"], mx.array)
    if is_packed:
        pack = {"bits": cache.bits, "group_size": cache.group_size}
        values_width = call["values"][0].shape[-1] * 32 // cache.bits
    for name in ("keys", "values"):
        first = _first(call[name])
        size = first.shape[-1]
        if is_packed:
            size = width if name == "keys" else values_width
        dtype = call["queries"].dtype if is_packed else first.dtype
        shapes[name] = (*first.shape[:-1], size), dtype
    mask = call["mask"]
    if isinstance(mask, mx.array):
        mask = mask.shape, mask.dtype
    kept = {name: call[name] for name in call if name not in (*shapes, "mask", "cache")}
    kind = _Packed(cache.bits, cache.group_size) if is_packed else None

    def make() -> Arguments:
        made: Arguments = {}
        for number, (name, (shape, dtype)) in enumerate(shapes.items()):
            made[name] = mx.random.normal(shape, key=mx.random.key(number)).astype(dtype)
            if is_packed and name in ("keys", "values"):
                made[name] = mx.quantize(made[name], **pack)
        made["mask"] = _causal(*mask) if isinstance(mask, tuple) else mask
        return kept | made | {"cache": kind}

    return make


@dataclass(frozen=True)
class _Packed:
    """What attention reads of a quantized cache."""

    bits: int
    group_size: int


def _causal(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    rows, length = shape[-2:]
    seen = mx.arange(length)[None] <= mx.arange(length - rows, length)[:, None]
    mask = seen if dtype == mx.bool_ else mx.where(seen, 0.0, -1e4).astype(dtype)
    return mx.broadcast_to(mask, shape)


def _whole(function: Function, call: Arguments) -> mx.array:
    # mlx-lm's quantized attention scales the array of its queries in place.
    return function(**call | {"queries": call["queries"][...]})  # type: ignore[no-any-return]


def split(function: Function, call: Arguments) -> mx.array:
    """Attention [..., rows, D] of a call, in calls of at most 5 rows that differ by at most one."""
    rows, length = call["queries"].shape[-2], _first(call["keys"]).shape[-2]
    # MLX's kernel for few rows takes at most 32 rows with the heads that share a key.
    sharing = call["queries"].shape[1] // _first(call["keys"]).shape[1]
    num_calls = -(-rows // max(2, min(MOST_IN_CALL, 32 // sharing)))
    outputs = []
    for i in range(num_calls):
        start, end = i * rows // num_calls, (i + 1) * rows // num_calls
        part = call | {"queries": call["queries"][..., start:end, :]}
        mask = call["mask"]
        if isinstance(mask, str):
            # "causal" means that the last row sees all keys
            cut = partial(_head, length=length - rows + end)
            part |= {name: tree_map(cut, call[name]) for name in ("keys", "values")}
        elif mask is not None and mask.shape[-2] == rows:
            part["mask"] = mask[..., start:end, :]
        outputs.append(function(**part))
    return mx.concatenate(outputs, axis=-2)


def _head(array: mx.array, length: int) -> mx.array:
    return array[..., :length, :]
