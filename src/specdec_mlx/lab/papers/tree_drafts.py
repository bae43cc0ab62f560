"""Drafts as trees: several texts joined in one draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec_mlx.contracts import ROOT, Draft, Evidence, chain
from specdec_mlx.token_ids import to_list

TokenPath = tuple[int, ...]  # the tokens that lead to a node of a tree, its own last


def texts_of(draft: Draft) -> list[TokenPath]:
    """The text of each node."""
    tokens, texts = to_list(draft.tokens), list[TokenPath]()
    for token, parent in zip(tokens, draft.tree, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts


def draft_of(texts: Iterable[TokenPath], evidence: Sequence[Evidence | int] | None = None) -> Draft:
    """The draft whose nodes have these texts, in order; a chain where they do not fork."""
    nodes = {text: node for node, text in enumerate(texts)}
    parents = [nodes.get(text[:-1], ROOT) for text in nodes]
    forks = parents != chain(len(parents))
    return Draft([text[-1] for text in nodes], None, evidence, parents if forks else None)
