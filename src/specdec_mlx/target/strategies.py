"""How each cache class of mlx-lm goes back; the only file that knows a cache's insides.

Each class has one strategy, looked up in `STRATEGIES`:

- `Trim`: the offset moves back, nothing is copied. `TrimToPath`: of a tree the rows of the kept
  path are moved together first.
- `TrimRows`: the same, and the rows behind the offset are sliced off.
- `Window`: a full rotating window is in temporal order right after a pass over several positions,
  so its last rows are sliced off; further back only by the buffers saved before the pass.
- `Chunks`: a pass that enters a new chunk drops the rows of the last one in front; to go back into
  that chunk takes the buffers saved before the pass.
- `Snapshot`: recurrent state cannot be shortened; what it was before the pass is put back, and the
  positions that were kept are fed again, with the next pass. After a short pass of a recurrence
  that `recurrent_states` knows its `KeptStates` stand in: going back is then a choice of states.
- `Unknown`: a class that is not in the table; all of it is copied before a pass and put back.
- `Asked`: the same, for a class that says that it can be trimmed: it is asked each time.
- `SingleTokens`: nothing is known to work, so nothing is drafted.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

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


class Cache(Protocol):
    """What every cache of mlx-lm offers; a strategy knows more about its own class."""

    @property
    def state(self) -> Any:
        """Its arrays, for `mx.eval`."""
        ...

    def is_trimmable(self) -> bool:
        """True if `trim` works now."""
        ...


class Strategy(Protocol):
    """How one class of cache goes back. `back` is a number of positions, always > 0.

    name: for reports. must_restore: whether going back may need what `save` took before the pass;
    if so it is kept until the verdict, else only while the pass is being built.
    """

    name: str
    must_restore: bool

    def save(self, cache: Any) -> Any:
        """All that `restore` needs, taken before a pass; no buffer is copied."""
        ...

    def restore(self, cache: Any, saved: Any) -> None:
        """Put the cache back exactly as it was when it was saved."""
        ...

    def can_trim(self, cache: Any, back: int) -> bool:
        """True if the last `back` positions can be dropped in place."""
        ...

    def trim(self, cache: Any, back: int) -> int:
        """Drop the last `back` positions; return how many were dropped."""
        ...

    def widest_pass(self, cache: Any) -> int | None:
        """Most positions that one pass may have and still be exact; None for any number."""
        ...


@runtime_checkable
class Gathers(Protocol):
    """A strategy that can keep some of the last rows and drop those between them (for trees)."""

    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        """Of the `last` positions keep those with the given indices, in this order."""
        ...


class Trim:
    """Move the offset back (KVCache and its like)."""

    name = "trim"
    must_restore = False

    def save(self, cache: Any) -> Any:
        return vars(cache).copy()

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).update(saved)

    def can_trim(self, cache: Any, back: int) -> bool:
        return True

    def trim(self, cache: Any, back: int) -> int:
        if cache.empty():  # made for a layer that has no attention, and never fed
            return back
        return int(cache.trim(back))

    def widest_pass(self, cache: Any) -> int | None:
        return None


class TrimToPath(Trim):
    """Keep some of the last rows, for caches that hold one row a position."""

    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        if not cache.empty():
            begin = self.end(cache) - last
            cache.keys, cache.values = (
                _moved(rows, begin, kept) for rows in (cache.keys, cache.values)
            )
        self.trim(cache, last - len(kept))

    def end(self, cache: Any) -> int:
        """Index of the row behind the last one."""
        return int(cache.offset)


class TrimRows(Trim):
    """Move the offset back and slice, for a cache that appends behind its last row."""

    name = "trim rows"

    def trim(self, cache: Any, back: int) -> int:
        dropped = super().trim(cache, back)
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]
        return dropped


class SavedBuffers(Trim):
    """Trim where that is enough; else put back what was there before the pass.

    A full window makes a new buffer for each pass of several positions anyway; before it is full
    the saved buffer costs a copy of it, at most.
    """

    must_restore = True

    def save(self, cache: Any) -> Any:
        return {name: saved_buffer(value) for name, value in vars(cache).items()}

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).update({name: saved_buffer(value) for name, value in saved.items()})


class Window(SavedBuffers, TrimToPath):
    """Slice the last rows off a rotating window, or put back what was there before the pass.

    With `keep` > 0 the mask for several positions forgets the kept tokens once the window is full,
    so a pass may only fill it up, and single tokens follow.
    """

    name = "window"

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

    def end(self, cache: Any) -> int:
        return int(cache._idx)

    def widest_pass(self, cache: Any) -> int | None:
        return None if cache.keep == 0 else max(1, cache.max_size - cache.offset)


class Chunks(SavedBuffers):
    """Trim, unless the pass dropped rows in front that an earlier chunk still needs."""

    name = "trim within chunks"

    def can_trim(self, cache: Any, back: int) -> bool:
        position = cache.offset - back
        first_needed = position - position % cache.chunk_size
        return bool(cache.start_position <= first_needed)


class Snapshot(SavedBuffers):
    """Put back the state from before the pass (recurrent state, whose slots are rebound)."""

    name = "snapshot and replay"

    def can_trim(self, cache: Any, back: int) -> bool:
        return False

    def trim(self, cache: Any, back: int) -> int:
        return 0


class Unknown(Snapshot):
    """The same for a class that is not known: whatever it holds is copied, however deep."""

    def save(self, cache: Any) -> Any:
        return copy.deepcopy(vars(cache))

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).clear()
        vars(cache).update(copy.deepcopy(saved))


class Asked(Unknown):
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

    def restore(self, cache: Any, saved: Any) -> None:
        raise CacheRollbackError(f"{type(cache).__name__} has no known way back.")

    def widest_pass(self, cache: Any) -> int | None:
        return 1


STRATEGIES: dict[type, Strategy] = {
    KVCache: TrimToPath(),
    QuantizedKVCache: TrimToPath(),
    ChunkedKVCache: Chunks(),
    ConcatenateKVCache: TrimRows(),
    RotatingKVCache: Window(),
    ArraysCache: Snapshot(),
}
"""Cache class -> its strategy. Register one of your own here: `STRATEGIES[MyCache] = MyStrategy()`;
`specdec_mlx.testing.check_strategy` holds it to the contract."""


def strategy_for(cache: Any) -> Strategy:
    """Strategy of a cache; a class that is not in the table is asked, once, what it can do."""
    kind = type(cache)
    if kind not in STRATEGIES:
        STRATEGIES[kind] = _strategy_for_unknown(cache)
    return STRATEGIES[kind]


def _strategy_for_unknown(cache: Any) -> Strategy:
    if hasattr(cache, "__dict__"):
        return Asked() if cache.is_trimmable() else Unknown()
    warnings.warn(
        f"specdec_mlx: {type(cache).__name__} has no known way back after a rejected draft, so "
        "nothing is drafted. Register a strategy in "
        "specdec_mlx.target.strategies.STRATEGIES to lift that.",
        stacklevel=2,
    )
    return SingleTokens()


def _moved(rows: Any, begin: int, kept: Sequence[int]) -> Any:
    """Rows [..., S, D] with some of those from `begin` on moved to the front of them, in order.

    A new array, so that what was there before can be put back; where nobody holds on to it, MLX
    writes in place.
    """
    if not isinstance(rows, mx.array):  # quantized: packed values, scales, biases
        return type(rows)(_moved(part, begin, kept) for part in rows)
    skipped = sum(index == i for i, index in enumerate(kept))  # ascending: those lie in place
    index = mx.array([begin + row for row in kept[skipped:]])
    axis = rows.ndim - 2
    moved = mx.take(rows, index, axis=axis)
    return mx.slice_update(rows, moved, mx.array([begin + skipped]), (axis,))


def saved_buffer(value: Any) -> Any:
    """The same data under another name: writing through one array does not show in the other."""
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, list):
        return [saved_buffer(item) for item in value]
    return value


def window_of(cache: Any) -> int | None:
    """Number of tokens after which a cache forgets; None if it keeps everything."""
    for name in ("max_size", "chunk_size", "window_size"):
        if isinstance(size := getattr(cache, name, None), int):
            return size
    return None


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """All caches that hold state, nested lists resolved, in a fixed order."""
    for cache in caches:
        if isinstance(cache, CacheList):
            yield from leaves(cache.caches)
        else:
            yield cache
