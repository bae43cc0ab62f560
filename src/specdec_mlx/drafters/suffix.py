"""Drafts copied from wherever the text has been before, in this generation or in a memory.

The longest match of the last tokens is found at any length, in the text and in everything that a
`Memory` holds, and the places that match best vote on what follows. Suffix decoding (Oliaro et al.
2024) counts continuations in a suffix tree; here the places themselves are kept, so that those
whose surroundings agree can weigh more than those that only end alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specdec_mlx.drafters.evidence import share_class
from specdec_mlx.memory.index import Context
from specdec_mlx.memory.recent import GrowingIndex
from specdec_mlx.memory.store import Memory, as_memory
from specdec_mlx.types import Draft, DraftContext, Evidence

MOST_PLACES = 32
"""Places that are asked of each index: 16 lose 0.3% of the tokens a pass, 64 gain nothing."""

WITHIN = 2
"""By how many tokens a match may be shorter than the longest one and still vote."""

LENGTH_LOG2 = 5
"""A match longer by one token weighs 2^5 as much; 2^4 and 2^6 lose 0.1%."""

SURROUNDINGS = 12
"""Tokens before a match that are compared as a set, so that names of another length do no harm."""

CLEAR_MATCH = 8
"""From this length on a match speaks for itself, and its surroundings are not compared."""

MEMORY_WEIGHT = 0.3
"""Of a place in a memory, to one of equal match in the text itself."""

WHOLE = 64
"""Parts that a weight is counted in for its share class: more than 63 of 64 is "always"."""


@dataclass(frozen=True)
class SuffixDrafter:
    """Copies what followed the places that match best, in the text and in a memory.

    A place that matches longer outweighs those that match shorter; of equal ones those count more
    that have more tokens in common before the match, and those in the text itself. All of them
    vote, token by token, and those that are outvoted drop out: a draft goes on as long as somebody
    is left.

    memory: what was written before, to be shared between generations: a `Memory`, or the path of
        its file, which is made if there is none and saved when the process ends. What a generation
        writes is added at its end. None remembers nothing.
    num_draft: most tokens in a draft, beside the loop's own limit; None is no cap of its own.
    min_match: the shortest match that is continued, in tokens.
    per_match: most draft tokens for each token of the match, as suffix decoding has it; None does
        not tie them together, and leaves it to the automatic length, which learns what a match of
        some length is worth.

    Memory: a token of the text costs at most 400 bytes, one of a `Memory` 40.

    Raises ValueError for arguments outside their range.
    """

    memory: Memory | str | None = None
    num_draft: int | None = None
    min_match: int = 1
    per_match: float | None = None

    def __post_init__(self) -> None:
        """Refuse arguments that mean nothing; open the memory that is named."""
        _check(
            self.num_draft is None or self.num_draft >= 1,
            "num_draft",
            self.num_draft,
            "an int >= 1, or None for no cap; to draft nothing, leave the drafter out",
        )
        _check(1 <= self.min_match <= 64, "min_match", self.min_match, "an int from 1 to 64")
        _check(
            self.per_match is None or self.per_match > 0,
            "per_match",
            self.per_match,
            "a number above 0, or None",
        )
        object.__setattr__(self, "memory", as_memory(self.memory))

    @property
    def key(self) -> str:
        """Its options, and whether it remembers; not what."""
        kind = "a memory" if self.memory is not None else "no memory"
        return (
            f"{type(self).__module__}.SuffixDrafter({kind}, num_draft={self.num_draft}, "
            f"min_match={self.min_match}, per_match={self.per_match})"
        )

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError if the memory was written by another tokenizer."""
        if isinstance(self.memory, Memory) and context.tokenizer is not None:
            self.memory.check_tokenizer(context.tokenizer)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> SuffixSession:
        """Index `prompt` [n], and take the memory as it is now."""
        self.check(context)
        return SuffixSession(self, prompt)


class Found(NamedTuple):
    """What followed a place, up to the limit: tokens, match, the place's text, place, weight."""

    tokens: tuple[int, ...]
    match: int
    ids: Sequence[int]
    end: int
    weight: float


class Path(NamedTuple):
    """A continuation, the longest match that it followed, its weight, and how many places vote."""

    tokens: tuple[int, ...]
    match: int
    weight: float
    places: int


