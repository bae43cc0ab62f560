"""Recurrent state after each position of a short pass, so that going back is a choice among them.

Recurrent state cannot be shortened. Put back to before the pass, it makes the kept positions be fed
again, which at K = 3 can double what a round computes. For the recurrences below nothing is fed
again: the state after n positions is had from what the recurrence was given in the pass.

- Gated delta: its inputs are kept, and run once more over the first n positions: one small kernel a
  layer, only after a rejection. The state of each position, which is large, is never stored.
- Mamba-2: a pass over several positions takes a blocked form that rounds otherwise than single
  steps. A short pass is therefore run step by step, as plain decoding does it, and each state kept.
  On a CPU that makes a pass over 5 positions 1.3 times as long (4 layers, width 384), and a text
  with half of its drafts right take 0.44 of the time that feeding again takes.
- Short convolutions, beside these and alone: their state is the last rows of their input.

The functions are those of mlx-lm, answered for during the pass (see `watching`). Which call belongs
to which slot of a cache is found, and what is chosen compared with single steps, once for each
loaded model; with any doubt, and for any other recurrence, positions are fed again.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import ArraysCache, make_prompt_cache
from mlx_lm.models.gated_delta import gated_delta_update
from mlx_lm.models.ssm import ssm_update

from specdec_mlx.per_model import PerModel
from specdec_mlx.target.rounding import is_rounding
from specdec_mlx.target.strategies import Snapshot, Strategy, leaves, strategy_for
from specdec_mlx.target.watching import answering, watching

MOST_POSITIONS = 8
"""Of a pass whose states are kept; wider ones are rare, and feed again what was kept of them."""


@dataclass(frozen=True)
class Recurrence:
    """A function of mlx-lm that carries a state through positions, and returns outputs and state.

    function: has a parameter `state`. sequences: parameters [B, S, ...] with a row for each
    position. idle: parameters that have to be None, masks and the like. in_steps: whether several
    positions at once round otherwise than single ones.
    """

    function: Callable[..., tuple[mx.array, mx.array]]
    sequences: tuple[str, ...]
    idle: tuple[str, ...]
    in_steps: bool = False

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names, in order."""
        return tuple(inspect.signature(self.function).parameters)

    def run(self, given: dict[str, Any], start: int, end: int) -> tuple[mx.array, mx.array]:
        """Outputs and state after some of the positions, from the state given."""
        some = {name: given[name][:, start:end] for name in self.sequences}
        return self.function(**{**given, **some})

    def step_by_step(self, given: dict[str, Any]) -> tuple[mx.array, list[mx.array]]:
        """Outputs of all positions, one at a time, and the state after each."""
        outputs, states = [], []
        for i in range(given[self.sequences[0]].shape[1]):
            output, state = self.run(given, i, i + 1)
            given = {**given, "state": state}
            outputs.append(output)
            states.append(state)
        return mx.concatenate(outputs, axis=1), states


RECURRENCES = {
    recurrence.function: recurrence
    for recurrence in (
        Recurrence(gated_delta_update, ("q", "k", "v", "a", "b"), ("mask",)),
        Recurrence(ssm_update, ("hidden_states", "B", "C", "dt"), ("mask", "lengths"), True),
    )
}
"""Those whose state after each position can be had."""


@dataclass(frozen=True)
class _Update:
    """A recurrence in a pass: what it was given, and the states that were kept, the last at least.

    states: after each position, if it was run in steps.
    """

    recurrence: Recurrence
    given: dict[str, Any]
    states: list[mx.array]

    def after(self, num_positions: int) -> mx.array:
        """State after the first positions of the pass."""
        if self.recurrence.in_steps:
            return self.states[num_positions - 1]
        return self.recurrence.run(self.given, 0, num_positions)[1]


