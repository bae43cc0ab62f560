"""Drafts of several texts from the same passes of a draft model or a trained head.

Each text has a row of the caches. The first text that asks in a round draws drafts for all texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache

from specdec_mlx.batch_caches import BatchCaches
from specdec_mlx.caches import Rollback, wait_for
from specdec_mlx.contracts import MOST_WAITING, Draft, DraftContext, FeatureRows, GoesOn, Session
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.drafters.drawing import ChainDraws, truncate
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.model import MOST_PENDING, ModelDrafter
from specdec_mlx.drafters.shortlist import NarrowOutput, TextShortlist
from specdec_mlx.exactness.probe import can_hold_rows


@dataclass
class SharedDrafts:
    """Shared passes of the drafters in a batch, as `DraftContext.shared_drafts`."""

    _by_model: dict[tuple[Any, ...], tuple[Any, DraftPasses | None]] = field(default_factory=dict)

    def __call__(self, drafter: Any, prompt: Sequence[int], context: DraftContext) -> Session:
        """Begin a text. It drafts alone for trees, and where passes cannot be shared."""
        model = drafter.model
        # A drafter's list is made once, and drafters with different lists share no passes.
        key = id(model), type(drafter), getattr(drafter, "window", None), id(drafter.shortlist)
        if key not in self._by_model:
            self._by_model[key] = drafter, passes_of(drafter, context)
        passes = self._by_model[key][1]
        alone: WritingSession = drafter.begin(prompt, replace(context, shared_drafts=None))
        if passes is None or drafter.branches > 1:
            return alone
        return SharedSession(passes, alone)


def passes_of(drafter: Any, context: DraftContext) -> DraftPasses | None:
    """Shared passes of a drafter, or None if its passes cannot be shared."""
    model, kind = drafter.model, type(drafter)
    is_head = kind is HeadDrafter and getattr(model, "moves_on", False)
    # A subclass may draft in another way, for example with an early exit.
    if not (is_head or kind is ModelDrafter):
        return None
    make_cache = model.make_cache if is_head else drafter.make_cache
    fresh = make_cache()
    may_share = can_trim_prompt_cache(fresh) and (is_head or can_hold_rows(model))
    caches = BatchCaches.like(fresh) if may_share else None
    rows = None if drafter.shortlist is None else drafter.shortlist.begin(context)
    return None if caches is None else DraftPasses(model, make_cache, caches, is_head, rows)


@dataclass
class DraftPasses:
    """Passes over several texts, each of which is a row of the caches.

    Attributes:
        model: the draft model or the head.
        make_cache: makes empty caches of a single text.
        is_head: the model is a head, which reads a state and the token after it.
        text_shortlist: chooses rows of the output layer for all texts, or None for all rows.
        output_rows: the rows of the present draft, or None for all rows.
        sessions: sessions of the rows, in order.
        joining: sessions that have no row yet.
    """

    model: Any
    make_cache: Callable[[], list[Any]]
    caches: BatchCaches
    is_head: bool
    text_shortlist: TextShortlist | None = None
    output_rows: NarrowOutput | None = None
    sessions: list[SharedSession] = field(default_factory=list)
    joining: list[SharedSession] = field(default_factory=list)

    def draft(self, limit: int, asked_by: SharedSession) -> None:
        """Draw `limit` tokens for all texts."""
        self.update()
        if asked_by not in self.sessions:
            return
        if self.text_shortlist is not None:
            self.output_rows = self.text_shortlist.refresh(len(self.sessions))
        # Extra rows are nearly free, so all texts get a draft even if only one text asked.
        self.read_ahead(MOST_PENDING)
        made, tokens = self.read(self.num_unread()), list[mx.array]()
        every = [session.alone.draws(limit) for session in self.sessions]
        for _ in range(limit):
            if tokens:
                made = self.run(tokens, made)
            tokens = [draws.draw(row) for draws, row in zip(every, self.logits(made), strict=True)]
            # The device draws while the next pass is built.
            mx.async_eval(tokens)
        for session, draws in zip(self.sessions, every, strict=True):
            session.set_draft(draws)

    def update(self) -> None:
        """Drop texts that ended, let new texts in, and rewind the others."""
        waiting, self.joining = self.joining, []
        for session in waiting:
            if session.has_ended:
                continue
            if (alone := session.source.hand_over()) is None:
                self.joining.append(session)
            else:
                self.caches.add(alone.caches, alone.end)
                self.sessions.append(session)
                if self.text_shortlist is not None:
                    session.source.choose_rows(self.text_shortlist)
        staying = [(row, x) for row, x in enumerate(self.sessions) if not x.has_ended]
        self.caches.keep([row for row, _ in staying])
        self.sessions = [session for _, session in staying]
        self.go_back()

    def go_back(self) -> None:
        self.caches.go_back([session.source.num_held for session in self.sessions])

    def num_unread(self) -> list[int]:
        return [session.source.num_unread for session in self.sessions]

    def read_ahead(self, most: int) -> None:
        """Read all except the last unread token of each text, while a text has more than `most`."""
        while max(unread := self.num_unread()) > most and min(unread) > 0:
            step = min(session.source.context.prefill_step_size for session in self.sessions)
            self.read([min(step, count - 1) for count in unread])
            self.go_back()
            wait_for(self.caches.caches)

    def read(self, counts: Sequence[int]) -> list[mx.array]:
        """Read the next `counts` tokens of each text. Returns the output of each last token."""
        sources = [session.source for session in self.sessions]
        # A pass cannot leave a row out. A row with nothing to read is fed one token, which
        # `go_back` drops.
        fed = [source.unread(max(1, count)) for source, count in zip(sources, counts, strict=True)]
        made = self.run([ids for ids, _ in fed], [states for _, states in fed])
        for source, count in zip(sources, counts, strict=True):
            source.count_read(count)
        return made

    def run(self, ids: Sequence[Any], states: Sequence[Any]) -> list[mx.array]:
        """Run one pass over ids [n] of each text, and a head's states [n, D].

        Returns the output of the last token of each text, logits [1, V] or a head's states [1, D].
        """
        call = self.model
        if self.is_head:
            width = max(map(len, ids))
            padded = [mx.pad(x, [(0, width - x.shape[0]), (0, 0)]) for x in states]
            call = partial(call.forward, mx.stack(padded))
        with (
            nullcontext() if self.output_rows is None or self.is_head else self.output_rows.in_use()
        ):
            made = self.caches.feed(call, ids)
        return [made[row, len(text) - 1][None] for row, text in enumerate(ids)]

    def logits(self, made: list[mx.array]) -> Sequence[mx.array]:
        """Logits [1, V] of each text, from the outputs of a pass."""
        if not self.is_head:
            return made if self.output_rows is None else list(map(self.output_rows.widen, made))
        return list(mx.split(self.model.logits(mx.concatenate(made), self.output_rows), len(made)))

    def note(self) -> None:
        # Waiting states take memory, in proportion to the texts.
        if self.is_head and max(self.num_unread(), default=0) * len(self.sessions) >= MOST_WAITING:
            self.update()
            self.read_ahead(1)

    def leave(self, session: SharedSession, length: int) -> None:
        """Give a draft model's caches back to their caller, with `length` tokens of the text."""
        if self.is_head:
            return
        caches, rollback = session.source.callers_cache, session.source.rollback
        if session in self.sessions and caches is not None:
            rollback.rewind_to(length)
            self.go_back()
            caches[:] = self.caches.extract(self.sessions.index(session), self.make_cache())
            rollback = Rollback(caches, rollback.position)
        session.source.take_back(rollback)


