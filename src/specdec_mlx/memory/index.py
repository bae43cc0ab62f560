"""Places in texts, sorted by the tokens before them.

The key of a place is one number made of the twelve tokens before it, the nearest on top. So one
bisection finds the longest match, and shorter matches lie around it. Longer matches are measured on
the text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

SEPARATOR = -1  # between two texts, in place of a token id
BITS = 21  # bits of a token in a key; 0 is no token
MAX_TOKEN = 2**BITS - 3  # largest token id
KNOWN = 12  # tokens in a key
NEAREST = BITS * (KNOWN - 1)  # shift of the nearest token in a key

MAX_MATCH = 64  # longest match that is measured; texts that agree for so long rarely part
MOST_DEEP = 8  # latest places that are measured where complete keys agree; more change nothing

# length of a match, in tokens, and the places that match for that length
Ring = tuple[int, Sequence[int]]


class Context(NamedTuple):
    """The end of a text.

    Attributes:
        key: its last 12 tokens as a number.
        last: its last tokens, at most 64, nearest first.
    """

    key: int
    last: Sequence[int]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Context:
        return cls(_keys(tokens[-KNOWN:])[-1], tokens[: -MAX_MATCH - 1 : -1])


class ContextIndex:
    """Texts and their places, sorted by key. Of places with equal keys the latest comes first.

    Attributes:
        ids: [n] token ids, with `SEPARATOR` between texts.
        places: [m] indices in `ids`, sorted by the tokens of the same text before them. None sorts
            them.
    """

    def __init__(self, ids: Iterable[int], places: Iterable[int] | None = None) -> None:
        self.ids = array("i", ids)
        keys = _keys(self.ids)
        if places is None:
            # a stable sort keeps the latest place first among equal keys
            latest_first = range(len(self.ids) - 1, -1, -1)
            unsorted = [place for place in latest_first if self.ids[place] != SEPARATOR]
            places = sorted(unsorted, key=keys.__getitem__)
        self.places = array("i", places)
        self._keys = [keys[place] for place in self.places]

    def __len__(self) -> int:
        """n, separators included."""
        return len(self.ids)

    def nearest(
        self, context: Context, most: int, within: int, least: int = 1, fewer: int | None = None
    ) -> list[Ring]:
        """Places with the longest matches of a context, the longest first.

        Args:
            context: the end of a text.
            most: most places. Of more places with one length, a sample at equal steps is taken.
            within: tokens by which a match may be shorter than the longest match.
            least: length of the shortest match that counts.
            fewer: most places with matches shorter than the longest. None for the rest of `most`.
        """
        keys, (key, last) = self._keys, context
        if not keys:
            return []
        start = bisect_left(keys, key)
        # The key with the longest common prefix is next to the insertion point. The top differing
        # bit gives the number of equal tokens.
        difference = min(map(key.__xor__, keys[max(0, start - 1) : start + 1]))
        longest = min(KNOWN - (difference.bit_length() + BITS - 1) // BITS, len(last))
        if longest < least:
            return []
        if longest == KNOWN:
            high = min(bisect_right(keys, key, start), start + MOST_DEEP)
            return self._deepest(self.places[start:high], last, within, least)
        rings: list[Ring] = []
        low = high = start
        for length in range(longest, max(least, longest - within) - 1, -1):
            inner_low, inner_high = low, high
            # Keys that share their top `length` tokens are one range, which contains the range of
            # the longer match.
            shift = BITS * (KNOWN - length)
            lower = key >> shift << shift
            low = bisect_left(keys, lower, 0, inner_low)
            high = bisect_left(keys, lower + (1 << shift), inner_high)
            more = high - low - (inner_high - inner_low)
            if more and most > 0:
                step = -(-more // most)
                ring = self.places[low:inner_low:step] + self.places[inner_high:high:step]
                rings.append((length, ring[:most]))
                most -= len(ring)
            if length == longest and fewer is not None:
                most = min(most, fewer)
        return rings

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """At most `length` tokens from a place on, to the end of its text."""
        tokens = tuple(self.ids[place : place + length])
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _deepest(
        self, places: Iterable[int], last: Sequence[int], within: int, least: int
    ) -> list[Ring]:
        """Places whose keys equal the context's, with matches measured on the text."""
        by_length: dict[int, list[int]] = {}
        for place in places:
            by_length.setdefault(self._matched(place, last), []).append(place)
        shortest = max(least, max(by_length) - within)
        return sorted([ring for ring in by_length.items() if ring[0] >= shortest], reverse=True)

    def _matched(self, place: int, last: Sequence[int]) -> int:
        ids, most = self.ids, min(place, len(last))
        length = min(KNOWN, most)
        if ids[place - most : place - length] == array("i", last[length:most])[::-1]:
            return most  # one comparison for the common case of a copied text
        while length < most and ids[place - 1 - length] == last[length]:
            length += 1
        return length


def _keys(ids: Sequence[int]) -> list[int]:
    """Keys [n + 1] before each of n tokens, and after the last token."""
    return list(accumulate(ids, _later, initial=0))


def _later(key: int, token: int) -> int:
    """The key one token later. It is 0 at the beginning of a text."""
    return 0 if token == SEPARATOR else (token + 1) << NEAREST | key >> BITS


class GrowingIndex(ContextIndex):
    """One text and its places. Tokens are appended, and each becomes a place at once."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self._key = Context.of(tokens).key

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # to the left of equal keys, because the latest place comes first
            place = bisect_left(self._keys, self._key)
            self._keys.insert(place, self._key)
            self.places.insert(place, len(self.ids))
            # `_later` without a call: this runs for every token of a text
            self._key = (token + 1) << NEAREST | self._key >> BITS
            self.ids.append(token)

    def context(self, more: Sequence[int] = ()) -> Context:
        """The end of the text, or of the text and `more`, which is not appended."""
        if more:
            return Context.of([*self.ids[-MAX_MATCH:], *more])
        return Context(self._key, self.ids[: -MAX_MATCH - 1 : -1])

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """`length` tokens of the text and `more` from a place on."""
        known = tuple(self.ids[place : place + length])
        if more:
            known = (*known, *more)[:length]
        # A text that repeats itself is taken to go on repeating: start again at the place.
        return known if len(known) == length else (known * -(-length // len(known)))[:length]
