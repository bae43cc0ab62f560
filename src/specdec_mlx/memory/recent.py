"""A text that grows, its places kept sorted by what stands before them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from specdec_mlx.memory.index import MOST_DEEP, Context, ContextIndex, Ring, deepest, rings
from specdec_mlx.memory.packing import (
    BITS,
    KNOWN,
    MAX_MATCH,
    agreement,
    bounds,
    key_of,
    packs_of,
    push,
)

NEAREST = BITS * (KNOWN - 1)
"""Where the nearest token stands in a key."""

MOST_RECENT = 4096
"""Places kept in the list that grows; inserting moves 16 kB at that size, a microsecond."""


class GrowingIndex:
    """One text and its places; tokens are appended, and every place is found from then on.

    The latest places stand in a sorted list, which goes over into a `ContextIndex` when it is full;
    a short text has no other, and one look-up less.

    ids: the text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Index `tokens` [n]."""
        self.ids = list(tokens)
        self._key = key_of(self.ids)
        self._keys: list[int] = []
        self._ends: list[int] = []
        self._index: ContextIndex | None = None
        if len(self.ids) < MOST_RECENT:
            self._list()
        else:
            self._index = ContextIndex.build(np.array(self.ids, np.int64))

    def append(self, tokens: Sequence[int]) -> None:
        """Write on: what stood before each token is a place now."""
        for token in tokens:
            place = bisect_left(self._keys, self._key)  # before its equals: the latest comes first
            self._keys.insert(place, self._key)
            self._ends.insert(place, len(self.ids))
            self._key = (token + 1) << NEAREST | self._key >> BITS  # as `push` does
            self.ids.append(token)
        if len(self._keys) >= MOST_RECENT:
            self._index = ContextIndex.build(np.array(self.ids, np.int64))
            self._keys, self._ends = [], []

    def context(self, more: Sequence[int] = ()) -> Context:
        """The end of the text, or of the text and `more` behind it, which is not noted."""
        if more:
            return Context.of([*self.ids[-MAX_MATCH:], *more])
        return Context(self._key, packs_of(self._key), self.ids[: -MAX_MATCH - 1 : -1])

    def nearest(
        self, context: Context, most: int, within: int, least: int = 1, fewer: int | None = None
    ) -> list[Ring]:
        """As `ContextIndex.nearest`; of equally long matches the latest places come first."""
        latest = self._latest(context, most, within, least, fewer)
        if self._index is None:
            return latest
        if latest:
            least = max(least, latest[0][0] - within)
        older = self._index.nearest(context, most, within, least, fewer)
        if not (latest and older) or latest[0][0] >= older[0][0]:
            return latest + older
        shortest = older[0][0] - within
        return older + [ring for ring in latest if ring[0] >= shortest]

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """The `length` tokens from a place on; behind the end, the copy is copied again.

        So a match at distance d from the end repeats the last d tokens, which is what a periodic
        text does. `more` is what comes behind the text.
        """
        known = tuple(self.ids[place : place + length])
        if more:
            known = (*known, *more)[:length]
        return known if len(known) == length else (known * -(-length // len(known)))[:length]

    def _list(self) -> None:
        """Sort all places by their keys; of equal ones the latest come first."""
        before = list(accumulate(self.ids[:-1], push, initial=0))[: len(self.ids)]
        latest_first = range(len(before) - 1, -1, -1)
        self._ends = sorted(latest_first, key=before.__getitem__)
        self._keys = [before[end] for end in self._ends]

    def _latest(
        self, context: Context, most: int, within: int, least: int, fewer: int | None
    ) -> list[Ring]:
        """The same among the places in the list."""
        keys, key = self._keys, context.key
        if not keys:
            return []
        start = bisect_left(keys, key)
        longest = agreement(keys, key, start, 0, len(keys), KNOWN)
        longest = min(longest, len(context.last))
        if longest < least:
            return []
        if longest == KNOWN:  # as in `ContextIndex`
            ends = self._ends[start : min(bisect_right(keys, key, start), start + MOST_DEEP)]
            return deepest(self.ids, ends, context, within, least)

        def agreeing(length: int) -> tuple[int, int]:
            lower, upper = bounds(key, length, KNOWN)
            return bisect_left(keys, lower, 0, start), bisect_left(keys, upper, start)

        return rings(self._ends, agreeing, longest, most, max(least, longest - within), fewer)
