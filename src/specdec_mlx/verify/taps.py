"""Taps: the parts of a loaded model, and what a drafter reads of its passes there.

The *head* is the last module of a watched pass that turns states into logits; its input is the
state after the final norm. That pass is made once a model, and never computed: its parts and sizes
are read off modules and shapes. Nothing of mlx-lm is edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import QuantizedKVCache, RotatingKVCache, make_prompt_cache

from specdec_mlx.contracts import FeatureRows, Features, KeysValues, ReadsCache
from specdec_mlx.errors import UnreadableError
from specdec_mlx.models import PerModel
from specdec_mlx.verify.strategies import READABLE, leaves, window_of
from specdec_mlx.verify.watching import watching

NUM_WATCHED = 7
"""Positions of the watched pass; no other axis, such as streams side by side, is as long."""


_Call = tuple[nn.Module, Any, Any]  # a module, its first argument, and what it returned


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


@dataclass(frozen=True)
class LastCache:
    """One of a model's caches: its place among all, nested ones counted, and a key's width."""

    index: int
    width: int


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model. They are its modules, and never the model itself, which may end.

    head: None where no module makes logits out of states. norm: makes the head's input. width,
    dtype: of that. embedding: the first module that makes states of ids. layers: of each
    decoder layer the tap, or why there is none. last_caches: kind of attention -> the last cache
    that it fills.
    """

    vocab_size: int
    head: Tap | None
    norm: nn.Module | None
    width: int
    dtype: mx.Dtype
    embedding: nn.Module | None
    layers: Sequence[Tap | str]
    last_caches: Mapping[str, LastCache]
    modules: Sequence[ref[nn.Module]]

    def fits(self, model: nn.Module) -> bool:
        """True until a module is replaced, as by adapters, or by quantizing in place."""
        return [*map(id, model.modules())] == [id(known()) for known in self.modules]

    def head_tap(self) -> Tap:
        """Where the head's input is read; UnreadableError if there is no head."""
        if self.head is None:
            reason = "no module makes its logits out of states"
            raise _unreadable("The input of this target's head", reason)
        return self.head

    def layer_tap(self, index: int) -> Tap:
        """Where a layer's output is read; UnreadableError if it cannot be."""
        name = f"Layer {index} of this target"
        if not 0 <= index < len(self.layers):
            raise UnreadableError(
                f"{name} cannot be read: it has layers 0 to {len(self.layers) - 1}. Use a drafter "
                "that was trained for this target."
            )
        tap = self.layers[index]
        if isinstance(tap, str):
            raise _unreadable(name, tap)
        return tap


def anatomy_of(model: nn.Module) -> Anatomy:
    """The parts of a loaded model, kept with it and watched anew when modules were replaced."""
    anatomy = _known(model)
    if not anatomy.fits(model):
        anatomy = _watch(model)
        _known.put(model, anatomy)
    return anatomy


def _watch(model: nn.Module) -> Anatomy:
    calls: list[_Call] = []
    parts = [part for part in model.modules() if part is not model]
    caches = make_prompt_cache(model)
    with watching(parts, lambda *call: calls.append(call)):
        logits = model(mx.zeros((1, NUM_WATCHED), mx.int32), cache=caches)
    vocab_size = logits.shape[-1]
    head, norm, states = None, None, logits
    for module, given, made in calls:  # the last: around adapters, before logits are scaled
        axis = _axis_of_positions(given)
        if axis is not None and _is(made, mx.floating):
            shapes = (*given.shape[:-1], vocab_size) == made.shape != given.shape
            head, states = (Tap(module, axis), given) if shapes else (head, states)
    if head is not None:
        norms = [m for m, _, made in calls if made is states and not m.children()]
        norm = norms[0] if norms else None
    embeddings = [m for m, ids, made in calls if _is(ids, mx.integer) and _is(made, mx.floating)]
    last_caches = {}
    for index, cache in enumerate(leaves(caches)):
        if isinstance(cache, READABLE) and not cache.empty():
            kind = "full_attention" if window_of(cache) is None else "sliding_attention"
            last_caches[kind] = LastCache(index, cache.keys.shape[-1])
    return Anatomy(
        vocab_size=vocab_size,
        head=head,
        norm=norm,
        width=states.shape[-1],
        dtype=states.dtype,
        embedding=embeddings[0] if embeddings else None,
        layers=[_layer(layer, calls) for layer in getattr(model, "layers", ())],
        last_caches=last_caches,
        modules=[ref(module) for module in model.modules()],
    )


def _layer(layer: nn.Module, calls: Sequence[_Call]) -> Tap | str:
    """Where the output of a layer is read, which has to be called as a module, once a pass."""
    outputs = [_first(made) for module, _, made in calls if module is layer]
    if len(outputs) != 1:
        return f"it is called {len(outputs)} times a pass"
    axis = _axis_of_positions(outputs[0])
    return "it has no states" if axis is None else Tap(layer, axis)


_known = PerModel(_watch)


def _first(output: Any) -> Any:
    """What a module returns, of several the first."""
    return output[0] if isinstance(output, tuple) else output


def _axis_of_positions(states: Any) -> int | None:
    """The axis of positions of a value seen in the watched pass; None if it has none."""
    if not _is(states, mx.floating):
        return None
    axes = [axis for axis, size in enumerate(states.shape[:-1]) if size == NUM_WATCHED]
    return axes[0] if len(axes) == 1 else None


def _is(value: Any, kind: mx.DtypeCategory) -> bool:
    return isinstance(value, mx.array) and mx.issubdtype(value.dtype, kind)


def _unreadable(name: str, reason: str) -> UnreadableError:
    instead = "Use a drafter that works on tokens, such as 'prompt-lookup'."
    return UnreadableError(f"{name} cannot be read: {reason}. {instead}")


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
            outs = {i: (tap, _first(outputs[id(tap.module)])) for i, tap in layers.items()}
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
