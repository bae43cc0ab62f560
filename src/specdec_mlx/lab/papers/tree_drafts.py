"""Drafts as trees: several texts in one draft, and the session of drafters that share a tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from operator import eq

import mlx.core as mx

from specdec_mlx.contracts import NO_DRAFT, ROOT, Draft, Evidence, Session, chain
from specdec_mlx.draft_length.value import Auto, MayFork, ValuedSession
from specdec_mlx.drafters.first_of import CombinedSession
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.trees.shape import depths_of

TokenPath = tuple[int, ...]  # the tokens that lead to a node of a tree, its own last

Grow = Callable[[Draft, int, Auto, MayFork], Draft]
"""Adds to the draft that is worth most: (draft, limit, values, may_fork) -> draft."""


def texts_of(draft: Draft) -> list[TokenPath]:
    tokens, texts = to_list(draft.tokens), list[TokenPath]()
    for token, parent in zip(tokens, draft.tree, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts


def draft_of(texts: Iterable[TokenPath], evidence: Sequence[Evidence | int] | None = None) -> Draft:
    """The draft whose nodes have these paths, in order. It is a chain if they do not fork."""
    nodes = {text: node for node, text in enumerate(texts)}
    parents = [nodes.get(text[:-1], ROOT) for text in nodes]
    return Draft([text[-1] for text in nodes], None, evidence, _unless_chain(parents))


def merged(drafts: Sequence[Draft]) -> Draft:
    """Merge one or more point-mass drafts into a tree, in which each path occurs once."""
    texts = dict.fromkeys(text for draft in drafts for text in texts_of(draft))
    # The sort is stable, so nodes of equal depth keep the order of the drafts.
    return draft_of(sorted(texts, key=len))


def side_by_side(drafts: Sequence[Draft]) -> Draft:
    """Join drafts into a tree without merging. At least one of them was drawn at random.

    Siblings are tried in turn, each with its own draft distribution (SpecInfer, Miao et al. 2024,
    algorithm 2). If equal tokens were merged, the draws would decide about the shape of the tree.
    """
    parents: list[int] = []
    for draft in drafts:
        parents += [p if p == ROOT else p + len(parents) for p in draft.tree]
    tokens = [to_ids(draft.tokens) for draft in drafts]
    width = max(d.logprobs.shape[-1] for d in drafts if d.logprobs is not None)
    rows = [
        one_hot_rows(ids, width) if draft.logprobs is None else draft.logprobs
        for draft, ids in zip(drafts, tokens, strict=True)
    ]
    # The sort is stable, so nodes of equal depth keep the order of the drafts.
    order = sorted(range(len(parents)), key=depths_of(parents).__getitem__)
    place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
    index = mx.array(order)
    return Draft(
        mx.concatenate(tokens)[index],
        mx.concatenate(rows)[index],
        parents=_unless_chain([place[parents[node]] for node in order]),
    )


def one_hot_rows(tokens: mx.array, width: int) -> mx.array:
    """Log-probabilities [n, V] with all mass on one token in each row."""
    return mx.where(mx.arange(width) == tokens[:, None], 0.0, -mx.inf)


def _unless_chain(parents: list[int]) -> list[int] | None:
    return None if parents == chain(len(parents)) else parents


class TreeSession(CombinedSession, ValuedSession):
    """A generation whose drafts are trees, from several drafters, or from one with several chains.

    Attributes:
        key: of the drafter.
        is_coupled: True if the accepted tokens are the target's own draws for any draft.
    """

    def __init__(
        self,
        key: str,
        keyed: Sequence[tuple[str, Session]],
        *,
        is_coupled: bool = False,
        grow: Grow | None = None,
    ) -> None:
        """Combine sessions.

        Args:
            key: of the drafter.
            keyed: sessions, each with its drafter's key.
            is_coupled: True if the target's own draws are emitted.
            grow: extends the most valuable tree.
        """
        super().__init__(keyed)
        self.key, self.is_coupled, self.grow = key, is_coupled, grow
        self.writers = [one for group in self.session_groups for one in group]
        self.drafts: Sequence[Draft] = ()

    def propose(self, limit: int) -> Draft:
        """A tree of at most `limit` tokens, which the drafters that cost time share evenly."""
        cheap = [writer.cheap for _, writer in self.writers]
        # limit / number of expensive drafters, rounded up
        share = -(-limit // max(1, cheap.count(False)))
        self.drafts = [
            writer.propose(limit if is_free else share)
            for (_, writer), is_free in zip(self.writers, cheap, strict=True)
        ]
        drafts = [draft for draft in self.drafts if len(draft)]
        if len(drafts) < 2:
            return drafts[0].head(limit) if drafts else NO_DRAFT
        is_drawn = any(draft.logprobs is not None for draft in drafts)
        # A coupled rule emits the target's own draws, so drawn drafts may be merged too.
        join = side_by_side if is_drawn and not self.is_coupled else merged
        return join(drafts).head(limit)

    def candidates(self, limit: int) -> Sequence[Draft]:
        return [draft for _, writer in self.writers for draft in writer.candidates(limit)]

    def propose_tree(self, limit: int, values: Auto, may_fork: MayFork) -> Draft:
        """The most valuable tree, or chain, from the chains of all drafters."""
        chains: list[tuple[str, Draft]] = []
        for key, writer in self.writers:
            # Chains and trees have separate statistics of acceptance.
            chain_key = f"{key} as a chain" if key == self.key else key
            for draft in writer.candidates(min(limit, values.limit(chain_key, True))):
                if len(draft) and draft.logprobs is None:
                    chains.append((chain_key, draft.first_chain()))
        draft = values.best_tree(self.key, chains, may_fork)
        return draft if self.grow is None else self.grow(draft, limit, values, may_fork)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell each session the accepted part of its own draft first, and then the rest."""
        drafts, self.drafts = self.drafts or [NO_DRAFT] * len(self.writers), ()
        for (_, writer), draft in zip(self.writers, drafts, strict=True):
            end = len(tokens)
            # A model's chain is rewound to the tokens that it proposed itself.
            if draft.parents is None and not writer.cheap:
                matches = map(eq, to_list(draft.tokens), tokens)
                end = 1 + len(list(takewhile(bool, matches)))
            writer.observe(tokens[:end])
            if tokens[end:]:
                writer.observe(tokens[end:])
