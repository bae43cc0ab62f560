"""Drafts of several texts from the same passes of a draft model, or of a trained head.

Each text has a row of the caches. The first one that asks in a round has a draft drawn for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, states_of, wait_for
from specdec_mlx.contracts import (
    MOST_WAITING,
    Draft,
    DraftContext,
    FeatureRows,
    GoesOn,
    Session,
)
from specdec_mlx.drafters.drawing import ChainDraws, truncate
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.session import RecurrentSource
from specdec_mlx.drafters.model import MOST_PENDING, ModelDrafter, ModelSource
from specdec_mlx.drafters.writing import WritingSession
from specdec_mlx.exactness.probe import can_hold_rows
from specdec_mlx.models.anatomy import vocab_size_of


@dataclass
class SharedDrafts:
    """What the texts of a batch share of their drafters; `DraftContext.shared_drafts`."""

    _by_model: dict[tuple[int, type], tuple[Any, DraftPasses | None]] = field(default_factory=dict)

    def __call__(self, drafter: Any, prompt: Sequence[int], context: DraftContext) -> Session:
        """Begin a text beside others; alone for trees, and where passes cannot be shared."""
        model = drafter.model
        key = id(model), type(drafter)
        if key not in self._by_model:
            self._by_model[key] = model, passes_of(drafter)
        passes = self._by_model[key][1]
        alone: WritingSession = drafter.begin(prompt, replace(context, shared_drafts=None))
        if passes is None or drafter.branches > 1:
            return alone
        return SharedSession(passes, alone)


def passes_of(drafter: Any) -> DraftPasses | None:
    """Shared passes of its model, or of a head with one layer; None where there cannot be any."""
    model, kind = drafter.model, type(drafter)
    is_head = kind is HeadDrafter and getattr(model, "moves_on", False)
    if not (is_head or kind is ModelDrafter):  # an exit is no model
        return None
    fresh = make_prompt_cache(model)
    may_share = can_trim_prompt_cache(fresh) and (is_head or can_hold_rows(model))
    caches = BatchCaches.like(fresh) if may_share else None
    passes = HeadPasses if is_head else ModelPasses
    return None if caches is None else passes(model, caches)


@dataclass
class DraftPasses(ABC):
    """Passes over several texts, each of which is a row of the caches.

    sessions: of the rows, in order. joining: not yet rows.
    """

    model: Any
    caches: BatchCaches
    sessions: list[SharedSession] = field(default_factory=list)
    joining: list[SharedSession] = field(default_factory=list)

    def draft(self, limit: int, asked_by: SharedSession) -> None:
        """Draw `limit` tokens for every text, asked for or not: a row more costs little."""
        self.update()
        if asked_by not in self.sessions:
            return
        self.catch_up()
        every, tokens = [session.alone.draws(limit) for session in self.sessions], None
        for _ in range(limit):
            logits = self.next_logits(tokens)
            tokens = [draws.draw(row) for draws, row in zip(every, logits, strict=True)]
            mx.async_eval(tokens)
        for session, draws in zip(self.sessions, every, strict=True):
            session.set_draft(draws)

    def run(self, model: Any, texts: Sequence[Any]) -> list[mx.array]:
        """One pass over these tokens of each text; what it makes of each one's last, [1, W]."""
        made = self.caches.feed(model, texts)
        return [made[row, len(text) - 1][None] for row, text in enumerate(texts)]

    def update(self) -> None:
        """Drop the texts that ended, let new ones in, go back to what was kept of the others."""
        waiting, self.joining = self.joining, []
        for session in waiting:
            if session.has_ended:
                continue
            if (alone := self.read_alone(session)) is None:
                self.joining.append(session)
            else:
                self.caches.add(alone.caches, alone.end)
                self.sessions.append(session)
        staying = [(row, x) for row, x in enumerate(self.sessions) if not x.has_ended]
        self.caches.keep([row for row, _ in staying])
        self.sessions = [session for _, session in staying]
        self.go_back()

    def go_back(self) -> None:
        """Drop what no session counts to its text."""
        self.caches.go_back([self.end_of(session) for session in self.sessions])

    @abstractmethod
    def next_logits(self, tokens: Any) -> Sequence[mx.array]:
        """Logits [1, V] after a token of each text, or after the texts for None."""

    @abstractmethod
    def catch_up(self) -> None:
        """Read what was written while no draft was asked for, if it is much."""

    @abstractmethod
    def read_alone(self, session: SharedSession) -> Rollback | None:
        """Caches with what a text read before it is a row; None where it cannot be a row yet."""

    @abstractmethod
    def end_of(self, session: SharedSession) -> int:
        """Positions of a row that count."""

    def see(self, session: SharedSession, features: FeatureRows) -> None:
        """Take the target's rows of a text; by default its source does."""
        session.source.see(features)

    @abstractmethod
    def observe(self, session: SharedSession, tokens: Sequence[int]) -> None:
        """Take the tokens emitted."""

    def leave(self, session: SharedSession, length: int) -> None:  # noqa: B027  # optional
        """Take back what a text of `length` tokens needs of its row; by default nothing."""


