"""Places in a text, sorted by what stands before them: a suffix array read backwards.

All places with the same last k tokens before them are neighbours, for every k, so that one
bisection finds the longest match of any length, and a walk from there meets the other places in
the order of how much before them agrees. It finds what a suffix automaton finds, in two integers
a token.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from specdec_mlx.memory.packing import (
    KNOWN,
    LEVELS,
    MAX_MATCH,
    NEAREST,
    PER_PACK,
    SEPARATOR,
    agreement,
    bounds,
    key_of,
    pack_text,
    packs_of,
)

Ring = tuple[int, Sequence[int]]
"""Places that match equally long: how many tokens before each agree with the context, and where."""


MOST_DEEP = 8
"""Places that are measured token by token where 12 agree; more change nothing."""


class Context(NamedTuple):
    """The end of a text that a continuation is looked for.

    key: the last 12 tokens as one number. packs: [LEVELS] the same, three by three. last: up to 64
    tokens, the nearest one first.
    """

    key: int
    packs: tuple[int, ...]
    last: Sequence[int]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Context:
        """The context at the end of `tokens` [n]."""
        key = key_of(tokens)
        return cls(key, packs_of(key), tokens[: -MAX_MATCH - 1 : -1])


@dataclass(frozen=True)
class ContextIndex:
    """Texts and their sorted places; immutable.

    tokens: [n] int32 ids, `SEPARATOR` between texts. order: [m] int32 places e in 0..n-1 at which
    a token stands, sorted by tokens[e-1], tokens[e-2], ... back to the beginning of e's own text.
    ids: the tokens again, for reading them one by one. largest: of them.
    """

    tokens: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " m"]
    ids: tuple[int, ...] = field(init=False, repr=False)
    largest: int = field(init=False, repr=False)
    _starts: Sequence[int] = field(init=False, repr=False)
    _places: Sequence[int] = field(init=False, repr=False)
    _levels: tuple[Sequence[int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Gather the packs of the sorted places: 32 bytes a token, which bisection reads in C.

        Elements of an `array` are read in a fifth of the time of a memoryview's or of NumPy's, and
        those of a tuple, 8 bytes each where equal tokens are one object, in half of that.
        Where the places behind each token begin takes 4 bytes for every id up to the largest.
        """
        packs = pack_text(self.tokens)
        nearest = packs[self.order] >> NEAREST  # a token's id + 1, 0 for nothing
        starts = np.cumsum(np.bincount(nearest), dtype=np.int32)
        object.__setattr__(self, "_starts", array("i", starts.tobytes()))
        levels = []
        for level in range(LEVELS):
            at = np.maximum(self.order - PER_PACK * level, 0)  # nothing stands before place 0
            levels.append(array("q", packs[at].tobytes()))
        object.__setattr__(self, "largest", int(self.tokens.max(initial=SEPARATOR)))
        ids, one_of_each = self.tokens.tolist(), dict[int, int]()
        object.__setattr__(self, "ids", tuple(map(one_of_each.setdefault, ids, ids)))
        object.__setattr__(self, "_places", array("i", self.order.tobytes()))
        object.__setattr__(self, "_levels", tuple(levels))

    @classmethod
    def build(cls, tokens: Int[np.ndarray, " n"]) -> ContextIndex:
        """Sort the places of a text: prefix doubling, O(n log n log r), r the longest repeat."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        return cls(tokens, _sorted_places(tokens))

    def __len__(self) -> int:
        """n, separators included."""
        return len(self.tokens)

    def nearest(
        self, context: Context, most: int, within: int, least: int = 1, fewer: int | None = None
    ) -> list[Ring]:
        """Places with the longest matches, longest first.

        Args:
            context: what they are compared with.
            most: how many at most; of more that match equally long, a sample in equal steps.
            within: by how many tokens a match may be shorter than the longest one.
            least: the shortest match that counts, at least 1.
            fewer: how many that match shorter than the longest one; None: as many as `most` leaves.
        """
        _, packs, last = context
        if not last or last[0] + 1 >= len(self._starts):
            return []
        low, high = self._starts[last[0]], self._starts[last[0] + 1]
        if low == high:
            return []
        intervals = [(low, high)]  # of matches of at least 1 token, of 3, of 6 and so on
        for keys, pack in zip(self._levels, packs, strict=True):
            start = bisect_left(keys, pack, low, high)
            agreed = PER_PACK * (len(intervals) - 1)
            if start == high or keys[start] != pack or len(last) < agreed + PER_PACK:
                longest = agreed + agreement(keys, pack, start, low, high)
                intervals.append((start, start))
                break
            low, high = start, _end_of_run(keys, pack, start, high)
            intervals.append((low, high))
        else:
            start = self._deeper(context, low, high) if high - low > MOST_DEEP else low
            first = max(low, min(start - MOST_DEEP // 2, high - MOST_DEEP))
            ends = self._places[first : min(high, first + MOST_DEEP)]
            return deepest(self.ids, ends, context, within, least)
        longest = min(longest, len(last))
        if longest < least:
            return []

        def agreeing(length: int) -> tuple[int, int]:
            level, more = divmod(length, PER_PACK)
            if not more or length == 1:
                return intervals[level]
            keys, (low, high), inner = self._levels[level], intervals[level], intervals[level + 1]
            lower, upper = bounds(packs[level], more)
            return bisect_left(keys, lower, low, inner[0]), bisect_left(keys, upper, inner[1], high)

        return rings(self._places, agreeing, longest, most, max(least, longest - within), fewer)

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens from a place on, at most `length`, to the end of its text."""
        tokens = self.ids[place : place + length]
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _deeper(self, context: Context, low: int, high: int) -> int:
        """Where the context belongs among places that agree with all of its packs."""
        depth, ids = KNOWN, self.ids
        return bisect_left(
            self._places,
            list(context.last[depth:]),
            low,
            high,
            key=lambda end: _before(ids, end, depth),
        )


