"""The caches of several texts as the rows of one: slots that are filled together, and masked.

A pass over several rows appends the same number of slots to each. What a slot holds of its row's
text is a position, or nothing: the padding of a short row, and what was rejected. Rotary positions
are given per row, and the mask lets a query see the slots of its own row whose positions are not
behind its window and not ahead of it. So going back by another number of positions in each row
moves no key and no value; the empty slots are dropped when they have become many.

Recurrent states have no slots. A row that cannot stay where a pass took it gets back the state from
before the pass, and what was kept of it is fed again with the row's next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from specdec_mlx.target.strategies import leaves, saved_buffer

EMPTY = -1
"""Position of a slot that holds nothing of its row's text."""

MOST_EMPTY = 64
"""Slots beyond those of the fullest row from which on the empty ones are dropped."""


@dataclass
class Slots:
    """Which position of its row's text each slot holds; one for all caches of the same window.

    window: positions that a query sees, its own included; None for all. positions: [rows, slots].
    """

    window: int | None
    positions: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    _queries: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    _masks: dict[int | None, mx.array] = field(default_factory=dict)

    def append(self, new: np.ndarray) -> None:
        """Add the slots of a pass, [rows, S]; padding, on the right, is `EMPTY`."""
        self.positions = np.concatenate([self.positions, new], axis=1)
        self._queries = np.maximum.accumulate(new, axis=1)  # padding sees what is before it
        self._masks.clear()

    def mask(self, num_queries: int, window: int | None) -> mx.array:
        """What each query of the latest pass sees; boolean [rows, 1, S, slots].

        Raises:
            ValueError: for a model that masks anything but the tokens that it was given.
        """
        if num_queries != self._queries.shape[1]:
            raise ValueError(f"a mask for {num_queries} of {self._queries.shape[1]} tokens")
        window = window or self.window
        if window not in self._masks:
            queries, keys = self._queries[:, :, None], self.positions[:, None, :]
            seen = (keys != EMPTY) & (keys <= queries)
            if window is not None:
                seen &= queries - keys < window
            self._masks[window] = mx.array(seen[:, None])
        return self._masks[window]

    def go_back(self, ends: Sequence[int]) -> int:
        """Empty the slots from each row's end on; how many at the back are empty in all rows."""
        self.positions[self.positions >= np.array(ends, np.int32)[:, None]] = EMPTY
        used = np.flatnonzero((self.positions != EMPTY).any(axis=0))
        num_slots = int(used[-1]) + 1 if len(used) else 0
        dropped = int(self.positions.shape[1]) - num_slots
        self.positions = self.positions[:, :num_slots]
        return dropped

    def forget(self, ends: Sequence[int]) -> None:
        """Empty the slots that are behind the window of each row's next position."""
        if self.window is not None:
            first = np.array(ends, np.int32)[:, None] - self.window
            self.positions[self.positions < first] = EMPTY

    def order(self) -> np.ndarray | None:
        """The slots [rows, n] to keep, as indices, if many are empty; else None."""
        num_full = (self.positions != EMPTY).sum(axis=1)
        most = int(num_full.max(initial=0))
        if self.positions.shape[1] - most <= max(MOST_EMPTY, most // 4):
            return None
        order = np.argsort(self.positions, axis=1, kind="stable")[:, -max(1, most) :]
        self.positions = np.take_along_axis(self.positions, order, axis=1)
        return order


class RowsCache(BatchKVCache):  # type: ignore[misc]
    """mlx-lm's batch of key-value caches, but for what its rows see of it; see the module."""

    keys: Any
    values: Any
    _idx: int

    def __init__(self, slots: Slots) -> None:
        """No row is there yet."""
        super().__init__([])
        self.slots = slots

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None, **kwargs: Any
    ) -> mx.array:
        """What each query of the latest pass sees; mlx-lm's arguments."""
        return self.slots.mask(N, window_size)

    def add_row(self, cache: Any, num_rows: int, num_slots: int) -> None:
        """Add a row behind the others.

        Args:
            cache: of one text, whose keys and values are taken in their order.
            num_rows: rows that are there.
            num_slots: slots that a row has from now on.
        """
        if num_rows == 0:
            self.keys, self.values, self._idx = None, None, 0
        is_empty = cache.empty() or cache.size() == 0  # trimmed to nothing, it still has keys
        if is_empty and self.keys is None:
            return
        row = self if is_empty else type(cache).merge([cache])
        others = row if self.keys is None else self
        num_new, num_old = 0 if is_empty else row._idx, 0 if self.keys is None else self._idx
        self.keys, self.values = (
            mx.concatenate(
                [
                    _held(old, num_rows, num_old, num_slots),
                    _held(new, 1, num_new, num_slots),
                ]
            )
            for old, new in ((others.keys, row.keys), (others.values, row.values))
        )
        self._idx = num_slots

    def keep_rows(self, rows: mx.array) -> None:
        """Keep these rows, in this order."""
        if self.keys is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def reorder(self, order: mx.array) -> None:
        """Keep these slots [rows, n] of each row."""
        if self.keys is not None:
            indices = order[:, None, :, None]
            self.keys = mx.take_along_axis(self.keys, indices, axis=2)
            self.values = mx.take_along_axis(self.values, indices, axis=2)
            self._idx = order.shape[1]

    def copy_row(self, row: int, like: Any, num_positions: int) -> Any:
        """A cache of one text, of the class of `like`, with what a row holds."""
        if self.keys is None:
            return like
        positions = self.slots.positions[row]
        full = np.flatnonzero(positions != EMPTY)
        slots = mx.array(full[np.argsort(positions[full])])
        like.keys = self.keys[row : row + 1, :, slots]
        like.values = self.values[row : row + 1, :, slots]
        like.offset = num_positions
        if isinstance(like, RotatingKVCache):
            like._idx = like.keys.shape[2]
        return like


