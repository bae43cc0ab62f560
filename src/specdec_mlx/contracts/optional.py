"""Optional members of drafters and sessions: protocols if called, else attributes; defaults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import mlx.nn as nn

from specdec_mlx.contracts.drafting import (
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    GoesOn,
    Session,
    SessionGroups,
)

if TYPE_CHECKING:
    from specdec_mlx.contracts.target import FeatureRows, Features

# rows that a session reads after the first token; 16 kB each, if large
# from so many on they are read for keys and values alone
MOST_WAITING = 2048
MANY_WAITING = MOST_WAITING // 8


@runtime_checkable
class Checks(Protocol):
    """A drafter that may refuse a target; default: it takes any."""

    def check(self, context: DraftContext) -> None:
        """Raise a ValueError, before anything is computed, if it cannot draft for this target."""


@runtime_checkable
class ReadsTarget(Protocol):
    """A drafter that reads the target's states; default: it reads none. See `SeesTarget`."""

    @property
    def features(self) -> Features:
        """Features that its sessions want to see."""


@runtime_checkable
class SeesTarget(Protocol):
    """A session that reads the target's states; default: it is shown none."""

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions of the text, lazy, before they are observed.

        Evaluate, or drop, those of one chunk of the prompt before the next.
        """


@runtime_checkable
class Stepwise(Protocol):
    """A session that can stop in the middle of a draft; default: it drafts to its limit."""

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Continue what was observed with 0 to `limit` tokens, as long as that is worth it.

        `goes_on` is asked at each position with the evidence so far, never with what was drawn: a
        token dropped for what it is would bias the text.
        """


@runtime_checkable
class Closes(Protocol):
    """A session that wants to know of the end; default: it is dropped."""

    def close(self, length: int) -> None:
        """The end: the first `length` tokens of prompt + observed are all that the caller has."""


OPTIONAL: dict[str, Any] = {
    # of a drafter: most tokens that it proposes at a place; more than one makes trees
    "branches": 1,
    # of a drafter: each machine of a target that is spread over several runs it, not one for all
    "on_every_rank": False,
    # of a session that costs time: its drafts are trees
    "forks": False,
    # of a look-up's session, (limit, values, may_fork) -> Draft: the chain or tree that is worth
    # most to `values`, a `ValuesDrafts`; may_fork() is asked if a tree is best
    "propose_tree": None,
    # of a session that reads the target, (tokens [n], rows): draft tokens that were not kept, and
    # their rows, after `see` was shown the others
    "see_rejected": None,
    # of a session, for beams, () -> DraftSession: a copy that goes its own way from here on
    "fork": None,
}
"""Further optional members: what each means, how it is called, and its default."""


def optional(owner: object, name: str) -> Any:
    """A member of OPTIONAL of a drafter or session, or its default."""
    return getattr(owner, name, OPTIONAL[name])


def is_cheap(session: Session) -> bool:
    """`cheap` of a session: proposing is microseconds of host work, and may be thrown away."""
    if isinstance(session, SessionGroups):
        return all(is_cheap(part) for _, part in session.parts)
    return getattr(session, "cheap", False)


def session_groups(session: Session, key: str) -> list[list[tuple[str, Session]]]:
    """The groups to ask in order in a session's place; by default itself, with the key given."""
    if isinstance(session, SessionGroups):
        return [list(group) for group in session.groups]
    return [[(key, session)]]


def session_parts(session: Session, key: str) -> list[tuple[str, DraftSession]]:
    """Parts of a session; by default itself, with the key given."""
    return (
        list(session.parts) if isinstance(session, SessionGroups) else [(key, session)]
    )


def key_of(drafter: Drafter) -> str:
    """`key` of a drafter, for what is learned of it; by default class and options, its `repr`."""
    kind, key = type(drafter), getattr(drafter, "key", None)
    described = (
        repr(drafter) if hasattr(kind, "__dataclass_fields__") else kind.__qualname__
    )
    return f"{kind.__module__}.{described}" if key is None else key


def all_drafters(drafter: Drafter | None) -> Iterator[Drafter]:
    """A drafter and its parts, in `drafters`, itself first; nothing for None."""
    if drafter is not None:
        yield drafter
        for part in getattr(drafter, "drafters", ()):
            yield from all_drafters(part)


def models_of(drafter: Drafter | None) -> list[nn.Module]:
    """`model` of a drafter and of its parts, each once; their memory is kept wired."""
    models = [getattr(part, "model", None) for part in all_drafters(drafter)]
    return list(
        {id(model): model for model in models if isinstance(model, nn.Module)}.values()
    )
