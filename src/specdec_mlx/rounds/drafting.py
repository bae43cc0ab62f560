"""The drafter's side of a generation: its session, how much it may draft, what it is told."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from specdec_mlx.draft_length.expected import ExpectedTokens
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.errors import DraftError
from specdec_mlx.rounds.features import FeatureFeed
from specdec_mlx.rounds.sequence import SequenceState
from specdec_mlx.target.inputs import begin_session
from specdec_mlx.types import (
    NO_DRAFT,
    ChoosesDrafts,
    ChoosesSteps,
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftsAtOnce,
    DraftSession,
    DraftsTrees,
    GrowsTrees,
    ProposesTrees,
    RoundRecord,
    SeesTarget,
    SizesTrees,
    Stepwise,
    TakesTrees,
    Target,
    TimesReading,
    TimesSteps,
    is_cheap,
    key_of,
    session_groups,
)


class _Part(NamedTuple):
    """One of the sessions to ask.

    key: its drafter's. is_cheap: whether asking it costs nothing. propose: asks it, within a limit.
    grows: whether that is one of nodes, of which no path is longer than what is wanted.
    """

    key: str
    session: DraftSession
    is_cheap: bool
    propose: Callable[[int], Draft]
    grows: bool


class Drafting:
    """Asks a drafter's session for drafts that are worth verifying.

    Args:
        drafter: None for plain decoding; its session begins with `begin`.
        length: the policy of how many tokens to draft.
        target: what the drafts are for.
        sequence: the text.
        keeps_cache: whether the caller keeps the target's caches, which then end with the last
            token.
        stream: MLX's stream to run on.

    session: None before `begin`, and without a drafter. part: key of the drafter of the latest
    draft, one of several under `FirstOf`; "" if there was none. features: what the session reads of
    the target, None if nothing.
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
        self.keeps_cache = keeps_cache
        self.stream = stream
        self.session: DraftSession | None = None
        self.features: FeatureFeed | None = None
        self.part = ""
        self._groups: list[list[_Part]] = []
        self._choice, self._expected = _choice_of(length)
        self.has_cheap_part = False

    def begin(self, context: DraftContext) -> None:
        """Begin the session, before the target reads the prompt."""
        if self.drafter is not None:
            self.session = begin_session(self.drafter, self.sequence.tokens, context)
            self.features = FeatureFeed.between(self.drafter, self.session, self.target)
            self._groups = [
                [self._part(key, part) for key, part in group]
                for group in session_groups(self.session, key_of(self.drafter))
            ]
            self.has_cheap_part = any(part.is_cheap for group in self._groups for part in group)

    @property
    def is_free(self) -> bool:
        """Whether all parts may be asked for drafts that are thrown away."""
        return all(part.is_cheap for group in self._groups for part in group)

    def _part(self, key: str, session: DraftSession) -> _Part:
        grows = isinstance(session, ProposesTrees) and isinstance(self.length, GrowsTrees)
        return _Part(key, session, is_cheap(session), self._way_to_ask(key, session), grows)

    def _way_to_ask(self, key: str, session: DraftSession) -> Callable[[int], Draft]:
        """Step by step or node by node, where session and draft length can; else up to a limit."""
        if isinstance(session, ProposesTrees) and isinstance(self.length, GrowsTrees):
            grows = self.length
            grows.begin_tree(key, [name for name, _ in session.guessers])
            return lambda limit: session.propose_tree(
                limit, self._num_wanted() or limit, grows, self._may_fork
            )
        sizes = self.length if isinstance(self.length, SizesTrees) else None
        forks = isinstance(session, DraftsTrees) and session.forks
        if forks and sizes is not None and self._may_fork():
            sizes.begin_forks(key)
            return session.propose
        if not isinstance(session, Stepwise) or not isinstance(self.length, ChoosesSteps):
            return session.propose
        time_step = session.time_step if isinstance(session, TimesSteps) else None
        self.length.begin_steps(
            key,
            time_step,
            time_reading=session.time_reading if isinstance(session, TimesReading) else None,
            at_once=session.at_once if isinstance(session, DraftsAtOnce) else False,
            reads_along=isinstance(session, SeesTarget),
        )
        goes_on = functools.partial(self.length.goes_on, key)
        return lambda limit: session.propose_while(limit, goes_on)

    def _may_fork(self) -> bool:
        """Whether the target takes trees now."""
        return isinstance(self.target, TakesTrees) and self.target.takes_trees()

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Tell the draft length what reading the prompt took."""
        if isinstance(self.length, ChoosesSteps):
            self.length.prefilled(num_tokens, seconds)

    def propose(self) -> Draft:
        """A draft for the text so far: of the first group of sessions that has one, the best."""
        if self.sequence.wants_more():
            for group in self._groups:
                self.part, draft = self._best_of(group)
                if len(draft):
                    return draft
        self.part = ""
        return NO_DRAFT

    def _best_of(self, group: Sequence[_Part]) -> tuple[str, Draft]:
        """The draft that is worth most, and its drafter's key.

        Nothing here looks at a token that was drawn: point masses are compared with each other, and
        what costs time is asked, by what is known before, or it is not; see `types.SessionGroups`.
        """
        key, best, drawn = self._best_cheap(group)
        for part in group:
            limit = 0 if part.is_cheap else self._limit(part)
            if limit and (not len(best) or self._choice.outbids(part.key, limit)):
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
                if draft.logprobs is None:
                    drafts += [(part.key, draft)] * (len(draft) > 0)
                elif not len(drawn[1]):
                    drawn = part.key, draft
        if not drafts:
            return "", NO_DRAFT, drawn
        if len(group) == 1:
            key, draft = drafts[0]
            return key, draft.head(self.length.cut(key, draft)), drawn
        index, length = self._choice.choose(drafts)
        key, draft = drafts[index]
        return key, draft.head(length), drawn

    def has_draft(self) -> bool:
        """Whether there may be a draft after the pass under way; only cheap sessions are asked."""
        return self.sequence.wants_more() and any(map(self._may_have_draft, self._groups))

    def _may_have_draft(self, group: Sequence[_Part]) -> bool:
        if any(not part.is_cheap and self._limit(part) for part in group):
            return True
        _, best, drawn = self._best_cheap(group)
        return len(best) > 0 or len(drawn[1]) > 0

    def record(self, round_: RoundRecord) -> None:
        """Tell the draft length, and what ranks drafts, of a finished round."""
        self.length.record(round_)
        if self._expected is not None:
            self._expected.record(round_)

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
        draft = _checked(draft, part.key).head(limit)
        if part.is_cheap or draft.logprobs is not None:
            return draft
        return draft.head(self.length.cut(part.key, draft))

    def _limit(self, part: _Part) -> int:
        """Most tokens to draft now: by choice, by max_tokens, and by what the caches can undo.

        The last token wanted comes with the verdict, so it is only drafted if it is to be in the
        caller's caches.
        """
        position = self.target.rollback.position
        if self.sequence.embeddings_from(position, 1) is not None:
            return 0
        wanted = self._num_wanted()
        if wanted is not None and wanted <= 0:
            return 0
        limit = self.length.limit(part.key, part.is_cheap)
        if limit == 0:  # paused: the caches need not be asked
            return 0
        ceilings = [limit] if wanted is None or part.grows else [limit, wanted]
        room = self.target.widest_pass()
        if room is not None:
            ceilings.append(room - max(1, len(self.sequence.tokens) - position))
        return max(0, min(ceilings))

    def _num_wanted(self) -> int | None:
        """Most tokens of the text that a draft may stand for; None for any number."""
        return self.sequence.num_wanted(besides=0 if self.keeps_cache else 1)


def _choice_of(length: DraftLength) -> tuple[ChoosesDrafts, ExpectedTokens | None]:
    """What ranks drafts: the draft length, or else expected tokens, which have to be told."""
    if isinstance(length, ChoosesDrafts):
        return length, None
    expected = ExpectedTokens(length.cut)
    return expected, expected


def _checked(draft: object, key: str) -> Draft:
    """What a session returned, if it is a draft that has a length."""
    if not isinstance(draft, Draft):
        raise DraftError(
            f"{key} proposed a {type(draft).__name__}; expected a specdec_mlx.Draft. Return "
            "Draft() where there is nothing to propose."
        )
    if isinstance(draft.tokens, mx.array) and draft.tokens.ndim == 0:
        raise DraftError(
            f"{key} proposed an array of shape (); expected token ids [K]. Use Draft([token]) for "
            "a single one."
        )
    return draft