class ModelPasses(DraftPasses):
    """A draft model's passes over several texts."""

    def next_logits(self, tokens: Any) -> Sequence[mx.array]:
        """Logits [1, V] after a token of each text, or after the texts for None."""
        return self.run(self.model, self.pending() if tokens is None else tokens)

    def pending(self) -> list[list[int]]:
        """Each text's tokens that its row does not hold."""
        most = vocab_size_of(self.model) - 1  # an id that the target alone has
        return [
            [min(token, most) for token in session.source.tokens[session.position :]]
            for session in self.sessions
        ]

    def catch_up(self) -> None:
        """Feed what was written while the model was not asked, but for its last tokens."""
        step = min(session.source.context.prefill_step_size for session in self.sessions)
        while max(map(len, pending := self.pending())) > MOST_PENDING:
            self.run(self.model, [ids[: min(step, max(1, len(ids) - 1))] for ids in pending])
            for session, ids in zip(self.sessions, pending, strict=True):
                session.position += min(step, len(ids) - 1)
            self.go_back()
            wait_for(self.caches.caches)

    def read_alone(self, session: SharedSession) -> Rollback:
        """Caches with what is read before this is a row."""
        source: ModelSource = session.source
        source.catch_up()
        session.position = source.rollback.position
        session.base = source.rollback.end - session.position
        return source.rollback

    def end_of(self, session: SharedSession) -> int:
        """Positions of earlier texts and of this one."""
        return session.base + session.position

    def observe(self, session: SharedSession, tokens: Sequence[int]) -> None:
        """Keep what was accepted of a draft that was asked for; the rest goes with the next."""
        text = session.source.tokens
        accepted = len(tokens) - 1 if session.was_asked else 0
        session.position = min(session.position, len(text) + accepted)
        text += tokens

    def leave(self, session: SharedSession, length: int) -> None:
        """Give the caller's caches what the row holds of the text; nothing more is read."""
        source: ModelSource = session.source
        caches, rollback = source.callers_cache, None
        if session in self.sessions and caches is not None:
            session.position = min(session.position, length)
            self.go_back()
            fresh = make_prompt_cache(self.model)
            caches[:] = self.caches.extract(self.sessions.index(session), fresh)
            rollback = Rollback(caches, session.position)
        source.leave_cache(rollback)


