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
    LEVELS,
    MAX_MATCH,
    PER_PACK,
    SEPARATOR,
    agreement,
    bounds,
    pack_text,
)

Place = tuple[int, int]
"""A match: how many tokens before a place agree with the context, and the place."""


MOST_DEEP = 8
"""Places that are measured token by token where 12 agree; more change nothing."""


class Context(NamedTuple):
    """The end of a text that a continuation is looked for.

    packs: [LEVELS] the last 12 tokens, packed. last: up to 64 tokens, the nearest one first.
    """

    packs: tuple[int, ...]
    last: Sequence[int]

    @classmethod
    def of(cls, tokens: Sequence[int]) -> Context:
        """The context at the end of `tokens` [n]."""
        packs = pack_text(np.array(tokens[-LEVELS * PER_PACK :], np.int64))[::-1].tolist()
        found = packs[: LEVELS * PER_PACK : PER_PACK]
        return cls((*found, *(0,) * (LEVELS - len(found))), tokens[: -MAX_MATCH - 1 : -1])


@dataclass(frozen=True)
class ContextIndex:
    """Texts and their sorted places; immutable.

    tokens: [n] int32 ids, `SEPARATOR` between texts. order: [m] int32 places e in 0..n-1 at which
    a token stands, sorted by tokens[e-1], tokens[e-2], ... back to the beginning of e's own text.
    ids: the tokens again, for reading them one by one. largest: of them.
    """

    tokens: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " m"]
    ids: Sequence[int] = field(init=False, repr=False)
    largest: int = field(init=False, repr=False)
    _places: Sequence[int] = field(init=False, repr=False)
    _levels: tuple[Sequence[int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Gather the packs of the sorted places: 32 bytes a token, which bisection reads in C.

        Elements of an `array` are read in a fifth of the time of a memoryview's or of NumPy's.
        """
        packs = pack_text(self.tokens)
        levels = []
        for level in range(LEVELS):
            at = np.maximum(self.order - PER_PACK * level, 0)  # nothing stands before place 0
            levels.append(array("q", packs[at].tobytes()))
        object.__setattr__(self, "largest", int(self.tokens.max(initial=SEPARATOR)))
        object.__setattr__(self, "ids", array("i", self.tokens.tobytes()))
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

    def nearest(self, context: Context, most: int, within: int, least: int = 1) -> list[Place]:
        """Places with the longest matches, longest first.

        Args:
            context: what they are compared with.
            most: how many at most; of more that match equally long, a sample in equal steps.
            within: by how many tokens a match may be shorter than the longest one.
            least: the shortest match that counts, at least 1.
        """
        packs, last = context
        low, high = 0, len(self._places)
        parents = [(low, high)]
        for keys, pack in zip(self._levels, packs, strict=True):
            start = bisect_left(keys, pack, low, high)
            known = len(last) >= PER_PACK * len(parents)
            if not known or start == high or keys[start] != pack:
                longest = PER_PACK * (len(parents) - 1)
                longest += max(
                    agreement(keys[start], pack) if start < high else 0,
                    agreement(keys[start - 1], pack) if start > low else 0,
                )
                break
            low, high = start, bisect_right(keys, pack, start, high)
            parents.append((low, high))
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
            if not more:
                return parents[level]
            keys, (low, high) = self._levels[level], parents[level]
            lower, upper = bounds(packs[level], more)
            first = bisect_left(keys, lower, low, high)
            return first, bisect_left(keys, upper, first, high)

        return ringed(self._places, agreeing, longest, most, max(least, longest - within))

    def following(self, place: int, length: int, more: Sequence[int] = ()) -> tuple[int, ...]:
        """The tokens from a place on, at most `length`, to the end of its text."""
        tokens = tuple(self.ids[place : place + length])
        return tokens[: tokens.index(SEPARATOR)] if SEPARATOR in tokens else tokens

    def _deeper(self, context: Context, low: int, high: int) -> int:
        """Where the context belongs among places that agree with all of its packs."""
        depth, ids = LEVELS * PER_PACK, self.ids
        return bisect_left(
            self._places,
            list(context.last[depth:]),
            low,
            high,
            key=lambda end: _before(ids, end, depth),
        )


def ringed(
    places: Sequence[int],
    agreeing: Callable[[int], tuple[int, int]],
    longest: int,
    most: int,
    least: int,
) -> list[Place]:
    """Places by the lengths of their matches, which run from `longest` down to `least`.

    Args:
        places: sorted.
        agreeing: gives first and last index, exclusive, of those that match at least so long.
        longest: length of the longest match, at most 11.
        most: how many places at most.
        least: the shortest match that counts.
    """
    found: list[Place] = []
    inner_low, inner_high = 0, 0
    for length in range(longest, least - 1, -1):
        low, high = agreeing(length)
        if length == longest:
            inner_low = inner_high = high
        step = -(-(high - low - (inner_high - inner_low)) // (most - len(found)))
        if step:
            found += [(length, end) for end in places[low:inner_low:step]]
            found += [(length, end) for end in places[inner_high:high:step]]
        if len(found) >= most:
            return found[:most]
        inner_low, inner_high = low, high
    return found


def deepest(
    ids: Sequence[int], ends: Iterable[int], context: Context, within: int, least: int
) -> list[Place]:
    """Places that agree in all packs, measured on the text itself, the longest match first."""
    depth = LEVELS * PER_PACK
    found = [(matched(ids, end, context.last, depth), end) for end in ends]
    found.sort(key=lambda place: -place[0])
    shortest = max(least, found[0][0] - within)
    return [place for place in found if place[0] >= shortest]


def matched(ids: Sequence[int], end: int, last: Sequence[int], length: int) -> int:
    """How many tokens before `end` equal the last ones, given that `length` do; at most 64."""
    most = min(end, len(last))
    length = min(length, most)
    while length < most and ids[end - 1 - length] == last[length]:
        length += 1
    return length


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
