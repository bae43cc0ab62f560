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
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from specdec_mlx.kernels.contract import Kernels
from specdec_mlx.models.anatomy import Function, replacing
from specdec_mlx.models.loading import PerModel

FEWEST, MOST = 6, 15  # rows of a pass that may be cut
MOST_IN_CALL = 5  # rows of each call
LONG = 4096  # positions from which a pass may be cut
REPEATS = 5  # times that either way runs in a race
MARGIN = 1.05  # times that one call must take longer, so that the race is no accident
TOLERANCE = 0.02  # most that the two ways may differ, in the largest value
NAME = "scaled_dot_product_attention"  # of mlx-lm's function, in the modules that call it
ARRAYS = "queries", "keys", "values", "mask", "sinks"  # its arguments that may be arrays

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
            # The race makes its own arrays, so that it does not keep old buffers of the caches.
            makers = tree_map(_maker, {name: call[name] for name in ARRAYS if name in call})
            cache, kinds = call["cache"], ("bits", "group_size")
            if hasattr(cache, "bits"):
                cache = SimpleNamespace(**{name: getattr(cache, name) for name in kinds})
            others = {"cache": cache, "scale": call["scale"]}
            self._races[shape] = partial(self._race, function, others, makers)
        return split(function, call) if self.faster.get(shape) else function(**call)

    def _race(self, function: Function, others: Arguments, makers: Any) -> bool:
        """True if the call in parts is faster than the call as a whole, with the same values."""
        arrays = tree_map(lambda make: make(), makers)
        call = others | arrays
        mx.eval(arrays)
        # The pass under way must not count.
        mx.synchronize(mx.default_stream(mx.default_device()))
        ways = partial(one_call, function, call), partial(split, function, call)
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
        together, apart = map(median_low, seconds)
        return together > MARGIN * apart


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
    is_array = isinstance(mask, mx.array)
    if is_array and (mask.ndim < 2 or mask.shape[-2] not in (1, rows) or mask.shape[-1] != length):
        return None
    if not is_array and mask not in (None, "causal"):
        return None
    return tuple(_kind(value) for _, value in tree_flatten([call.get(name) for name in ARRAYS]))


def _kind(value: Any) -> Hashable:
    if not isinstance(value, mx.array):
        return value  # type: ignore[no-any-return]
    # All lengths up to the next doubling share a race.
    sizes = (size if size < LONG else LONG << (size // LONG).bit_length() for size in value.shape)
    return (*sizes, value.dtype)


def _first(keys: Any) -> mx.array:
    """The keys, or the packed part of quantized keys."""
    return keys if isinstance(keys, mx.array) else keys[0]


def _maker(value: Any) -> Callable[[], Any]:
    """A function that makes a value like this one: for an array, random numbers of its shape."""
    if isinstance(value, mx.array):
        return partial(_random, value.shape, value.dtype)
    return lambda: value


def _random(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    key = mx.random.key(0)
    if dtype == mx.bool_:  # every row sees all keys
        return mx.ones(shape, dtype)
    if mx.issubdtype(dtype, mx.integer):  # packed keys or values
        return mx.random.randint(0, 1 << 30, shape, key=key).astype(dtype)
    return mx.random.normal(shape, key=key).astype(dtype)


def one_call(function: Function, call: Arguments) -> mx.array:
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
