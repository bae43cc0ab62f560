"""Places of a text vote on what comes next: the longer they agree with it, the more they weigh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ldexp

from specdec_mlx.drafters.evidence import (
    WHOLE,
    distance_class,
    places_class,
    share_class,
    surroundings_class,
    vote_class,
)
from specdec_mlx.memory.index import ContextIndex
from specdec_mlx.memory.recent import GrowingIndex
from specdec_mlx.types import Draft, Evidence, Guess

LENGTH_LOG2 = 5
"""A match longer by one token weighs 2^5 as much; 2^3 and 2^6 differ by 0.1% at most."""

SURROUNDINGS = 12
"""Tokens before a match that are compared as a set, so that a name of another length does no harm.

Each that is there too doubles the weight. 8 or 16 of them lose 0.3 to 0.5% of the tokens a pass,
and none at all 2.5%.
"""

DOUBLED = tuple(2.0**n for n in range(SURROUNDINGS + 1))

CLEAR_MATCH = 3
"""From this length on a match speaks for itself, and its surroundings have no weight: with 5 there
is 0.1% to gain in tokens a pass, and they are compared in far more rounds."""

SURE_MATCH = 5
"""From this length on surroundings are no evidence either: what the priors were fitted with."""

MOST_PATHS = 12
"""Voters that are followed beyond the first token, the weightiest ones; 6 lose 0.2%."""

Source = GrowingIndex | ContextIndex
"""What places stand in: the generation's text, or a part of a memory."""

Voters = tuple[int, Sequence[int], Source, float]
"""Places that have a say: their match, where they are, in what, and what a place there weighs."""

Voter = tuple[int, int, Source]
"""One of them: its match, where it is, and in what."""

Origin = tuple[int, int]
"""Where a draft is from: classes of the distance and of the surroundings of its places."""


@dataclass(slots=True)
class Path:
    """A continuation that voters stand for: the longest match, their weight, and their number."""

    tokens: tuple[int, ...]
    match: int
    weight: float
    places: int = 1


def elect(
    voters: Sequence[Voters], last: Sequence[int], length: int, more: Sequence[int] = ()
) -> Draft:
    """The draft that most weight is for, token by token.

    Who was outvoted has no say in the tokens after it, since what followed there followed something
    else; and where nobody is left the draft ends.

    Args:
        voters: one at least, the longest match first.
        last: what they match, the nearest token first.
        length: most tokens in the draft, at least 1.
        more: tokens that come behind the text's end.

    Returns:
        A draft whose evidence is the longest match behind each token, its share of the vote, the
        number of places that vote for it, and where the draft is from.
    """
    firsts: list[int] = []
    for _, ends, source, _ in voters:
        firsts += map(source.ids.__getitem__, ends)
    tokens: list[int] = []
    evidence: list[Evidence] = []
    weights: list[float] = []
    if firsts.count(firsts[0]) < len(firsts):
        best, share, chosen, weights = _first_vote(voters, firsts, weigh(voters, last))
        places, longest = len(chosen), chosen[0][0]
        if places > MOST_PATHS:
            heaviest = sorted(range(places), key=weights.__getitem__, reverse=True)[:MOST_PATHS]
            chosen, weights = [chosen[i] for i in heaviest], [weights[i] for i in heaviest]
            longest = max([match for match, _, _ in chosen])
        origin = _origin(chosen, chosen[weights.index(max(weights))], last)
        tokens.append(best)
        evidence.append(_evidence(longest, places, round(WHOLE * share), origin))
    else:
        chosen = [(match, end, source) for match, ends, source, _ in voters for end in ends]
        if len(chosen) > MOST_PATHS:
            voters = _most_alike(voters)
            del chosen[MOST_PATHS:]
        longest = chosen[0][0]
        origin = _origin(chosen, chosen[0], last)
    followed = [source.following(end, length, more) for _, end, source in chosen]
    if followed.count(followed[0]) < len(followed):
        paths = _paths(chosen, followed, weights or weigh(voters, last))
        _count(paths, length, origin, tokens, evidence)
    else:
        rest = followed[0][len(tokens) :]
        tokens += rest
        evidence += [_evidence(longest, len(chosen), WHOLE, origin)] * len(rest)
    return Draft(tokens, evidence=evidence)


def guesses(
    matches: Sequence[int],
    weights: Sequence[float],
    followed: Sequence[tuple[int, ...]],
    path: Sequence[int],
) -> list[Guess]:
    """All tokens that somebody votes for after a path, the weightiest first.

    Args:
        matches: of each place, which has a vote while what followed it is the path.
        weights: of the votes.
        followed: what followed each place.
        path: tokens that come behind the text's end.

    Returns:
        Each token with the longest match behind it, and how regularly it followed, by places and
        by their weight.
    """
    at, so_far = len(path), tuple(path)
    votes: dict[int, list[float]] = {}
    for match, weight, tokens in zip(matches, weights, followed, strict=True):
        if len(tokens) > at and tokens[:at] == so_far:
            vote = votes.setdefault(tokens[at], [0.0, 0, 0])
            vote[0] += weight
            vote[1] = max(vote[1], match)
            vote[2] += 1
    total, places = sum(vote[0] for vote in votes.values()), sum(int(v[2]) for v in votes.values())
    ranked = sorted(votes.items(), key=lambda item: -item[1][0])
    return [
        Guess(token, _regular(int(match), int(count), places, round(WHOLE * weight / total)))
        for token, (weight, match, count) in ranked
    ]


