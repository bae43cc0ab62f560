"""What a drafter, a session, a rule, a draft length or a target may add, and what holds without.

Each is a protocol of one member; the functions at the end give the member, or its default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import mlx.nn as nn

from specdec_mlx.types.drafting import (
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    GoesOn,
)
from specdec_mlx.types.target import FeatureRows, Features
from specdec_mlx.types.verdicts import AcceptanceRule


@runtime_checkable
class Tappable(Protocol):
    """A target whose states can be read; default: it cannot be read."""

    def tap(self, wanted: Features) -> None:
        """Have every pass from now on bring these features.

        Raises an UnreadableError for what the target does not show.
        """
        ...

    def fed_features(self) -> tuple[FeatureRows, int]:
        """Rows of the latest `feed`, and how many positions it had."""
        ...


@runtime_checkable
class Keyed(Protocol):
    """A drafter with an identity of its own; default: its class and options, see `key_of`."""

    @property
    def key(self) -> str:
        """What its costs and acceptance are remembered under: content and options that matter.

        Two drafters that behave differently must not share a key; a wrapper passes on the key of
        what it wraps.
        """
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
        """What it is made of."""
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
        """What its sessions want to see."""
        ...


@runtime_checkable
class DraftsOnEveryRank(Protocol):
    """A drafter that says where it drafts for a target on several ranks; default: on rank 0."""

    @property
    def on_every_rank(self) -> bool:
        """Whether each rank draws its drafts anew, so that no distribution has to be sent."""
        ...


@runtime_checkable
class Cheap(Protocol):
    """A session that says what asking it costs; default: asking costs time."""

    @property
    def cheap(self) -> bool:
        """Whether proposing is microseconds of host work whose result may be thrown away.

        The loop then looks for a draft while a pass runs.
        """
        ...


@runtime_checkable
class SessionParts(Protocol):
    """A session made of others, asked in its place, in order, until one has a draft."""

    @property
    def parts(self) -> Sequence[tuple[str, DraftSession]]:
        """The sessions, in order, each with its drafter's key; default: the session itself."""
        ...


@runtime_checkable
class SessionGroups(Protocol):
    """A session made of others some of which compete; default: they are asked one after another."""

    @property
    def groups(self) -> Sequence[Sequence[tuple[str, DraftSession]]]:
        """Groups of sessions, each with its drafter's key, to be asked in order.

        Within a group all cheap sessions propose, and the draft that is worth most is taken. Only
        point masses compete: they are what this text would always have led to, so that comparing
        them reads no draw. A session that costs time is asked, by what is known before anything is
        drawn, only where it promises more than the best of these, and a draft that it has drawn is
        taken whatever was drawn. A cheap session's drawn draft is taken where no other is.
        """
        ...


@runtime_checkable
class Stepwise(Protocol):
    """A session that can stop in the middle of a draft; default: it drafts to its limit."""

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """Continue what was observed with 0 to `limit` tokens, as long as that is worth it.

        `goes_on` is asked at each position, in order, with what the draft's distributions said
        there and before, and never with what was drawn: whether a token is proposed may depend on
        its distribution and on all tokens before it, but not on itself, or what comes out would no
        longer have the target's distribution. The draft carries the same evidence.
        """
        ...


@runtime_checkable
class TimesSteps(Protocol):
    """A session that can tell what a step costs before it reads the text; default: it cannot."""

    def time_step(self) -> float:
        """Run one step on nothing, and give its seconds."""
        ...


@runtime_checkable
class TimesReading(Protocol):
    """A session that can tell what reading the text would cost; default: none does."""

    def time_reading(self) -> float:
        """Read some tokens for nothing, and give the seconds that one of them took."""
        ...


@runtime_checkable
class DraftsAtOnce(Protocol):
    """A stepwise session that drafts in one pass; default: every token is a step that costs."""

    @property
    def at_once(self) -> bool:
        """Whether a draft costs the same however long it is; `time_step` is then all of it."""
        ...


MOST_WAITING = 256
"""Rows that may wait to be read by a session that reads the target, while nothing is drafted; a
state of a large model is 16 kB."""


