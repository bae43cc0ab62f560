"""The caches of several texts as the rows of one cache, with masks.

A pass appends the same number of slots to each row. A slot holds a position of its row's text, or
nothing: padding, or a rejected token. Rotary positions are given per row, and the mask lets a query
see the slots of its own row and window, so that rows go back without moving a key or a value; empty
slots are dropped when they are many. A row with recurrent states gets the state from before the
pass, and what was kept is fed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import ArraysCache, BatchKVCache, CacheList, KVCache, RotatingKVCache

from specdec_mlx.caches import leaves, saved_buffer, window_of
from specdec_mlx.token_ids import to_ids
from specdec_mlx.window_cache import WindowCache

EMPTY = -1  # position of a slot without a token of its row: padding, or a rejected token


MOST_EMPTY = 64  # slots beyond the fullest row's that may stay empty


@dataclass
class Slots:
    """The positions [rows, slots] that the slots hold. Caches with one window share this object.

    Attributes:
        window: tokens after which the caches forget, or None.
        sinks: first positions that the caches never forget.
        positions: index in its row's text of each slot's token, or `EMPTY`.
    """

    window: int | None
    sinks: int = 0
    positions: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    _queries: np.ndarray = field(init=False)
    _masks: dict[int | None, mx.array] = field(default_factory=dict)

    def add_row(self, num_positions: int, num_rows: int) -> None:
        """Add a row of `num_positions` tokens after `num_rows` others, aligned at the right."""
        text = np.arange(num_positions, dtype=np.int32)
        rows = [*self.positions[:num_rows], text[self._keeps(text, num_positions)]]
        width = max(map(len, rows))
        self.positions = np.stack(
            [np.pad(row, (width - len(row), 0), constant_values=EMPTY) for row in rows]
        )

    def _keeps(self, positions: np.ndarray, length: Any) -> Any:
        """True for the positions of a text of this length that its next position may see."""
        if self.window is None:
            return positions >= 0
        return (positions < self.sinks) | (positions >= length - self.window)

    def append(self, new: np.ndarray) -> None:
        self.positions = np.concatenate([self.positions, new], axis=1)
        # A query without any key gives NaN, so that padding sees the tokens before it.
        self._queries = np.maximum.accumulate(new, axis=1)
        self._masks.clear()

    def mask(self, num_queries: int, window: int | None) -> mx.array:
        """Slots that each query sees, [rows, 1, S, slots]."""
        # A model that asks for another number of queries makes its own layout of the pass.
        if num_queries != self._queries.shape[1]:
            raise ValueError(f"a mask for {num_queries} of {self._queries.shape[1]} tokens")
        if not self.sinks and self.window is not None:
            # A single token sees no more than the cache keeps, whatever mask the model asks for.
            window = min(window or self.window, self.window)
        if window not in self._masks:
            queries, keys = self._queries[:, :, None], self.positions[:, None, :]
            seen = (keys != EMPTY) & (keys <= queries)
            if self.sinks:
                seen &= (queries - keys < self.window) | (keys < self.sinks)
            if window is not None:
                seen &= queries - keys < window
            self._masks[window] = mx.array(seen[:, None])
        return self._masks[window]

    def compact(self, lengths: Sequence[int]) -> tuple[int, mx.array | None]:
        """Empty the slots from each row's end on, and the slots outside its next window.

        Returns the number of slots dropped at the back, where all rows are empty, and the indices
        [rows, n] of the other slots to keep. None keeps all of them.

        lengths: [rows] number of positions that stay of each row.
        """
        limits = np.array(lengths, np.int32)[:, None]
        self.positions[self.positions >= limits] = EMPTY
        used = np.flatnonzero((self.positions != EMPTY).any(axis=0))
        num_slots = int(used[-1]) + 1 if len(used) else 0
        dropped = int(self.positions.shape[1]) - num_slots
        self.positions = self.positions[:, :num_slots]
        self.positions[~self._keeps(self.positions, limits)] = EMPTY
        most = int((self.positions != EMPTY).sum(axis=1).max(initial=0))
        if num_slots - most <= max(MOST_EMPTY, most // 4):
            return dropped, None
        # EMPTY is the smallest value, so that a stable sort puts empty slots first and the last
        # `most` slots hold all tokens in order.
        order = np.argsort(self.positions, axis=1, kind="stable")[:, -max(1, most) :]
        self.positions = np.take_along_axis(self.positions, order, axis=1)
        return dropped, mx.array(order.astype(np.int32))


class SlotCache(BatchKVCache):  # type: ignore[misc]
    def __init__(self, slots: Slots) -> None:
        super().__init__([])
        self.slots = slots

    def make_mask(self, N: int, window_size: int | None = None, **options: Any) -> mx.array:
        return self.slots.mask(N, window_size)

    def add_row(self, cache: Any, num_rows: int) -> None:
        if num_rows == 0:
            self.keys, self.values, self._idx = None, None, 0
        # `extend` reads the number of rows off it.
        self.offset = mx.zeros(num_rows, mx.int32)
        self.extend(type(cache).merge([cache]))

    def keep_rows(self, rows: mx.array) -> None:
        if self.keys is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def drop_slots(self, dropped: int, order: mx.array | None) -> None:
        """Drop slots at the back, and keep the slots [rows, n] of the rest; see `compact`."""
        if self.keys is None:
            return
        self._idx -= dropped
        if order is not None:
            indices = order[:, None, :, None]
            self.keys = mx.take_along_axis(self.keys, indices, axis=2)
            self.values = mx.take_along_axis(self.values, indices, axis=2)
            self._idx = order.shape[1]

    def copy_row(self, row: int, like: Any, num_positions: int) -> None:
        if self.keys is None:
            return
        positions = self.slots.positions[row]
        full = np.flatnonzero(positions != EMPTY)
        slots = mx.array(full[np.argsort(positions[full])])
        like.keys = self.keys[row : row + 1, :, slots]
        like.values = self.values[row : row + 1, :, slots]
        like.offset = num_positions
        if isinstance(like, RotatingKVCache | WindowCache):
            like._idx = like.keys.shape[2]


@dataclass
class BatchCaches:
    """The caches of a model for several texts at once, one row for each text.

    Attributes:
        caches: the model's caches.
        lengths: number of positions in each row.
    """

    caches: list[Any]
    lengths: list[int] = field(default_factory=list)
    _slots: dict[tuple[int | None, int], Slots] = field(default_factory=dict)
    _before: list[tuple[ArraysCache, Any]] = field(default_factory=list)
    _began: list[int] = field(default_factory=list)

    @classmethod
    def like(cls, caches: Sequence[Any]) -> BatchCaches | None:
        """Caches without rows for a model with caches like these. None if they cannot hold rows."""
        rows = cls([])
        rows.caches = [rows._make(cache) for cache in caches]
        return None if None in rows.caches else rows

    def _make(self, cache: Any) -> Any:
        kind = type(cache)
        if kind is CacheList:
            parts = [self._make(part) for part in cache.caches]
            return None if None in parts else CacheList(*parts)
        if kind is ArraysCache:
            return ArraysCache(len(cache.cache))
        if kind is WindowCache:
            window, sinks = cache.window, cache.sinks
        elif kind is KVCache or (kind is RotatingKVCache and not cache.keep):
            window, sinks = window_of(cache), 0
        else:
            return None
        return SlotCache(self._slots.setdefault((window, sinks), Slots(window, sinks)))

    def takes(self, caches: Sequence[Any]) -> bool:
        """True if caches of one text can be a row: they forget after the same numbers of tokens."""
        other = BatchCaches.like(caches)
        return other is not None and other.windows == self.windows

    @property
    def windows(self) -> list[Any]:
        slots = (getattr(cache, "slots", None) for cache in leaves(self.caches))
        return [None if each is None else (each.window, each.sinks) for each in slots]

    @property
    def num_bytes(self) -> int:
        return sum(int(cache.nbytes) for cache in self.caches)

    def add(self, caches: Sequence[Any], num_positions: int) -> None:
        """Add a text, with its caches, after the others. An exception changes nothing."""
        parts = (*self._slots.values(), *leaves(self.caches))
        before = [(part, {**vars(part)}) for part in parts]
        try:
            for slots in self._slots.values():
                slots.add_row(num_positions, len(self.lengths))
            for mine, cache in zip(leaves(self.caches), leaves(caches), strict=True):
                self._add(mine, cache)
        except BaseException:
            for part, attributes in before:
                vars(part).clear()
                vars(part).update(attributes)
            raise
        self.lengths.append(num_positions)

    def _add(self, mine: Any, cache: Any) -> None:
        if isinstance(mine, SlotCache):
            mine.add_row(cache, len(self.lengths))
        elif not self.lengths:
            merged = ArraysCache.merge([cache])
            mine.cache, mine.left_padding = merged.cache, merged.left_padding
        else:
            mine.extend(ArraysCache.merge([cache]))
            # An empty cache reads its number of rows off its padding, which `finalize` would drop.
            if not mine.empty():
                mine.finalize()

    def keep(self, rows: Sequence[int]) -> None:
        if list(rows) == list(range(len(self.lengths))):
            return
        ids = mx.array(list(rows), mx.int32)
        for slots in self._slots.values():
            slots.positions = slots.positions[list(rows)]
        for cache in leaves(self.caches):
            if isinstance(cache, SlotCache):
                cache.keep_rows(ids)
            else:
                cache.filter(ids)
        self.lengths = [self.lengths[row] for row in rows]

    def feed(self, model: nn.Module, texts: Sequence[Sequence[int] | mx.array]) -> mx.array:
        """Lazy logits [rows, S, V] of the next tokens of each row, padded on the right."""
        self._begin([len(text) for text in texts])
        logits: mx.array = model(_padded(texts), cache=self.caches)
        # `prepare` gave recurrent layers the lengths of this pass only.
        for cache, _ in self._before:
            cache.finalize()
        return logits

    def _begin(self, widths: Sequence[int]) -> None:
        width = max(widths)
        steps = np.arange(width, dtype=np.int32)[None]
        new = np.array(self.lengths, np.int32)[:, None] + steps
        new[steps >= np.array(widths)[:, None]] = EMPTY
        for slots in self._slots.values():
            slots.append(new)
        self._began, self._before = self.lengths, []
        offset = mx.array(self.lengths, mx.int32)
        for cache in leaves(self.caches):
            if isinstance(cache, SlotCache):
                cache.offset = offset
            else:
                # Recurrent state cannot be shortened: save it for `go_back`.
                self._before.append((cache, saved_buffer(cache.cache)))
                if min(widths) < width:
                    cache.prepare(lengths=list(widths))
        self.lengths = [end + n for end, n in zip(self.lengths, widths, strict=True)]

    def go_back(self, lengths: Sequence[int]) -> list[int]:
        """Shorten rows to these lengths. Returns the lengths reached.

        A row with recurrent state goes back to before the latest pass, and its kept tokens must be
        fed again.
        """
        is_back = [wanted < end for wanted, end in zip(lengths, self.lengths, strict=True)]
        if any(is_back):
            for cache, before in self._before:
                pairs = zip(before, cache.cache, strict=True)
                cache.cache = [_chosen(is_back, old, new) for old, new in pairs]
            reached = zip(
                self._began if self._before else lengths, self.lengths, is_back, strict=True
            )
            self.lengths = [to if back else end for to, end, back in reached]
        for slots in self._slots.values():
            dropped, order = slots.compact(self.lengths)
            for cache in leaves(self.caches):
                if isinstance(cache, SlotCache) and cache.slots is slots:
                    cache.drop_slots(dropped, order)
        return self.lengths

    def extract(self, row: int, like: Sequence[Any]) -> list[Any]:
        for mine, cache in zip(leaves(self.caches), leaves(like), strict=True):
            if isinstance(mine, SlotCache):
                mine.copy_row(row, cache, self.lengths[row])
            else:
                cache.cache = mine.extract(row).cache
        return list(like)


def _padded(texts: Sequence[Sequence[int] | mx.array]) -> mx.array:
    """Token ids [rows, S], padded with zeros."""
    width = max(map(len, texts))
    if any(isinstance(text, mx.array) for text in texts):
        rows = map(to_ids, texts)
        return mx.stack([mx.pad(row, (0, width - row.shape[0])) for row in rows])
    # All ids are on the host: one array in place of an operation for each row.
    padded = np.zeros((len(texts), width), np.uint32)
    for row, text in zip(padded, texts, strict=True):
        row[: len(text)] = text
    return mx.array(padded)


def _chosen(rows: Sequence[bool], old: mx.array | None, new: mx.array | None) -> mx.array | None:
    """The old state in the marked rows, the new state in the others."""
    if new is None:
        return None
    before = mx.zeros_like(new) if old is None else old
    marked = mx.array(list(rows)).reshape(-1, *[1] * (new.ndim - 1))
    return mx.where(marked, before, new)
