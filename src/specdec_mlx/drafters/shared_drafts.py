"""Drafts of several texts from the same passes of a draft model, or of a trained head.

Each text has a row of the caches. The first one that asks in a round has a draft drawn for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, wait_for
from specdec_mlx.contracts import MOST_WAITING, Draft, DraftContext, FeatureRows, GoesOn, Session
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.drafters.drawing import ChainDraws, truncate
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.model import MOST_PENDING, ModelDrafter
from specdec_mlx.exactness.probe import can_hold_rows


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
    return None if caches is None else DraftPasses(model, caches, is_head)


@dataclass
class DraftPasses:
    """Passes over several texts, each of which is a row of the caches.

    is_head: the model is a head, which reads a state and the token after it. sessions: of the
    rows, in order. joining: not yet rows.
    """

    model: Any
    caches: BatchCaches
    is_head: bool
    sessions: list[SharedSession] = field(default_factory=list)
    joining: list[SharedSession] = field(default_factory=list)

    def draft(self, limit: int, asked_by: SharedSession) -> None:
        """Draw `limit` tokens for every text, asked for or not: a row more costs little."""
        self.update()
        if asked_by not in self.sessions:
            return
        self.read_ahead(MOST_PENDING)
        made, tokens = self.read(self.num_unread()), list[mx.array]()
        every = [session.alone.draws(limit) for session in self.sessions]
        for _ in range(limit):
            if tokens:
                made = self.run(tokens, made)
            tokens = [draws.draw(row) for draws, row in zip(every, self.logits(made), strict=True)]
            mx.async_eval(tokens)
        for session, draws in zip(self.sessions, every, strict=True):
            session.set_draft(draws)

    def update(self) -> None:
        """Drop the texts that ended, let new ones in, go back to what was kept of the others."""
        waiting, self.joining = self.joining, []
        for session in waiting:
            if session.has_ended:
                continue
            if (alone := session.source.hand_over()) is None:
                self.joining.append(session)
            else:
                self.caches.add(alone.caches, alone.end)
                self.sessions.append(session)
        staying = [(row, x) for row, x in enumerate(self.sessions) if not x.has_ended]
        self.caches.keep([row for row, _ in staying])
        self.sessions = [session for _, session in staying]
        self.go_back()

    def go_back(self) -> None:
        """Drop from the rows what their texts do not count."""
        self.caches.go_back([session.source.num_held for session in self.sessions])

    def num_unread(self) -> list[int]:
        """How much of each text could be read and was not."""
        return [session.source.num_unread for session in self.sessions]

    def read_ahead(self, most: int) -> None:
        """Read all but the last of each text, in chunks, while more than `most` is unread."""
        while max(unread := self.num_unread()) > most and min(unread) > 0:
            step = min(session.source.context.prefill_step_size for session in self.sessions)
            self.read([min(step, count - 1) for count in unread])
            self.go_back()
            wait_for(self.caches.caches)

    def read(self, counts: Sequence[int]) -> list[mx.array]:
        """Read so much of each text; what the pass makes of the last of each.

        A pass cannot leave a row out, so that one is fed where none is to be read.
        """
        sources = [session.source for session in self.sessions]
        fed = [source.unread(max(1, count)) for source, count in zip(sources, counts, strict=True)]
        made = self.run([ids for ids, _ in fed], [states for _, states in fed])
        for source, count in zip(sources, counts, strict=True):
            source.count_read(count)
        return made

    def run(self, ids: Sequence[Any], states: Sequence[Any]) -> list[mx.array]:
        """One pass over ids [n] of each text, and a head's states [n, D].

        Returns what it makes of the last of each, logits [1, V] or a head's states [1, D].
        """
        call = self.model
        if self.is_head:
            width = max(map(len, ids))
            padded = [mx.pad(x, [(0, width - x.shape[0]), (0, 0)]) for x in states]
            call = partial(call.forward, mx.stack(padded))
        made = self.caches.feed(call, ids)
        return [made[row, len(text) - 1][None] for row, text in enumerate(ids)]

    def logits(self, made: list[mx.array]) -> Sequence[mx.array]:
        """Logits [1, V] of each text, from what a pass made."""
        if not self.is_head:
            return made
        return list(mx.split(self.model.logits(mx.concatenate(made)), len(made)))

    def note(self) -> None:
        """Read what a head was shown, if it is much: states take room."""
        if self.is_head and max(self.num_unread(), default=0) * len(self.sessions) >= MOST_WAITING:
            self.update()
            self.read_ahead(1)

    def leave(self, session: SharedSession, length: int) -> None:
        """Give a draft model's caches back to their caller, up to `length` tokens of the text."""
        if self.is_head:
            return
        caches, held = session.source.callers_cache, session.source.rollback
        if session in self.sessions and caches is not None:
            held.rewind_to(length)
            self.go_back()
            fresh = make_prompt_cache(self.model)
            caches[:] = self.caches.extract(self.sessions.index(session), fresh)
            held = Rollback(caches, held.position)
        session.source.take_back(held)


class SharedSession(Session):
    """One of several texts: its drafts come from a shared pass, once it is a row of that.

    alone: its session, which drafts until then. drawn: its draft of this round, which may not be
    asked for.
    """

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
        self.was_asked = True
        return self.drawn

    def set_draft(self, draws: ChainDraws) -> None:
        """Take the draft of this round; a model's row holds all but its last token."""
        self.drawn = draws
        self.source.hold_draft(len(draws) - 1)

    @property
    def reads_target(self) -> bool:
        """True for a head."""
        return self.alone.reads_target

    def see(self, features: FeatureRows) -> None:
        """Take the rows of further positions."""
        self.source.see(features)
        self.passes.note()

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens emitted; of a draft that was not asked for nothing was verified."""
        if not self.was_asked:
            self.source.hold_draft(0)
        self.source.observe(tokens)
        self.drawn, self.was_asked = None, False
        self.passes.note()

    def close(self, length: int) -> None:
        """Leave the rows."""
        self.has_ended = True
        self.passes.leave(self, length)
        self.alone.close(length)
