"""Taps: what a drafter reads of the target's passes, off mlx-lm's own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from specdec_mlx.contracts import FeatureRows, Features, KeysValues, ReadsCache
from specdec_mlx.errors import UnreadableError
from specdec_mlx.verify.strategies import READABLE, leaves
from specdec_mlx.verify.watching import Call, Tap, anatomy_of, watching


class Taps:
    """The places where a model's passes are read; UnreadableError for what it does not show.

    modules: those whose calls are to be watched.
    """

    def __init__(
        self, model: nn.Module, wanted: Features, keys_values: ReadsCache | None = None
    ) -> None:
        self._keys_values = keys_values if wanted.caches else None
        self.wanted = wanted
        self.features: FeatureRows | None = None
        self.num_rows = 0
        self._head = anatomy_of(model).head_tap() if wanted.head_input else None
        self._layers = {i: anatomy_of(model).layer_tap(i) for i in wanted.layers}
        taps = [*self._layers.values(), *([self._head] if self._head else [])]
        self.modules: list[nn.Module] = [tap.module for tap in taps]

    def read(self, run: Callable[[], mx.array]) -> mx.array:
        """Run a pass, logits [n, V], and keep what is wanted of it in `features`, all lazy."""
        self.features, calls = None, list[Call]()
        with watching(self.modules, calls.append):
            logits = run()
        self.num_rows = logits.shape[0]
        self.features = self.rows(calls, logits, Tap.rows)
        return logits

    def rows(
        self, calls: Sequence[Call], logits: mx.array, rows: Callable[..., mx.array], *which: int
    ) -> FeatureRows:
        """Those of a pass, of the calls seen and logits [n, V], by a method of taps.

        The method is given a tap, its states, and `which`.
        """
        seen = {id(module): (given, made) for module, given, made in calls}
        layers: dict[int, mx.array] = {}
        for index, tap in self._layers.items():
            made = seen[id(tap.module)][1]
            layers[index] = rows(tap, made[0] if isinstance(made, tuple) else made, *which)
        head = self._head
        return FeatureRows(
            layers=layers,
            head_input=rows(head, seen[id(head.module)][0], *which) if head else None,
            top_tokens=top_tokens(logits, self.wanted.top) if self.wanted.top else None,
            keys_values=self._keys_values,
        )


def top_tokens(logits: mx.array, number: int) -> mx.array:
    """The likeliest tokens [n, number] of logits [n, V], the likeliest first."""
    number = min(number, logits.shape[-1])
    best = mx.argpartition(-logits, kth=number - 1, axis=-1)[:, :number]
    order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1)


def keys_values_of(caches: Sequence[Any], index: int) -> KeysValues:
    """Contents of a cache as slices of its buffers; UnreadableError if it holds others."""
    cache = check_readable(caches, index)
    keys, values = cache.keys_and_values()
    if isinstance(cache, QuantizedKVCache):
        how = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = mx.dequantize(*keys, **how), mx.dequantize(*values, **how)
    if isinstance(cache, RotatingKVCache):  # after a pass of several positions it holds more
        keys, values = (part[..., -cache.max_size :, :] for part in (keys, values))
    return KeysValues(keys, values, cache.offset)


def check_readable(caches: Sequence[Any], index: int) -> Any:
    """A cache that has keys and values, by its index; UnreadableError for another."""
    all_caches = list(leaves(caches))
    kind = type(all_caches[index]).__name__ if index < len(all_caches) else "no cache"
    if index >= len(all_caches) or not isinstance(all_caches[index], READABLE):
        raise UnreadableError(
            f"Cache {index} of this target, {kind}, has no keys and values that a drafter can "
            f"read; expected one of {', '.join(known.__name__ for known in READABLE)}. Use "
            "another drafter."
        )
    return all_caches[index]
