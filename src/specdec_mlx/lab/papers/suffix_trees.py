"""Trees of suffix decoding: the likeliest tokens of all places (Oliaro et al. 2024).

REST (He et al. 2024) has such a tree too. Do not use it if additional positions are expensive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Evidence,
    LookUpSession,
    Session,
    TextIndex,
)
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.drafters.suffix import Path, SuffixDrafter, SuffixIndex, evidence_of, vote
from specdec_mlx.lab.papers.tree_drafts import TokenPath, TreeSession, draft_of


@cache
def known_chances() -> Chances:
    return Chances.of("look-up")


def trie(paths: Sequence[Path], limit: int, known: Chances) -> dict[TokenPath, Evidence]:
    """The `limit` likeliest texts that places vote for, in this order, with parents first.

    The votes of a place are shared among its tokens.

    Args:
        paths: places with their votes.
        limit: most texts.
        known: probabilities by evidence.
    """
    nodes: dict[TokenPath, Evidence] = {}
    waiting: list[tuple[float, TokenPath, list[Path], Evidence]] = []

    def open_after(text: TokenPath, reach: float, paths: Sequence[Path]) -> None:
        voting: dict[int, list[Path]] = {}
        for path in paths:
            if len(path[2]) > len(text):
                voting.setdefault(path[2][len(text)], []).append(path)
        votes = {token: sum([p[0] for p in some]) for token, some in voting.items()}
        total = sum(votes.values())
        ranked = sorted(votes, key=votes.__getitem__, reverse=True)
        for rank, token in enumerate(ranked):
            some = voting[token]
            evidence = evidence_of(some, votes[token] / total)._replace(rank=rank)
            # P(path) = P(parent) * P(token | evidence)
            (chance,) = known.of_draft([evidence], first=len(text))
            # The heap gives the smallest entry first. No child is likelier than its parent.
            heappush(waiting, (-reach * chance, (*text, token), some, evidence))

    open_after((), 1.0, paths)
    while waiting and len(nodes) < limit:
        reach, text, some, evidence = heappop(waiting)
        nodes[text] = evidence
        open_after(text, -reach, some)
    return nodes


@dataclass(frozen=True)
class SuffixTreeDrafter(SuffixDrafter):
    """A `SuffixDrafter` that drafts the likeliest tokens of all places, as a tree."""

    def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeSession:
        places = SuffixIndex(self, prompt, self.memory_of(context))
        return TreeSession(self.key, [(self.key, LookUpSession(AllVotes(places, forks=True)))])


@dataclass(eq=False)
class AllVotes(TextIndex):
    """All tokens that the places of a text vote for.

    Attributes:
        places: index of the text.
        forks: True if a draft of fixed length is a tree, and False for the winner's chain.
    """

    places: SuffixIndex
    forks: bool = False

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        if not self.forks:
            return self.places.draft(limit, more)
        nodes = trie(*self.places.paths(limit, more), known_chances())
        return draft_of(nodes, list(nodes.values()))

    def chains(self, limit: int) -> Sequence[Draft]:
        paths, length = self.places.paths(limit)
        nodes = trie(paths, length, known_chances())
        chains = [vote(paths, length)] if nodes else []
        # Leaves are nodes that are no node's beginning.
        inner = {text[:-1] for text in nodes}
        for leaf in (text for text in nodes if text not in inner):
            heads = [leaf[: n + 1] for n in range(len(leaf))]
            chains.append(Draft(leaf, evidence=[nodes[head] for head in heads]))
        return chains

    def append(self, tokens: Sequence[int]) -> None:
        self.places.append(tokens)

    def close(self, length: int) -> None:
        self.places.close(length)


def offering_all(session: Session) -> Session:
    """A session that offers all votes as candidates, if the session looks places up."""
    if isinstance(session, LookUpSession) and isinstance(session.index, SuffixIndex):
        return LookUpSession(AllVotes(session.index))
    return session
