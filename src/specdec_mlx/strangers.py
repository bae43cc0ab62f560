"""Drafters and sessions that have the methods of the contracts, and inherit nothing of them.

A drafter passes `as_drafter` where it enters the package, and every session passes `begin_session`,
so that all other code meets the base classes. Members that a stranger lacks have their defaults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.nn as nn

from specdec_mlx.arguments import argument_error, short_repr
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    FeatureRows,
    Features,
    GoesOn,
    Session,
    class_and_options,
)
from specdec_mlx.errors import DraftError


def as_drafter(drafter: Any) -> Any:
    """A drafter as it is, or a stranger as a `Drafter`; None for None, ValueError for others."""
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if callable(getattr(drafter, "begin", None)) and not isinstance(drafter, type):
        return StrangersDrafter(drafter)
    if isinstance(drafter, type):
        instead = f"give {short_repr(drafter)}()"
    elif isinstance(drafter, tuple):
        instead = "of mlx_lm.load(...) give the model alone; several drafters are a list"
    else:
        instead = "`generate` also takes a name, a loaded model, the folder of a model, or a list"
    raise argument_error("drafter", drafter, f"an object with begin(prompt, context); {instead}")


def as_given(owner: Drafter | Session) -> Any:
    """The drafter or session that the user made: the stranger, or `owner` itself."""
    if isinstance(owner, StrangersDrafter | StrangersSession):
        return owner.stranger
    return owner


def begin_session(drafter: Drafter, prompt: Sequence[int], context: DraftContext) -> Session:
    """Begin a drafter's session; DraftError for one without `propose` or `observe`."""
    return as_session(drafter.begin(prompt, context), drafter.class_name)


def as_session(session: Any, made_by: str) -> Session:
    """A session as it is, or a stranger as a `Session`; DraftError for others."""
    if isinstance(session, Session):
        return session
    if hasattr(session, "propose") and hasattr(session, "observe"):
        return StrangersSession(session, made_by)
    raise DraftError(
        f"{made_by}.begin(...) returned {short_repr(session)}; expected a session with "
        "propose(limit) and observe(tokens)."
    )


@dataclass(frozen=True)
class StrangersDrafter(Drafter):
    """A drafter around one that inherits nothing."""

    stranger: Any

    def _own(self, name: str, default: Any) -> Any:
        return getattr(self.stranger, name, default)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        """The stranger's session."""
        session: Session = self.stranger.begin(prompt, context)
        return session

    @property
    def key(self) -> str:
        """The stranger's key, or its class and options."""
        key: str | None = self._own("key", None)
        return class_and_options(self.stranger) if key is None else key

    @property
    def class_name(self) -> str:
        """The stranger's class."""
        return type(self.stranger).__name__

    @property
    def branches(self) -> int:  # type: ignore[override]
        """The stranger's, or 1."""
        return int(self._own("branches", 1))

    @property
    def on_every_rank(self) -> bool:  # type: ignore[override]
        """The stranger's, or False."""
        return bool(self._own("on_every_rank", False))

    @property
    def drafters(self) -> Sequence[Drafter]:  # type: ignore[override]
        """The stranger's parts, if it has any."""
        return [as_drafter(part) for part in self._own("drafters", ())]

    @property
    def features(self) -> Features | None:
        """The stranger's, if it wants any."""
        features: Features | None = self._own("features", None)
        return features

    def models(self) -> Sequence[nn.Module]:
        """The stranger's `model`, if it has one."""
        model = self._own("model", None)
        return [model] if isinstance(model, nn.Module) else []

    def check(self, context: DraftContext) -> None:
        """Let the stranger refuse the target, if it can."""
        self._own("check", super().check)(context)

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        """The stranger's answer, or False."""
        return bool(self._own("keeps_draft_cache", super().keeps_draft_cache)(context))

    def describe(self) -> str:
        """The stranger's line, or none."""
        return str(self._own("describe", super().describe)())


class StrangersSession(Session):
    """A session around one that inherits nothing."""

    def __init__(self, stranger: Any, made_by: str) -> None:
        self.stranger, self.made_by = stranger, made_by
        self.cheap = self._own("cheap", False)

    def _own(self, name: str, default: Any) -> Any:
        return getattr(self.stranger, name, default)

    def propose(self, limit: int) -> Draft:
        """The stranger's draft."""
        draft: Draft = self.stranger.propose(limit)
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        """Tell the stranger."""
        self.stranger.observe(tokens)

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The stranger's draft, as long as it is worth it."""
        draft: Draft = self.stranger.propose_while(limit, goes_on)
        return draft

    @property
    def can_stop(self) -> bool:
        """True if the stranger can."""
        return hasattr(self.stranger, "propose_while")

    @property
    def forks(self) -> bool:
        """The stranger's answer, or False."""
        return bool(self._own("forks", False))

    def see(self, features: FeatureRows) -> None:
        """Show the stranger these rows."""
        self.stranger.see(features)

    @property
    def reads_target(self) -> bool:
        """True if the stranger has `see`."""
        return hasattr(self.stranger, "see")

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Show the stranger these rows, if it wants them."""
        self._own("see_rejected", super().see_rejected)(tokens, features)

    def close(self, length: int) -> None:
        """Tell the stranger, if it wants to know."""
        self._own("close", super().close)(length)

    def parts(self, key: str) -> Sequence[tuple[str, Session]]:
        """The stranger's parts, or this session."""
        own = self._own("parts", None)
        return super().parts(key) if own is None else self._adapted(own(key))

    def groups(self, key: str) -> Sequence[Sequence[tuple[str, Session]]]:
        """The stranger's groups, or this session."""
        own = self._own("groups", None)
        return super().groups(key) if own is None else [self._adapted(group) for group in own(key)]

    def _adapted(self, keyed: Sequence[tuple[str, Any]]) -> list[tuple[str, Session]]:
        return [
            (key, self if session is self.stranger else as_session(session, self.made_by))
            for key, session in keyed
        ]
