"""Optional members of drafters, sessions, rules and targets: small protocols.

Each says in its first line what holds by default, for who does not have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import mlx.nn as nn

from specdec_mlx.types.drafting import Draft, DraftContext, Drafter, DraftSession, GoesOn

if TYPE_CHECKING:
    from specdec_mlx.types.target import FeatureRows, Features
    from specdec_mlx.types.verdicts import AcceptanceRule

MOST_WAITING = 256
"""Rows that may wait to be read by a session that reads the target, while nothing is drafted; a
state of a large model is 16 kB."""


@runtime_checkable
class Tappable(Protocol):
    """A target whose states can be read; default: it cannot be read."""

    def tap(self, wanted: Features) -> None:
        """Have every pass from now on bring these features. Raises UnreadableError."""
        ...

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Rows of the latest `feed`, and its number of positions."""
        ...


@runtime_checkable
class Keyed(Protocol):
    """A drafter with an identity of its own; default: its class and options, see `key_of`."""

    @property
    def key(self) -> str:
        """Name that its acceptance is remembered under: content and options, of a wrapper
        those of what it wraps."""
        ...


@runtime_checkable
class Checks(Protocol):
    """A drafter that may refuse a target; default: it takes any."""

    def check(self, context: DraftContext) -> None:
        """Raise a ValueError, before anything is computed, if it cannot draft for this target."""
        ...


@runtime_checkable
class DrafterParts(Protocol):
    """A drafter made of others; default: it has no parts."""

    @property
    def drafters(self) -> Sequence[Drafter]:
        """Its parts."""
        ...


@runtime_checkable
class RunsModel(Protocol):
    """A drafter that runs a model of its own; default: it runs none."""

    @property
    def model(self) -> nn.Module:
        """The model, whose memory is kept wired while it drafts."""
        ...


@runtime_checkable
class ReadsTarget(Protocol):
    """A drafter that reads the target's states; default: it reads none. See `SeesTarget`."""

    @property
    def features(self) -> Features:
        """Features that its sessions want to see."""
        ...


@runtime_checkable
class DraftsOnEveryRank(Protocol):
    """A drafter that says where it drafts for a target on several ranks; default: on rank 0."""

    @property
    def on_every_rank(self) -> bool:
        """True if each rank draws its drafts anew, so that no distribution has to be sent."""
        ...


@runtime_checkable
class Cheap(Protocol):
    """A session that says what asking it costs; default: asking costs time."""

    @property
    def cheap(self) -> bool:
        """True if proposing is microseconds of host work whose result may be thrown away."""
        ...


@runtime_checkable
class SessionGroups(Protocol):
    """A session made of others, asked in its place; default: it is asked itself.

    Within a group all cheap sessions propose, and the draft that is worth most is taken. Only point
    masses compete: they are what this text would always have led to, so that comparing them reads
    no draw. A session that costs time is asked, by what is known before anything is drawn, only
    where it promises more than the best of these, and a draft that it has drawn is taken whatever
    was drawn. A cheap session's drawn draft is taken where no other is.
    """

    @property
    def parts(self) -> Sequence[tuple[str, DraftSession]]:
        """The sessions that it is made of, each with its drafter's key."""
        ...

    @property
    def groups(self) -> Sequence[Sequence[tuple[str, DraftSession]]]:
        """Groups of sessions to be asked in order; itself, where it puts their drafts together."""
        ...


@runtime_checkable
class Stepwise(Protocol):
    """A session that can stop in the middle of a draft; default: it drafts to its limit."""

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Continue what was observed with 0 to `limit` tokens, as long as that is worth it.

        `goes_on` is asked at each position, in order, with what the draft's distributions said
        there and before, and never with what was drawn: whether a token is proposed may depend on
        its distribution and on all tokens before it, but not on itself, or the text would no longer
        have the target's distribution. The draft carries the same evidence.
        """
        ...


@runtime_checkable
class SeesTarget(Protocol):
    """A session that reads the target's states; default: it is shown none."""

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions of the text, before they are observed.

        The prompt's rows come chunk by chunk during prefill, later ones after each verdict, only
        those of positions that were kept. They are lazy, and hold what they are made of: evaluate,
        or drop, those of one chunk before the next.

        On a prompt cache that holds earlier text the rows begin with this call's prompt. A session
        that remembers the earlier turn, in `DraftContext.draft_cache`, goes on from there; any
        other drafts from what it has seen, which may cost acceptance, never the text.
        """
        ...


@runtime_checkable
class SeesRejected(Protocol):
    """A reader of the target's states that wants those of rejected drafts, too; default: not."""

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        """Take draft tokens [n] that were not kept, and their rows; before `observe`."""
        ...