@runtime_checkable
class SeesTarget(Protocol):
    """A session that reads the target's states; default: it is shown none."""

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions of the text, before they are observed.

        The prompt's rows come chunk by chunk during prefill, later ones after each verdict, only
        those of positions that were kept. They are lazy, and what they are made of is held until
        they are computed: evaluate, or drop, what was shown of one chunk before the next.

        On a prompt cache that holds earlier text, the rows begin with this call's prompt: what the
        cache holds is not read again. A session that remembers the earlier turn, in the draft
        caches of the same list (`DraftContext.draft_cache`), goes on from there; any other drafts
        from what it has seen, with the positions counted from this call's prompt on. That may cost
        acceptance, never the text.
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
        """What it would propose if `tokens` had been observed too; nothing is noted."""
        ...


@runtime_checkable
class Closes(Protocol):
    """A session that wants to know of the end; default: it is dropped."""

    def close(self, length: int) -> None:
        """The end: the first `length` tokens of prompt + observed are all that the caller has."""
        ...


@runtime_checkable
class Forks(Protocol):
    """A session of which a copy can be had; default: a new session begins with the whole text."""

    def fork(self) -> DraftSession:
        """A session that has seen the same text, and goes its own way from here."""
        ...


@runtime_checkable
class NeedsNoDistribution(Protocol):
    """A rule that works with samplers and processors that can only be called.

    Default: a rule reads `TargetRows.probs`, and such samplers are refused. Where rows have to be
    drawn one by one, the draft is kept as far as it equals the target's own tokens.
    """

    @property
    def needs_distribution(self) -> bool:
        """Whether it reads `TargetRows.probs` come what may."""
        ...


@runtime_checkable
class SharesNoise(Protocol):
    """A rule for drafts drawn from the noise of the target's own draws; default: independent."""

    @property
    def shares_noise(self) -> bool:
        """Whether drafters are to draw from that noise (`DraftContext.coupled`)."""
        ...


@runtime_checkable
class ChoosesRule(Protocol):
    """A rule that lets another one decide; default: it decides itself."""

    def for_draft(self, draft: Draft) -> AcceptanceRule:
        """The rule that decides about this draft where the target is not greedy."""
        ...


def needs_distribution(rule: AcceptanceRule) -> bool:
    """Whether a rule reads the target's distribution come what may."""
    return rule.needs_distribution if isinstance(rule, NeedsNoDistribution) else True


def shares_noise(rule: AcceptanceRule) -> bool:
    """Whether a rule wants drafts drawn from the target's own noise."""
    return rule.shares_noise if isinstance(rule, SharesNoise) else False


def rule_for(rule: AcceptanceRule, draft: Draft) -> AcceptanceRule:
    """The rule that decides about a draft where the target is not greedy."""
    return rule.for_draft(draft) if isinstance(rule, ChoosesRule) else rule


def is_cheap(session: DraftSession) -> bool:
    """Whether a proposal may be asked for and thrown away."""
    return session.cheap if isinstance(session, Cheap) else False


def session_parts(session: DraftSession, key: str) -> list[tuple[str, DraftSession]]:
    """The sessions to ask in a session's place, each with its drafter's key.

    By default that is the session itself, with the key given.
    """
    return list(session.parts) if isinstance(session, SessionParts) else [(key, session)]


def session_groups(session: DraftSession, key: str) -> list[list[tuple[str, DraftSession]]]:
    """The groups to ask in order in a session's place; by default each of its parts is one."""
    if isinstance(session, SessionGroups):
        return [list(group) for group in session.groups]
    return [[part] for part in session_parts(session, key)]


def key_of(drafter: Drafter) -> str:
    """What costs and acceptance of a drafter are remembered under.

    Its own `key`, or else class and options: the `repr` of a dataclass, which has both.
    """
    if isinstance(drafter, Keyed):
        return drafter.key
    kind = type(drafter)
    described = repr(drafter) if hasattr(kind, "__dataclass_fields__") else kind.__qualname__
    return f"{kind.__module__}.{described}"


def all_drafters(drafter: Drafter | None) -> Iterator[Drafter]:
    """A drafter and all that it is made of, itself first; nothing for None."""
    if drafter is not None:
        yield drafter
        for part in drafter.drafters if isinstance(drafter, DrafterParts) else ():
            yield from all_drafters(part)


def models_of(drafter: Drafter | None) -> list[nn.Module]:
    """Models that run for a drafter, its parts' included, each once."""
    models = [part.model for part in all_drafters(drafter) if isinstance(part, RunsModel)]
    return list({id(model): model for model in models}.values())
