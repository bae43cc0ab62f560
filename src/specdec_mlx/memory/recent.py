"""A text that grows, its places kept sorted by what stands before them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from specdec_mlx.memory.index import BITS, MAX_MATCH, NEAREST, Context, ContextIndex


class GrowingIndex(ContextIndex):
    """One text and its places; tokens are appended, and every place is found from then on."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self._key = Context.of(tokens).key

    def append(self, tokens: Sequence[int]) -> None:
        """Write on: what stood before each token is a place now."""
        for token in tokens:
            place = bisect_left(self._keys, self._key)  # before its equals: the latest comes first
            self._keys.insert(place, self._key)
            self.ends.insert(place, len(self.ids))
            self._key = (token + 1) << NEAREST | self._key >> BITS  # as in the index, but no call
            self.ids.append(token)

    def context(self, more: Sequence[int] = ()) -> Context:
        """The end of the text, or of the text and `more` after it, which is not noted."""
        if more:
            return Context.of([*self.ids[-MAX_MATCH:], *more])
        return Context(self._key, self.ids[: -MAX_MATCH - 1 : -1])

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """The `length` tokens from a place on, of the text and `more`, around and around."""
        known = tuple(self.ids[place : place + length])
        if more:
            known = (*known, *more)[:length]
        return known if len(known) == length else (known * -(-length // len(known)))[:length]
