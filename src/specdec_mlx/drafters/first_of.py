"""Several drafters: the first that has something to propose, or the draft that is worth most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from specdec_mlx.contracts import (
    Checks,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    is_cheap,
    key_of,
    session_groups,
    session_parts,
)


class Several:
    """A drafter made of `drafters`, each of which may refuse the target."""

    drafters: Sequence[Drafter]

    def check(self, context: DraftContext) -> None:
        """Let each of them refuse the target."""
        for drafter in self.drafters:
            if isinstance(drafter, Checks):
                drafter.check(context)


class SeveralSession:
    """One generation, seen by all of the sessions."""

    sessions: Sequence[DraftSession]

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell all of them."""
        for session in self.sessions:
            session.observe(tokens)

    def close(self, length: int) -> None:
        """Close those that want to know."""
        for session in self.sessions:
            if isinstance(session, Closes):
                session.close(length)


class FirstOfSession(SeveralSession):
    """One generation of several drafters; see `contracts.SessionGroups`."""

    def __init__(self, sessions: Sequence[DraftSession], keys: Sequence[str]) -> None:
        self.sessions = list(sessions)
        keyed = list(zip(sessions, keys, strict=True))
        self.parts = [part for session, key in keyed for part in session_parts(session, key)]
        self.groups = [group for session, key in keyed for group in session_groups(session, key)]
        self.cheap = all(is_cheap(session) for session in sessions)

    def propose(self, limit: int) -> Draft:
        """The first draft that is not empty; sessions after it are not asked."""
        return next(filter(len, (session.propose(limit) for session in self.sessions)), Draft())


@dataclass(frozen=True)
class FirstOf(Several):
    """The draft of the first drafter that has one; each is asked only if those before had none."""

    drafters: tuple[Drafter, ...]
    _together: ClassVar[Callable[..., FirstOfSession]] = FirstOfSession

    def __init__(self, *drafters: Drafter) -> None:
        if not drafters:
            name = type(self).__name__
            raise ValueError(f"{name}() has nothing to try. Give at least one drafter.")
        object.__setattr__(self, "drafters", drafters)

    @property
    def key(self) -> str:
        """The keys of its parts, in order."""
        return f"{type(self).__name__}({', '.join(map(key_of, self.drafters))})"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> FirstOfSession:
        """Begin with each of them."""
        sessions = [drafter.begin(list(prompt), context) for drafter in self.drafters]
        return self._together(sessions, [key_of(drafter) for drafter in self.drafters])

    def with_each(self, change: Callable[[Drafter], Drafter]) -> FirstOf:
        """This combination, of changed drafters."""
        return type(self)(*map(change, self.drafters))


class BestOfSession(FirstOfSession):
    """One generation, seen by all of the drafters, which compete in one group."""

    def __init__(self, sessions: Sequence[DraftSession], keys: Sequence[str]) -> None:
        super().__init__(sessions, keys)
        self.groups = [[part for group in self.groups for part in group]]
        self._free = [part for _, part in self.parts if is_cheap(part)]
        self._costly = [part for _, part in self.parts if not is_cheap(part)]

    def propose(self, limit: int) -> Draft:
        """The draft of the longest match; those that cost time are asked if there is none."""
        free = [part.propose(limit) for part in self._free]
        certain = [draft for draft in free if len(draft) and draft.logprobs is None]
        if certain:
            return max(certain, key=lambda draft: draft.match)
        asked = (part.propose(limit) for part in self._costly)
        return next(filter(len, chain(asked, free)), Draft())


@dataclass(frozen=True, init=False)
class BestOf(FirstOf):
    """The draft that is worth most: its expected tokens less what its pass costs.

    Every drafter that is free to ask proposes, and the automatic draft length values each draft by
    its evidence; with a fixed length the longest match wins among them. One that costs time is
    asked, before it draws, where it promises more than the best of the others. All drafts are
    scored against what came. drafters: at least one, else ValueError; of equal drafts the earlier
    one's is taken.
    """

    _together = BestOfSession
