"""Recurrences of a pass as plain decoding computes them, and their state after each position.

Recurrent state cannot be shortened, and putting back the one from before a pass makes the kept
positions be fed again. For these recurrences the state after n positions follows from the pass:

- Gated delta: its inputs are run once more over the first n positions, only after a rejection. The
  state of each position, which is large, is never stored.
- Mamba-2: a pass over several positions rounds otherwise than single steps. A pass that verifies
  is therefore run step by step, as plain decoding does it, and each state of a short one kept.
- Short convolutions: their state is the last rows of their input.

The call that fills each slot of a cache is found once for each loaded model, and its states are
compared with single steps; with any doubt, and for any other recurrence, positions are fed again.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from specdec_mlx.caches import Snapshot, Strategy, leaves, leaves_of, strategy_for
from specdec_mlx.exactness.rounding import is_rounding
from specdec_mlx.models.anatomy import Call, replacing, watching
from specdec_mlx.models.loading import PerModel

MOST_POSITIONS = 8  # widest pass whose states are kept; wider ones are rare


# positions before and in the pass that a model is measured with
NUM_BEFORE, NUM_WATCHED = 2, 3


UNKNOWN = -1


class Recurrence(NamedTuple):
    """A function of mlx-lm with a parameter `state` that returns outputs and the new state.

    Attributes:
        function: the function.
        parameters: names of its parameters.
        sequences: parameters [B, S, ...] with a row for each position.
        idle: parameters that must be None.
        in_steps: several positions at once round differently from single positions.
    """

    function: Callable[..., tuple[mx.array, mx.array]]
    parameters: list[str]
    sequences: tuple[str, ...]
    idle: tuple[str, ...]
    in_steps: bool

    def run(self, arguments: dict[str, Any], start: int, end: int) -> tuple[mx.array, mx.array]:
        return self.function(
            **arguments | {name: arguments[name][:, start:end] for name in self.sequences}
        )

    def step_by_step(self, arguments: dict[str, Any]) -> tuple[mx.array, list[mx.array]]:
        """Outputs of all positions, computed one at a time, and the state after each."""
        mask, outputs, states = arguments.get("mask"), [], []
        arguments = {**arguments, **dict.fromkeys(self.idle)}
        for i in range(arguments[self.sequences[0]].shape[1]):
            output, state = self.run(arguments, i, i + 1)
            # A text of a batch that has fewer tokens keeps its state.
            if mask is not None:
                state = mx.where(mask[:, i, None, None, None], state, arguments["state"])
            arguments["state"] = state
            outputs.append(output)
            states.append(state)
        return mx.concatenate(outputs, axis=1), states


RECURRENCES = {
    function: Recurrence(function, list(inspect.signature(function).parameters), *about)
    for function, about in {
        gated_delta_update: (("q", "k", "v", "a", "b"), ("mask",), False),
        ssm_update: (("hidden_states", "B", "C", "dt"), ("mask", "lengths"), True),
    }.items()
}
"""Recurrences whose state after each position can be computed."""


class _Update(NamedTuple):
    """A call of a recurrence, and its states: after each step, or only after the last."""

    recurrence: Recurrence
    arguments: dict[str, Any]
    states: list[mx.array]

    def after(self, num_positions: int, slot: mx.array) -> mx.array:
        """The state after the first positions of the pass. `slot` is the state after all."""
        if self.recurrence.in_steps:
            return self.states[num_positions - 1]
        return self.recurrence.run(self.arguments, 0, num_positions)[1]

    def fits(self, slot: mx.array, width: int) -> bool:
        """True if this call filled the slot in a pass of this width."""
        return self.states[-1] is slot


class _Convolution(NamedTuple):
    """A call of a short convolution. `rows` [B, state + S, D] are its state and the pass."""

    rows: mx.array

    def after(self, num_positions: int, slot: mx.array) -> mx.array:
        # A slice would keep the rows of the whole pass in memory.
        return mx.contiguous(self.rows[:, num_positions : num_positions + slot.shape[1]])

    def fits(self, slot: mx.array, width: int) -> bool:
        return self.rows.shape[1] == width + slot.shape[1]


_StateCall = _Update | _Convolution


class KeptStates(Snapshot):
    """Way back of one cache right after a pass, by the call that filled each slot."""

    name = "choice of states"

    def __init__(self, calls: Sequence[_StateCall], width: int) -> None:
        self.calls, self.width = calls, width

    def can_trim(self, cache: Any, back: int) -> bool:
        return back < self.width

    def trim(self, cache: Any, back: int) -> int:
        self.width -= back
        for slot, call in enumerate(self.calls):
            # `width` shrinks with each rewind, because a later rewind counts from the position
            # reached.
            cache[slot] = call.after(self.width, cache[slot])
        return back


@dataclass(frozen=True)
class RecurrentStates:
    """The calls of a model's passes that give the states after each position.

    Attributes:
        places: modules of mlx-lm, and names of recurrences in them.
        convolutions: the model's short convolutions.
        sources: index among all caches -> the number of the call that fills each slot.
        kinds: types of the calls of a pass, in order.
    """

    places: list[tuple[ModuleType, str]]
    convolutions: list[nn.Module]
    sources: dict[int, list[int]]
    kinds: list[type]

    def run(
        self, run: Callable[[], mx.array], caches: Sequence[Any], width: int
    ) -> tuple[mx.array, dict[int, Strategy]]:
        """Run a pass. Returns logits, and strategies by cache index, as measured."""
        if not all(type(caches[i]) is ArraysCache for i in self.sources):
            return run(), {}
        with _recording(self.places, self.convolutions) as calls:
            logits = run()
        ways: dict[int, Strategy] = {}
        # Another sequence of calls than in the measured pass: the numbers in `sources` do not
        # apply.
        if width <= MOST_POSITIONS and [type(call) for call in calls] == self.kinds:
            for index, numbers in self.sources.items():
                chosen = [calls[number] for number in numbers]
                pairs = zip(chosen, caches[index].cache, strict=True)
                if not all(call.fits(slot, width) for call, slot in pairs):
                    return logits, {}
                ways[index] = KeptStates(chosen, width)
        return logits, ways


@contextmanager
def _recording(
    places: list[tuple[ModuleType, str]], convolutions: list[nn.Module]
) -> Iterator[list[_StateCall]]:
    """Collect the calls of a pass that give states, and run recurrences step by step."""
    calls: list[_StateCall] = []

    def answer(function: Callable[..., Any], args: tuple[Any, ...], more: Any) -> Any:
        recurrence = RECURRENCES[function]
        arguments = dict(zip(recurrence.parameters, args, strict=False)) | more
        # With a mask or lengths, several texts share the call, and one state cannot go back for one
        # of them.
        is_alone = all(arguments.get(name) is None for name in recurrence.idle)
        if recurrence.in_steps and (is_alone or arguments.get("state") is not None):
            output, states = recurrence.step_by_step(arguments)
        else:
            output, *states = function(*args, **more)
        if is_alone:
            calls.append(_Update(recurrence, arguments, states))
        return output, states[-1]

    def convolve(call: Call) -> None:
        module, rows, _ = call
        # A watcher gets the calls of all modules that anybody watches.
        if isinstance(module, nn.Conv1d):
            calls.append(_Convolution(rows))

    with replacing(places, answer), watching(convolutions, convolve):
        yield calls


@PerModel
def recurrent_states_of(model: nn.Module) -> RecurrentStates | None:
    """The calls that a loaded model's recurrent states come from.

    None if the model has no recurrent state, or if a call is not found. Positions are then fed
    again.
    """
    start = make_prompt_cache(model)
    recurrent = [i for i, c in enumerate(leaves(start)) if type(c) is ArraysCache]
    places = _places(model)
    convolutions = [
        m for m in model.modules() if isinstance(m, nn.Conv1d) and m.weight.shape[1] > 1
    ]
    if not (recurrent and (places or convolutions)):
        return None
    tokens = mx.arange(1, 1 + NUM_BEFORE + NUM_WATCHED)[None]
    model(tokens[:, :NUM_BEFORE], cache=start)
    single = copy.deepcopy(start)
    with _recording(places, convolutions) as calls:
        model(tokens[:, NUM_BEFORE:], cache=start)
    slots = {i: list(c.cache) for i, c in enumerate(leaves(start)) if i in recurrent}
    sources = {i: [_source(calls, slot) for slot in states] for i, states in slots.items()}
    if any(UNKNOWN in numbers for numbers in sources.values()):
        return None
    # Trust the calls only if they give the states of single steps at every position.
    for num_kept in range(1, NUM_WATCHED + 1):
        model(tokens[:, NUM_BEFORE + num_kept - 1, None], cache=single)
        reached = list(leaves(single))
        for i in recurrent:
            for number, slot, stepped in zip(sources[i], slots[i], reached[i].cache, strict=True):
                if not _is_near(model, calls[number].after(num_kept, slot), stepped):
                    return None
    return RecurrentStates(places, convolutions, sources, [type(call) for call in calls])


def in_steps(model: nn.Module, width: int) -> AbstractContextManager[Any]:
    """Run the recurrences of a wide pass step by step in this block, as for a single text."""
    states = recurrent_states_of(model) if width > 1 else None
    return nullcontext() if states is None else _recording(states.places, [])


def padded(model: nn.Module) -> AbstractContextManager[None]:
    """Tell recurrences in this block how long each padded row is. Nemotron-H does not."""

    def answer(function: Callable[..., Any], args: tuple[Any, ...], more: Any) -> Any:
        recurrence = RECURRENCES[function]
        arguments = dict(zip(recurrence.parameters, args, strict=False)) | more
        mask = arguments.get("mask")
        if mask is not None and "lengths" in recurrence.idle:
            arguments["lengths"] = mask.sum(axis=1)
        return function(**arguments)

    return replacing(_places(model), answer)


def ways_back(model: nn.Module) -> list[str]:
    states = recurrent_states_of(model)
    chosen = {} if states is None else states.sources
    return [
        KeptStates.name if i in chosen else strategy_for(cache).name
        for i, cache in enumerate(leaves_of(model))
    ]


def _places(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """Modules of the model's classes, and names under which they look recurrences up."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in sorted(names & sys.modules.keys())]
    return [
        (file, function.__name__)
        for file in files
        for function in RECURRENCES
        if inspect.unwrap(getattr(file, function.__name__, print)) is function
    ]


def _source(calls: Sequence[_StateCall], slot: mx.array | None) -> int:
    """Number of the call that filled a slot in the measured pass, or UNKNOWN."""
    for i, call in enumerate(calls):
        if slot is None or not call.fits(slot, NUM_WATCHED):
            continue
        if isinstance(call, _Update) or mx.array_equal(call.after(NUM_WATCHED, slot), slot):
            return i
    return UNKNOWN


def _is_near(model: nn.Module, a: mx.array, b: mx.array) -> bool:
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return is_rounding(model, float(mx.abs(a - b).max()), float(mx.std(b)))
