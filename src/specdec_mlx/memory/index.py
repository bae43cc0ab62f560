"""Places in texts, sorted by the tokens before them.

A place's key is the twelve tokens before it as one number, the nearest on top: one bisection finds
the longest match, and around it shorter ones. Longer matches are measured on the text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

SEPARATOR = -1  # stands between two texts, where a token id would stand
BITS = 21  # bits of a token in a key; 0 stands for no token
MAX_TOKEN = 2**BITS - 3  # largest token id
KNOWN = 12  # tokens in a key
NEAREST = BITS * (KNOWN - 1)  # shift of the nearest token in a key

MAX_MATCH = 64  # tokens of the longest match that is measured: texts that agree so long go on so
MOST_DEEP = 8  # places that are measured where whole keys agree, the latest; more change nothing

# the length of a match, in tokens, and places that match so long
Ring = tuple[int, Sequence[int]]


class Context(NamedTuple):
    """The end of a text: the last 12 tokens as a `key`, up to 64 as `last`, nearest first."""

    key: int
    last: Sequence[int]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Context:
        """The context at the end of `tokens` [n]."""
        return cls(_keys(tokens[-KNOWN:])[-1], tokens[: -MAX_MATCH - 1 : -1])


class ContextIndex:
    """Texts and their places, sorted by their keys, the latest of equal ones first.

    ids: [n] token ids, `SEPARATOR` between texts. ends: [m] indices in `ids`, sorted by the tokens
    of the same text before them; None sorts them.
    """

    def __init__(self, ids: Iterable[int], ends: Iterable[int] | None = None) -> None:
        self.ids = array("i", ids)
        keys = _keys(self.ids)
        if ends is None:
            latest_first = range(len(self.ids) - 1, -1, -1)
            places = [end for end in latest_first if self.ids[end] != SEPARATOR]
            ends = sorted(places, key=keys.__getitem__)
        self.ends = array("i", ends)
        self._keys = [keys[end] for end in self.ends]

    def __len__(self) -> int:
        """n, separators included."""
        return len(self.ids)

    def nearest(
        self, context: Context, most: int, within: int, least: int = 1, fewer: int | None = None
    ) -> list[Ring]:
        """Places with the longest matches of a context, longest first.

        most: how many; of more that match equally long, a sample in equal steps. within: by how
        many tokens a match may be shorter than the longest. least: the shortest that counts. fewer:
        how many that match shorter than the longest; None: as many as `most` leaves.
        """
        keys, (key, last) = self._keys, context
        if not keys:
            return []
        start = bisect_left(keys, key)
        difference = min(map(key.__xor__, keys[max(0, start - 1) : start + 1]))
        longest = min(KNOWN - (difference.bit_length() + BITS - 1) // BITS, len(last))
        if longest < least:
            return []
        if longest == KNOWN:
            high = min(bisect_right(keys, key, start), start + MOST_DEEP)
            return self._deepest(self.ends[start:high], last, within, least)
        found: list[Ring] = []
        low = high = start
        for length in range(longest, max(least, longest - within) - 1, -1):
            inner_low, inner_high = low, high
            shift = BITS * (KNOWN - length)
            lower = key >> shift << shift
            low = bisect_left(keys, lower, 0, inner_low)
            high = bisect_left(keys, lower + (1 << shift), inner_high)
            more = high - low - (inner_high - inner_low)
            if more and most > 0:
                step = -(-more // most)
                ring = self.ends[low:inner_low:step] + self.ends[inner_high:high:step]
                found.append((length, ring[:most]))
                most -= len(ring)
            if length == longest and fewer is not None:
                most = min(most, fewer)
        return found

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens from a place on, at most `length`, to the end of its text."""
        tokens = tuple(self.ids[place : place + length])
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _deepest(
        self, ends: Iterable[int], last: Sequence[int], within: int, least: int
    ) -> list[Ring]:
        """Places whose keys are the context's, measured on the text, the longest match first."""
        found: dict[int, list[int]] = {}
        for end in ends:
            found.setdefault(self._matched(end, last), []).append(end)
        shortest = max(least, max(found) - within)
        return sorted([ring for ring in found.items() if ring[0] >= shortest], reverse=True)

    def _matched(self, end: int, last: Sequence[int]) -> int:
        """Number of tokens before `end` that equal the last ones, at least those of the key."""
        ids, most = self.ids, min(end, len(last))
        length = min(KNOWN, most)
        if ids[end - most : end - length] == array("i", last[length:most])[::-1]:
            return most  # as in a text that is copied, and quicker than token by token
        while length < most and ids[end - 1 - length] == last[length]:
            length += 1
        return length


def _keys(ids: Sequence[int]) -> list[int]:
    """The keys before each of n tokens, and after the last one; [n + 1]."""
    return list(accumulate(ids, _later, initial=0))


def _later(key: int, token: int) -> int:
    """The key one token later; nothing stands before the beginning of a text."""
    return 0 if token == SEPARATOR else (token + 1) << NEAREST | key >> BITS


class GrowingIndex(ContextIndex):
    """One text and its places; tokens are appended, and every place is found from then on."""

    def __init__(self, tokens: Sequence[int]) -> None:
        super().__init__(tokens)
        self._key = Context.of(tokens).key

    def append(self, tokens: Sequence[int]) -> None:
        """Write on: what stood before each token is a place now."""
        for token in tokens:
            # before its equals: the latest comes first
            place = bisect_left(self._keys, self._key)
            self._keys.insert(place, self._key)
            self.ends.insert(place, len(self.ids))
            # as in the index, but no call
            self._key = (token + 1) << NEAREST | self._key >> BITS
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
