"""Suffix decoding's tree: the likeliest of all that places vote for (Oliaro et al. 2024).

Also REST's (He et al. 2024). Not worth it where positions cost.
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
    """Chances of look-ups' tokens by their evidence."""
    return Chances.of("look-up")


def trie(paths: Sequence[Path], limit: int, known: Chances) -> dict[TokenPath, Evidence]:
    """Of all texts that places vote for, the `limit` likeliest, in that order, parents first.

    A place's votes are shared among its tokens; known: chances by the evidence that this is.
    """
    found: dict[TokenPath, Evidence] = {}
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
            (chance,) = known.of_draft([evidence], first=len(text))
            heappush(waiting, (-reach * chance, (*text, token), some, evidence))

    open_after((), 1.0, paths)
    while waiting and len(found) < limit:
        reach, text, some, evidence = heappop(waiting)
        found[text] = evidence
        open_after(text, -reach, some)
    return found


@dataclass(frozen=True)
class SuffixTreeDrafter(SuffixDrafter):
    """A `SuffixDrafter` that drafts the likeliest of all that was voted for, as a tree."""

    def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeSession:
        """Index `prompt` [n], and take the memory as it is now."""
        places = SuffixIndex(self, prompt, self.memory_of(context))
        return TreeSession(self.key, [(self.key, LookUpSession(AllVotes(places, forks=True)))])


@dataclass(eq=False)
class AllVotes(TextIndex):
    """All that the places of a text vote for, and not the winner alone.

    forks: a draft of a fixed length is a tree, and not the winner's chain.
    """

    places: SuffixIndex
    forks: bool = False

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """The winner's chain, or a tree of the `limit` likeliest tokens."""
        if not self.forks:
            return self.places.draft(limit, more)
        found = trie(*self.places.paths(limit, more), known_chances())
        return draft_of(found, list(found.values()))

    def chains(self, limit: int) -> Sequence[Draft]:
        """The winner's chain, and chains with what was outvoted of the likeliest tokens."""
        paths, length = self.places.paths(limit)
        found = trie(paths, length, known_chances())
        chains = [vote(paths, length)] if found else []
        inner = {text[:-1] for text in found}
        for leaf in (text for text in found if text not in inner):
            heads = [leaf[: n + 1] for n in range(len(leaf))]
            chains.append(Draft(leaf, evidence=[found[head] for head in heads]))
        return chains

    def append(self, tokens: Sequence[int]) -> None:
        """Write the text on."""
        self.places.append(tokens)

    def close(self, length: int) -> None:
        """Remember the text."""
        self.places.close(length)


def offering_all(session: Session) -> Session:
    """A session whose candidates are all that is voted for, if it looks places up."""
    if isinstance(session, LookUpSession) and isinstance(session.index, SuffixIndex):
        return LookUpSession(AllVotes(session.index))
    return session
