"""The drafter's side of a generation: which sessions are asked, and which draft is taken."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import mlx.core as mx

from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    RoundRecord,
    Session,
)
from specdec_mlx.draft_length.contract import DraftLength, ValuesDrafts

if TYPE_CHECKING:
    from specdec_mlx.sequence import SequenceState
    from specdec_mlx.target import Verifier
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.errors import DraftError
from specdec_mlx.exactness.features import FeatureFeed
from specdec_mlx.strangers import begin_session


class SessionPart(NamedTuple):
    """One of the sessions to ask: its drafter's key, whether that is free, and how."""

    key: str
    is_cheap: bool
    propose: Callable[[int], Draft]


Proposal = tuple[str, Draft]  # a drafter's key, and its draft


NO_MATCH = "the drafter found nothing to propose"


NOT_WORTH = "not worth it at these costs"


NOTHING: Proposal = "", NO_DRAFT


class Selection(ABC):
    """Asks the sessions of a drafter for the draft that is worth most.

    values: the draft length where it values drafts. judge: where that does not, it values those of
    look-ups and of drafters that cost time, at the length that is given. may_find: a draft is
    likely to be looked for after this round. why_none: why nothing is drafted. has_cheap, is_free:
    some of the sessions, or all, are free to ask.
    """

    length: DraftLength
    stream: Any = None
    values: ValuesDrafts | None = None
    judge: Auto | None = None
    why_none: str = NO_MATCH
    may_find: bool = False
    has_cheap: bool = False
    is_free: bool = True
    groups: Sequence[Sequence[SessionPart]] = ()

    @abstractmethod
    def _limit(self, part: SessionPart) -> int:
        """Most tokens to draft now."""

    def _may_fork(self) -> bool:
        return True

    def use(self, session: Session, key: str) -> None:
        """Ask this session, or those that it is made of, from now on."""
        self.values = self.length if isinstance(self.length, ValuesDrafts) else None
        self.groups = [
            [SessionPart(part, one.cheap, self._way_to(part, one)) for part, one in group]
            for group in session.groups(key)
        ]
        kinds = [{part.is_cheap for part in group} for group in self.groups]
        self.has_cheap = any(True in kind for kind in kinds)
        self.is_free = all(False not in kind for kind in kinds)
        if self.values is None and any(len(kind) > 1 for kind in kinds):
            self.judge = Auto()

    def _way_to(self, key: str, session: Session) -> Callable[[int], Draft]:
        if self.values is None:
            return session.propose
        return self.values.begin(key, session, self._may_fork)

    def select(self) -> Proposal:
        """The best draft of the first group of sessions that has one, and its drafter's key."""
        for group in self.groups:
            proposal = self._best_of(group)
            if len(proposal[1].tokens):
                return proposal
        return NOTHING

    def _best_of(self, group: Sequence[SessionPart]) -> Proposal:
        """The draft that is worth most; no token that was drawn decides, see `Session.groups`."""
        best, drawn = self._best_cheap(group)
        for part in group:
            limit = 0 if part.is_cheap else self._limit(part)
            if limit and (not len(best[1]) or self._beats_best(part, best, limit)):
                self.may_find = True
                draft = self._ask(part, limit)
                if len(draft.tokens):
                    return part.key, draft
        return best if len(best[1].tokens) else drawn

    def _beats_best(self, part: SessionPart, best: Proposal, limit: int) -> bool:
        """True if a session that costs time promises more than the best of the others."""
        if self.values is not None:
            return self.values.beats_chosen(part.key)
        if self.judge is None:
            return True
        self.judge.prices.most = limit
        self.judge.limit(best[0], cheap=True)
        _, worth = self.judge.choose([best])
        self.judge.limit(part.key, cheap=False)
        return not len(worth) or self.judge.beats_chosen(part.key)

    def _best_cheap(self, group: Sequence[SessionPart]) -> tuple[Proposal, Proposal]:
        """Of the sessions that are free to ask, the best point mass, and a drawn draft."""
        certain: list[Proposal] = []
        drawn = NOTHING
        for part in group:
            if part.is_cheap and (limit := self._limit(part)):
                draft = self._ask(part, limit)
                if draft.logprobs is not None:
                    drawn = drawn if len(drawn[1]) else (part.key, draft)
                elif len(draft.tokens):
                    certain.append((part.key, draft))
        if not certain:
            return NOTHING, drawn
        self.why_none = NOT_WORTH
        if self.values is not None:
            return self.values.choose(certain), drawn
        key, draft = max(certain, key=lambda proposal: proposal[1].match)
        return (key, draft.head(self.length.cut(key, draft))), drawn

    def has_draft(self) -> bool:
        """True if there may be a draft now; only cheap sessions are asked."""
        for group in self.groups:
            for part in group:
                if not part.is_cheap and self._limit(part):
                    return True
            best, drawn = self._best_cheap(group)
            if len(best[1].tokens) or len(drawn[1].tokens):
                return True
        return False

    def _ask(self, part: SessionPart, limit: int) -> Draft:
        """A session's draft, within the limit; if it cost time, cut to what is worth verifying."""
        with mx.stream(self.stream):
            draft = part.propose(limit)
        if not isinstance(draft, Draft):
            kind = type(draft).__name__
            raise DraftError(f"{part.key} proposed a {kind}; expected a specdec_mlx.Draft.")
        if isinstance(draft.tokens, mx.array) and draft.tokens.ndim == 0:
            raise DraftError(f"{part.key} proposed an array of shape (); expected token ids [K].")
        if len(draft.tokens) > limit:
            draft = draft.head(limit)
        if part.is_cheap or draft.logprobs is not None:
            return draft
        return draft.head(self.length.cut(part.key, draft))


