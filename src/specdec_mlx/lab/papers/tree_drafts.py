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
    """The text of each node."""
    tokens, texts = to_list(draft.tokens), list[TokenPath]()
    for token, parent in zip(tokens, draft.tree, strict=True):
        texts.append((*(() if parent == ROOT else texts[parent]), token))
    return texts


def draft_of(texts: Iterable[TokenPath], evidence: Sequence[Evidence | int] | None = None) -> Draft:
    """The draft whose nodes have these texts, in order; a chain where they do not fork."""
    nodes = {text: node for node, text in enumerate(texts)}
    parents = [nodes.get(text[:-1], ROOT) for text in nodes]
    return Draft([text[-1] for text in nodes], None, evidence, _unless_chain(parents))


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
        one_hot_rows(ids, width) if draft.logprobs is None else draft.logprobs
        for draft, ids in zip(drafts, tokens, strict=True)
    ]
    # stable: at a depth the order of the drafts
    order = sorted(range(len(parents)), key=depths_of(parents).__getitem__)
    place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
    index = mx.array(order)
    return Draft(
        mx.concatenate(tokens)[index],
        mx.concatenate(rows)[index],
        parents=_unless_chain([place[parents[node]] for node in order]),
    )


def one_hot_rows(tokens: mx.array, width: int) -> mx.array:
    """Log-probabilities [n, V] that have all mass on one token [n] each."""
    return mx.where(mx.arange(width) == tokens[:, None], 0.0, -mx.inf)


def _unless_chain(parents: list[int]) -> list[int] | None:
    return None if parents == chain(len(parents)) else parents


class TreeSession(CombinedSession, ValuedSession):
    """One generation of drafters whose drafts are one tree, or of one that has several chains.

    key: of their drafter. is_coupled: whatever is drafted, the target's own draws are what is kept.
    """

    def __init__(
        self,
        key: str,
        keyed: Sequence[tuple[str, Session]],
        *,
        is_coupled: bool = False,
        grow: Grow | None = None,
    ) -> None:
        """keyed: sessions, each with its drafter's key. grow: adds to the tree worth most."""
        super().__init__(keyed)
        self.key, self.is_coupled, self.grow = key, is_coupled, grow
        self.writers = [one for group in self.session_groups for one in group]
        self.drafts: Sequence[Draft] = ()

    def propose(self, limit: int) -> Draft:
        """A tree of at most `limit` tokens, as many of each drafter that costs time."""
        cheap = [writer.cheap for _, writer in self.writers]
        share = -(-limit // max(1, cheap.count(False)))
        self.drafts = [
            writer.propose(limit if is_free else share)
            for (_, writer), is_free in zip(self.writers, cheap, strict=True)
        ]
        drafts = [draft for draft in self.drafts if len(draft)]
        if len(drafts) < 2:
            return drafts[0].head(limit) if drafts else NO_DRAFT
        is_drawn = any(draft.logprobs is not None for draft in drafts)
        join = side_by_side if is_drawn and not self.is_coupled else merged
        return join(drafts).head(limit)

    def candidates(self, limit: int) -> Sequence[Draft]:
        """All that its drafters have."""
        return [draft for _, writer in self.writers for draft in writer.candidates(limit)]

    def propose_tree(self, limit: int, values: Auto, may_fork: MayFork) -> Draft:
        """The tree, or the chain, of all their chains that is worth most."""
        chains: list[tuple[str, Draft]] = []
        for key, writer in self.writers:
            # how often chains are right is learned apart from how often the tree is
            own = f"{key} as a chain" if key == self.key else key
            for draft in writer.candidates(min(limit, values.limit(own, True))):
                if len(draft) and draft.logprobs is None:
                    chains.append((own, draft.first_chain()))
        draft = values.best_tree(self.key, chains, may_fork)
        return draft if self.grow is None else self.grow(draft, limit, values, may_fork)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell each what was kept of its own draft, then what came after that."""
        drafts, self.drafts = self.drafts or [NO_DRAFT] * len(self.writers), ()
        for (_, writer), draft in zip(self.writers, drafts, strict=True):
            end = len(tokens)
            if draft.parents is None and not writer.cheap:
                own = map(eq, to_list(draft.tokens), tokens)
                end = 1 + len(list(takewhile(bool, own)))
            writer.observe(tokens[:end])
            if tokens[end:]:
                writer.observe(tokens[end:])
