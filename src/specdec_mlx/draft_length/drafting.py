"""Ask the sessions of a drafter for drafts, and choose the draft to verify."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import mlx.core as mx

from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    RoundRecord,
    Session,
    all_drafters,
)
from specdec_mlx.draft_length.value import Auto, DraftLength, MayFork
from specdec_mlx.duck_typed import as_session
from specdec_mlx.errors import DraftError
from specdec_mlx.exactness.feature_feed import FeatureFeed

if TYPE_CHECKING:
    from specdec_mlx.sequence import SequenceState
    from specdec_mlx.target import Verifier

ANY_LENGTH = 1 << 30  # tokens of a draft that has no bound

OFF = "drafter=None"
NO_MATCH = "the drafter found nothing to propose"
NOT_WORTH = "not worth it at these costs"
NOT_EXACT = "this model is not exact for several positions"


class SessionPart(NamedTuple):
    """A session to ask for drafts.

    Attributes:
        key: key of its drafter.
        is_cheap: asking is free.
        propose: makes a draft of at most this number of tokens.
    """

    key: str
    is_cheap: bool
    propose: Callable[[int], Draft]


Proposal = tuple[str, Draft]  # a drafter's key, and its draft
NOTHING: Proposal = "", NO_DRAFT


class Choice(NamedTuple):
    """A draft and the key of its drafter. Both are empty if nothing is worth verifying.

    Attributes:
        why_none: the reason for an empty draft.
        was_paid: a drafter that costs time was asked.
    """

    part: str = ""
    draft: Draft = NO_DRAFT
    why_none: str = ""
    was_paid: bool = False


Room = Callable[[], int]
"""Most tokens that a draft may have now."""


@dataclass
class Selection:
    """The sessions of a drafter in groups, and the draft length that values their drafts.

    Attributes:
        has_cheap: some sessions are free to ask.
        is_free: all sessions are free to ask.
    """

    length: DraftLength
    groups: Sequence[Sequence[SessionPart]]
    has_cheap: bool
    is_free: bool
    stream: Any

    @classmethod
    def of(
        cls, session: Session, key: str, length: DraftLength, may_fork: MayFork, stream: Any
    ) -> Selection:
        """Select among a session's parts. A session without parts is the only part."""
        groups = session.groups(key)
        kinds = [{one.cheap for _, one in group} for group in groups]
        # Free and expensive sessions compete by value, even if the length is fixed.
        if not length.values_drafts and any(len(kind) > 1 for kind in kinds):
            length = Auto(policy=length)
        parts = [
            [SessionPart(key, one.cheap, length.begin(key, one, may_fork)) for key, one in group]
            for group in groups
        ]
        is_free = all(kind == {True} for kind in kinds)
        return cls(length, parts, any(True in kind for kind in kinds), is_free, stream)

    def choose(self, room: Room) -> Choice:
        reasons, was_paid = [NOT_WORTH], False
        for group in self.groups:
            best = self.look_up(group, room, reasons) if self.has_cheap else NOTHING
            # No drawn token decides: a drawn draft must not depend on its own tokens (see
            # `Session.groups`).
            is_certain = len(best[1].tokens) > 0 and best[1].logprobs is None
            for part in group:
                limit = 0 if part.is_cheap else self.limit(part, room, reasons)
                if limit and (not is_certain or self.length.beats_chosen(part.key)):
                    was_paid, draft = True, self.ask(part, limit)
                    if draft.logprobs is None:
                        draft = draft.head(self.length.cut(part.key, draft))
                    if len(draft.tokens):
                        return Choice(part.key, draft, was_paid=True)
            if len(best[1].tokens):
                return Choice(*best, was_paid=was_paid)
        return Choice("", NO_DRAFT, reasons[-1], was_paid)

    def look_up(self, group: Sequence[SessionPart], room: Room, reasons: list[str]) -> Proposal:
        """The best draft of the free parts. Deterministic drafts come before drawn drafts."""
        certain, drawn = list[Proposal](), NOTHING
        for part in group:
            limit = self.limit(part, room, reasons) if part.is_cheap else 0
            draft = self.ask(part, limit) if limit else NO_DRAFT
            if draft.logprobs is None and len(draft.tokens):
                certain.append((part.key, draft))
            elif len(draft.tokens) and not len(drawn[1].tokens):
                drawn = part.key, draft
        if certain:
            reasons.append(NOT_WORTH)
            best = self.length.choose(certain)
            return best if len(best[1].tokens) else drawn
        return drawn

    def may_find(self, room: Room) -> bool:
        """Ask the free parts. Returns True if there may be a draft now."""
        for group in self.groups:
            for part in group:
                if not part.is_cheap and self.limit(part, room, []):
                    return True
            if len(self.look_up(group, room, [])[1].tokens):
                return True
        return False

    def limit(self, part: SessionPart, room: Room, reasons: list[str]) -> int:
        """Most tokens that a part may draft now. A reason for no draft is added to `reasons`."""
        limit = self.length.limit(part.key, part.is_cheap)
        if limit:
            # Asking the caches takes time, so the length is asked first.
            limit = max(0, min(limit, room()))
            reasons.append(NO_MATCH if limit else NOT_EXACT)
        return limit

    def ask(self, part: SessionPart, limit: int) -> Draft:
        """A session's draft within the limit. Raises DraftError for anything else."""
        with mx.stream(self.stream):
            draft = part.propose(limit)
        if not isinstance(draft, Draft):
            kind = type(draft).__name__
            raise DraftError(f"{part.key} proposed a {kind}; expected a specdec_mlx.Draft.")
        if isinstance(draft.tokens, mx.array) and draft.tokens.ndim == 0:
            raise DraftError(f"{part.key} proposed an array of shape (); expected token ids [K].")
        return draft.head(limit) if len(draft.tokens) > limit else draft


