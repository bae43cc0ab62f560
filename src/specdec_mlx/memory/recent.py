"""A text that grows, its places kept sorted by what stands before them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from specdec_mlx.memory.index import MOST_DEEP, Context, ContextIndex, Place, deepest, ringed
from specdec_mlx.memory.packing import (
    LEVELS,
    MAX_MATCH,
    PER_PACK,
    agreement,
    bounds,
    pack_text,
    push,
)

MOST_RECENT = 4096
"""Places kept in the list that grows; inserting moves 16 kB at that size, a microsecond."""


class GrowingIndex:
    """One text and its places; tokens are appended, and every place is found from then on.

    Most of the places stand in a `ContextIndex`, the latest ones in a sorted list, which goes over
    into the index when it is full.

    ids: the text.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """Index `tokens` [n]."""
        self.ids = list(tokens)
        array = np.array(self.ids, np.int64)
        packs: list[int] = pack_text(array).tolist()
        self._packs = [0] * (LEVELS * PER_PACK) + packs  # so that the text may begin anywhere
        self._index = ContextIndex.build(array)
        self._keys: list[tuple[int, ...]] = []
        self._ends: list[int] = []

    def append(self, tokens: Sequence[int]) -> None:
        """Write on: what stood before each token is a place now."""
        for token in tokens:
            key = self._key()
            place = bisect_left(self._keys, key)  # before its equals: the latest comes first
            self._keys.insert(place, key)
            self._ends.insert(place, len(self.ids))
            self._packs.append(push(self._packs[-1], token))
            self.ids.append(token)
        if len(self._keys) >= MOST_RECENT:
            self._index = ContextIndex.build(np.array(self.ids, np.int64))
            self._keys, self._ends = [], []

    def context(self, more: Sequence[int] = ()) -> Context:
        """The end of the text, or of the text and `more` behind it, which is not noted."""
        if more:
            return Context.of([*self.ids[-MAX_MATCH:], *more])
        return Context(self._key(), self.ids[: -MAX_MATCH - 1 : -1])

    def nearest(self, context: Context, most: int, within: int, least: int = 1) -> list[Place]:
        """As `ContextIndex.nearest`; of equally long matches the latest places come first."""
        latest = self._latest(context, most, within, least)
        if latest:
            least = max(least, latest[0][0] - within)
        older = self._index.nearest(context, most, within, least)
        if not (latest and older) or latest[0][0] >= older[0][0]:
            return latest + older
        shortest = older[0][0] - within
        return older + [place for place in latest if place[0] >= shortest]

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """The `length` tokens from a place on; behind the end, the copy is copied again.

        So a match at distance d from the end repeats the last d tokens, which is what a periodic
        text does. `more` is what comes behind the text.
        """
        known = (*self.ids[place : place + length], *more)[:length]
        return known if len(known) == length else (known * -(-length // len(known)))[:length]

    def _latest(self, context: Context, most: int, within: int, least: int) -> list[Place]:
        """The same among the places in the list."""
        keys, packs = self._keys, context.packs
        start = bisect_left(keys, packs)
        around = keys[max(0, start - 1) : start + 1]
        longest = min(max((_agreement(key, packs) for key in around), default=0), len(context.last))
        if longest == LEVELS * PER_PACK:  # as in `ContextIndex`
            high = bisect_right(keys, packs, start)
            ends = self._ends[start : min(high, start + MOST_DEEP)]
            return deepest(self.ids, ends, context, within, least)

        def agreeing(length: int) -> tuple[int, int]:
            level = (length - 1) // PER_PACK
            lower, upper = bounds(packs[level], length - PER_PACK * level)
            first = bisect_left(keys, (*packs[:level], lower))
            return first, bisect_left(keys, (*packs[:level], upper), first)

        return ringed(self._ends, agreeing, longest, most, max(least, longest - within))

    def _key(self) -> tuple[int, ...]:
        """The packs of the last 12 tokens."""
        packs = self._packs
        return packs[-1], packs[-4], packs[-7], packs[-10]


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """In how many tokens two contexts [LEVELS] agree, 0 to 12."""
    length = 0
    for a, b in zip(one, other, strict=True):
        length += agreement(a, b)
        if a != b:
            break
    return length
