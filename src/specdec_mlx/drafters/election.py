"""Places of a text vote on what comes next: the longer they agree with it, the more they weigh."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import ldexp

from specdec_mlx.contracts import Draft, Evidence
from specdec_mlx.contracts.drafting import places_class, share_class
from specdec_mlx.memory.index import ContextIndex, GrowingIndex

LENGTH_LOG2 = 5  # a match longer by one token weighs 2^5 as much
SURROUNDINGS = 12  # tokens before a short match; each that stands there too doubles the weight
CLEAR_MATCH = 3  # from this length on a match's surroundings have no weight
MOST_PATHS = 12  # voters that are followed beyond the first token, the weightiest ones

Source = GrowingIndex | ContextIndex
"""What places stand in: the generation's text, or a part of a memory."""

Voters = tuple[int, Sequence[int], Source, float]
"""Places that have a say: their match, where they are, in what, and what a place there weighs."""

Path = tuple[float, int, tuple[int, ...]]
"""Of one place: the weight of its vote, its match, and what followed it."""


def vote(
    voters: Sequence[Voters], last: Sequence[int], length: int, more: Sequence[int] = ()
) -> Draft:
    """The draft that most weight is for, token by token; places that were outvoted drop out.

    voters: the longest match first. last: what they match, the nearest token first. more: tokens
    after the text's end.
    """
    paths = paths_of(voters, last, length, more)
    tokens: list[int] = []
    evidence: list[Evidence] = []
    while paths and len(tokens) < length:
        at = len(tokens)
        shortest = min([len(path) for _, _, path in paths])
        if shortest <= at:
            paths = [path for path in paths if len(path[2]) > at]
            continue
        first = paths[0][2]
        rest = first[at:shortest]
        if len(paths) == 1 or all(path[at:shortest] == rest for _, _, path in paths):
            tokens += rest
            evidence += [_evidence(paths, 1.0)] * (shortest - at)
            continue
        votes: dict[int, float] = {}
        for weight, _, path in paths:
            votes[path[at]] = votes.get(path[at], 0.0) + weight
        best = max(votes, key=votes.__getitem__)
        paths = [path for path in paths if path[2][at] == best]
        tokens.append(best)
        evidence.append(_evidence(paths, votes[best] / sum(votes.values())))
    return Draft(tokens, evidence=evidence)


def paths_of(
    voters: Sequence[Voters], last: Sequence[int], length: int, more: Sequence[int] = ()
) -> list[Path]:
    """What followed the weightiest places; a single one needs no weight."""
    if len(voters) == 1 and len(voters[0][1]) == 1:
        match, (end,), source, _ = voters[0]
        return [(1.0, match, source.following(end, length, more))]
    places = [(match, end, source) for match, ends, source, _ in voters for end in ends]
    weights = weigh(voters, last)
    heaviest: Sequence[int] = range(len(places))
    if len(places) > MOST_PATHS:
        heaviest = sorted(heaviest, key=weights.__getitem__, reverse=True)[:MOST_PATHS]
    return [
        (weights[i], match, source.following(end, length, more))
        for i in heaviest
        for match, end, source in (places[i],)
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


def _evidence(paths: Sequence[Path], share: float) -> Evidence:
    return _same(max([match for _, match, _ in paths]), share, len(paths))


@lru_cache(maxsize=4096)
def _same(match: int, share: float, num_places: int) -> Evidence:
    """One object for the same evidence: the same few come up over and over."""
    return Evidence(match, share_class(share), places_class(num_places))
