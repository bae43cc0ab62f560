"""Drafts copied from wherever the text has been before, in this generation or in a memory.

The longest match of the last tokens is found in the text and in a `Memory`, and the places that
match best vote on what follows. Suffix decoding (Oliaro et al. 2024) counts continuations in a
suffix tree; here the places are kept, so that those whose surroundings agree weigh more.
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

LENGTH_LOG2 = 5  # a match longer by one token weighs 2^5 as much
SURROUNDINGS = 12  # tokens before a short match; each that stands there too doubles the weight
CLEAR_MATCH = 3  # from this length on a match's surroundings have no weight
MOST_PATHS = 12  # voters that are followed beyond the first token, the weightiest ones

Voters = tuple[int, Sequence[int], ContextIndex, float]
"""Places that have a say: their match, where they are, in what, and what a place there weighs."""

Path = tuple[float, int, tuple[int, ...]]
"""Of one place: the weight of its vote, its match, and what followed it."""

MATCH, FOLLOWED = itemgetter(1), itemgetter(2)  # of a path


def vote(paths: Sequence[Path], length: int) -> Draft:
    """The draft that most weight is for, token by token; places that were outvoted drop out."""
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
        if len(paths) == 1 or all(path[at:shortest] == rest for _, _, path in paths):
            tokens += rest
            evidence += [_same(max(map(MATCH, paths)), 1.0, len(paths))] * (shortest - at)
            continue
        votes: dict[int, float] = {}
        for weight, _, path in paths:
            votes[path[at]] = votes.get(path[at], 0.0) + weight
        best = max(votes, key=votes.__getitem__)
        paths = [path for path in paths if path[2][at] == best]
        tokens.append(best)
        evidence.append(evidence_of(paths, votes[best] / sum(votes.values())))
    return Draft(tokens, evidence=evidence)


def paths_of(
    voters: Sequence[Voters], last: Sequence[int], length: int, more: Sequence[int] = ()
) -> list[Path]:
    """What followed the weightiest places; a single one needs no weight.

    voters: the longest match first. last: what they match, the nearest token first. more: tokens
    after the text's end.
    """
    if len(voters) == 1 and len(voters[0][1]) == 1:
        match, (end,), source, _ = voters[0]
        return [(1.0, match, source.following(end, length, more))]
    places = [(match, end, source) for match, ends, source, _ in voters for end in ends]
    weighed = list(zip(weigh(voters, last), places, strict=True))
    if len(weighed) > MOST_PATHS:
        weighed = sorted(weighed, key=itemgetter(0), reverse=True)[:MOST_PATHS]
    return [
        (weight, match, source.following(end, length, more))
        for weight, (match, end, source) in weighed
    ]


def weigh(voters: Sequence[Voters], last: Sequence[int]) -> list[float]:
    """The weight of each place's vote: by its match, by its surroundings, and by where it is."""
    longest = voters[0][0]
    weights: list[float] = []
    for match, ends, source, weight in voters:
        alone = ldexp(weight, LENGTH_LOG2 * (match - longest))
        if match >= CLEAR_MATCH:
            weights += [alone] * len(ends)
            continue
        reach, ids = match + SURROUNDINGS, source.ids
        shared_with = set(last[match:reach]).intersection
        for end in ends:
            around = ids[end - reach if end > reach else 0 : end - match]
            weights.append(alone * 2.0 ** len(shared_with(around)))
    return weights


def evidence_of(paths: Sequence[Path], share: float) -> Evidence:
    """Evidence of a token that places vote for, with its share of their weight."""
    return _same(max(map(MATCH, paths)), share, len(paths))


@lru_cache(maxsize=4096)
def _same(match: int, share: float, num_places: int) -> Evidence:
    """One object for the same evidence: the same few come up over and over."""
    return Evidence(match, share_class(share), places_class(num_places))


MOST_PLACES = 24  # places that are asked of each index: 20 lose 0.1 to 0.2% of the tokens a pass
FEWER_PLACES = 4  # of those places, the ones that match shorter than the longest; 8 gain nothing
WITHIN = 1  # tokens by which a match may be shorter than the longest match and still vote
MEMORY_WEIGHT = 0.3  # of a place in a memory, to one of equal match in the text itself


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
            object.__setattr__(self, "memory", as_memory(self.memory))

    @property
    def key(self) -> str:
        """Its options, and whether it remembers; not what."""
        kind = "a memory" if self.memory is not None else "no memory"
        options = f"{kind}, num_draft={self.num_draft}, min_match={self.min_match}"
        return f"{type(self).__module__}.{type(self).__name__}({options})"

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError if the memory was written by another tokenizer."""
        self.memory_of(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """Index `prompt` [n], and take the memory as it is now."""
        return LookUpSession(SuffixIndex(self, prompt, self.memory_of(context)))

    def memory_of(self, context: DraftContext) -> Memory | None:
        """The memory for a target; raises TokenizerMismatchError as `check`."""
        memory = self.memory.of(context) if isinstance(self.memory, Memory) else None
        if memory and context.vocab_size and memory.largest_token >= context.vocab_size:
            raise TokenizerMismatchError(
                f"The memory holds token {memory.largest_token}, the target has "
                f"{context.vocab_size}. Give a memory that was written with its tokenizer."
            )
        return memory


class SuffixIndex(TextIndex):
    """The places of one text, and those of the memory as it was at the beginning."""

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
        """Copy up to `limit` tokens from the places that match best."""
        paths, length = self.paths(limit, more)
        return vote(paths, length) if paths else NO_DRAFT

    def append(self, tokens: Sequence[int]) -> None:
        """Write the text on: a place for each of the tokens [n]."""
        self._text.append(tokens)

    def close(self, length: int) -> None:
        """Remember what was written, up to `length` tokens of prompt and output."""
        memory, self._memory = self._memory, None
        if memory is not None:
            written = 0 if memory.remember_prompts else self._num_prompt
            memory.add(self._text.ids[written:length])

    def paths(self, limit: int, more: Sequence[int] = ()) -> tuple[list[Path], int]:
        """What followed the places that match best, and how long a draft of it may be."""
        context, length = self._text.context(more), min(limit, self._longest)
        least = self._config.min_match
        voters: list[Voters] = []  # the longest match first
        for source, weight in self._sources if length > 0 else ():
            rings = source.nearest(context, MOST_PLACES, WITHIN, least, FEWER_PLACES)
            if rings:
                least = max(least, rings[0][0] - WITHIN)
                for match, ends in rings:
                    voters.append((match, ends, source, weight))
        voters.sort(key=itemgetter(0), reverse=True)
        while voters and voters[-1][0] < least:
            voters.pop()
        return (paths_of(voters, context.last, length, more) if voters else []), length
