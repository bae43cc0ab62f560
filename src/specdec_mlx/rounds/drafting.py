"""The drafter's side of a generation: its session, how much it may draft, what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from specdec_mlx.draft_length.auto import Unpriced
from specdec_mlx.errors import DraftError
from specdec_mlx.rounds.features import FeatureFeed
from specdec_mlx.rounds.sequence import SequenceState
from specdec_mlx.target.inputs import begin_session
from specdec_mlx.types import (
    NO_DRAFT,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftLength,
    DraftSession,
    RoundRecord,
    TakesTrees,
    Target,
    ValuesDrafts,
    is_cheap,
    key_of,
    session_groups,
)


class _Part(NamedTuple):
    """One of the sessions to ask.

    key: its drafter's. is_cheap: True if asking it costs nothing. propose: asks it, up to a limit.
    """

    key: str
    is_cheap: bool
    propose: Callable[[int], Draft]


class Drafting:
    """Asks a drafter's session for drafts that are worth verifying.

    What a session and a draft length can do is found out once, when the session begins.

    Args:
        drafter: None for plain decoding; its session begins with `begin`.
        length: the policy of how many tokens to draft.
        target: what the drafts are for.
        sequence: the text.
        keeps_cache: True if the caller keeps the target's caches, which then end with the last
            token.
        stream: MLX's stream to run on.

    session: None before `begin`, and without a drafter. part: key of the drafter of the latest
    draft, one of several under `FirstOf`; "" if there was none. features: what the session reads of
    the target, None if nothing. values: the draft length where it values drafts, once a session has
    begun.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        length: DraftLength,
        target: Target,
        sequence: SequenceState,
        *,
        keeps_cache: bool,
        stream: Any,
    ) -> None:
        """Nothing has begun."""
        self.drafter = drafter
        self.length = length
        self.target = target
        self.sequence = sequence
        self.stream = stream
        self.session: DraftSession | None = None
        self.features: FeatureFeed | None = None
        self.part = ""
        self.keeps_cache = keeps_cache
        self.values: ValuesDrafts | None = None
        self._groups: list[list[_Part]] = []
        self.has_cheap_part = False
        self.is_free = True

    def begin(self, context: DraftContext) -> None:
        """Begin the session, before the target reads the prompt."""
        if self.drafter is None:
            return
        self.session = begin_session(self.drafter, self.sequence.tokens, context)
        self.features = FeatureFeed.between(self.drafter, self.session, self.target)
        groups = session_groups(self.session, key_of(self.drafter))
        length = self.length
        values: ValuesDrafts | None = length if isinstance(length, ValuesDrafts) else None
        if values is None and any(len(group) > 1 for group in groups):
            self.length = values = Unpriced(length)
        for group in groups:
            self._groups.append([])
            for key, session in group:
                cheap = is_cheap(session)
                way = values.begin(key, session, self._may_fork) if values else session.propose
                self._groups[-1].append(_Part(key, cheap, way))
                self.has_cheap_part = self.has_cheap_part or cheap
                self.is_free = self.is_free and cheap
        self.values = values

    def _may_fork(self) -> bool:
        """True if the target takes trees now."""
        return isinstance(self.target, TakesTrees) and self.target.takes_trees()

    def propose(self) -> Draft:
        """A draft for the text so far: of the first group of sessions that has one, the best."""
        self.part = ""
        if self.sequence.wants_more():
            for group in self._groups:
                key, draft = self._best_of(group)
                if len(draft):
                    self.part = key
                    return draft
        return NO_DRAFT

    def _best_of(self, group: Sequence[_Part]) -> tuple[str, Draft]:
        """The draft that is worth most, and its drafter's key.

        Nothing here looks at a token that was drawn: point masses are compared with each other, and
        what costs time is asked, by what is known before, or it is not; see `types.SessionGroups`.
        """
        key, best, drawn = self._best_cheap(group)
        for part in group:
            limit = 0 if part.is_cheap else self._limit(part)
            if limit and not (len(best) and self.values and not self.values.outbids(part.key)):
                draft = self._ask(part, limit)
                if len(draft):
                    return part.key, draft
        return (key, best) if len(best) else drawn

    def _best_cheap(self, group: Sequence[_Part]) -> tuple[str, Draft, tuple[str, Draft]]:
        """Of the sessions that are free to ask: the best draft with its key, and one drawn."""
        drafts: list[tuple[str, Draft]] = []
        drawn = ("", NO_DRAFT)
        for part in group:
            if part.is_cheap and (limit := self._limit(part)):
                draft = self._ask(part, limit)
                if draft.logprobs is not None:
                    drawn = drawn if len(drawn[1]) else (part.key, draft)
                elif len(draft):
                    drafts.append((part.key, draft))
        if not drafts:
            return "", NO_DRAFT, drawn
        if self.values is None:
            key, draft = drafts[0]
            return key, draft.head(self.length.cut(key, draft)), drawn
        index, length = self.values.choose(drafts)
        key, draft = drafts[index]
        return key, draft.head(length), drawn

    def has_draft(self) -> bool:
        """True if there may be a draft after the pass under way; only cheap sessions are asked."""
        return self.sequence.wants_more() and any(map(self._may_have_draft, self._groups))

    def _may_have_draft(self, group: Sequence[_Part]) -> bool:
        if any(not part.is_cheap and self._limit(part) for part in group):
            return True
        _, best, drawn = self._best_cheap(group)
        return len(best) > 0 or len(drawn[1]) > 0

    def record(self, round_: RoundRecord) -> None:
        """Tell the draft length of a finished round."""
        if self._groups:
            self.length.record(round_)

    def observe(self) -> None:
        """Tell the session what was emitted."""
        if self.session is not None:
            self.session.observe(self.sequence.not_handed_out)

    def close(self, end: int) -> None:
        """Tell the session that the first `end` tokens are all that the caller has."""
        if isinstance(self.session, Closes):
            self.session.close(end)

    def _ask(self, part: _Part, limit: int) -> Draft:
        """A session's draft, within the limit; cut to what is worth verifying if it cost time."""
        with mx.stream(self.stream):
            draft = part.propose(limit)
        if not isinstance(draft, Draft):
            raise DraftError(
                f"{part.key} proposed a {type(draft).__name__}; expected a specdec_mlx.Draft. "
                "Return Draft() where there is nothing to propose."
            )
        if isinstance(draft.tokens, mx.array) and draft.tokens.ndim == 0:
            raise DraftError(
                f"{part.key} proposed an array of shape (); expected token ids [K]. Use "
                "Draft([token]) for a single one."
            )
        draft = draft.head(limit)
        if part.is_cheap or draft.logprobs is not None:
            return draft
        return draft.head(self.length.cut(part.key, draft))

    def _limit(self, part: _Part) -> int:
        """Most tokens to draft now: by choice, by max_tokens, and by what the caches can undo."""
        # The last token wanted comes with the verdict.
        wanted = self.sequence.num_wanted(0 if self.keeps_cache else 1)
        limit = self.length.limit(part.key, part.is_cheap)
        if limit == 0 or (wanted is not None and wanted <= 0):  # the caches need not be asked
            return 0
        position, room = self.target.rollback.position, self.target.widest_pass()
        if self.sequence.embeddings_from(position, 1) is not None:
            return 0
        if room is not None:
            limit = min(limit, room - max(1, len(self.sequence.tokens) - position))
        return max(0, limit if wanted is None else min(limit, wanted))
