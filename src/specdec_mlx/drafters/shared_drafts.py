"""Drafts of several texts from the same passes of a draft model, or of a trained head.

Each text has a row of the caches. The first one that asks in a round has a draft drawn for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, states_of, wait_for
from specdec_mlx.contracts import MOST_WAITING, Draft, DraftContext, GoesOn
from specdec_mlx.drafters.drawing import ChainDraws, truncate
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.session import RecurrentSession
from specdec_mlx.drafters.model import MOST_PENDING, ModelDrafter, ModelSession
from specdec_mlx.drafters.writing import WritingSession
from specdec_mlx.exactness.probe import can_hold_rows
from specdec_mlx.models.anatomy import vocab_size_of


@dataclass
class SharedDrafts:
    """What the texts of a batch share of their drafters; `DraftContext.shared_drafts`."""

    _by_model: dict[int, tuple[Any, ModelPasses | None]] = field(default_factory=dict)

    def __call__(self, drafter: Any, prompt: Sequence[int], context: DraftContext) -> Any:
        """Begin a text beside others; alone for trees, and where passes cannot be shared."""
        model = drafter.model
        if id(model) not in self._by_model:
            self._by_model[id(model)] = model, passes_of(drafter)
        passes = self._by_model[id(model)][1]
        if passes is None or drafter.branches > 1:
            return drafter.begin(prompt, replace(context, shared_drafts=None))
        is_head = isinstance(passes, HeadPasses)
        begin = SharedHeadSession if is_head else SharedModelSession
        return begin(passes, drafter, prompt, context)


def passes_of(drafter: Any) -> ModelPasses | None:
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
class ModelPasses:
    """A draft model's passes over several texts, each of which is a row of its caches.

    sessions: of the rows, in order. joining: not yet rows.
    """

    model: Any
    caches: BatchCaches
    sessions: list[Any] = field(default_factory=list)
    joining: list[Any] = field(default_factory=list)

    def draft(self, limit: int, asked_by: Any) -> None:
        """Draw `limit` tokens for every text, asked for or not: a row more costs little."""
        self.update()
        if asked_by not in self.sessions:
            return
        self.catch_up()
        every, tokens = [session.draws(limit) for session in self.sessions], None
        for _ in range(limit):
            logits = self.next_logits(tokens)
            tokens = [draws.draw(row) for draws, row in zip(every, logits, strict=True)]
            mx.async_eval(tokens)
        for session, draws in zip(self.sessions, every, strict=True):
            session.set_draft(draws)

    def next_logits(self, tokens: Any) -> Sequence[mx.array]:
        """Logits [1, V] after a token of each text, or after the texts for None."""
        return self.run(self.model, self.pending() if tokens is None else tokens)

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
            if (alone := session.read_alone()) is None:
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
        self.caches.go_back([one.base + one.position for one in self.sessions])

    def pending(self) -> list[list[int]]:
        """Each text's tokens that its row does not hold."""
        most = vocab_size_of(self.model) - 1  # an id that the target alone has
        return [
            [min(token, most) for token in session.tokens[session.position :]]
            for session in self.sessions
        ]

    def catch_up(self) -> None:
        """Feed what was written while the model was not asked, but for its last tokens."""
        step = min(session.context.prefill_step_size for session in self.sessions)
        while max(map(len, pending := self.pending())) > MOST_PENDING:
            self.run(self.model, [ids[: min(step, max(1, len(ids) - 1))] for ids in pending])
            for session, ids in zip(self.sessions, pending, strict=True):
                session.position += min(step, len(ids) - 1)
            self.go_back()
            wait_for(self.caches.caches)


class HeadPasses(ModelPasses):
    """A head's passes over several texts: over pairs of a state and the token after it.

    states: of each text [n, D], for its next pass.
    """

    states: list[mx.array]

    def next_logits(self, tokens: Any) -> Sequence[mx.array]:
        """Logits of the states of its own steps; for None every complete pair is read."""
        if tokens is None:
            self.read([session.num_pending for session in self.sessions])
        else:
            self.states = self.run(self._forward, tokens)
        return list(mx.split(self.model.logits(mx.concatenate(self.states)), len(self.states)))

    def read(self, counts: Sequence[int]) -> None:
        """Read so many of the pairs of each text."""
        pairs = [s.take_pairs(count) for s, count in zip(self.sessions, counts, strict=True)]
        self.states = [states for states, _ in pairs]
        self.states = self.run(self._forward, [tokens for _, tokens in pairs])

    def _forward(self, ids: mx.array, cache: list[Any]) -> Any:
        """States [rows, S, D] after `self.states` and ids [rows, S]."""
        width = ids.shape[1]
        padded = [mx.pad(x, [(0, width - x.shape[0]), (0, 0)]) for x in self.states]
        return self.model.forward(mx.stack(padded), ids, cache)

    def catch_up(self) -> None:
        """Read all pairs but the last of each text, if they are many."""
        most = max(session.num_pending for session in self.sessions)
        if most * len(self.sessions) < MOST_WAITING:
            return
        self.update()
        counts = [session.num_pending - 1 for session in self.sessions]
        if min(counts, default=0) > 0:
            self.read(counts)
            mx.async_eval(states_of(self.caches.caches))


