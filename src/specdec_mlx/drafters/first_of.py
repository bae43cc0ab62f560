"""Several drafters as one drafter. They are asked in order, or they compete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar

from specdec_mlx.contracts import NO_DRAFT, Draft, DraftContext, Drafter, Session
from specdec_mlx.duck_typed import as_drafter, begin_session


class Several(Drafter):
    """A drafter that combines `drafters`."""

    def with_each(self, change: Callable[[Drafter], Drafter]) -> Any:
        """This combination with changed drafters, or itself if its drafters cannot be changed."""
        return self

    def check(self, context: DraftContext) -> None:
        """Check each drafter. Raises ValueError if two drafters would fill the same caches."""
        num_keepers = sum(drafter.keeps_draft_cache(context) for drafter in self.drafters)
        if context.draft_cache is not None and num_keepers > 1:
            raise ValueError(
                f"prompt_cache holds {len(context.draft_cache)} caches behind the target's, for "
                f"one draft model, and {num_keepers} drafters of {type(self).__name__} would fill "
                "them. Give only the target's caches, or draft with one of these models."
            )
        for drafter in self.drafters:
            drafter.check(context)

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        return any(drafter.keeps_draft_cache(context) for drafter in self.drafters)


def context_for(drafter: Drafter, context: DraftContext) -> DraftContext:
    """The context for one drafter. Only a drafter that keeps draft caches gets them."""
    if context.draft_cache is None or drafter.keeps_draft_cache(context):
        return context
    return replace(context, draft_cache=None)


class CombinedSession(Session):
    """One generation of several drafters.

    Attributes:
        sessions: the sessions of the drafters.
        session_groups: the sessions to ask for drafts, in groups. Each has its drafter's key.
        cheap: all of these are free to ask.
    """

    def __init__(self, keyed: Sequence[tuple[str, Session]]) -> None:
        self.sessions = [session for _, session in keyed]
        self.session_groups = [
            list(group) for key, session in keyed for group in session.groups(key)
        ]
        self.cheap = all(session.cheap for group in self.session_groups for _, session in group)
        self._parts = [part for key, session in keyed for part in session.parts(key)]

    def parts(self, key: str) -> Sequence[tuple[str, Session]]:
        return self._parts

    def observe(self, tokens: Sequence[int]) -> None:
        for session in self.sessions:
            session.observe(tokens)

    def close(self, length: int) -> None:
        for session in self.sessions:
            session.close(length)


class GroupedSession(CombinedSession):
    """One generation of several drafters in groups. In one group they compete."""

    def __init__(self, keyed: Sequence[tuple[str, Session]], *, in_one_group: bool = False) -> None:
        super().__init__(keyed)
        if in_one_group:
            self.session_groups = [[*chain.from_iterable(self.session_groups)]]

    def groups(self, key: str) -> Sequence[Sequence[tuple[str, Session]]]:
        return self.session_groups

    def propose(self, limit: int) -> Draft:
        """The longest match in the first group that has a draft."""
        for group in self.session_groups:
            drafts = [draft for _, part in group if len(draft := part.propose(limit))]
            if drafts:
                return max(drafts, key=lambda draft: draft.match)
        return NO_DRAFT


@dataclass(frozen=True)
class FirstOf(Several):
    """The draft of the first drafter that has a draft. Later drafters are not asked."""

    drafters: tuple[Drafter, ...]
    compete: ClassVar[bool] = False

    def __init__(self, *drafters: Any) -> None:
        if not drafters:
            name = type(self).__name__
            raise ValueError(f"{name}() has nothing to try. Give at least one drafter.")
        # The dataclass is frozen.
        object.__setattr__(self, "drafters", tuple(map(as_drafter, drafters)))

    @property
    def key(self) -> str:
        return f"{type(self).__name__}({', '.join(drafter.key for drafter in self.drafters)})"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        keyed = [
            (drafter.key, begin_session(drafter, list(prompt), context_for(drafter, context)))
            for drafter in self.drafters
        ]
        return GroupedSession(keyed, in_one_group=self.compete)

    def with_each(self, change: Callable[[Drafter], Drafter]) -> FirstOf:
        return type(self)(*map(change, self.drafters))


@dataclass(frozen=True, init=False)
class BestOf(FirstOf):
    """The draft that is worth most: its expected tokens less what its pass costs.

    Every cheap drafter proposes, and the automatic draft length values each draft by its evidence.
    With a fixed length the longest match wins among them. A drafter that costs time is asked only
    if it promises more than the best of the others, and before it draws. Drafts that were not used
    are scored against the text as well. Among equal drafts the earlier drafter's is taken.

    Attributes:
        drafters: at least one, else ValueError.
    """

    compete = True