class SharedSession(Session):
    """One of several texts. A shared pass drafts for it once it has a row.

    Attributes:
        alone: its own session, which drafts until then.
        drawn: its draft of this round, or None.
        was_asked: the draft of this round was asked for.
    """

    has_ended = was_asked = False
    drawn: ChainDraws | None = None

    def __init__(self, passes: DraftPasses, alone: WritingSession) -> None:
        self.passes = passes
        self.alone = alone
        self.source: Any = alone.source
        passes.joining.append(self)

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens. The first text that asks draws all texts' drafts."""
        if (drawn := self.shared_draft(limit)) is None:
            return self.alone.propose(limit)
        return drawn.draft(min(limit, len(drawn)))

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The part of the draft that is worth verifying (see `truncate`)."""
        if (drawn := self.shared_draft(limit)) is None:
            return self.alone.propose_while(limit, goes_on)
        return truncate(drawn, goes_on)

    def shared_draft(self, limit: int) -> ChainDraws | None:
        """The tokens drawn for this text in this round, or None if it has no row."""
        if limit == 0:
            return None
        if self.drawn is None:
            self.passes.draft(limit, self)
        self.was_asked = True
        return self.drawn

    def set_draft(self, draws: ChainDraws) -> None:
        self.drawn = draws
        # The last drawn token was never fed to the model.
        self.source.hold_draft(len(draws) - 1)

    @property
    def reads_target(self) -> bool:
        return self.alone.reads_target

    def see(self, features: FeatureRows) -> None:
        self.source.see(features)
        self.passes.note()

    def observe(self, tokens: Sequence[int]) -> None:
        # Nothing of this draft was verified, so the row holds the text only.
        if not self.was_asked:
            self.source.hold_draft(0)
        self.source.observe(tokens)
        self.drawn, self.was_asked = None, False
        self.passes.note()

    def close(self, length: int) -> None:
        self.has_ended = True
        self.passes.leave(self, length)
        self.alone.close(length)
