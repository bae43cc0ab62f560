"""Drafts copied from places with the same last tokens, in this generation or in a memory.

The longest matches of the last tokens are found in the text and in a `Memory`, and the best places
vote on the next tokens. Suffix decoding (Oliaro et al. 2024) counts continuations in a suffix tree.
Here the places themselves are kept, so that places with similar surroundings get more weight.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ldexp
from operator import itemgetter

from specdec_mlx.arguments import require, require_cap
from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    Evidence,
    LookUpSession,
    Session,
    TextIndex,
    places_class,
    share_class,
)
from specdec_mlx.errors import TokenizerMismatchError
from specdec_mlx.memory.index import ContextIndex, GrowingIndex
from specdec_mlx.memory.store import Memory, as_memory

LENGTH_LOG2 = 5  # one more token of a match multiplies its weight by 2^5
SURROUNDINGS = 12  # tokens before a short match; each that recurs doubles the weight
CLEAR_MATCH = 3  # surroundings have no weight for matches of this length or longer
MOST_PATHS = 12  # most places that are followed, by weight

Voters = tuple[int, Sequence[int], ContextIndex, float]
"""Places that vote: the length of their match, their positions, their index, and their weight."""

Path = tuple[float, int, tuple[int, ...]]
"""The weight of a place's vote, the length of its match, and the tokens that followed it."""

MATCH, FOLLOWED = itemgetter(1), itemgetter(2)  # of a path


def vote(paths: Sequence[Path], length: int) -> Draft:
    """The draft with the most weight, token by token. Outvoted places drop out."""
    tokens: list[int] = []
    evidence: list[Evidence] = []
    while paths and len(tokens) < length:
        at = len(tokens)
        shortest = min(map(len, map(FOLLOWED, paths)))
        if shortest <= at:
            paths = [path for path in paths if len(path[2]) > at]
            continue
        first = paths[0][2]
        rest = first[at:shortest]
        # All places agree, so several tokens are taken at once.
        if len(paths) == 1 or all(path[at:shortest] == rest for _, _, path in paths):
            tokens += rest
            evidence += [_same(max(map(MATCH, paths)), 1.0, len(paths))] * (shortest - at)
            continue
        votes: dict[int, float] = {}
        for weight, _, path in paths:
            # token = argmax of the sum of the weights of the places that continue with it
            votes[path[at]] = votes.get(path[at], 0.0) + weight
        best = max(votes, key=votes.__getitem__)
        paths = [path for path in paths if path[2][at] == best]
        tokens.append(best)
        evidence.append(evidence_of(paths, votes[best] / sum(votes.values())))
    return Draft(tokens, evidence=evidence)


def paths_of(
    voters: Sequence[Voters], last: Sequence[int], length: int, more: Sequence[int] = ()
) -> list[Path]:
    """The tokens that followed the places with the most weight.

    Args:
        voters: places, the longest match first.
        last: the last tokens of the text, nearest first.
        length: most tokens.
        more: tokens after the end of the text.
    """
    # A single place needs no weight.
    if len(voters) == 1 and len(voters[0][1]) == 1:
        match, (end,), source, _ = voters[0]
        return [(1.0, match, source.following(end, length, more))]
    places = [(match, end, source) for match, positions, source, _ in voters for end in positions]
    weighed = list(zip(weigh(voters, last), places, strict=True))
    if len(weighed) > MOST_PATHS:
        weighed = sorted(weighed, key=itemgetter(0), reverse=True)[:MOST_PATHS]
    return [
        (weight, match, source.following(end, length, more))
        for weight, (match, end, source) in weighed
    ]


def weigh(voters: Sequence[Voters], last: Sequence[int]) -> list[float]:
    """The weight of each place's vote, by its match, its surroundings and its index."""
    longest = voters[0][0]
    weights: list[float] = []
    for match, positions, source, weight in voters:
        # 2^(5 (match - longest)) * weight of the index
        alone = ldexp(weight, LENGTH_LOG2 * (match - longest))
        if match >= CLEAR_MATCH:
            weights += [alone] * len(positions)
            continue
        reach, ids = match + SURROUNDINGS, source.ids
        shared_with = set(last[match:reach]).intersection
        for end in positions:
            around = ids[end - reach if end > reach else 0 : end - match]
            # 2^(number of different tokens around the place that are also around the end of the
            # text)
            weights.append(alone * 2.0 ** len(shared_with(around)))
    return weights


def evidence_of(paths: Sequence[Path], share: float) -> Evidence:
    return _same(max(map(MATCH, paths)), share, len(paths))


