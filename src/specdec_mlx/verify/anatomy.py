"""The parts of a loaded model: head, norm, layers and sizes, found by watching one pass.

The *head* is the last module of the pass that turns states into logits; its input is the state
after the final norm. The pass is never computed: all of it is read off modules and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import UnreadableError
from specdec_mlx.models import PerModel
from specdec_mlx.verify.strategies import READABLE, leaves, window_of
from specdec_mlx.verify.watching import watching

NUM_WATCHED = 7
"""Positions of the watched pass; no other axis, such as streams side by side, is as long."""


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


class Layer(NamedTuple):
    """A decoder layer, and of each of its calls in a pass the axis of positions, None without."""

    module: nn.Module
    axes: list[int | None]


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model. They are its modules, and never the model itself, which may end.

    head: None where no module makes logits out of states. norm: makes the head's input. width,
    dtype: of that. embedding: the first module that makes states of ids. last_caches: kind of
    attention -> the last cache that it fills.
    """

    vocab_size: int
    head: Tap | None
    norm: nn.Module | None
    width: int
    dtype: mx.Dtype
    embedding: nn.Module | None
    layers: Sequence[Layer]
    last_caches: Mapping[str, LastCache]
    modules: Sequence[ref[nn.Module]]

    def fits(self, model: nn.Module) -> bool:
        """True until a module is replaced, as by adapters, or by quantizing in place."""
        now = model.modules()
        return len(now) == len(self.modules) and all(
            known() is module for known, module in zip(self.modules, now, strict=True)
        )

    def head_tap(self) -> Tap:
        """Where the head's input is read; UnreadableError if there is no head."""
        if self.head is None:
            reason = "no module makes its logits out of states"
            raise _unreadable("The input of this target's head", reason)
        return self.head

    def layer_tap(self, index: int) -> Tap:
        """Where a layer is read, which has to be called as a module, once a pass."""
        name = f"Layer {index} of this target"
        if not 0 <= index < len(self.layers):
            raise UnreadableError(
                f"{name} cannot be read: it has layers 0 to {len(self.layers) - 1}. Use a drafter "
                "that was trained for this target."
            )
        module, axes = self.layers[index]
        if len(axes) != 1:
            raise _unreadable(name, f"it is called {len(axes)} times a pass")
        if axes[0] is None:
            raise _unreadable(name, "it has no states")
        return Tap(module, axes[0])


def anatomy_of(model: nn.Module) -> Anatomy:
    """The parts of a loaded model, kept with it and watched anew when modules were replaced."""
    anatomy = _known(model)
    if not anatomy.fits(model):
        anatomy = _watch(model)
        _known.put(model, anatomy)
    return anatomy


def _watch(model: nn.Module) -> Anatomy:
    calls: list[tuple[nn.Module, Any, Any]] = []
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
    axes: dict[int, list[int | None]] = {}
    for module, _, made in calls:
        axes.setdefault(id(module), []).append(_axis_of_positions(first(made)))
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
        layers=[Layer(m, axes.get(id(m), [])) for m in getattr(model, "layers", ())],
        last_caches=last_caches,
        modules=[ref(module) for module in model.modules()],
    )


_known = PerModel(_watch)


def first(output: Any) -> Any:
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
