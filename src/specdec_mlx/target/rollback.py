"""Going back: rollback for every cache class of mlx-lm; the only file that knows a cache's insides.

A pass over S positions appends S entries to every cache of the model; after the verdict the
rejected ones must go. Each class has one strategy, looked up in `STRATEGIES`:

- `Trim`: the offset moves back, nothing is copied.
- `TrimRows`: the same, and the rows behind the offset are sliced off.
- `Window`: a full rotating window is in temporal order right after a pass over several positions,
  so its last rows are sliced off; further back only by the handles kept from before the pass.
- `Chunks`: a pass that enters a new chunk drops the rows of the last one in front; to go back into
  that chunk takes the handles from before the pass.
- `Snapshot`: recurrent state cannot be shortened; what it was before the pass is put back, and the
  positions that were kept are fed again, with the next pass.
- `Asked`: a class that is not in the table and says that it can be trimmed is asked each time, and
  treated as a snapshot when it says no.
- `SingleTokens`: nothing is known to work, so nothing is drafted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from specdec_mlx.errors import CacheRollbackError


class Strategy(Protocol):
    """How one class of cache goes back. `back` is a number of positions, always > 0."""

    name: str

    def save(self, cache: Any) -> Any:
        """What `restore` will need, taken before a pass; no copy is made."""
        ...

    def can_trim(self, cache: Any, back: int) -> bool:
        """Whether the last `back` positions can be dropped in place."""
        ...

    def trim(self, cache: Any, back: int) -> int:
        """Drop the last `back` positions; return how many were dropped."""
        ...

    def restore(self, cache: Any, saved: Any, back: int) -> int:
        """Return to the state that was saved `back` positions ago; return how many were dropped."""
        ...

    def widest_pass(self, cache: Any) -> int | None:
        """Most positions that one pass may have and still be exact; None for any number."""
        ...


class Trim:
    """Move the offset back (KVCache and its like)."""

    name = "trim"

    def save(self, cache: Any) -> Any:
        return None

    def can_trim(self, cache: Any, back: int) -> bool:
        return True

    def trim(self, cache: Any, back: int) -> int:
        if cache.empty():  # made for a layer that has no attention, and never fed
            return back
        return int(cache.trim(back))

    def restore(self, cache: Any, saved: Any, back: int) -> int:
        return self.trim(cache, back)

    def widest_pass(self, cache: Any) -> int | None:
        return None


class TrimRows(Trim):
    """Move the offset back and slice, for a cache that appends behind its last row."""

    name = "trim rows"

    def trim(self, cache: Any, back: int) -> int:
        dropped = super().trim(cache, back)
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]
        return dropped


class Handles(Trim):
    """Trim where that is enough; else put back what was there before the pass.

    kept: attributes that make up the state. A full window makes a new buffer for each pass of
    several positions anyway; before it is full the handle costs a copy of it, at most.
    """

    kept: tuple[str, ...] = ()

    def save(self, cache: Any) -> Any:
        return {name: _handle(getattr(cache, name)) for name in self.kept}

    def restore(self, cache: Any, saved: Any, back: int) -> int:
        offset = cache.offset
        for name, value in saved.items():
            setattr(cache, name, _handle(value))
        return int(offset - cache.offset)


class Window(Handles):
    """Slice the last rows off a rotating window, or put back what was there before the pass.

    With `keep` > 0 the mask for several positions forgets the kept tokens once the window is full,
    so a pass may only fill it up, and single tokens follow.
    """

    name = "window"
    kept = ("keys", "values", "offset", "_idx")

    def can_trim(self, cache: Any, back: int) -> bool:
        if cache.offset <= cache.max_size:
            return True
        rows = cache.keys.shape[2]
        in_order = cache._idx == rows
        return bool(in_order and (rows == cache.offset or rows - back >= cache.max_size))

    def trim(self, cache: Any, back: int) -> int:
        back = min(back, cache.offset)
        cache.offset -= back
        cache._idx -= back
        if cache.keys.shape[2] > cache.max_size:
            cache.keys = cache.keys[..., : cache._idx, :]
            cache.values = cache.values[..., : cache._idx, :]
        return back

    def widest_pass(self, cache: Any) -> int | None:
        return None if cache.keep == 0 else max(1, cache.max_size - cache.offset)


class Chunks(Handles):
    """Trim, unless the pass dropped rows in front that an earlier chunk still needs."""

    name = "trim within chunks"
    kept = ("keys", "values", "offset", "start_position")

    def can_trim(self, cache: Any, back: int) -> bool:
        position = cache.offset - back
        first_needed = position - position % cache.chunk_size
        return bool(cache.start_position <= first_needed)


class Snapshot:
    """Put back the state from before the pass (recurrent state, and unknown classes)."""

    name = "snapshot and replay"

    def save(self, cache: Any) -> Any:
        return copy.deepcopy(vars(cache))

    def can_trim(self, cache: Any, back: int) -> bool:
        return False

    def trim(self, cache: Any, back: int) -> int:
        return 0

    def restore(self, cache: Any, saved: Any, back: int) -> int:
        vars(cache).clear()
        vars(cache).update(copy.deepcopy(saved))
        return back

    def widest_pass(self, cache: Any) -> int | None:
        return None


class Asked(Snapshot):
    """Trim while the cache itself says that it can, else put back the state from before."""

    name = "trim if it says so, else snapshot and replay"

    def can_trim(self, cache: Any, back: int) -> bool:
        return bool(cache.is_trimmable())

    def trim(self, cache: Any, back: int) -> int:
        return int(cache.trim(back))


class SingleTokens(Snapshot):
    """Never draft: there is no known way back."""

    name = "single tokens"

    def save(self, cache: Any) -> Any:
        return None

    def restore(self, cache: Any, saved: Any, back: int) -> int:
        return 0

    def widest_pass(self, cache: Any) -> int | None:
        return 1


STRATEGIES: dict[type, Strategy] = {
    KVCache: Trim(),
    QuantizedKVCache: Trim(),
    ChunkedKVCache: Chunks(),
    ConcatenateKVCache: TrimRows(),
    RotatingKVCache: Window(),
    ArraysCache: Snapshot(),
}


def strategy_for(cache: Any) -> Strategy:
    """Strategy of a cache; a class that is not in the table is asked, once, what it can do."""
    kind = type(cache)
    if kind not in STRATEGIES:
        STRATEGIES[kind] = _strategy_for_unknown(cache)
    return STRATEGIES[kind]


def _strategy_for_unknown(cache: Any) -> Strategy:
    if hasattr(cache, "__dict__"):
        return Asked() if cache.is_trimmable() else Snapshot()
    warnings.warn(
        f"specdec_mlx: {type(cache).__name__} has no known way back after a rejected draft, so "
        "nothing is drafted. Register a strategy in "
        "specdec_mlx.target.rollback.STRATEGIES to lift that.",
        stacklevel=2,
    )
    return SingleTokens()


def _handle(value: Any) -> Any:
    """The same data under another name: writing through one array does not show in the other."""
    return value[...] if isinstance(value, mx.array) else value


def window_of(cache: Any) -> int | None:
    """Number of tokens after which a cache forgets; None if it keeps everything."""
    for name in ("max_size", "chunk_size", "window_size"):
        if isinstance(size := getattr(cache, name, None), int):
            return size
    return None


def leaves(caches: Any) -> Iterator[Any]:
    """All caches that hold state, nested lists resolved, in a fixed order."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache


