"""A drafter's side of a conversation, which is kept between its turns.

A state is a list of caches that hold the first tokens of a text. A draft model's state is its
caches. A head's state is its caches and `LatestFeatures`.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.caches import STRATEGIES, Rollback, Trim, leaves
from specdec_mlx.contracts import DrafterStates
from specdec_mlx.errors import CacheRollbackError

KEPT_ROWS = 64
"""Rows of the target that are kept beside a head's caches. After a cut farther back than that, a
head goes on without the row before the cut."""


class LatestFeatures:
    """The latest rows of the target that a head was shown. The last of a head's kept caches.

    Attributes:
        rows: [r, W], of the last r positions of the text.
        offset: positions of the text.
        num_skipped: positions that the head was not shown.
        states: of layers that read each other's states, those that were not read. A cut drops them.
    """

    def __init__(
        self, rows: mx.array, offset: int, num_skipped: int, states: Sequence[mx.array] = ()
    ) -> None:
        self.rows, self.offset, self.num_skipped = rows, offset, num_skipped
        self.states = list(states)

    @property
    def state(self) -> list[mx.array]:
        return [self.rows, *self.states]

    @property
    def nbytes(self) -> int:
        return sum(int(array.nbytes) for array in self.state)

    def empty(self) -> bool:
        return False

    def trim(self, num_positions: int) -> int:
        self.offset -= num_positions
        self.states = []
        self.rows = self.rows[: max(0, self.rows.shape[0] - num_positions)]
        return num_positions


STRATEGIES[LatestFeatures] = Trim()


def num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the longest common beginning of two texts."""
    least, most = 0, min(len(one), len(other))
    while least < most:  # halves are compared at once: texts are long
        half = (least + most + 1) // 2
        if one[least:half] == other[least:half]:
            least = half
        else:
            most = half - 1
    return least


NAME = "specdec_mlx_kept"
"""Attribute of a model's first cache: the `_State`s of its text, which a deep copy has too."""

MOST_OWNERS = 4  # drafters whose states stay on a prompt cache, the latest


class _State(NamedTuple):
    """One drafter's state. `text` has its tokens as bytes, which a deep copy shares."""

    owner: weakref.ref[nn.Module]
    text: bytes
    caches: list[Any]


class StatesOnCache(DrafterStates):
    """States that stay on the caller's prompt cache, as its tokens do (see `remember`).

    Args:
        prompt_cache: the caller's list.
    """

    def __init__(self, prompt_cache: Sequence[Any]) -> None:
        self.prompt_cache = prompt_cache

    def fetch(self, owner: nn.Module, tokens: Sequence[int]) -> tuple[list[Any] | None, int]:
        state = next((state for state in self._states() if state.owner() is owner), None)
        if state is None:
            return None, 0
        # The state goes to the generation, which stores it again at its end.
        self._set([other for other in self._states() if other is not state])
        stored = array("q", state.text).tolist()
        length = num_common(stored, list(tokens))
        with suppress(CacheRollbackError):
            Rollback(state.caches, len(stored)).rewind_to(length)
            return (state.caches, length) if length else (None, 0)
        return None, 0

    def store(self, owner: nn.Module, tokens: Sequence[int], caches: list[Any]) -> None:
        # Modules are compared by identity, because they are dicts of arrays.
        others = [s for s in self._states() if s.owner() is not None and s.owner() is not owner]
        state = _State(weakref.ref(owner), array("q", tokens).tobytes(), caches)
        self._set([*others[1 - MOST_OWNERS :], state])

    def _states(self) -> list[_State]:
        return list(getattr(next(leaves(self.prompt_cache), None), NAME, ()))

    def _set(self, states: list[_State]) -> None:
        for cache in leaves(self.prompt_cache):
            with suppress(AttributeError):  # of a class with slots
                setattr(cache, NAME, states)
            return