class SharedSession(WritingSession):
    """One of several texts: its drafts come from a shared pass, once it is a row of that.

    position: tokens of the text in its row. base: positions of earlier texts there. drawn: its
    draft of this round, which may not be asked for.
    """

    base = 0
    has_ended = was_asked = False
    drawn: ChainDraws | None = None

    def __init__(self, passes: ModelPasses, *of_session: Any) -> None:
        super().__init__(*of_session)
        self.passes = passes

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens; the first text that asks has all texts' drafts drawn."""
        if (drawn := self.shared_draft(limit)) is None:
            return super().propose(limit)
        return drawn.draft(min(limit, len(drawn)))

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The part that is worth verifying; see `truncate`."""
        if (drawn := self.shared_draft(limit)) is None:
            return super().propose_while(limit, goes_on)
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
        """Take the draft of this round."""
        self.drawn = draws


class SharedModelSession(SharedSession, ModelSession):
    """A draft model's side of one of several texts."""

    position = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.passes.joining.append(self)

    def read_alone(self) -> Rollback:
        """Caches with what is read before this is a row."""
        self.catch_up()
        self.position = self.rollback.position
        self.base = self.rollback.end - self.position
        return self.rollback

    def set_draft(self, draws: ChainDraws) -> None:
        """Take a draft, which is in the row but for its last token."""
        super().set_draft(draws)
        self.position = len(self.tokens) + len(draws) - 1

    def observe(self, tokens: Sequence[int]) -> None:
        """Keep what was accepted of a draft that was asked for; the rest goes with the next."""
        accepted = len(tokens) - 1 if self.was_asked else 0
        self.position = min(self.position, len(self.tokens) + accepted)
        self.tokens += tokens
        self.drawn, self.was_asked = None, False

    def close(self, length: int) -> None:
        """Leave the rows; the caller's caches get what they hold of the first `length` tokens."""
        passes, caches = self.passes, self.callers_cache
        self.has_ended = True
        if self in passes.sessions and caches is not None:
            self.position = min(self.position, length)
            passes.go_back()
            fresh = make_prompt_cache(self.model)
            caches[:] = passes.caches.extract(passes.sessions.index(self), fresh)
            self.rollback = Rollback(caches, self.position)
        WritingSession.close(self, length)  # not the model's, which reads on to the end


class SharedHeadSession(SharedSession, RecurrentSession):
    """A head's side of one of several texts; until its first token it reads alone."""

    @property
    def position(self) -> int:
        """Pairs in its row."""
        return self.waiting.num_read

    @property
    def num_pending(self) -> int:
        """Pairs that are complete, and not read."""
        return min(self.waiting.num_rows, len(self.tokens) - 1 - self.waiting.start)

    def take_pairs(self, count: int) -> tuple[mx.array, list[int]]:
        """States [n, D] and tokens of the next pairs, which count as read."""
        first = self.waiting.start + 1
        self.waiting.num_read += count
        return self.waiting.take(count), self.tokens[first : first + count]

    def read_alone(self) -> Rollback | None:
        """Caches with all pairs but the last; None if there are too few to be a row."""
        if self.num_pending > 0:
            self._read_pairs(but=1)
            if self.waiting.num_read:
                return self.waiting.rollback
        return None

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens emitted, of which the first make a row of this."""
        if len(self.tokens) == self.num_prompt:
            self.passes.joining.append(self)
        super().observe(tokens)
        self.drawn = None

    def _read_if_many(self) -> None:
        if self in self.passes.sessions:
            self.passes.catch_up()
        else:
            super()._read_if_many()

    def close(self, length: int) -> None:
        """Leave the rows."""
        self.has_ended = True
        super().close(length)
