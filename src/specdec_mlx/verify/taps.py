"""Taps: what a drafter reads of the target's passes, off mlx-lm's own modules.

The *head* is the last module of a watched pass that turns states into logits; its input is the
state after the final norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache, make_prompt_cache

from specdec_mlx.contracts import FeatureRows, Features, KeysValues, ReadsCache
from specdec_mlx.errors import UnreadableError
from specdec_mlx.verify.strategies import leaves
from specdec_mlx.verify.watching import watching

NUM_WATCHED = 7
"""Positions of the watched pass; no other axis, such as streams side by side, is as long."""


_Call = tuple[nn.Module, Any, Any]  # A module, the states that it was called with, and its output


class Tap(NamedTuple):
    """A module, and the axis of positions of the states that are read there."""

    module: nn.Module
    axis: int

    def rows(self, states: mx.array) -> mx.array:
        """[n, D]: a row for each position; streams side by side are one after the other in it."""
        if self.axis == 1 and states.shape[0] == 1:  # the usual layout, in one operation
            return states.reshape(states.shape[1], -1)
        return mx.moveaxis(states, self.axis, 0).reshape(states.shape[self.axis], -1)

    def of_text(self, states: mx.array, text: int, num_rows: int) -> mx.array:
        """`rows` of the first positions of one of several texts, whose axis is the one before."""
        return self.rows(mx.take(states, mx.array([text]), axis=self.axis - 1))[:num_rows]


class Taps:
    """The places where a model's passes are read; UnreadableError for what it does not show."""

    def __init__(
        self, model: nn.Module, wanted: Features, keys_values: ReadsCache | None = None
    ) -> None:
        self._keys_values = keys_values if wanted.caches else None
        self.wanted = wanted
        self.features: FeatureRows | None = None
        self.num_rows = 0
        self._num_top = wanted.top
        self._head: Tap | None = None
        self._layers: dict[int, Tap] = {}
        if wanted.head_input or wanted.layers:
            calls, vocab_size = _calls_of_one_pass(model)
            if wanted.head_input:
                self._head = _head(calls, vocab_size)
            self._layers = {i: _layer(calls, model.layers, i) for i in wanted.layers}

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
            outs = {i: (tap, _first(outputs[id(tap.module)])) for i, tap in layers.items()}
            return FeatureRows(
                layers={i: rows(*out, *which) for i, out in outs.items()},
                head_input=rows(head, inputs[id(head.module)], *which) if head else None,
                top_tokens=top_tokens(logits, self._num_top) if self._num_top else None,
            )

        with watching([tap.module for tap in (*layers.values(), *([head] if head else []))], note):
            yield rows_of


def top_tokens(logits: mx.array, number: int) -> mx.array:
    """The likeliest tokens [n, number] of logits [n, V], the likeliest first."""
    number = min(number, logits.shape[-1])
    best = mx.argpartition(-logits, kth=number - 1, axis=-1)[:, :number]
    order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1)


def _calls_of_one_pass(model: nn.Module) -> tuple[list[_Call], int]:
    """Calls of all modules, in the order of their ends, and V."""
    calls: list[_Call] = []
    with watching(model.modules(), lambda *call: calls.append(call)):
        tokens = mx.zeros((1, NUM_WATCHED), mx.int32)
        logits = model(tokens, cache=make_prompt_cache(model))
    return calls, logits.shape[-1]


def _head(calls: Sequence[_Call], vocab_size: int) -> Tap:
    """The last module that made logits of states: around adapters, before logits are scaled."""
    for module, states, output in reversed(calls):
        axis = _axis_of_positions(states)
        if axis is not None and isinstance(output, mx.array):
            before, after = states.shape[-1], output.shape[-1]
            if before != vocab_size == after and states.shape[:-1] == output.shape[:-1]:
                return Tap(module, axis)
    raise _unreadable("The input of this target's head", "no module makes its logits out of states")


def _layer(calls: Sequence[_Call], layers: Sequence[nn.Module], index: int) -> Tap:
    """A decoder layer, which has to be called as a module, once a pass."""
    name = f"Layer {index} of this target"
    if not 0 <= index < len(layers):
        raise UnreadableError(
            f"{name} cannot be read: it has layers 0 to {len(layers) - 1}. Use a drafter that was "
            "trained for this target."
        )
    outputs = [_first(output) for module, _, output in calls if module is layers[index]]
    if len(outputs) != 1:
        raise _unreadable(name, f"it is called {len(outputs)} times a pass")
    if (axis := _axis_of_positions(outputs[0])) is None:
        raise _unreadable(name, "it has no states")
    return Tap(layers[index], axis)


def _unreadable(name: str, reason: str) -> UnreadableError:
    instead = "Use a drafter that works on tokens, such as 'prompt-lookup'."
    return UnreadableError(f"{name} cannot be read: {reason}. {instead}")


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _axis_of_positions(states: Any) -> int | None:
    """The axis of positions of a value seen in the watched pass; None if it has none."""
    if not isinstance(states, mx.array) or not mx.issubdtype(states.dtype, mx.floating):
        return None
    axes = [axis for axis, size in enumerate(states.shape[:-1]) if size == NUM_WATCHED]
    return axes[0] if len(axes) == 1 else None


READABLE = (KVCache, RotatingKVCache, QuantizedKVCache)
"""Caches of one key and one value for each head and position."""


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
