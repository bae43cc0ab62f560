"""A text that grows, its places kept sorted by what stands before them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from specdec_mlx.memory.index import Context, ContextIndex, Place, matched, walk
from specdec_mlx.memory.packing import (
    LEVELS,
    MAX_MATCH,
    PER_PACK,
    agreement,
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
        """As `ContextIndex.nearest`; of equal matches the recent ones come first."""
        start = bisect_left(self._keys, context.packs)
        found = walk(self._matched, start, len(self._keys), context, most, within, least)
        return found + self._index.nearest(context, most, within, least)

    def _key(self) -> tuple[int, ...]:
        """The packs of the last 12 tokens."""
        packs = self._packs
        return packs[-1], packs[-4], packs[-7], packs[-10]

    def _matched(self, index: int, context: Context) -> Place:
        """How much before the place at an index agrees, and the place."""
        end = self._ends[index]
        length = agreement(self._keys[index], context.packs)
        if length == LEVELS * PER_PACK:
            length = matched(self.ids, end, context.last, length)
        return min(length, len(context.last)), end