class SuffixSession:
    """One generation's text, its index, and the memory as it was at the beginning.

    match_length: how many tokens matched, at most 64, for the last proposal; 0 where it was empty.
    """

    cheap = True

    def __init__(self, config: SuffixDrafter, prompt: Sequence[int]) -> None:
        """Index `prompt`."""
        self.match_length = 0
        self._config = config
        self._memory = config.memory if isinstance(config.memory, Memory) else None
        self._remembered = self._memory.indexes() if self._memory is not None else ()
        self._num_prompt = len(prompt)
        self._text = GrowingIndex(prompt)

    def propose(self, limit: int) -> Draft:
        """Copy up to `limit` tokens from behind the places that match best."""
        self.match_length = 0
        return self._draft(limit)

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        """Copy what follows matches of text and `tokens` together; nothing is noted.

        Matches are looked for in text and memory, so that a repetition within `tokens` is not
        seen.
        """
        noted = self.match_length
        draft = self._draft(limit, list(tokens))
        self.match_length = noted
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        """Append the tokens [n] to the text."""
        self._text.append(tokens)

    def close(self, length: int) -> None:
        """Remember what was written, up to `length` tokens of prompt and output."""
        memory, self._memory = self._memory, None
        if memory is not None:
            written = 0 if memory.remember_prompts else self._num_prompt
            memory.add(self._text.ids[written:length])

    def _draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        cap = self._config.num_draft
        length = limit if cap is None else min(limit, cap)
        if length <= 0:
            return Draft()
        context = self._text.context(more)
        found = self._found(context, length, more)
        if not found:
            return Draft()
        self.match_length = max(place.match for place in found)
        if self._config.per_match is not None:
            length = min(length, int(self._config.per_match * self.match_length))
        tokens, evidence = vote(weighed(found, context), length)
        return Draft(tokens, evidence=evidence)

    def _found(self, context: Context, length: int, more: Sequence[int]) -> list[Found]:
        """What followed the places that match best, in the text and in the memory."""
        least = self._config.min_match
        ids = self._text.ids
        found = [
            Found(_copied(ids, end, length, more), match, ids, end, 1.0)
            for match, end in self._text.nearest(context, MOST_PLACES, WITHIN, least)
        ]
        for index in self._remembered:
            found += [
                Found(index.following(end, length), match, index.ids, end, MEMORY_WEIGHT)
                for match, end in index.nearest(context, MOST_PLACES, WITHIN, least)
            ]
        shortest = max((place.match for place in found), default=0) - WITHIN
        return [place for place in found if place.match >= shortest]


def weighed(found: Sequence[Found], context: Context) -> list[Path]:
    """The different continuations of places, each with the sum of its places' weights.

    Args:
        found: what followed places that match; one at least.
        context: what they match.
    """
    longest = max(place.match for place in found)
    first = found[0].tokens
    if all(place.tokens == first for place in found):
        return [Path(first, longest, 1.0, len(found))]
    last = context.last
    surroundings: dict[int, set[int]] = {}
    paths: dict[tuple[int, ...], Path] = {}
    for tokens, match, ids, end, weight in found:
        bits = LENGTH_LOG2 * (match - longest)
        if match < CLEAR_MATCH:
            if match not in surroundings:
                surroundings[match] = set(last[match : match + SURROUNDINGS])
            start = end - match
            there = ids[max(0, start - SURROUNDINGS) : start]
            bits += len(surroundings[match].intersection(there))
        weight *= 2.0**bits
        if (path := paths.get(tokens)) is not None:
            match, weight = max(match, path.match), weight + path.weight
        paths[tokens] = Path(tokens, match, weight, path.places + 1 if path else 1)
    return list(paths.values())


def vote(paths: Sequence[Path], length: int) -> tuple[list[int], list[Evidence]]:
    """The tokens that most weight is for, one by one; who was outvoted has no say any more.

    Args:
        paths: different continuations.
        length: most tokens.

    Returns:
        The draft's tokens, and what speaks for each: the longest match behind it, the share of
        the places that go on so, and the share of their weight.
    """
    tokens: list[int] = []
    evidence: list[Evidence] = []
    while len(paths) > 1 and len(tokens) < length:
        position = len(tokens)
        votes: dict[int, float] = {}
        for path in paths:
            if position < len(path.tokens):
                token = path.tokens[position]
                votes[token] = votes.get(token, 0.0) + path.weight
        if not votes:
            return tokens, evidence
        best = max(votes, key=votes.__getitem__)
        before = sum(path.places for path in paths)
        paths = [p for p in paths if position < len(p.tokens) and p.tokens[position] == best]
        places = share_class(sum(path.places for path in paths), before)
        weight = share_class(round(WHOLE * votes[best] / sum(votes.values())), WHOLE)
        tokens.append(best)
        evidence.append(Evidence(max(path.match for path in paths), places, weight))
    (path, *_) = paths
    sure = Evidence(path.match, share_class(path.places, path.places), share_class(WHOLE, WHOLE))
    rest = path.tokens[len(tokens) : length]
    return tokens + list(rest), evidence + [sure] * len(rest)


def _copied(ids: Sequence[int], start: int, length: int, more: Sequence[int]) -> tuple[int, ...]:
    """`length` tokens from `start` on; behind the end of the text, the copy is copied again.

    So a match at distance d from the end repeats the last d tokens, which is what a periodic text
    does.
    """
    known = (*ids[start : start + length], *more)[:length]
    return known if len(known) == length else (known * -(-length // len(known)))[:length]


def _check(holds: bool, name: str, got: object, expected: str) -> None:
    """Raise ValueError unless `holds`."""
    if not holds:
        raise ValueError(f"SuffixDrafter: {name} is {got!r}, expected {expected}.")
