"""Several drafters as one: asked in order, in competition, or for one tree of all drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import eq

from specdec_mlx.contracts import (
    NO_DRAFT,
    Checks,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    Session,
    is_cheap,
    keeps_draft_cache,
    key_of,
    optional,
    session_groups,
    session_parts,
)
from specdec_mlx.token_ids import to_list
from specdec_mlx.trees.drafts import merged, side_by_side


class Several:
    """A drafter made of `drafters`, each of which may refuse the target."""

    drafters: Sequence[Drafter]

    def check(self, context: DraftContext) -> None:
        """Let each of them refuse the target; ValueError if two would fill the same caches."""
        num_keepers = sum(keeps_draft_cache(one, context) for one in self.drafters)
        if context.draft_cache is not None and num_keepers > 1:
            raise ValueError(
                f"prompt_cache holds {len(context.draft_cache)} caches behind the target's, for "
                f"one draft model, and {num_keepers} drafters of {type(self).__name__} would fill "
                "them. Give the target's caches alone, or draft with one of these models."
            )
        for drafter in self.drafters:
            if isinstance(drafter, Checks):
                drafter.check(context)

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        """True if one of them does."""
        return any(keeps_draft_cache(one, context) for one in self.drafters)


def context_for(drafter: Drafter, context: DraftContext) -> DraftContext:
    """The context of a part of a combination: draft caches are for the part that keeps them."""
    if context.draft_cache is None or keeps_draft_cache(drafter, context):
        return context
    return replace(context, draft_cache=None)


class SeveralSession:
    """One generation, seen by all of the sessions."""

    sessions: Sequence[Session]

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell all of them."""
        for session in self.sessions:
            session.observe(tokens)

    def close(self, length: int) -> None:
        """Close those that want to know."""
        for session in self.sessions:
            if isinstance(session, Closes):
                session.close(length)


class CombinedSession(SeveralSession):
    """One generation of several drafters; see `contracts.SessionGroups`.

    is_coupled: whatever is drafted, the target's own draws are what is kept.
    """

    is_coupled = False

    def __init__(self, keyed: Sequence[tuple[str, Session]]) -> None:
        """keyed: sessions, each with its drafter's key."""
        self.sessions = [session for _, session in keyed]
        self.parts = [
            part for key, session in keyed for part in session_parts(session, key)
        ]
        self.groups = [
            group for key, session in keyed for group in session_groups(session, key)
        ]


@dataclass(frozen=True)
class FirstOf(Several):
    """The draft of the first drafter that has one; each is asked only if those before had none."""

    drafters: tuple[Drafter, ...]

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            name = type(self).__name__
            raise ValueError(f"{name}() has nothing to try. Give at least one drafter.")
        object.__setattr__(self, "drafters", drafters)

    @property
    def key(self) -> str:
        """The keys of its parts, in order."""
        return f"{type(self).__name__}({', '.join(map(key_of, self.drafters))})"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> CombinedSession:
        """Begin with each of them."""
        return CombinedSession(
            [
                (
                    key_of(drafter),
                    drafter.begin(list(prompt), context_for(drafter, context)),
                )
                for drafter in self.drafters
            ]
        )

    def with_each(self, change: Callable[[Drafter], Drafter]) -> FirstOf:
        """This combination, of changed drafters."""
        return type(self)(*map(change, self.drafters))


@dataclass(frozen=True, init=False)
class BestOf(FirstOf):
    """The draft that is worth most: its expected tokens less what its pass costs.

    Every drafter that is free to ask proposes, and the automatic draft length values each draft by
    its evidence; with a fixed length the longest match wins among them. One that costs time is
    asked, before it draws, where it promises more than the best of the others. All drafts are
    scored against what came. drafters: at least one, else ValueError; of equal drafts the earlier
    one's is taken.
    """

    def begin(self, prompt: Sequence[int], context: DraftContext) -> CombinedSession:
        """Begin with each of them, in one group."""
        session = super().begin(prompt, context)
        session.groups = [[part for group in session.groups for part in group]]
        return session


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
            if optional(drafter, "on_every_rank"):
                raise ValueError(
                    f"TreeOf: {type(drafter).__name__} drafts on every rank. Leave that out."
                )
            if noise is not None:
                # siblings are independent draws; the next seeds are those of other texts
                own = replace(noise, seed=noise.seed + (i << 48))
                context = replace(context, noise=own)
            session = drafter.begin(list(prompt), context_for(drafter, context))
            keyed.append((key_of(drafter), session))
        is_free = all(is_cheap(session) for _, session in keyed)
        tree = CombinedSession(keyed) if is_free else TreeSession(keyed)
        tree.groups = [[(self.key, tree)]]
        tree.is_coupled = context.coupled
        return tree


class TreeSession(CombinedSession):
    """One generation of drafters whose drafts are one tree, some of which cost time."""

    drafts: Sequence[Draft] = ()

    def propose(self, limit: int) -> Draft:
        """A tree of at most `limit` tokens, as many of each drafter that costs time."""
        cheap = [is_cheap(part) for _, part in self.parts]
        share = -(-limit // cheap.count(False))
        self.drafts = [
            part.propose(limit if is_free else share)
            for (_, part), is_free in zip(self.parts, cheap, strict=True)
        ]
        drafts = [draft for draft in self.drafts if len(draft)]
        if len(drafts) < 2:
            return drafts[0].head(limit) if drafts else NO_DRAFT
        is_drawn = any(draft.logprobs is not None for draft in drafts)
        join = side_by_side if is_drawn and not self.is_coupled else merged
        return join(drafts).head(limit)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell each what was kept of its own draft, then what came after that."""
        drafts, self.drafts = self.drafts or [NO_DRAFT] * len(self.parts), ()
        for (_, part), draft in zip(self.parts, drafts, strict=True):
            end = len(tokens)
            if draft.parents is None and not is_cheap(part):
                own = map(eq, to_list(draft.tokens), tokens)
                end = 1 + len(list(takewhile(bool, own)))
            part.observe(tokens[:end])
            if tokens[end:]:
                part.observe(tokens[end:])
