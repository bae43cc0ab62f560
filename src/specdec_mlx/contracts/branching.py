"""Draft lengths: the contract, and what drafts that fork need.

A drafter with a tree of its own hands it over as a `Draft` with `parents`. Sessions that have
several drafts may leave it to the draft length which of them, or which tree of them, is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, runtime_checkable

import mlx.core as mx

from specdec_mlx.contracts.drafting import (
    NO_DRAFT,
    ROOT,
    Draft,
    DraftSession,
    Evidence,
    RoundRecord,
)
from specdec_mlx.contracts.trees import chain, depths_of
from specdec_mlx.token_ids import to_ids, to_list


@runtime_checkable
class OffersSeveral(Protocol):
    """A session that has several drafts at once; default: what it proposes."""

    def candidates(self, limit: int) -> Sequence[Draft]:
        """Point-mass chains of 1 to `limit` tokens, the likeliest first; microseconds of work."""


class DraftLength(Protocol):
    """Chooses the draft length of each round of one generation; learns from the rounds.

    `part` is the key of the drafter that is asked, one of several under `FirstOf`;
    `RoundRecord.part` of the one whose draft was verified.
    """

    def limit(self, part: str, cheap: bool) -> int:
        """Most tokens to draft now, >= 0; decided before anything is drawn.

        cheap: True if proposing is free, so that more may be asked for than `cut` keeps.
        """

    def cut(self, part: str, draft: Draft) -> int:
        """How many tokens of a point-mass draft to keep, 0 to K.

        A drawn draft is never shown here: dropping a token for what it is would change the output
        law.
        """

    def record(self, round_: RoundRecord) -> None:
        """Learn from a finished round."""


@runtime_checkable
class ValuesDrafts(DraftLength, Protocol):
    """A draft length that values drafts; default: they are verified as they are proposed."""

    def begin(
        self, part: str, session: DraftSession, may_fork: Callable[[], bool]
    ) -> Callable[[int], Draft]:
        """Register a session; returns the function that gets its drafts, by most tokens."""

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft that is worth most, with its drafter's key; empty where none is worth any.

        drafts: point masses of at least one token, each with its drafter's key; at least one.
        """

    def beats_chosen(self, part: str) -> bool:
        """True if a session that costs time promises more than the draft that was chosen last."""

    def best_tree(
        self,
        part: str,
        drafts: Sequence[tuple[str, Draft]],
        may_fork: Callable[[], bool],
    ) -> Draft:
        """The chain or the tree that is worth most, of what several look-ups propose.

        drafts: chains of point masses, each with its drafter's key. may_fork: asked if a tree is
        best.
        """

    def price(self, num_drafted: int) -> float:
        """Price of verifying so many tokens, in tokens; infinite where it cannot be tried."""

    def wants_timing(self, num_drafted: int) -> bool:
        """True if a round's seconds are needed now; the loop then waits before it emits."""


def best_of_chains(
    session: OffersSeveral,
    key: str,
    limit: int,
    values: ValuesDrafts,
    may_fork: Callable[[], bool],
) -> Draft:
    """The chain or tree that is worth most, of all that a session has; `key` of its drafter.

    How often its chains are right is learned under a key of their own.
    """
    chain_key = f"{key} as a chain"
    longest = min(limit, values.limit(chain_key, True))
    chains = [(chain_key, draft) for draft in session.candidates(longest)]
    return values.best_tree(key, chains, may_fork) if chains else NO_DRAFT


TokenPath = tuple[int, ...]  # the tokens that lead to a node of a tree, its own last


def merged(drafts: Sequence[Draft]) -> Draft:
    """Drafts of point masses, at least one, as one tree, in which each text stands once."""
    texts = dict.fromkeys(text for draft in drafts for text in texts_of(draft))
    # stable: at a length the order of the drafts
    return draft_of(sorted(texts, key=len))


def side_by_side(drafts: Sequence[Draft]) -> Draft:
    """Drafts of which some were drawn, at least one token, as one tree that merges nothing.

    Siblings are tried in turn, each with what it was drawn from (SpecInfer, Miao et al. 2024,
    algorithm 2). Merging what happens to be equal would let a draw decide about the tree.
    """
    parents: list[int] = []
    for draft in drafts:
        parents += [p if p == ROOT else p + len(parents) for p in draft.tree]
    tokens = [to_ids(draft.tokens) for draft in drafts]
    width = max(d.logprobs.shape[-1] for d in drafts if d.logprobs is not None)
    rows = [
        mx.where(mx.arange(width) == ids[:, None], 0.0, -mx.inf)
        if draft.logprobs is None
        else draft.logprobs
        for draft, ids in zip(drafts, tokens, strict=True)
    ]
    # stable: at a depth the order of the drafts
    order = sorted(range(len(parents)), key=depths_of(parents).__getitem__)
    place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
    shape = [place[parents[node]] for node in order]
    index = mx.array(order)
    return Draft(
        mx.concatenate(tokens)[index],
        mx.concatenate(rows)[index],
        parents=None if shape == chain(len(shape)) else shape,
    )


def texts_of(draft: Draft) -> list[TokenPath]:
    """The text of each node."""
    tokens, texts = to_list(draft.tokens), list[TokenPath]()
    for token, parent in zip(tokens, draft.tree, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts


def draft_of(
    texts: Iterable[TokenPath], evidence: Sequence[Evidence | int] | None = None
) -> Draft:
    """The draft whose nodes have these texts, in order; a chain where they do not fork."""
    nodes = {text: node for node, text in enumerate(texts)}
    parents = [nodes.get(text[:-1], ROOT) for text in nodes]
    forks = parents != chain(len(parents))
    return Draft(
        [text[-1] for text in nodes], None, evidence, parents if forks else None
    )
