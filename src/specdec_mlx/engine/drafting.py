"""The drafter's side of a generation: its session, how much it may draft, what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

from specdec_mlx.contracts import (
    Closes,
    Draft,
    DraftContext,
    Drafter,
    DraftLength,
    RoundRecord,
    Session,
    Target,
    key_of,
)
from specdec_mlx.engine.features import FeatureFeed
from specdec_mlx.engine.selection import NO_MATCH, NOT_WORTH, NOTHING, Selection, SessionPart
from specdec_mlx.engine.sequence import SequenceState
from specdec_mlx.verify.inputs import begin_session

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
    target: Target
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
        prompt = list(self.sequence.tokens)  # which a drafter may keep: it does not grow
        self.session = begin_session(self.drafter, prompt, context)
        self.features = FeatureFeed.between(self.drafter, self.session, self.target)
        self.use(self.session, key_of(self.drafter))

    def _may_fork(self) -> bool:
        takes_trees: Callable[[], bool] = getattr(self.target, "takes_trees", bool)
        return takes_trees()

    def propose(self) -> Draft:
        """The best draft of the first group of sessions that has one."""
        is_timed = self.values is not None and self.values.wants_timing(0)
        self.may_find = self.has_cheap or (is_timed and self.may_find)  # timed in one round
        self.part, draft = self.select() if self.sequence.wants_more() else NOTHING
        return draft

    def record(self, round_: RoundRecord) -> None:
        """Tell the draft length of a finished round."""
        if self.groups:
            self.length.record(round_)
        if self.judge is not None:
            self.judge.record(replace(round_, steady=False))  # a pass costs as much, whoever drafts

    def observe(self) -> None:
        """Tell the session what was emitted."""
        if self.session is not None:
            self.session.observe(self.sequence.not_handed_out)

    def agree_on_end(self) -> bool:
        """True: alone, a generation ends where its caller is; see `ranks.SharedDrafting`."""
        return True

    def close(self, end: int) -> None:
        """Tell the session that the first `end` tokens are all that the caller has."""
        if isinstance(self.session, Closes):
            self.session.close(end)

    def _limit(self, part: SessionPart) -> int:
        """Most tokens to draft now: by choice, by max_tokens, and by what the caches can undo."""
        besides = 0 if self.keeps_cache else 1  # one comes with the verdict
        wanted = self.sequence.num_remaining(besides)
        limit = self.length.limit(part.key, part.is_cheap)
        if limit == 0 or (wanted is not None and wanted <= 0):  # the caches need not be asked
            self.why_none = self.why_none if limit else NOT_WORTH
            return 0
        self.why_none = NO_MATCH
        position, room = self.target.rollback.position, self.target.widest_pass()
        if self.sequence.embeddings is not None and position < self.sequence.prompt_length:
            return 0
        if room is not None:
            limit = min(limit, room - max(1, len(self.sequence.tokens) - position))
            self.why_none = self.why_none if limit > 0 else NOT_EXACT
        return max(0, limit if wanted is None else min(limit, wanted))
