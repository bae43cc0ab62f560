"""Taps: what a drafter reads of the target's passes, off mlx-lm's own modules.

Where to read is found by watching one short pass, whose numbers are never computed: the *head* is
the last module that turns states into logits, `lm_head` or the embeddings where they are tied, and
what it is called with is the state after the final norm; decoder layers are those of
`model.layers`. Paths and names are not guessed, and nothing outlives a pass: quantizing a model or
giving it adapters between two generations moves the taps with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import UnreadableError
from specdec_mlx.target.watching import watching
from specdec_mlx.types import FeatureRows, Features, ReadsCache

NUM_WATCHED = 7
"""Positions of the pass that is watched. By its size their axis is told from others, such as the 2
or 4 streams that some layers carry side by side."""


class _Call(NamedTuple):
    """A module that was called with `states` and returned `output`."""

    module: nn.Module
    states: Any
    output: Any


@dataclass(frozen=True)
class _Tap:
    """A module, and which axis of the states that are read there counts positions."""

    module: nn.Module
    axis: int

    def rows(self, states: mx.array) -> mx.array:
        """[n, D]: a row for each position; streams side by side are one after the other in it."""
        if self.axis == 1 and states.shape[0] == 1:  # the usual layout, in one operation
            return states.reshape(states.shape[1], -1)
        return mx.moveaxis(states, self.axis, 0).reshape(states.shape[self.axis], -1)


class Taps:
    """What of a model's passes is read, and where.

    Args:
        model: a mlx-lm model, whose modules are not touched between passes.
        wanted: what to read.
        keys_values: reads one of the caches that the passes fill; see `FeatureRows`.

    features: rows of the latest pass, None before the first. num_rows: how many it has.

    Raises:
        UnreadableError: the model does not show something of it.
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: Features,
        keys_values: ReadsCache | None = None,
    ) -> None:
        """Find the modules; nothing was read yet."""
        self._keys_values = keys_values if wanted.caches else None
        self.features: FeatureRows | None = None
        self.num_rows = 0
        self._num_top = wanted.top
        self._head: _Tap | None = None
        self._layers: dict[int, _Tap] = {}
        if wanted.head_input or wanted.layers:
            calls, vocab_size = _calls_of_one_pass(model)
            if wanted.head_input:
                self._head = _head(calls, vocab_size)
            self._layers = {i: _layer(calls, model.layers, i) for i in wanted.layers}

    def read(self, run: Callable[[], mx.array]) -> mx.array:
        """Run a pass, logits [n, V], and keep what is wanted of it in `features`, all lazy."""
        self.features = None
        inputs: dict[int, Any] = {}
        outputs: dict[int, Any] = {}

        def note(module: nn.Module, states: Any, output: Any) -> None:
            inputs[id(module)], outputs[id(module)] = states, output

        taps = [*self._layers.values(), *([self._head] if self._head else [])]
        with watching([tap.module for tap in taps], note):
            logits = run()
        self.num_rows = logits.shape[0]
        self.features = FeatureRows(
            layers={
                layer: tap.rows(_first(outputs[id(tap.module)]))
                for layer, tap in self._layers.items()
            },
            head_input=self._head.rows(inputs[id(self._head.module)]) if self._head else None,
            top_tokens=top_tokens(logits, self._num_top) if self._num_top else None,
            keys_values=self._keys_values,
        )
        return logits


def top_tokens(logits: mx.array, number: int) -> mx.array:
    """The likeliest tokens [n, number] of logits [n, V], the likeliest first."""
    number = min(number, logits.shape[-1])
    best = mx.argpartition(-logits, kth=number - 1, axis=-1)[:, :number]
    order = mx.argsort(-mx.take_along_axis(logits, best, axis=-1), axis=-1)
    return mx.take_along_axis(best, order, axis=-1)


def _calls_of_one_pass(model: nn.Module) -> tuple[list[_Call], int]:
    """Calls of all modules, in the order in which they ended, and V."""
    calls: list[_Call] = []
    with watching(model.modules(), lambda *call: calls.append(_Call(*call))):
        tokens = mx.zeros((1, NUM_WATCHED), mx.int32)
        logits = model(tokens, cache=make_prompt_cache(model))
    return calls, logits.shape[-1]


def _head(calls: Sequence[_Call], vocab_size: int) -> _Tap:
    """The last module that made logits of states: around adapters, and not what scales logits."""
    for module, states, output in reversed(calls):
        axis = _axis_of_positions(states)
        if axis is not None and isinstance(output, mx.array):
            before, after = states.shape[-1], output.shape[-1]
            if before != vocab_size == after and states.shape[:-1] == output.shape[:-1]:
                return _Tap(module, axis)
    raise UnreadableError(
        "The input of this target's head cannot be read: no module makes its logits out of states. "
        "Use a drafter that works on tokens, such as 'prompt-lookup'."
    )


def _layer(calls: Sequence[_Call], layers: Sequence[nn.Module], index: int) -> _Tap:
    """A decoder layer, which has to be called as a module, once a pass."""
    if not 0 <= index < len(layers):
        raise UnreadableError(
            f"Layer {index} of this target cannot be read: it has layers 0 to {len(layers) - 1}. "
            "Use a drafter that was trained for this target."
        )
    outputs = [_first(call.output) for call in calls if call.module is layers[index]]
    if len(outputs) == 1 and (axis := _axis_of_positions(outputs[0])) is not None:
        return _Tap(layers[index], axis)
    times = f"it is called {len(outputs)} times a pass" if len(outputs) != 1 else "it has no states"
    raise UnreadableError(
        f"Layer {index} of this target cannot be read: {times}. "
        "Use a drafter that works on tokens, such as 'prompt-lookup'."
    )


def _first(output: Any) -> Any:
    """The states among what a layer returns; some return more behind them."""
    return output[0] if isinstance(output, tuple) else output


def _axis_of_positions(states: Any) -> int | None:
    """Which axis of what was seen of the watched pass counts positions; None if it has no such."""
    if not isinstance(states, mx.array) or not mx.issubdtype(states.dtype, mx.floating):
        return None
    axes = [axis for axis, size in enumerate(states.shape[:-1]) if size == NUM_WATCHED]
    return axes[0] if len(axes) == 1 else None
