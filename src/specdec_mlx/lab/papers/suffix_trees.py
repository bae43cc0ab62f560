"""Suffix decoding's tree: the likeliest of all that places vote for (Oliaro et al. 2024).

Also REST's (He et al. 2024). Not worth it where positions cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush

from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext, Evidence
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.draft_length.value import Auto, ValuedSession
from specdec_mlx.drafters.suffix import Path, SuffixDrafter, SuffixSession, evidence_of, vote
from specdec_mlx.lab.papers.tree_drafts import TokenPath, draft_of


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


def chains_of(session: SuffixSession, limit: int) -> list[Draft]:
    """The winner's chain, and the chains that hold what was outvoted of the likeliest tokens."""
    paths, length = session.paths(limit)
    found = trie(paths, length, known_chances())
    chains = [vote(paths, length)] if found else []
    inner = {text[:-1] for text in found}
    for leaf in (text for text in found if text not in inner):
        path = [leaf[: n + 1] for n in range(len(leaf))]
        chains.append(Draft(leaf, evidence=[found[text] for text in path]))
    return chains


def best_of_chains(
    candidates: Callable[[int], Sequence[Draft]],
    key: str,
    limit: int,
    values: Auto,
    may_fork: Callable[[], bool],
) -> Draft:
    """The chain or tree that is worth most, of all the chains of a session.

    candidates: at most so many tokens -> its chains. key: of its drafter; how often its chains are
    right is learned under a key of their own.
    """
    chain_key = f"{key} as a chain"
    longest = min(limit, values.limit(chain_key, True))
    chains = [(chain_key, draft) for draft in candidates(longest)]
    return values.best_tree(key, chains, may_fork) if chains else NO_DRAFT


@dataclass(frozen=True)
class SuffixTreeDrafter(SuffixDrafter):
    """A `SuffixDrafter` that drafts the likeliest of all that was voted for, as a tree."""

    def begin(self, prompt: Sequence[int], context: DraftContext) -> SuffixTreeSession:
        """Index `prompt` [n], and take the memory as it is now."""
        return SuffixTreeSession(self, prompt, self.memory_of(context))


class SuffixTreeSession(SuffixSession, ValuedSession):
    """A session that drafts all that was voted for, not the winner alone."""

    def propose(self, limit: int) -> Draft:
        """A tree of the `limit` likeliest tokens."""
        found = trie(*self.paths(limit), known_chances())
        return draft_of(found, list(found.values()))

    def propose_tree(self, limit: int, values: Auto, may_fork: Callable[[], bool]) -> Draft:
        """The chain or tree that is worth most."""

        def chains(longest: int) -> list[Draft]:
            return chains_of(self, longest)

        return best_of_chains(chains, self._config.key, limit, values, may_fork)