def rings(
    places: Sequence[int],
    agreeing: Callable[[int], tuple[int, int]],
    longest: int,
    most: int,
    least: int,
    fewer: int | None = None,
) -> list[Ring]:
    """Places by the lengths of their matches, which run from `longest` down to `least`.

    Args:
        places: sorted.
        agreeing: gives first and last index, exclusive, of those that match at least so long.
        longest: length of the longest match, at most 11.
        most: how many places at most.
        least: the shortest match that counts.
        fewer: how many that match shorter than that, within `most`.
    """
    low, high = agreeing(longest)
    found: list[Ring] = [(longest, places[low : high : -(-(high - low) // most)])]
    left = most - len(found[0][1])
    if fewer is not None and left > fewer:
        left = fewer
    for length in range(longest - 1, least - 1, -1):
        inner_low, inner_high = low, high
        low, high = agreeing(length)
        more = high - low - (inner_high - inner_low)
        if more and left > 0:
            step = -(-more // left)
            ring = [*places[low:inner_low:step], *places[inner_high:high:step]][:left]
            found.append((length, ring))
            left -= len(ring)
    return found


def deepest(
    ids: Sequence[int], ends: Iterable[int], context: Context, within: int, least: int
) -> list[Ring]:
    """Places that agree in all packs, measured on the text itself, the longest match first."""
    found: dict[int, list[int]] = {}
    for end in ends:
        found.setdefault(matched(ids, end, context.last, KNOWN), []).append(end)
    shortest = max(least, max(found) - within)
    return sorted([ring for ring in found.items() if ring[0] >= shortest], reverse=True)


def matched(ids: Sequence[int], end: int, last: Sequence[int], length: int) -> int:
    """How many tokens before `end` equal the last ones, given that `length` do; at most 64."""
    most = min(end, len(last))
    length = min(length, most)
    if tuple(ids[end - most : end - length]) == tuple(last[length:most])[::-1]:
        return most  # as in a text that is copied, and quicker than token by token
    while length < most and ids[end - 1 - length] == last[length]:
        length += 1
    return length


NEAR = 16
"""Neighbours among which the end of a run is looked for first: most runs are short."""


def _end_of_run(keys: Sequence[int], pack: int, start: int, high: int) -> int:
    """The first index behind `start` at which the keys, sorted, are no longer `pack`."""
    near = start + NEAR
    if near < high and keys[near] != pack:
        high = near
    return bisect_right(keys, pack, start, high)


def _before(ids: Sequence[int], end: int, depth: int) -> list[int]:
    """The tokens from the `depth`-th before a place on, back to 64 or to its text's beginning."""
    tokens = list(ids[max(0, end - MAX_MATCH) : max(0, end - depth)])[::-1]
    return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens


def _reach(tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """How many tokens of its own text stand before each place."""
    places = np.arange(len(tokens))
    starts = np.where(tokens == SEPARATOR, places + 1, 0)
    # A separator's own place belongs to the text before it.
    begin = np.maximum.accumulate(np.concatenate([[0], starts[:-1]])) if len(tokens) else starts
    reach: Int[np.ndarray, " n"] = places - begin
    return reach


def _sorted_places(tokens: Int[np.ndarray, " n"]) -> Int[np.ndarray, " m"]:
    """The places of tokens, sorted by what stands before them; equal ones latest first.

    Karp, Miller and Rosenberg's doubling: ranks by the nearest k tokens give ranks by the nearest
    2k, until a round tells no more places apart.
    """
    n = len(tokens)
    reach = _reach(tokens)
    ranks, classes = _ranked(pack_text(tokens)[:n])
    k = PER_PACK
    while n and k < reach.max():
        further = np.zeros(n, np.int64)
        inside = np.flatnonzero(reach >= k)
        further[inside] = ranks[inside - k] + 1
        ranks, more = _ranked(ranks * (n + 1) + further)
        if more == classes:
            break
        classes, k = more, 2 * k
    latest_first = np.argsort(-ranks, kind="stable")[::-1]
    order: Int[np.ndarray, " m"] = latest_first[tokens[latest_first] != SEPARATOR].astype(np.int32)
    return order


def _ranked(keys: Int[np.ndarray, " n"]) -> tuple[Int[np.ndarray, " n"], int]:
    """The rank of each key among the different ones, and how many there are."""
    order = np.argsort(keys, kind="stable")
    in_order = keys[order]
    steps = np.concatenate([[0], np.cumsum(in_order[1:] != in_order[:-1])]) if len(keys) else order
    ranks = np.empty(len(keys), np.int64)
    ranks[order] = steps
    return ranks, int(steps[-1]) + 1 if len(keys) else 0
