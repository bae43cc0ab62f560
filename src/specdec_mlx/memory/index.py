"""Places in a text, sorted by what stands before them: a suffix array read backwards.

All places with the same last k tokens before them are neighbours, for every k, so that one
bisection finds the longest match of any length, and a walk from there meets the other places in
the order of how much before them agrees. It finds what a suffix automaton finds, in two integers
a token.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

from specdec_mlx.memory.packing import (
    LEVELS,
    MAX_MATCH,
    PER_PACK,
    SEPARATOR,
    agreement,
    pack_text,
)

Place = tuple[int, int]
"""A match: how many tokens before a place agree with the context, and the place."""


@dataclass(frozen=True)
class Context:
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
    """

    tokens: Int[np.ndarray, " n"]
    order: Int[np.ndarray, " m"]
    ids: Sequence[int] = field(init=False, repr=False)
    _places: Sequence[int] = field(init=False, repr=False)
    _levels: tuple[Sequence[int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Gather the packs of the sorted places: 32 bytes a token, which bisection reads in C."""
        packs = pack_text(self.tokens)
        reach = _reach(self.tokens)
        levels = []
        for level in range(LEVELS):
            at = self.order - PER_PACK * level
            inside = reach[self.order] >= PER_PACK * level
            levels.append(np.where(inside, packs[np.maximum(at, 0)], 0).data)
        # Elements of a memoryview are read in half the time of an array's.
        object.__setattr__(self, "ids", self.tokens.data)
        object.__setattr__(self, "_places", self.order.data)
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
        """The places with the longest matches, longest first.

        Args:
            context: what they are compared with.
            most: how many at most.
            within: by how many tokens a match may be shorter than the longest one.
            least: the shortest match that counts.
        """
        low, high = 0, len(self._places)
        for level, pack in zip(self._levels, context.packs, strict=True):
            start = bisect_left(level, pack, low, high)
            if start == high or level[start] != pack:
                return walk(self._matched, start, len(self._places), context, most, within, least)
            low, high = start, bisect_right(level, pack, start, high)
        if high - low > 1:
            low = self._deeper(context, low, high)
        return walk(self._matched, low, len(self._places), context, most, within, least)

    def following(self, place: int, length: int) -> tuple[int, ...]:
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

    def _matched(self, index: int, context: Context) -> Place:
        """How much before the place at an index agrees, and the place."""
        end = self._places[index]
        packs = context.packs
        if self._levels[0][index] != packs[0]:
            return agreement((self._levels[0][index],), packs), end
        length = agreement([level[index] for level in self._levels], packs)
        if length == LEVELS * PER_PACK:
            length = matched(self.ids, end, context.last, length)
        return min(length, len(context.last)), end


def walk(
    matched_at: Callable[[int, Context], Place],
    start: int,
    size: int,
    context: Context,
    most: int,
    within: int,
    least: int,
) -> list[Place]:
    """The places around the one where a context belongs, the longest matches first.

    Args:
        matched_at: gives the place at an index, and its match.
        start: index at which the context would be inserted; matches fall to both sides of it.
        size: number of places.
        context: what they are compared with.
        most: how many at most.
        within: by how many tokens a match may be shorter than the longest one.
        least: the shortest match that counts.
    """
    nothing = (0, -1)
    left, right = start - 1, start
    before = matched_at(left, context) if left >= 0 else nothing
    after = matched_at(right, context) if right < size else nothing
    shortest = max(least, 1, max(before[0], after[0]) - within)
    found: list[Place] = []
    while len(found) < most:
        if before[0] >= after[0]:
            if before[0] < shortest:
                break
            found.append(before)
            left -= 1
            before = matched_at(left, context) if left >= 0 else nothing
        else:
            if after[0] < shortest:
                break
            found.append(after)
            right += 1
            after = matched_at(right, context) if right < size else nothing
    return found


def matched(ids: Sequence[int], end: int, last: Sequence[int], length: int) -> int:
    """How many tokens before `end` equal the last ones, given that `length` do; at most 64."""
    most = min(end, len(last))
    while length < most and ids[end - 1 - length] == last[length]:
        length += 1
    return length


def _before(ids: Sequence[int], end: int, depth: int) -> list[int]:
    """The tokens from the `depth`-th before a place on, back to 64 or to its text's beginning."""
    before = ids[max(0, end - MAX_MATCH) : max(0, end - depth)]
    tokens: list[int] = (before.tolist() if isinstance(before, memoryview) else list(before))[::-1]
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