@dataclass
class _Recording:
    """What the recurrences and convolutions of one pass were given, each in order of their calls.

    is_complete: whether all of it can be gone back on.
    """

    updates: list[_Update] = field(default_factory=list)
    windows: list[mx.array] = field(default_factory=list)
    is_complete: bool = True

    def answer(self, function: Callable[..., Any], args: tuple[Any, ...], more: Any) -> Any:
        """A recurrence: in steps where it rounds otherwise, and its states or inputs kept."""
        recurrence = RECURRENCES[function]
        given = dict(zip(recurrence.parameters, args, strict=False)) | more
        if any(given.get(name) is not None for name in recurrence.idle):
            self.is_complete = False
            return function(*args, **more)
        if recurrence.in_steps:
            output, states = recurrence.step_by_step(given)
        else:
            output, *states = function(*args, **more)
        self.updates.append(_Update(recurrence, given, states))
        return output, states[-1]

    def convolve(self, module: nn.Module, window: mx.array, output: Any) -> None:
        """A convolution, over the rows of its state and those of the pass."""
        if isinstance(module, nn.Conv1d):
            self.windows.append(window)


class _Source(NamedTuple):
    """Where the state in a slot of a cache comes from: which recurrence, or else convolution."""

    is_update: bool
    number: int

    def after(self, recording: _Recording, num_positions: int, slot: mx.array) -> mx.array:
        """The state after the first positions of the pass; `slot` is that after all of them."""
        if self.is_update:
            return recording.updates[self.number].after(num_positions)
        rows = slice(num_positions, num_positions + slot.shape[1])
        return mx.contiguous(recording.windows[self.number][:, rows])

    def fits(self, recording: _Recording, width: int, slot: mx.array) -> bool:
        """True if the slot holds what comes from here after a pass of this width."""
        if self.is_update:
            return recording.updates[self.number].states[-1] is slot
        return recording.windows[self.number].shape[1] == width + slot.shape[1]


class KeptStates(Snapshot):
    """The way back of one cache, right after a pass: to the state after any of its positions.

    Args:
        recording: of that pass.
        sources: where each slot comes from.
        width: positions of the pass that the cache holds.
    """

    name = "choice of states"

    def __init__(self, recording: _Recording, sources: Sequence[_Source], width: int) -> None:
        """All positions of the pass are in the cache."""
        self.recording = recording
        self.sources = sources
        self.width = width

    def can_trim(self, cache: Any, back: int) -> bool:
        """Any position of the pass can be gone back to."""
        return back < self.width

    def trim(self, cache: Any, back: int) -> int:
        """Put the states of an earlier position of the pass into the cache's slots."""
        self.width -= back
        for slot, source in enumerate(self.sources):
            cache[slot] = source.after(self.recording, self.width, cache[slot])
        return back


@dataclass(frozen=True)
class RecurrentStates:
    """What of a model's passes gives the states after each position.

    places: files and names of the recurrences. convolutions: of the model. sources: index among all
    caches -> where its slots come from. counts: recurrences and convolutions that a pass calls.
    """

    places: list[tuple[ModuleType, str]]
    convolutions: list[nn.Module]
    sources: dict[int, list[_Source]]
    counts: tuple[int, int]

    def run(
        self, run: Callable[[], mx.array], caches: Sequence[Any], width: int
    ) -> tuple[mx.array, dict[int, Strategy]]:
        """Run a pass over `width` positions on these caches, nested ones resolved.

        Returns:
            Its logits, and the ways back of the recurrent caches by index; none where this pass was
            not like the one that was watched.
        """
        if not all(type(caches[i]) is ArraysCache for i in self.sources):
            return run(), {}
        with _recording(self.places, self.convolutions) as recording:
            logits = run()
        seen = len(recording.updates), len(recording.windows)
        if not (recording.is_complete and seen == self.counts):
            return logits, {}
        pairs = (
            (source, slot)
            for index, sources in self.sources.items()
            for source, slot in zip(sources, caches[index].cache, strict=True)
        )
        if not all(source.fits(recording, width, slot) for source, slot in pairs):
            return logits, {}
        ways = {i: KeptStates(recording, sources, width) for i, sources in self.sources.items()}
        return logits, dict(ways)