OFF = "drafter=None"


NOT_EXACT = "this model is not exact for several positions"


@dataclass
class Drafting(Selection):
    """Asks a drafter's session for drafts that are worth verifying.

    keeps_cache: the caller keeps the target's caches, which end with the last token. part: key of
    the latest draft's drafter, or "". features: what the session reads of the target. is_shared:
    ranks draft together. is_under_way: the pass of the latest draft is launched.
    """

    is_shared: ClassVar[bool] = False
    drafter: Drafter | None
    length: DraftLength
    target: Verifier
    sequence: SequenceState
    _: KW_ONLY
    keeps_cache: bool
    stream: Any
    session: Session | None = None
    features: FeatureFeed | None = None
    part: str = ""
    why_none: str = OFF
    is_under_way: bool = False

    def begin(self, context: DraftContext) -> None:
        """Begin the session, before the target reads the prompt."""
        if self.drafter is None:
            return
        self.why_none = NO_MATCH
        # which a drafter may keep: it does not grow
        prompt = list(self.sequence.tokens)
        self.session = begin_session(self.drafter, prompt, context)
        self.features = FeatureFeed.between(self.drafter, self.session, self.target)
        self.use(self.session, self.drafter.key)

    def _may_fork(self) -> bool:
        return self.target.takes_trees()

    def propose(self) -> Draft:
        """The best draft of the first group of sessions that has one."""
        is_timed = self.values is not None and self.values.wants_timing(0)
        # timed in one round
        self.may_find = self.has_cheap or (is_timed and self.may_find)
        self.part, draft = self.select() if self.sequence.wants_more() else NOTHING
        return draft

    def record(self, round_: RoundRecord) -> None:
        """Tell the draft length of a finished round."""
        if self.groups:
            self.length.record(round_)
        if self.judge is not None:
            # a pass costs as much, whoever drafts
            self.judge.record(replace(round_, steady=False))

    def agree_on_end(self) -> bool:
        """True: alone, a generation ends where its caller is; see `ranks.SharedDrafting`."""
        return True

    def close(self, end: int) -> None:
        """Tell the session that the first `end` tokens are all that the caller has."""
        if self.session is not None:
            self.session.close(end)

    def _limit(self, part: SessionPart) -> int:
        """Most tokens to draft now: by choice, by max_tokens, and by what the caches can undo."""
        besides = 0 if self.keeps_cache else 1  # one comes with the verdict
        wanted = self.sequence.num_remaining(besides)
        limit = self.length.limit(part.key, part.is_cheap)
        # the caches need not be asked
        if limit == 0 or (wanted is not None and wanted <= 0):
            is_timed = self.values is not None and self.values.wants_timing(0)
            self.why_none = self.why_none if limit or is_timed else NOT_WORTH
            return 0
        self.why_none = NO_MATCH
        position, room = self.target.rollback.position, self.target.measure_width()
        if self.sequence.embeddings is not None and position < self.sequence.prompt_length:
            return 0
        if room is not None:
            limit = min(limit, room - max(1, len(self.sequence.tokens) - position))
            self.why_none = self.why_none if limit > 0 else NOT_EXACT
        return max(0, limit if wanted is None else min(limit, wanted))
