"""Drafts as trees: several texts joined in one draft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from specdec_mlx.contracts import (
    NO_DRAFT,
    ROOT,
    Draft,
    Evidence,
    chain,
)
from specdec_mlx.trees.shape import depths_of

if TYPE_CHECKING:
    from specdec_mlx.draft_length.contract import ValuesDrafts
from specdec_mlx.contracts import OffersSeveral
from specdec_mlx.token_ids import to_ids, to_list


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