@runtime_checkable
class ProposesAhead(Protocol):
    """A session that can be asked about a text that may not come; default: it cannot."""

    def propose_after(self, tokens: Sequence[int], limit: int) -> Draft:
        """The draft if `tokens` had been observed too; nothing is noted."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A session that wants to know of the end; default: it is dropped."""

    def close(self, length: int) -> None:
        """The end: the first `length` tokens of prompt + observed are all that the caller has."""
        ...


@runtime_checkable
class Forks(Protocol):
    """A session that can be copied; default: a new session begins with the whole text."""

    def fork(self) -> DraftSession:
        """A session that has seen the same text, and goes its own way from here."""
        ...


@runtime_checkable
class NeedsNoDistribution(Protocol):
    """A rule that works with opaque samplers; default: it reads `TargetRows.probs`."""

    @property
    def needs_distribution(self) -> bool:
        """True if it reads `TargetRows.probs` in any case."""
        ...


@runtime_checkable
class SharesNoise(Protocol):
    """A rule for drafts drawn from the noise of the target's own draws; default: independent."""

    @property
    def shares_noise(self) -> bool:
        """True if drafters are to draw from that noise (`DraftContext.coupled`)."""
        ...


@runtime_checkable
class ChoosesRule(Protocol):
    """A rule that lets another one decide; default: it decides itself."""

    def for_draft(self, draft: Draft) -> AcceptanceRule:
        """The rule that decides about this draft where the target is not greedy."""
        ...


def needs_distribution(rule: AcceptanceRule) -> bool:
    """True if a rule reads the target's distribution in any case."""
    return rule.needs_distribution if isinstance(rule, NeedsNoDistribution) else True


def shares_noise(rule: AcceptanceRule) -> bool:
    """True if a rule wants drafts drawn from the target's own noise."""
    return rule.shares_noise if isinstance(rule, SharesNoise) else False


def rule_for(rule: AcceptanceRule, draft: Draft) -> AcceptanceRule:
    """The rule that decides about a draft where the target is not greedy."""
    return rule.for_draft(draft) if isinstance(rule, ChoosesRule) else rule


def is_cheap(session: DraftSession) -> bool:
    """True if a proposal may be asked for and thrown away."""
    return session.cheap if isinstance(session, Cheap) else False


def session_groups(session: DraftSession, key: str) -> list[list[tuple[str, DraftSession]]]:
    """The groups to ask in order in a session's place; by default itself, with the key given."""
    if isinstance(session, SessionGroups):
        return [list(group) for group in session.groups]
    return [[(key, session)]]


def session_parts(session: DraftSession, key: str) -> list[tuple[str, DraftSession]]:
    """Parts of a session; by default itself, with the key given."""
    return list(session.parts) if isinstance(session, SessionGroups) else [(key, session)]


def key_of(drafter: Drafter) -> str:
    """Name that costs and acceptance of a drafter are remembered under.

    Its own `key`, or else class and options: the `repr` of a dataclass, which has both.
    """
    if isinstance(drafter, Keyed):
        return drafter.key
    kind = type(drafter)
    described = repr(drafter) if hasattr(kind, "__dataclass_fields__") else kind.__qualname__
    return f"{kind.__module__}.{described}"


def all_drafters(drafter: Drafter | None) -> Iterator[Drafter]:
    """A drafter and its parts, itself first; nothing for None."""
    if drafter is not None:
        yield drafter
        for part in drafter.drafters if isinstance(drafter, DrafterParts) else ():
            yield from all_drafters(part)


def models_of(drafter: Drafter | None) -> list[nn.Module]:
    """Models that run for a drafter, its parts' included, each once."""
    models = [part.model for part in all_drafters(drafter) if isinstance(part, RunsModel)]
    return list({id(model): model for model in models}.values())