@contextmanager
def _recording(
    places: list[tuple[ModuleType, str]], convolutions: list[nn.Module]
) -> Iterator[_Recording]:
    recording = _Recording()
    with answering(places, recording.answer), watching(convolutions, recording.convolve):
        yield recording


NUM_BEFORE, NUM_WATCHED = 2, 3
"""Positions before and in the pass from which it is found whether and how states are chosen."""


def _find(model: nn.Module) -> RecurrentStates | None:
    """How this model's states are had; None if it has none, or not all of them can be had."""
    start = make_prompt_cache(model)
    recurrent = [i for i, c in enumerate(leaves(start)) if type(c) is ArraysCache]
    places, convolutions = _places(model), _convolutions(model)
    if not (recurrent and (places or convolutions)):
        return None
    tokens = mx.arange(1, 1 + NUM_BEFORE + NUM_WATCHED)[None]
    dtype = model(tokens[:, :NUM_BEFORE], cache=start).dtype
    single = copy.deepcopy(start)
    with _recording(places, convolutions) as recording:
        model(tokens[:, NUM_BEFORE:], cache=start)
    states = {i: list(c.cache) for i, c in enumerate(leaves(start)) if i in recurrent}
    found = {i: _sources(recording, slots) for i, slots in states.items()}
    sources = {i: known for i, known in found.items() if known is not None}
    if len(sources) < len(found) or not recording.is_complete:
        return None
    for num_kept in range(1, NUM_WATCHED + 1):
        model(tokens[:, NUM_BEFORE + num_kept - 1, None], cache=single)
        reached = list(leaves(single))
        for i, slots in states.items():
            for source, slot, stepped in zip(sources[i], slots, reached[i].cache, strict=True):
                chosen = source.after(recording, num_kept, slot)
                if not _is_near(chosen, stepped, dtype):
                    return None
    counts = len(recording.updates), len(recording.windows)
    return RecurrentStates(places, convolutions, sources, counts)


recurrent_states_of = PerModel(_find)
"""How a loaded model's recurrent states are chosen among; None where positions are fed again."""


def ways_back(model: nn.Module) -> list[str]:
    """How each cache that the model makes goes back after a short pass, nested ones resolved."""
    states = recurrent_states_of(model)
    chosen = {} if states is None else states.sources
    return [
        KeptStates.name if i in chosen else strategy_for(cache).name
        for i, cache in enumerate(leaves(make_prompt_cache(model)))
    ]


def _places(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """Where the files of a model's classes look recurrences up."""
    names = {type(module).__module__ for module in model.modules()}
    files = [sys.modules[name] for name in sorted(names & sys.modules.keys())]
    return [
        (file, function.__name__)
        for file in files
        for function in RECURRENCES
        if inspect.unwrap(getattr(file, function.__name__, print)) is function
    ]


def _convolutions(model: nn.Module) -> list[nn.Module]:
    """Those that reach over several positions."""
    return [m for m in model.modules() if isinstance(m, nn.Conv1d) and m.weight.shape[1] > 1]


def _sources(recording: _Recording, slots: Sequence[mx.array | None]) -> list[_Source] | None:
    """Where each slot of a cache comes from, after the watched pass; None if one is not known."""
    found = [_source(recording, slot) for slot in slots]
    known = [source for source in found if source is not None]
    return known if len(known) == len(found) else None


def _source(recording: _Recording, slot: mx.array | None) -> _Source | None:
    for i, update in enumerate(recording.updates):
        if update.states[-1] is slot:
            return _Source(True, i)
    for i, window in enumerate(recording.windows):
        end = window[:, NUM_WATCHED:]
        if slot is not None and end.shape == slot.shape and mx.array_equal(end, slot):
            return _Source(False, i)
    return None


def _is_near(a: mx.array, b: mx.array, dtype: mx.Dtype) -> bool:
    """True if rounding in the model's type explains the difference of two states."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return is_rounding(float(mx.abs(a - b).max()), float(mx.std(b)), dtype)