@lru_cache(maxsize=4096)
def _same(match: int, share: float, num_places: int) -> Evidence:
    """One cached object for equal evidence."""
    return Evidence(match, share_class(share), places_class(num_places))


MOST_PLACES = 24  # most places of each index; 20 lose 0.1 to 0.2% of the tokens per pass
FEWER_PLACES = 4  # most of these with a shorter match than the longest; 8 gain nothing
WITHIN = 1  # tokens by which a match may be shorter than the longest match and still vote
MEMORY_WEIGHT = 0.3  # weight of a place in a memory; an equal match in the text has 1


@dataclass(frozen=True)
class SuffixDrafter(Drafter):
    """Copies what followed the places that match best, in the text and in a memory.

    Places vote on each token. Outvoted places drop out, and the draft ends when none remains. A
    longer match has more weight. Among equal matches, places in the text itself have more weight,
    and matches of 1 or 2 tokens have more weight if more tokens before them agree.

    Attributes:
        memory: texts shared between generations. A `Memory`, the path of its file (created if it
            does not exist, and saved when the process ends), or "process" for a memory without a
            file. The text of a generation is added at its end. None remembers nothing.
        num_draft: most tokens in a draft, or None for no limit.
        min_match: the shortest match that is continued.

    A token of the text costs at most 400 bytes, and a token of a `Memory` costs 80. Raises
    ValueError for numbers out of range.
    """

    memory: Memory | str | None = None
    num_draft: int | None = None
    min_match: int = 1

    def __post_init__(self) -> None:
        require_cap(self)
        require(self, 1 <= self.min_match <= 64, "min_match", "an int from 1 to 64")
        if self.memory is not None:
            # The dataclass is frozen.
            object.__setattr__(self, "memory", as_memory(self.memory))

    @property
    def key(self) -> str:
        """The options of the drafter. The contents of the memory are not part of it."""
        kind = "a memory" if self.memory is not None else "no memory"
        options = f"{kind}, num_draft={self.num_draft}, min_match={self.min_match}"
        return f"{type(self).__module__}.{type(self).__name__}({options})"

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError if the memory was written by another tokenizer."""
        self.memory_of(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Index `prompt` [n]. Texts that enter the memory later are not used."""
        return LookUpSession(SuffixIndex(self, prompt, self.memory_of(context)))

    def memory_of(self, context: DraftContext) -> Memory | None:
        """The memory for a target. Raises TokenizerMismatchError."""
        memory = self.memory.of(context) if isinstance(self.memory, Memory) else None
        if memory and context.vocab_size and memory.largest_token >= context.vocab_size:
            raise TokenizerMismatchError(
                f"The memory holds token {memory.largest_token}, the target has "
                f"{context.vocab_size}. Give a memory that was written with its tokenizer."
            )
        return memory


class SuffixIndex(TextIndex):
    """The places of one text, and the places of the memory at the beginning."""

    def __init__(self, config: SuffixDrafter, prompt: Sequence[int], memory: Memory | None) -> None:
        self._config = config
        self._memory = memory
        indexes = memory.indexes if memory is not None else ()
        self._num_prompt = len(prompt)
        self._text = GrowingIndex(prompt)
        self._sources: list[tuple[ContextIndex, float]] = [
            (self._text, 1.0),
            *((index, MEMORY_WEIGHT) for index in reversed(indexes)),
        ]
        self._longest = config.num_draft or sys.maxsize

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        paths, length = self.paths(limit, more)
        return vote(paths, length) if paths else NO_DRAFT

    def append(self, tokens: Sequence[int]) -> None:
        self._text.append(tokens)

    def close(self, length: int) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            start = 0 if memory.remember_prompts else self._num_prompt
            memory.add(self._text.ids[start:length])

    def paths(self, limit: int, more: Sequence[int] = ()) -> tuple[list[Path], int]:
        """The tokens after the places that match best, and the largest draft length."""
        context, length = self._text.context(more), min(limit, self._longest)
        least = self._config.min_match
        voters: list[Voters] = []
        for source, weight in self._sources if length > 0 else ():
            rings = source.nearest(context, MOST_PLACES, WITHIN, least, FEWER_PLACES)
            if rings:
                # Later indexes need no places that would be dropped below.
                least = max(least, rings[0][0] - WITHIN)
                for match, positions in rings:
                    voters.append((match, positions, source, weight))
        voters.sort(key=itemgetter(0), reverse=True)
        while voters and voters[-1][0] < least:
            voters.pop()
        return (paths_of(voters, context.last, length, more) if voters else []), length