@dataclass
class RowCaches:
    """The caches of a model for several texts at once, one row each.

    caches: what the model is called with. ends: positions that each row holds of its text.
    """

    caches: list[Any]
    ends: list[int] = field(default_factory=list)
    _slots: dict[int | None, Slots] = field(default_factory=dict)
    _before: list[tuple[ArraysCache, Any]] = field(default_factory=list)
    _began: list[int] = field(default_factory=list)

    @classmethod
    def like(cls, caches: Sequence[Any]) -> RowCaches | None:
        """No row yet, for a model with caches like these; None where rows cannot be held."""
        rows = cls([])
        made = [rows._make(cache) for cache in caches]
        if any(cache is None for cache in made):
            return None
        rows.caches = made
        return rows

    def _make(self, cache: Any) -> Any:
        """What holds the rows of a cache; None for a class that is not known."""
        kind = type(cache)
        if kind is CacheList:
            parts = [self._make(part) for part in cache.caches]
            return None if None in parts else CacheList(*parts)
        if kind is ArraysCache:
            return ArraysCache(len(cache.cache))
        if kind is not KVCache and (kind is not RotatingKVCache or cache.keep):
            return None
        window = cache.max_size if kind is RotatingKVCache else None
        return RowsCache(self._slots.setdefault(window, Slots(window)))

    @property
    def num_bytes(self) -> int:
        """Of all rows, room included."""
        return sum(int(cache.nbytes) for cache in self.caches)

    def add(self, caches: Sequence[Any], num_positions: int) -> None:
        """Add a text behind the others, with the caches that hold its first positions.

        Where that raises, the others are as they were.
        """
        parts = (*self._slots.values(), *leaves(self.caches))
        before = [(part, {**vars(part)}) for part in parts]
        try:
            self._add(caches, num_positions)
        except BaseException:
            for part, held in before:
                vars(part).clear()
                vars(part).update(held)
            raise

    def _add(self, caches: Sequence[Any], num_positions: int) -> None:
        for slots in self._slots.values():
            size = num_positions if slots.window is None else min(num_positions, slots.window)
            row = np.arange(num_positions - size, num_positions, dtype=np.int32)[None]
            slots.positions = _stacked(slots.positions, row, len(self.ends))
        for mine, cache in zip(leaves(self.caches), leaves(caches), strict=True):
            if isinstance(mine, RowsCache):
                mine.add_row(cache, len(self.ends), mine.slots.positions.shape[1])
            elif not self.ends:
                merged = ArraysCache.merge([cache])
                mine.cache, mine.left_padding = merged.cache, merged.left_padding
            else:
                mine.extend(ArraysCache.merge([cache]))
                if not mine.empty():  # else its padding is all that says how many rows it has
                    mine.finalize()
        self.ends.append(num_positions)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others."""
        if list(rows) == list(range(len(self.ends))):
            return
        ids = mx.array(list(rows), mx.int32)
        for slots in self._slots.values():
            slots.positions = slots.positions[list(rows)]
        for cache in leaves(self.caches):
            if isinstance(cache, RowsCache):
                cache.keep_rows(ids)
            else:
                cache.filter(ids)
        self.ends = [self.ends[row] for row in rows]

    def begin(self, widths: Sequence[int]) -> None:
        """Make room for a pass that feeds so many tokens to each row, padded on the right."""
        width = max(widths)
        steps = np.arange(width, dtype=np.int32)[None]
        new = np.array(self.ends, np.int32)[:, None] + steps
        new[steps >= np.array(widths)[:, None]] = EMPTY
        for slots in self._slots.values():
            slots.append(new)
        self._began = list(self.ends)
        self._before = []
        offset = mx.array(self.ends, mx.int32)
        for cache in leaves(self.caches):
            if isinstance(cache, RowsCache):
                cache.offset = offset
            else:
                self._before.append((cache, saved_buffer(cache.cache)))
                if min(widths) < width:
                    cache.prepare(lengths=list(widths))
        self.ends = [end + n for end, n in zip(self.ends, widths, strict=True)]

    def finish(self) -> None:
        """The pass is built: the lengths that recurrent layers were told hold no longer."""
        for cache, _ in self._before:
            cache.finalize()

    def go_back(self, ends: Sequence[int]) -> list[int]:
        """Go back to these ends after a pass, or to before it in rows with recurrent states.

        Returns:
            The ends that were reached; what lies between is to be fed again.
        """
        behind = [wanted < end for wanted, end in zip(ends, self.ends, strict=True)]
        if any(behind):
            reached = self._began if self._before else ends
            if self._before:
                self._restore(behind)
            self.ends = [
                to if back else end
                for to, end, back in zip(reached, self.ends, behind, strict=True)
            ]
        self._tidy()
        return self.ends

    def _restore(self, rows: Sequence[bool]) -> None:
        """Give these rows the recurrent states from before the pass."""
        for cache, before in self._before:
            pairs = zip(before, cache.cache, strict=True)
            cache.cache = [_chosen(rows, old, new) for old, new in pairs]

    def _tidy(self) -> None:
        """Drop slots that nobody sees any more."""
        for slots in self._slots.values():
            dropped = slots.go_back(self.ends)
            slots.forget(self.ends)
            order = slots.order()
            indices = None if order is None else mx.array(order.astype(np.int32))
            for cache in leaves(self.caches):
                if isinstance(cache, RowsCache) and cache.slots is slots and not cache.empty():
                    cache._idx -= dropped
                    if indices is not None:
                        cache.reorder(indices)

    def extract(self, row: int, like: Sequence[Any]) -> list[Any]:
        """The caches of one text: what a row holds, in new caches of this model."""
        for mine, cache in zip(leaves(self.caches), leaves(like), strict=True):
            if isinstance(mine, RowsCache):
                mine.copy_row(row, cache, self.ends[row])
            else:
                cache.cache = mine.extract(row).cache
        return list(like)


def _chosen(rows: Sequence[bool], old: mx.array | None, new: mx.array | None) -> mx.array | None:
    """The old state in the rows that are marked, the new one in the others."""
    if new is None:
        return None
    before = mx.zeros_like(new) if old is None else old
    marked = mx.array(list(rows)).reshape(-1, *[1] * (new.ndim - 1))
    return mx.where(marked, before, new)


def _held(array: mx.array, num_rows: int, num_held: int, num_slots: int) -> mx.array:
    """Keys or values [rows, heads, slots, d] of rows that hold `num_held`, with room behind.

    Where nothing is held, another cache's array tells their shape.
    """
    if num_held == 0:
        return mx.zeros((num_rows, array.shape[1], num_slots, array.shape[3]), array.dtype)
    room = num_slots - num_held
    return mx.pad(array[..., :num_held, :], [(0, 0), (0, 0), (0, room), (0, 0)])


def _stacked(positions: np.ndarray, row: np.ndarray, num_rows: int) -> np.ndarray:
    """Positions of the slots with one row more; slots that one of them lacks are empty."""
    if num_rows == 0:
        return row
    width = max(positions.shape[1], row.shape[1])
    padded = [
        np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=EMPTY)
        for part in (positions, row)
    ]
    return np.concatenate(padded)