def weigh(voters: Sequence[Voters], last: Sequence[int]) -> list[float]:
    """What each place's vote counts: by its match, by its surroundings, and by where it is."""
    longest = voters[0][0]
    weights: list[float] = []
    compared = 0
    for match, ends, source, weight in voters:
        alone = ldexp(weight, LENGTH_LOG2 * (match - longest))
        if match >= CLEAR_MATCH:
            weights += [alone] * len(ends)
            continue
        if match != compared:
            compared, reach = match, match + SURROUNDINGS
            shared_with = set(last[match:reach]).intersection
        ids = source.ids
        for end in ends:
            around = ids[end - reach if end > reach else 0 : end - match]
            weights.append(alone * DOUBLED[len(shared_with(around))])
    return weights


def _first_vote(
    voters: Sequence[Voters], firsts: Sequence[int], weights: Sequence[float]
) -> tuple[int, float, list[Voter], list[float]]:
    """The token that most weight is for, its share, and those that it is chosen by."""
    best, share = _winner(firsts, weights)
    votes = zip(firsts, weights, strict=True)
    chosen: list[Voter] = []
    behind: list[float] = []
    for match, ends, source, _ in voters:
        for end, (first, weight) in zip(ends, votes, strict=False):
            if first == best:
                chosen.append((match, end, source))
                behind.append(weight)
    return best, share, chosen, behind


def _most_alike(voters: Sequence[Voters]) -> Sequence[Voters]:
    """Of more than that the voters that match longest, as many as are followed."""
    left = MOST_PATHS
    chosen: list[Voters] = []
    for match, ends, source, weight in voters:
        chosen.append((match, ends[:left], source, weight))
        left -= len(chosen[-1][1])
        if not left:
            break
    return chosen


def _winner(tokens: Sequence[int], weights: Sequence[float]) -> tuple[int, float]:
    """The token that most weight is for, of equal ones the first, and its share."""
    votes: dict[int, float] = {}
    for token, weight in zip(tokens, weights, strict=True):
        votes[token] = votes.get(token, 0.0) + weight
    best = max(votes, key=votes.__getitem__)
    return best, votes[best] / sum(votes.values())


def _paths(
    voters: Sequence[Voter], followed: Sequence[tuple[int, ...]], weights: Sequence[float]
) -> list[Path]:
    """The different continuations, with all that speaks for each."""
    paths: dict[tuple[int, ...], Path] = {}
    for (match, _, _), tokens, weight in zip(voters, followed, weights, strict=True):
        path = paths.get(tokens)
        if path is None:
            paths[tokens] = Path(tokens, match, weight)
        else:
            path.match = max(path.match, match)
            path.weight += weight
            path.places += 1
    return list(paths.values())


def _count(
    paths: list[Path], length: int, origin: Origin, tokens: list[int], evidence: list[Evidence]
) -> None:
    """Vote on one position after the other, until one path has the majority; adds to the draft."""
    shortest = min([len(path.tokens) for path in paths])
    weights: list[float] = []
    agreed: Evidence | None = None
    for position in range(len(tokens), length):
        if not weights or position > shortest:  # some have dropped out
            weights = [path.weight for path in paths]
            heaviest, total = max(weights), sum(weights)
            if 2 * heaviest > total:  # it would win every vote from here on
                leader = paths[weights.index(heaviest)]
                rest = leader.tokens[position:length]
                tokens += rest
                parts = round(WHOLE * heaviest / total)
                evidence += [_evidence(leader.match, leader.places, parts, origin)] * len(rest)
                return
            agreed = None
        if position >= shortest:
            paths = [path for path in paths if position < len(path.tokens)]
            if not paths:
                return
            weights, agreed = [path.weight for path in paths], None
        at = [path.tokens[position] for path in paths]
        best = at[0]
        if at.count(best) < len(at):
            best, share = _winner(at, weights)
            paths = [path for path in paths if path.tokens[position] == best]
            weights, told = [], _agreed(paths, origin, share)
        else:
            told = agreed = agreed or _agreed(paths, origin, 1.0)
        tokens.append(best)
        evidence.append(told)


def _agreed(paths: Sequence[Path], origin: Origin, share: float) -> Evidence:
    """What speaks for a token on which all of these go on."""
    longest, places = max([path.match for path in paths]), sum([path.places for path in paths])
    return _evidence(longest, places, round(WHOLE * share), origin)


def _origin(chosen: Sequence[Voter], leader: Voter, last: Sequence[int]) -> Origin:
    """Where a draft is from: how far back its nearest place is, what surrounds the leader."""
    near = [len(text.ids) - end for _, end, text in chosen if type(text) is GrowingIndex]
    match, end, source = leader
    around = 0
    if match < SURE_MATCH:
        reach = match + SURROUNDINGS
        there = source.ids[end - reach if end > reach else 0 : end - match]
        around = surroundings_class(len(set(last[match:reach]).intersection(there)))
    return distance_class(min(near) if near else None), around


@lru_cache(maxsize=16384)
def _evidence(match: int, places: int, parts: int, origin: Origin) -> Evidence:
    """What speaks for a token; the same few come up over and over."""
    distance, around = origin
    return Evidence(
        match,
        share=vote_class(parts),
        places=places_class(places),
        distance=distance,
        surroundings=around,
    )


@lru_cache(maxsize=4096)
def _regular(match: int, places: int, of_places: int, parts: int) -> Evidence:
    """What speaks for a guess in a tree: shares of places and of weight."""
    return Evidence(match, share_class(places, of_places), share_class(parts, WHOLE))