@dataclass(frozen=True)
class _Mark:
    position: int
    saved: list[Any]


@dataclass
class Rollback:
    """A model's caches as one tape that can be wound back.

    caches: the list that the model is called with, the caller's own; kept by identity, and its
        entries may be replaced while it is used (kv_bits does).
    position: positions fed since this object was made.
    """

    caches: list[Any]
    position: int = 0
    _marks: list[_Mark] = field(default_factory=list)

    def mark(self) -> None:
        """Remember this position as one to come back to; call it before a pass with a draft.

        The two latest marks are kept, as many as there are passes under way at a time.
        """
        saved = [strategy_for(cache).save(cache) for cache in leaves(self.caches)]
        self._marks = [*self._marks[-1:], _Mark(self.position, saved)]

    def fed(self, num_positions: int) -> None:
        """Note a pass over `num_positions`."""
        self.position += num_positions

    def forget(self) -> None:
        """Drop all marks, so that no handle on a buffer outlives its round."""
        self._marks = []

    def widest_pass(self) -> int | None:
        """Most positions that one pass may have here; None for any number."""
        limits = (strategy_for(cache).widest_pass(cache) for cache in leaves(self.caches))
        return min((limit for limit in limits if limit is not None), default=None)

    def room_in_window(self) -> int | None:
        """Positions that still fit before the smallest window forgets; None without windows."""
        rooms = (
            window - cache.offset
            for cache in leaves(self.caches)
            if (window := window_of(cache)) is not None
        )
        return min(rooms, default=None)

    def rewind_to(self, position: int) -> int:
        """Go back to `position`, or to the last mark before it where a cache cannot stop there.

        Returns the position reached; what lies between has to be fed again. Raises
        CacheRollbackError if a cache gave back another number of positions than was asked.
        """
        back = self.position - position
        if back <= 0:
            return self.position
        state = [(cache, strategy_for(cache)) for cache in leaves(self.caches)]
        if all(strategy.can_trim(cache, back) for cache, strategy in state):
            dropped = [strategy.trim(cache, back) for cache, strategy in state]
        else:
            mark = self._last_mark_at_or_before(position)
            back = self.position - mark.position
            dropped = [
                strategy.restore(cache, saved, back)
                for (cache, strategy), saved in zip(state, mark.saved, strict=True)
            ]
        self._check(state, dropped, back)
        self.position -= back
        return self.position

    def _last_mark_at_or_before(self, position: int) -> _Mark:
        for mark in reversed(self._marks):
            if mark.position <= position:
                return mark
        kinds = sorted({type(cache).__name__ for cache in leaves(self.caches)})
        raise CacheRollbackError(
            f"No way back from position {self.position} to {position}: {', '.join(kinds)} kept no "
            "state from before it. Discard these caches and start from the prompt."
        )

    @staticmethod
    def _check(state: list[tuple[Any, Strategy]], dropped: list[int], back: int) -> None:
        for layer, ((cache, _), got) in enumerate(zip(state, dropped, strict=True)):
            if got != back:
                raise CacheRollbackError(
                    f"Cache {layer} ({type(cache).__name__}) gave back {got} of {back} positions. "
                    "Discard these caches; use drafter=None with this kind of cache."
                )