class HeadPasses(DraftPasses):
    """A head's passes over several texts: over pairs of a state and the token after it.

    states: of each text [n, D], for its next pass.
    """

    states: list[mx.array]

    def next_logits(self, tokens: Any) -> Sequence[mx.array]:
        """Logits of the states of its own steps; for None every complete pair is read."""
        if tokens is None:
            self.read(self.counts())
        else:
            self.states = self.run(self._forward, tokens)
        return list(mx.split(self.model.logits(mx.concatenate(self.states)), len(self.states)))

    def counts(self) -> list[int]:
        """Pairs of each text that are complete, and not read."""
        return [session.source.num_pending for session in self.sessions]

    def read(self, counts: Sequence[int]) -> None:
        """Read so many of the pairs of each text."""
        pairs = [
            session.source.take_pairs(count)
            for session, count in zip(self.sessions, counts, strict=True)
        ]
        self.states = [states for states, _ in pairs]
        self.states = self.run(self._forward, [tokens for _, tokens in pairs])

    def _forward(self, ids: mx.array, cache: list[Any]) -> Any:
        """States [rows, S, D] after `self.states` and ids [rows, S]."""
        width = ids.shape[1]
        padded = [mx.pad(x, [(0, width - x.shape[0]), (0, 0)]) for x in self.states]
        return self.model.forward(mx.stack(padded), ids, cache)

    def catch_up(self) -> None:
        """Read all pairs but the last of each text, if they are many."""
        if max(self.counts()) * len(self.sessions) < MOST_WAITING:
            return
        self.update()
        counts = [count - 1 for count in self.counts()]
        if min(counts, default=0) > 0:
            self.read(counts)
            mx.async_eval(states_of(self.caches.caches))

    def read_alone(self, session: SharedSession) -> Rollback | None:
        """Caches with all pairs but the last; None before the first token, and if there are few."""
        source: RecurrentSource = session.source
        if len(source.tokens) > source.num_prompt and source.num_pending > 0:
            source.read_pairs(but=1)
            if source.first.num_read:
                return source.first.rollback
        return None

    def end_of(self, session: SharedSession) -> int:
        """Pairs in its row."""
        read: int = session.source.first.num_read
        return read

    def see(self, session: SharedSession, features: FeatureRows) -> None:
        """Let the rows wait, and read them if they are many."""
        if session in self.sessions:
            session.source.take(features)
            self.catch_up()
        else:
            session.source.see(features)

    def observe(self, session: SharedSession, tokens: Sequence[int]) -> None:
        """Take the tokens emitted, of which the first may make a row of the text."""
        if session in self.sessions:
            session.source.tokens += tokens
            self.catch_up()
        else:
            session.source.observe(tokens)


class SharedSession(Session):
    """One of several texts: its drafts come from a shared pass, once it is a row of that.

    alone: its session, which drafts until then. position: tokens of the text in its row. base:
    positions of earlier texts there. drawn: its draft of this round, which may not be asked for.
    """

    base = position = 0
    has_ended = was_asked = False
    drawn: ChainDraws | None = None

    def __init__(self, passes: DraftPasses, alone: WritingSession) -> None:
        self.passes = passes
        self.alone = alone
        self.source: Any = alone.source
        passes.joining.append(self)

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens; the first text that asks has all texts' drafts drawn."""
        if (drawn := self.shared_draft(limit)) is None:
            return self.alone.propose(limit)
        return drawn.draft(min(limit, len(drawn)))

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The part that is worth verifying; see `truncate`."""
        if (drawn := self.shared_draft(limit)) is None:
            return self.alone.propose_while(limit, goes_on)
        return truncate(drawn, goes_on)

    def shared_draft(self, limit: int) -> ChainDraws | None:
        """The tokens drawn for this text in this round; None where it is no row yet."""
        if limit == 0:
            return None
        if self.drawn is None:
            self.passes.draft(limit, self)
        self.was_asked = self.drawn is not None
        return self.drawn

    def set_draft(self, draws: ChainDraws) -> None:
        """Take the draft of this round; a model's row holds all but its last token."""
        self.drawn = draws
        self.position = len(self.source.tokens) + len(draws) - 1

    @property
    def reads_target(self) -> bool:
        """True for a head."""
        return self.alone.reads_target

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions."""
        self.passes.see(self, features)

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens emitted."""
        self.passes.observe(self, tokens)
        self.drawn, self.was_asked = None, False

    def close(self, length: int) -> None:
        """Leave the rows."""
        self.has_ended = True
        self.passes.leave(self, length)
        self.alone.close(length)
