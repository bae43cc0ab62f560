"""How each cache class of mlx-lm goes back: the only file that knows a cache's insides."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from specdec_mlx.errors import CacheRollbackError


class Strategy:
    """How one class of cache goes back; as it is, by the cache's own `trim`.

    must_restore: going back may need what `save` took before the pass, which is kept until the
    verdict. `back` is a number of positions > 0.
    """

    name = "trim"
    must_restore = False
    # nothing but the attributes is saved, which needs no call in each pass
    saves_by_name = True

    def __init_subclass__(cls) -> None:
        cls.saves_by_name = cls.save is Strategy.save

    def save(self, cache: Any) -> Any:
        """All that `restore` needs, taken before a pass; no buffer is copied."""
        return vars(cache).copy()

    def restore(self, cache: Any, saved: Any) -> None:
        """Put the cache back exactly as it was when it was saved."""
        vars(cache).update(saved)

    def can_trim(self, cache: Any, back: int) -> bool:
        """True if the last `back` positions can be dropped in place."""
        return True

    def trim(self, cache: Any, back: int) -> int:
        """Drop the last `back` positions; return how many were dropped."""
        if cache.empty():  # made for a layer that has no attention, and never fed
            return back
        return int(cache.trim(back))

    def widest_pass(self, cache: Any) -> int | None:
        """Most positions that one pass may have and still be exact; None for any number."""
        return None


Trim = Strategy


@runtime_checkable
class Gathers(Protocol):
    """A strategy that can keep some of the last rows and drop those between them (for trees)."""

    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        """Of the `last` positions keep those with the given indices, in this order."""


class TrimToPath(Trim):
    """Keep some of the last rows, for caches that hold one row a position."""

    def gather(self, cache: Any, last: int, kept: Sequence[int]) -> None:
        if not cache.empty():
            # in a window rows are shifted
            begin = getattr(cache, "_idx", cache.offset) - last
            cache.keys = _moved(cache.keys, begin, kept)
            cache.values = _moved(cache.values, begin, kept)
        self.trim(cache, last - len(kept))


class TrimAndSlice(Trim):
    """Move the offset back and slice, for a cache that appends after its last row."""

    name = "trim rows"

    def trim(self, cache: Any, back: int) -> int:
        dropped = super().trim(cache, back)
        cache.keys = cache.keys[..., : cache.offset, :]
        cache.values = cache.values[..., : cache.offset, :]
        return dropped


class SavedBuffers(Trim):
    """Trim where that is enough; else put the buffers from before the pass back."""

    must_restore = True

    def save(self, cache: Any) -> Any:
        return {name: saved_buffer(value) for name, value in vars(cache).items()}

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).update({name: saved_buffer(value) for name, value in saved.items()})


class RotatingWindow(SavedBuffers, TrimToPath):
    """A rotating window: in temporal order after a pass over several positions, so sliced then.

    With `keep` > 0 the mask for several positions forgets the kept tokens once the window is full:
    a pass may only fill it up.
    """

    name = "window"

    def can_trim(self, cache: Any, back: int) -> bool:
        if cache.offset <= cache.max_size:
            return True
        rows = cache.keys.shape[2]
        in_order = cache._idx == rows
        return bool(
            in_order and (rows == cache.offset or rows - back >= cache.max_size)
        )

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


class Chunks(SavedBuffers):
    """Trim, unless the pass dropped rows of an earlier chunk that are needed again."""

    name = "trim within chunks"

    def can_trim(self, cache: Any, back: int) -> bool:
        position = cache.offset - back
        first_needed = position - position % cache.chunk_size
        return bool(cache.start_position <= first_needed)


class Snapshot(SavedBuffers):
    """Put back recurrent state from before the pass; kept tokens may have to be fed again."""

    name = "snapshot and replay"

    def can_trim(self, cache: Any, back: int) -> bool:
        return False

    def trim(self, cache: Any, back: int) -> int:
        return 0


class Unknown(Snapshot):
    """A class that is not in the table: trimmed while it says that it can, else deep copies."""

    def save(self, cache: Any) -> Any:
        return copy.deepcopy(vars(cache))

    def restore(self, cache: Any, saved: Any) -> None:
        vars(cache).clear()
        vars(cache).update(copy.deepcopy(saved))

    def can_trim(self, cache: Any, back: int) -> bool:
        return bool(cache.is_trimmable())

    def trim(self, cache: Any, back: int) -> int:
        return int(cache.trim(back))


class SingleTokens(Snapshot):
    """There is no known way back, so nothing is drafted."""

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
    ConcatenateKVCache: TrimAndSlice(),
    RotatingKVCache: RotatingWindow(),
    ArraysCache: Snapshot(),
}
"""Cache class -> its strategy. Register one of your own here: `STRATEGIES[MyCache] = MyStrategy()`;
`specdec_mlx.lab.check_strategy` holds it to the contract."""


READABLE = (KVCache, RotatingKVCache, QuantizedKVCache)
"""Caches of one key and one value for each head and position."""


def strategy_for(cache: Any) -> Strategy:
    """Strategy of a cache; a class that is not in the table gets a general one, with its name."""
    kind = type(cache)
    if kind not in STRATEGIES:
        has_names = hasattr(cache, "__dict__")
        STRATEGIES[kind] = Unknown() if has_names else SingleTokens()
        if not has_names:
            warnings.warn(
                f"specdec_mlx: {kind.__name__} has no known way back after a rejected draft, so "
                "nothing is drafted. Register a strategy in "
                "specdec_mlx.verify.strategies.STRATEGIES to lift that.",
                stacklevel=2,
            )
    return STRATEGIES[kind]


def _moved(rows: Any, begin: int, kept: Sequence[int]) -> Any:
    """Rows [..., S, D], those kept of the ones from `begin` on moved to `begin`; a new array."""
    if not isinstance(rows, mx.array):  # quantized: packed values, scales, biases
        return type(rows)(_moved(part, begin, kept) for part in rows)
    # ascending: those lie in place
    skipped = sum(index == i for i, index in enumerate(kept))
    index = mx.array([begin + row for row in kept[skipped:]])
    axis = rows.ndim - 2
    moved = mx.take(rows, index, axis=axis)
    return mx.slice_update(rows, moved, mx.array([begin + skipped]), (axis,))


def saved_buffer(value: Any) -> Any:
    """The data under another name: writing through one array does not show in the other."""
    if isinstance(value, mx.array):
        return value[...]
    return [saved_buffer(item) for item in value] if isinstance(value, list) else value


def window_of(cache: Any) -> int | None:
    """Number of tokens after which a cache forgets; None if it keeps everything."""
    for name in ("max_size", "chunk_size", "window_size"):
        if isinstance(size := getattr(cache, name, None), int):
            return size
    return None


def leaves(caches: Sequence[Any]) -> Iterator[Any]:
    """All caches that hold state, nested lists resolved, in a fixed order."""
    for cache in caches:
        if parts := parts_of(cache):
            yield from leaves(parts)
        else:
            yield cache


def leaves_of(model: nn.Module) -> list[Any]:
    """The caches that a model makes for a text, nested lists resolved; nothing is fed to them."""
    return list(leaves(make_prompt_cache(model)))


def parts_of(cache: Any) -> Sequence[Any]:
    """What a list of caches holds, mlx-lm's or mlx-vlm's; nothing of one that holds state."""
    parts: Sequence[Any] = getattr(cache, "caches", ())
    return parts
