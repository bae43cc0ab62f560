"""A cache that keeps the first positions of a text and its latest positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from specdec_mlx.arguments import check_int
from specdec_mlx.caches import STRATEGIES, TrimToPath, leaves

SINKS = 4  # first positions that stay visible (attention sinks, Xiao et al. 2023, arXiv 2309.17453)


class WindowCache(KVCache):  # type: ignore[misc]
    """Keys and values of the first positions and of the latest positions of a text.

    Position p sees position j <= p if j < sinks or p - j < window, in a pass of any width. All
    positions count from the start of the text. The cache holds up to 2 * `spare` rows that are not
    visible, so it rarely moves rows, and drafts of `spare` positions can be dropped.

    Attributes:
        window: number of latest positions that a position sees, with itself.
        sinks: number of first positions that every position sees.
        offset: number of positions read.
        _idx: number of rows rows, in the order of the text.
    """

    spare = 256
    keys: Any
    values: Any
    offset: int

    def __init__(self, window: int, sinks: int = SINKS) -> None:
        super().__init__()
        self.window, self.sinks, self._idx = window, sinks, 0

    @property
    def num_lost(self) -> int:
        """Positions after the first ones whose rows are gone."""
        return self.offset - self._idx

    @property
    def _num_lost_next(self) -> int:
        """`num_lost` in the next pass."""
        fewest = self.sinks + self.window + self.spare
        return self.offset - fewest if self._idx >= fewest + self.spare else self.num_lost

    def positions(self, num_new: int) -> mx.array:
        """Positions [n] of the rows that the next pass over `num_new` positions attends to."""
        num_lost = self._num_lost_next
        rows = mx.arange(self.offset + num_new - num_lost)
        return mx.where(rows < self.sinks, rows, rows + num_lost)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | None:
        # With few positions, all of them are visible and none is lost.
        if self.offset + N <= self.sinks + self.window:
            mask: mx.array | str | None = super().make_mask(
                N, return_array=return_array, window_size=window_size
            )
            return mask
        keys = self.positions(N)
        back = mx.arange(self.offset, self.offset + N)[:, None] - keys
        seen = (back >= 0) & ((back < self.window) | (keys < self.sinks))
        if window_size is not None:
            seen &= back < window_size
        return seen[None, None]  # see `trees.tree_pass.view_class`

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        num_dropped = self._num_lost_next - self.num_lost
        start = self._idx - num_dropped
        end = start + keys.shape[2]
        if self.keys is None or num_dropped or end > self.keys.shape[2]:
            size = -(-end // self.step) * self.step
            self.keys, self.values = (
                self._moved(rows, new, num_dropped, size)
                for rows, new in ((self.keys, keys), (self.values, values))
            )
        self.keys[..., start:end, :] = keys
        self.values[..., start:end, :] = values
        self.offset, self._idx = self.offset + keys.shape[2], end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _moved(self, rows: mx.array | None, new: mx.array, num_dropped: int, size: int) -> mx.array:
        """The rows of the cache in `size` rows, without `num_dropped` rows after the first."""
        batch, heads, _, width = new.shape
        parts = [] if rows is None else self._split(rows, self.sinks + num_dropped)
        free = size - sum(part.shape[2] for part in parts)
        return mx.concatenate([*parts, mx.zeros((batch, heads, free, width), new.dtype)], axis=2)

    def _split(self, rows: mx.array, first: int) -> list[mx.array]:
        """The rows of the first positions, and the rows held from row `first` on."""
        sinks = min(self.sinks, self._idx)
        return [rows[..., :sinks, :], rows[..., max(first, sinks) : self._idx, :]]

    @property
    def oldest(self) -> int:
        """The first position that the cache can go back to. The window before it is there."""
        return self.num_lost and self.window + self.sinks + self.num_lost

    def can_go_back(self, back: int) -> bool:
        """True if the last `back` positions can be dropped, and the window before them is there."""
        position = self.offset - back
        return position <= 0 or position >= self.oldest

    def trim(self, n: int) -> int:
        """Drop the last `n` positions, or none if the window before them is gone."""
        n = min(n, self.offset)
        if not self.can_go_back(n):
            return 0
        self.offset -= n
        self._idx = max(0, self._idx - n)
        return n

    @property
    def state(self) -> tuple[Any, ...]:
        keys, values = self.keys, self.values
        if keys is not None:
            keys, values = keys[..., : self._idx, :], values[..., : self._idx, :]
        return keys, values, self.offset, self.window, self.sinks

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.window, self.sinks = state
        self._idx = 0 if self.keys is None else self.keys.shape[2]

    @classmethod
    def merge(cls, caches: Sequence[WindowCache]) -> Any:
        """A batch of the visible rows of each cache."""
        return KVCache.merge([cache._visible() for cache in caches])

    def _visible(self) -> KVCache:
        rows = KVCache()
        if self.keys is not None:
            first = self.offset - self.window - self.num_lost
            for name in ("keys", "values"):
                parts = self._split(getattr(self, name), first)
                setattr(rows, name, mx.concatenate(parts, axis=2))
            rows.offset = rows.keys.shape[2]
        return rows


def has_window(caches: Sequence[Any], window: int | None) -> bool:
    """True if each cache that can keep a window keeps this window, or everything for None or 0."""
    each = (cache for cache in leaves(caches) if type(cache) in (KVCache, WindowCache))
    return all(getattr(cache, "window", 0) == (window or 0) for cache in each)


class RowsOfWindow(TrimToPath):
    """Trim or gather while the rows of the window before are there, else return to a checkpoint.

    Passes only append rows, so the attributes from before a pass are enough to return to it.
    """

    name = "trim in window"
    must_restore = True

    def can_trim(self, cache: Any, back: int) -> bool:
        can_go_back: bool = cache.can_go_back(back)
        return can_go_back


STRATEGIES[WindowCache] = RowsOfWindow()


def check_window(window: int | None) -> None:
    if window is not None:
        check_int("window", window, 0, ", or None")


def limit_to_window(caches: list[Any], window: int | None, sinks: int = SINKS) -> list[Any]:
    """Let each cache of a whole text keep a window only, in place. Other caches stay as they are.

    Args:
        window: number of latest positions to keep, None or 0 for all.
        sinks: number of first positions to keep.
    """
    for cache in leaves(caches):
        if window and type(cache) is KVCache:
            # The caller's list keeps its objects, and their rows are in order.
            cache.__class__ = WindowCache
            cache.window, cache.sinks, cache._idx = window, sinks, cache.offset
    return caches
