"""A draft model for several texts at once: its drafts for all of them are rows of its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from specdec_mlx.contracts import Draft, DraftContext, GoesOn
from specdec_mlx.drafters.drawing import Draws, cut_while
from specdec_mlx.drafters.model import MOST_PENDING, ModelDrafter, ModelSession, logit_width
from specdec_mlx.target.exactness import can_hold_rows
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.row_caches import RowCaches


@dataclass
class DraftRows:
    """The draft models of a batch, each with the caches of all its texts; `DraftContext.rows`."""

    _models: dict[int, tuple[nn.Module, ModelRows | None]] = field(default_factory=dict)

    def __call__(
        self, drafter: ModelDrafter, prompt: Sequence[int], context: DraftContext
    ) -> ModelSession:
        """Begin a text as a row among others; alone for trees, and where there cannot be rows."""
        model = drafter.model
        if type(drafter) is not ModelDrafter or drafter.branches > 1:  # an exit is no model
            return ModelSession(drafter, prompt, context)
        if id(model) not in self._models:
            fresh = make_prompt_cache(model)
            may = can_trim_prompt_cache(fresh) and can_hold_rows(model)
            caches = RowCaches.like(fresh) if may else None
            rows = None if caches is None else ModelRows(model, caches)
            self._models[id(model)] = model, rows
        rows = self._models[id(model)][1]
        begin = ModelSession if rows is None else partial(RowSession, rows)
        return begin(drafter, prompt, context)


@dataclass
class ModelRows:
    """A draft model's passes over several texts. sessions: of its rows. joining: not yet rows."""

    model: nn.Module
    caches: RowCaches
    sessions: list[RowSession] = field(default_factory=list)
    joining: list[RowSession] = field(default_factory=list)

    def draft(self, limit: int) -> None:
        """Draw `limit` tokens for every text, asked for or not: a row more costs little."""
        self.update()
        self.catch_up()
        texts: list[Any] = self.pending()
        every = [session.draws(limit) for session in self.sessions]
        for _ in range(limit):
            logits = self.caches.feed(self.model, texts)
            lasts = [logits[row, len(text) - 1][None] for row, text in enumerate(texts)]
            texts = [draws.draw(last) for draws, last in zip(every, lasts, strict=True)]
            mx.async_eval(texts)
        for session, draws in zip(self.sessions, every, strict=True):
            session.drawn = draws
            session.position = len(session.tokens) + limit - 1

    def update(self) -> None:
        """Drop the texts that ended, let new ones in, go back to what was kept of the others."""
        for session in [session for session in self.joining if not session.has_ended]:
            session.catch_up()
            alone = session.rollback
            self.caches.add(alone.caches, alone.end)
            session.position, session.base = alone.position, alone.end - alone.position
            self.sessions.append(session)
        self.joining = []
        staying = [row for row, session in enumerate(self.sessions) if not session.has_ended]
        self.caches.keep(staying)
        self.sessions = [self.sessions[row] for row in staying]
        self.go_back()

    def go_back(self) -> None:
        """Drop what no session counts to its text."""
        self.caches.go_back([session.base + session.position for session in self.sessions])

    def pending(self) -> list[list[int]]:
        """Each text's tokens that its row does not hold."""
        most = logit_width(self.model) - 1  # an id that the target alone has
        return [
            [min(token, most) for token in session.tokens[session.position :]]
            for session in self.sessions
        ]

    def catch_up(self) -> None:
        """Feed what was written while the model was not asked, but for its last tokens."""
        step = min(session.context.prefill_step_size for session in self.sessions)
        while max(map(len, pending := self.pending())) > MOST_PENDING:
            self.caches.feed(
                self.model, [ids[: min(step, max(1, len(ids) - 1))] for ids in pending]
            )
            for session, ids in zip(self.sessions, pending, strict=True):
                session.position += min(step, len(ids) - 1)
            self.go_back()
            mx.eval([cache.state for cache in self.caches.caches])


class RowSession(ModelSession):
    """The draft model's side of one of several texts; its drafts come with the others'.

    position: tokens of the text in its row. base: positions of earlier texts there.
    """

    position = base = 0
    has_ended = was_asked = False
    drawn: Draws | None = None

    def __init__(
        self,
        rows: ModelRows,
        drafter: ModelDrafter,
        prompt: Sequence[int],
        context: DraftContext,
    ) -> None:
        super().__init__(drafter, prompt, context)
        self.rows_of_model = rows
        rows.joining.append(self)

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens; the first text that asks has all texts' drafts drawn."""
        return self.asked(limit).draft() if limit else Draft()

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The part that is worth verifying; see `cut_while`."""
        return cut_while(self.asked(limit), goes_on) if limit else Draft()

    def asked(self, limit: int) -> Draws:
        """The tokens drawn for this text in this round."""
        if self.drawn is None:
            self.rows_of_model.draft(limit)
        assert self.drawn is not None
        self.was_asked = True
        return self.drawn

    def observe(self, tokens: Sequence[int]) -> None:
        """Keep what was accepted of a draft that was asked for; the rest goes with the next."""
        accepted = len(tokens) - 1 if self.was_asked else 0
        self.position = min(self.position, len(self.tokens) + accepted)
        self.tokens += tokens
        self.drawn, self.was_asked = None, False

    def close(self, length: int) -> None:
        """Leave the rows; the caller's caches get what they hold of the first `length` tokens."""
        rows, caches = self.rows_of_model, self.callers_cache
        self.has_ended = True
        if self in rows.sessions and caches is not None:
            self.position = min(self.position, length)
            rows.go_back()
            fresh = make_prompt_cache(self.model)
            caches[:] = rows.caches.extract(rows.sessions.index(self), fresh)
            self.rollback = Rollback(caches, self.position)
        if self.on_close is not None:
            self.on_close(self.tokens[:length])
