"""Drafters and sessions that have the methods of the contracts and inherit nothing.

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
    """A drafter as it is, or a stranger as a `Drafter`. None for None. Raises ValueError."""
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if callable(getattr(drafter, "begin", None)) and not isinstance(drafter, type):
        return StrangersDrafter(drafter)
    if isinstance(drafter, type):
        instead = f"give {short_repr(drafter)}()"
    # A common slip: mlx_lm.load returns model and tokenizer.
    elif isinstance(drafter, tuple):
        instead = "of mlx_lm.load(...) give the model alone; several drafters are a list"
    else:
        instead = "`generate` also takes a name, a loaded model, the folder of a model, or a list"
    raise argument_error("drafter", drafter, f"an object with begin(prompt, context); {instead}")


def as_given(owner: Drafter | Session) -> Any:
    """The drafter or session that the user made."""
    if isinstance(owner, StrangersDrafter | StrangersSession):
        return owner.stranger
    return owner


def begin_session(drafter: Drafter, prompt: Sequence[int], context: DraftContext) -> Session:
    """Begin a drafter's session. DraftError if it has no `propose` or `observe`."""
    return as_session(drafter.begin(prompt, context), drafter.class_name)


def as_session(session: Any, made_by: str) -> Session:
    """A session as it is, or a stranger as a `Session`. Raises DraftError."""
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
    """A drafter around an object that inherits nothing."""

    stranger: Any

    def _get(self, name: str, default: Any) -> Any:
        return getattr(self.stranger, name, default)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        session: Session = self.stranger.begin(prompt, context)
        return session

    @property
    def key(self) -> str:
        key: str | None = self._get("key", None)
        return class_and_options(self.stranger) if key is None else key

    @property
    def class_name(self) -> str:
        return type(self.stranger).__name__

    @property
    def branches(self) -> int:  # type: ignore[override]
        return int(self._get("branches", 1))

    @property
    def on_every_rank(self) -> bool:  # type: ignore[override]
        return bool(self._get("on_every_rank", False))

    @property
    def drafters(self) -> Sequence[Drafter]:  # type: ignore[override]
        return [as_drafter(part) for part in self._get("drafters", ())]

    @property
    def features(self) -> Features | None:
        features: Features | None = self._get("features", None)
        return features

    def models(self) -> Sequence[nn.Module]:
        model = self._get("model", None)
        return [model] if isinstance(model, nn.Module) else []

    def check(self, context: DraftContext) -> None:
        self._get("check", super().check)(context)

    def keeps_draft_cache(self, context: DraftContext) -> bool:
        return bool(self._get("keeps_draft_cache", super().keeps_draft_cache)(context))

    def describe(self) -> str:
        return str(self._get("describe", super().describe)())


class StrangersSession(Session):
    """A session around an object that inherits nothing."""

    def __init__(self, stranger: Any, made_by: str) -> None:
        self.stranger, self.made_by = stranger, made_by
        self.cheap = self._get("cheap", False)

    def _get(self, name: str, default: Any) -> Any:
        return getattr(self.stranger, name, default)

    def propose(self, limit: int) -> Draft:
        draft: Draft = self.stranger.propose(limit)
        return draft

    def observe(self, tokens: Sequence[int]) -> None:
        self.stranger.observe(tokens)

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        draft: Draft = self.stranger.propose_while(limit, goes_on)
        return draft

    @property
    def can_stop(self) -> bool:
        return hasattr(self.stranger, "propose_while")

    @property
    def forks(self) -> bool:
        return bool(self._get("forks", False))

    def candidates(self, limit: int) -> Sequence[Draft]:
        """The stranger's, or its draft."""
        drafts: Sequence[Draft] = self._get("candidates", super().candidates)(limit)
        return drafts

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        """The stranger's draft after the text and `tokens`."""
        draft: Draft = self.stranger.propose_after(tokens, limit)
        return draft

    @property
    def looks_ahead(self) -> bool:
        """True if the stranger does."""
        return hasattr(self.stranger, "propose_after")

    def see(self, features: FeatureRows) -> None:
        self.stranger.see(features)

    @property
    def reads_target(self) -> bool:
        return hasattr(self.stranger, "see")

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        self._get("see_rejected", super().see_rejected)(tokens, features)

    def close(self, length: int) -> None:
        self._get("close", super().close)(length)

    def parts(self, key: str) -> Sequence[tuple[str, Session]]:
        parts = self._get("parts", None)
        return super().parts(key) if parts is None else self._adapted(parts(key))

    def groups(self, key: str) -> Sequence[Sequence[tuple[str, Session]]]:
        groups = self._get("groups", None)
        return (
            super().groups(key)
            if groups is None
            else [self._adapted(group) for group in groups(key)]
        )

    def _adapted(self, keyed: Sequence[tuple[str, Any]]) -> list[tuple[str, Session]]:
        return [
            # A session that lists itself among its parts must stay this object, by which the parts
            # are compared.
            (key, self if session is self.stranger else as_session(session, self.made_by))
            for key, session in keyed
        ]
