"""Taps: what a drafter reads of the target's passes, off mlx-lm's own modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache

from specdec_mlx.contracts import FeatureRows, Features, KeysValues, ReadsCache
from specdec_mlx.errors import UnreadableError
from specdec_mlx.verify.strategies import READABLE, leaves
from specdec_mlx.verify.watching import Tap, anatomy_of, first, watching


class Taps:
    """The places where a model's passes are read; UnreadableError for what it does not show."""

    def __init__(
        self, model: nn.Module, wanted: Features, keys_values: ReadsCache | None = None
    ) -> None:
        self._keys_values = keys_values if wanted.caches else None
        self.wanted = wanted
        self.features: FeatureRows | None = None
        self.num_rows = 0
        self._head = anatomy_of(model).head_tap() if wanted.head_input else None
        self._layers = {i: anatomy_of(model).layer_tap(i) for i in wanted.layers}

    def read(self, run: Callable[[], mx.array]) -> mx.array:
        """Run a pass, logits [n, V], and keep what is wanted of it in `features`, all lazy."""
        self.features = None
        with self.watched() as rows_of:
            logits = run()
        self.num_rows = logits.shape[0]
        self.features = replace(rows_of(logits, Tap.rows), keys_values=self._keys_values)
        return logits

    @contextmanager
    def watched(self) -> Iterator[Callable[..., FeatureRows]]:
        """A context for a pass; yields what makes its rows, of logits [n, V] and a method of taps.

        That is given a tap, its states, and what follows the method.
        """
        inputs: dict[int, Any] = {}
        outputs: dict[int, Any] = {}

        def note(module: nn.Module, states: Any, output: Any) -> None:
            inputs[id(module)], outputs[id(module)] = states, output

        head, layers = self._head, self._layers

        def rows_of(logits: mx.array, rows: Callable[..., mx.array], *which: int) -> FeatureRows:
            outs = {i: (tap, first(outputs[id(tap.module)])) for i, tap in layers.items()}
            return FeatureRows(
                layers={i: rows(*out, *which) for i, out in outs.items()},
                head_input=rows(head, inputs[id(head.module)], *which) if head else None,
                top_tokens=top_tokens(logits, self.wanted.top) if self.wanted.top else None,
            )

        tapped = [*layers.values(), *([head] if head else [])]
        with watching([tap.module for tap in tapped], note):
            yield rows_of


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
