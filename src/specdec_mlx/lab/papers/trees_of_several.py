"""The drafts of several drafters as one tree (SpecInfer, Miao et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import (
    NO_DRAFT,
    ROOT,
    Draft,
    DraftContext,
    Session,
    chain,
)
from specdec_mlx.draft_length.value import Auto, ValuedSession
from specdec_mlx.drafters.first_of import CombinedSession, FirstOf, context_for
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter, SuffixSession
from specdec_mlx.duck_typed import begin_session
from specdec_mlx.lab.papers.lookahead import LookaheadSession
from specdec_mlx.lab.papers.recycling import RecyclingDrafter, RecyclingSession, kept_recyclers
from specdec_mlx.lab.papers.suffix_trees import chains_of
from specdec_mlx.lab.papers.tree_drafts import draft_of, texts_of
from specdec_mlx.memory.store import Memory
from specdec_mlx.token_ids import to_ids, to_list
from specdec_mlx.trees.shape import depths_of


def candidates_of(session: Session, limit: int) -> Sequence[Draft]:
    """All chains that a look-up has, or that it offers; nothing for other sessions."""
    if isinstance(session, SuffixSession):
        return chains_of(session, limit)
    if isinstance(session, RecyclingSession):
        return list(session.chains(limit))
    return session.candidates(limit) if isinstance(session, LookaheadSession) else ()


@dataclass(frozen=True, init=False)
class TreeOf(FirstOf):
    """The drafts of several drafters as one tree (SpecInfer, Miao et al. 2024, section 3).

    Look-ups' drafts are merged where they agree; the automatic draft length keeps the tokens that
    are worth their rows, a fixed one takes what each proposes. Draft models and heads share a
    draft's tokens evenly, and theirs are merged unless they are drawn: then each writes a branch
    from draws of its own. A model on which trees are not exact gets the first one's chain. Not
    worth it where one of two models is seldom right when the other is wrong. drafters: at least
    one, the likelier first, else ValueError.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> CombinedSession:
        """Begin with each of them; ValueError for one that drafts on every rank."""
        noise = None if context.coupled else context.noise
        keyed: list[tuple[str, Session]] = []
        for i, drafter in enumerate(self.drafters):
            if drafter.on_every_rank:
                raise ValueError(
                    f"TreeOf: {drafter.class_name} drafts on every rank. Leave that out."
                )
            if noise is not None:
                # siblings are independent draws; the next seeds are those of other texts
                own = replace(noise, seed=noise.seed + (i << 48))
                context = replace(context, noise=own)
            session = begin_session(drafter, list(prompt), context_for(drafter, context))
            keyed.append((drafter.key, session))
        is_free = all(session.cheap for _, session in keyed)
        kind = LookUpTree if is_free else TreeSession
        return kind(self.key, keyed, is_coupled=context.coupled)


class TreeSession(CombinedSession):
    """One generation of drafters whose drafts are one tree.

    key: of their drafter. is_coupled: whatever is drafted, the target's own draws are what is kept.
    """

    drafts: Sequence[Draft] = ()

    def __init__(self, key: str, keyed: Sequence[tuple[str, Session]], *, is_coupled: bool) -> None:
        super().__init__(keyed)
        self.key, self.is_coupled = key, is_coupled
        self._groups: list[Any] = [[(key, self)]]

    def propose(self, limit: int) -> Draft:
        """A tree of at most `limit` tokens, as many of each drafter that costs time."""
        cheap = [part.cheap for _, part in self._parts]
        share = -(-limit // max(1, cheap.count(False)))
        self.drafts = [
            part.propose(limit if is_free else share)
            for (_, part), is_free in zip(self._parts, cheap, strict=True)
        ]
        drafts = [draft for draft in self.drafts if len(draft)]
        if len(drafts) < 2:
            return drafts[0].head(limit) if drafts else NO_DRAFT
        is_drawn = any(draft.logprobs is not None for draft in drafts)
        join = side_by_side if is_drawn and not self.is_coupled else merged
        return join(drafts).head(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell each what was kept of its own draft, then what came after that."""
        drafts, self.drafts = self.drafts or [NO_DRAFT] * len(self._parts), ()
        for (_, part), draft in zip(self._parts, drafts, strict=True):
            end = len(tokens)
            if draft.parents is None and not part.cheap:
                own = map(eq, to_list(draft.tokens), tokens)
                end = 1 + len(list(takewhile(bool, own)))
            part.observe(tokens[:end])
            if tokens[end:]:
                part.observe(tokens[end:])


class LookUpTree(TreeSession, ValuedSession):
    """One generation of look-ups, whose chains the automatic draft length makes into one tree."""

    def propose_tree(self, limit: int, values: Auto, may_fork: Callable[[], bool]) -> Draft:
        """The tree, or the chain, of all their chains that is worth most."""
        chains: list[tuple[str, Draft]] = []
        for key, part in self._parts:
            most = min(limit, values.limit(key, True))
            for draft in candidates_of(part, most) or [part.propose(most)]:
                if len(draft) and draft.logprobs is None:
                    chains.append((key, draft.first_chain()))
        return values.best_tree(self.key, chains, may_fork)


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


def default_trees(memory: Memory | str | None = None, recycling: bool = False) -> TreeOf:
    """The default's look-up, n-grams and Token Recycling share a tree where that pays.

    memory: as `SuffixDrafter` takes it. recycling: with tables kept from generation to generation.
    """
    recyclers = kept_recyclers() if recycling else [RecyclingDrafter()]
    return TreeOf(SuffixDrafter(memory), NGramDrafter(), *recyclers)
