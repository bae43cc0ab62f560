"""Several drafters as one: asked in order, or in competition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec_mlx.contracts import (
    Checks,
    Closes,
    DraftContext,
    Drafter,
    Session,
    keeps_draft_cache,
    key_of,
    session_groups,
    session_parts,
)


class Several:
    """A drafter made of `drafters`, each of which may refuse the target."""

    drafters: Sequence[Drafter]

    def with_each(self, change: Callable[[Drafter], Drafter]) -> Any:
        """This drafter, made of changed ones; itself where they cannot be changed."""
        return self

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
    """One generation of several drafters; see `contracts.SessionGroups`."""

    def __init__(self, keyed: Sequence[tuple[str, Session]]) -> None:
        """keyed: sessions, each with its drafter's key."""
        self.sessions = [session for _, session in keyed]
        self.parts = [part for key, session in keyed for part in session_parts(session, key)]
        self.groups = [group for key, session in keyed for group in session_groups(session, key)]


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
                (key_of(drafter), drafter.begin(list(prompt), context_for(drafter, context)))
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