@dataclass
class Drafting:
    """Asks the session of a drafter for drafts that are worth verifying.

    Attributes:
        keeps_cache: the caller keeps the target's caches, which must end with the last token.
        selection: the session's parts, or None without a drafter.
        features: the target's states that the session reads.
        part: key of the latest draft's drafter, or "".
        may_find: a draft will probably be looked for after this round.
        why_none: the reason that nothing is drafted.
        is_shared: ranks draft together.
        is_under_way: the pass of the latest draft has been launched.
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
    selection: Selection | None = None
    features: FeatureFeed | None = None
    part: str = ""
    may_find: bool = False
    why_none: str = OFF
    is_under_way: bool = False

    def begin(self, context: DraftContext) -> None:
        """Begin the session, before the target reads the prompt."""
        if self.drafter is None:
            return
        self.why_none = NO_MATCH
        # A drafter may keep the list, which must not grow.
        prompt = list(self.sequence.tokens)
        session = self.drafter.begin(prompt, context)
        if not isinstance(session, Session):
            session = as_session(session, self.drafter.class_name)
        self.session = session
        if any(part.features is not None for part in all_drafters(self.drafter)):
            self.features = FeatureFeed.between(self.drafter, session, self.target)
        key = self.drafter.key
        self.selection = Selection.of(self.session, key, self.length, self.may_fork, self.stream)

    def may_fork(self) -> bool:
        return self.target.takes_trees()

    def propose(self) -> Draft:
        self.part, selection = "", self.selection
        # The verdict brings a token of its own, so the last token needs no draft.
        if selection is None or not self.sequence.wants_more(0 if self.keeps_cache else 1):
            return NO_DRAFT
        chosen = selection.choose(self.room)
        self.part = chosen.part
        if not len(chosen.draft.tokens) and not selection.length.wants_timing(0):
            self.may_find, self.why_none = False, chosen.why_none  # else a plain round is timed
        self.may_find = selection.has_cheap or chosen.was_paid or self.may_find
        return chosen.draft

    def record(self, round_: RoundRecord) -> None:
        if self.selection is not None:
            self.selection.length.record(round_)

    def as_on_first(self, tokens: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The tokens of the first rank (see `ranks.SharedDrafting`)."""
        return tokens

    def agree_on_end(self) -> bool:
        """True if the generation ends for all ranks (see `ranks.SharedDrafting`)."""
        return True

    def close(self, end: int) -> None:
        if self.session is not None:
            self.session.close(end)

    def room(self) -> int:
        """Most tokens of a draft, by max_tokens and by the positions that the caches can undo."""
        position, widest = self.target.rollback.position, self.target.measure_width()
        if self.sequence.embeddings is not None and position < self.sequence.prompt_length:
            return 0
        wanted = self.sequence.num_remaining(0 if self.keeps_cache else 1)
        rooms = [ANY_LENGTH if wanted is None else wanted]
        if widest is not None:
            # Pending tokens and the draft are fed in one pass.
            rooms.append(widest - max(1, len(self.sequence.tokens) - position))
        return min(rooms)
