"""Several drafters as one: asked in order, in competition, or for one tree of all drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec_mlx.contracts import (
    Checks,
    Closes,
    DraftContext,
    Drafter,
    Session,
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
        return self._combined(
            [
                (key_of(drafter), drafter.begin(list(prompt), context))
                for drafter in self.drafters
            ]
        )

    def _combined(self, keyed: Sequence[tuple[str, Session]]) -> CombinedSession:
        return CombinedSession(keyed)

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

    def _combined(self, keyed: Sequence[tuple[str, Session]]) -> CombinedSession:
        session = CombinedSession(keyed)
        session.groups = [[part for group in session.groups for part in group]]
        return session


@dataclass(frozen=True, init=False)
class TreeOf(FirstOf):
    """The drafts of several drafters as one tree, merged where they agree (SpecInfer).

    (Miao et al. 2024, section 3.) The automatic draft length keeps the tokens that are worth their
    rows; a fixed one takes what each proposes. A model on which trees are not exact gets chains.
    drafters: at least one, the likelier first, else ValueError; each proposes without a model.
    """

    def _combined(self, keyed: Sequence[tuple[str, Session]]) -> CombinedSession:
        session = CombinedSession(keyed)
        session.groups = [[(self.key, session)]]
        return session

    def begin(self, prompt: Sequence[int], context: DraftContext) -> CombinedSession:
        """Begin with each of them; ValueError for a drafter whose drafts cost time."""
        session = super().begin(prompt, context)
        for drafter, begun in zip(self.drafters, session.sessions, strict=True):
            if not is_cheap(begun):
                raise ValueError(
                    f"TreeOf: what {type(drafter).__name__} proposes may not be thrown away, and "
                    "of a tree one path is kept. Give drafters that look tokens up."
                )
        return session
