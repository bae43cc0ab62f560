"""Several drafters, tried in order: the first that has something to propose is taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_mlx.types import Draft, DraftContext, Drafter, DraftSession, key_of, keyed_parts


@dataclass(frozen=True)
class FirstOf:
    """The draft of the first drafter that has one; each is asked only if those before had none.

    So prompt lookup can copy where there is something to copy, and a draft model, which costs
    time, is asked elsewhere.

    drafters: at least one. Raises ValueError for none.
    """

    drafters: tuple[Drafter, ...]

    def __init__(self, *drafters: Drafter) -> None:
        """Take the drafters in the order in which they are tried."""
        if not drafters:
            raise ValueError("FirstOf() has nothing to try. Give at least one drafter.")
        object.__setattr__(self, "drafters", drafters)

    @property
    def key(self) -> str:
        """The keys of its parts, in order."""
        return f"FirstOf({', '.join(map(key_of, self.drafters))})"

    def begin(self, prompt: Sequence[int], context: DraftContext) -> FirstOfSession:
        """Begin with each of them."""
        sessions = [drafter.begin(prompt, context) for drafter in self.drafters]
        return FirstOfSession(sessions, [key_of(drafter) for drafter in self.drafters])

    def check(self, context: DraftContext) -> None:
        """Let each of them refuse the target."""
        for drafter in self.drafters:
            if hasattr(drafter, "check"):
                drafter.check(context)


class FirstOfSession:
    """One generation, seen by all of the drafters.

    parts: the sessions in order, for a loop that asks each within a limit of its own; those of
    which one is made instead of it. part_keys: the key of each.
    """

    def __init__(self, sessions: Sequence[DraftSession], keys: Sequence[str]) -> None:
        """Take the sessions in the order in which they are tried, with their drafters' keys."""
        self.sessions = list(sessions)
        keyed = [p for s, key in zip(sessions, keys, strict=True) for p in keyed_parts(s, key)]
        self.part_keys = [key for key, _ in keyed]
        self.parts = [part for _, part in keyed]
        self.cheap = all(getattr(session, "cheap", False) for session in sessions)

    def propose(self, limit: int) -> Draft:
        """The first draft that is not empty.

        Those behind it are not asked: what is observed next begins with the accepted part of this
        draft, and they would take it for theirs.
        """
        for session in self.sessions:
            draft = session.propose(limit)
            if len(draft):
                return draft
        return Draft()

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell all of them."""
        for session in self.sessions:
            session.observe(tokens)

    def close(self, length: int) -> None:
        """Close those that want to know."""
        for session in self.sessions:
            if hasattr(session, "close"):
                session.close(length)
