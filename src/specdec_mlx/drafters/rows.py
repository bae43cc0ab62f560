"""A draft model, or a trained head, for several texts at once: a draft for each from its passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache

from specdec_mlx.contracts import MOST_WAITING, Draft, DraftContext, GoesOn
from specdec_mlx.drafters.drawing import Draws, cut_while
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.session import RecurrentSession
from specdec_mlx.drafters.model import MOST_PENDING, ModelDrafter, ModelSession
from specdec_mlx.verify.exactness import can_hold_rows
from specdec_mlx.verify.model_pass import vocab_size_of
from specdec_mlx.verify.rollback import Rollback, states_of, wait_for
from specdec_mlx.verify.row_caches import BatchCaches


@dataclass
class DraftRows:
    """What the texts of a batch share of their drafters, by model or head; `DraftContext.rows`."""

    _shared: dict[int, tuple[Any, ModelRows | None]] = field(default_factory=dict)

    def __call__(self, drafter: Any, prompt: Sequence[int], context: DraftContext) -> Any:
        """Begin a text as a row among others; alone for trees, and where there cannot be rows."""
        if id(drafter.model) not in self._shared:
            self._shared[id(drafter.model)] = drafter.model, rows_for(drafter)
        rows = self._shared[id(drafter.model)][1]
        if rows is None or drafter.branches > 1:
            begin = drafter.begin if type(drafter) is HeadDrafter else drafter.session
            return begin(prompt, replace(context, rows=None))
        return rows.kind(rows, drafter, prompt, context)


def rows_for(drafter: Any) -> ModelRows | None:
    """Shared passes of its model, or of a head with one layer; None where there cannot be any."""
    model, kind = drafter.model, type(drafter)
    is_head = kind is HeadDrafter and issubclass(model.session, RecurrentSession) and model.moves_on
    if not (is_head or kind is ModelDrafter):  # an exit is no model
        return None
    fresh = make_prompt_cache(model)
    may = can_trim_prompt_cache(fresh) and (is_head or can_hold_rows(model))
    caches = BatchCaches.like(fresh) if may else None
    return None if caches is None else (HeadRows if is_head else ModelRows)(model, caches)


@dataclass
class ModelRows:
    """A draft model's passes over several texts. sessions: of its rows. joining: not yet rows."""

    model: Any
    caches: BatchCaches
    sessions: list[Any] = field(default_factory=list)
    joining: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> type[Any]:
        """The session of a row."""
        return RowSession

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
            session.hold(draws)

    def next_logits(self, tokens: Any) -> Sequence[mx.array]:
        """Logits [1, V] after a token of each text, or after the texts for None."""
        texts = self.pending() if tokens is None else tokens
        logits = self.caches.feed(self.model, texts)
        return [logits[row, len(text) - 1][None] for row, text in enumerate(texts)]

    def update(self) -> None:
        """Drop the texts that ended, let new ones in, go back to what was kept of the others."""
        joining, self.joining = [x for x in self.joining if not x.has_ended], []
        for session in joining:
            alone = session.read_alone()
            if alone is None:
                self.joining.append(session)
            else:
                self.caches.add(alone.caches, alone.end)
                self.sessions.append(session)
        staying = [row for row, session in enumerate(self.sessions) if not session.has_ended]
        self.caches.keep(staying)
        self.sessions = [self.sessions[row] for row in staying]
        self.go_back()

    def go_back(self) -> None:
        """Drop what no session counts to its text."""
        self.caches.go_back([session.base + session.position for session in self.sessions])

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
            self.caches.feed(
                self.model, [ids[: min(step, max(1, len(ids) - 1))] for ids in pending]
            )
            for session, ids in zip(self.sessions, pending, strict=True):
                session.position += min(step, len(ids) - 1)
            self.go_back()
            wait_for(self.caches.caches)


class HeadRows(ModelRows):
    """A head's passes over several texts: over pairs of a state and the token after it."""

    states: list[mx.array]

    @property
    def kind(self) -> type[Any]:
        """The session of a row."""
        return HeadRowSession

    def next_logits(self, tokens: Any) -> Sequence[mx.array]:
        """As of a model, by the states of its own steps; for None every complete pair is read."""
        if tokens is None:
            tokens = self.feed([session.num_pending for session in self.sessions])
        else:
            self.run(tokens)
        return list(mx.split(self.model.logits(mx.concatenate(self.states)), len(tokens)))

    def feed(self, counts: Sequence[int]) -> list[list[int]]:
        """Read so many of the pairs of each text; returns their tokens."""
        pairs = [s.take_pairs(count) for s, count in zip(self.sessions, counts, strict=True)]
        self.states, texts = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.run(texts)
        return texts

    def run(self, texts: Sequence[Any]) -> None:
        """A pass over `states`, and these tokens; the last of each text take their place."""

        def forward(ids: mx.array, cache: list[Any]) -> mx.array:
            width = ids.shape[1]
            wide = [mx.pad(x, [(0, width - x.shape[0]), (0, 0)]) for x in self.states]
            made: mx.array = self.model.forward(mx.stack(wide), ids, cache)
            return made

        made = self.caches.feed(forward, texts)
        self.states = [made[row, len(text) - 1][None] for row, text in enumerate(texts)]

    def catch_up(self) -> None:
        """Read all pairs but the last of each text, if they are many."""
        most = max(session.num_pending for session in self.sessions)
        if most * len(self.sessions) < MOST_WAITING:
            return
        self.update()
        counts = [session.num_pending - 1 for session in self.sessions]
        if min(counts, default=0) > 0:
            self.feed(counts)
            mx.async_eval(states_of(self.caches.caches))


class AsRow:
    """The side of one of several texts; its drafts come with the others'.

    position: tokens of the text in its row. base: positions of earlier texts there.
    """

    base = 0
    has_ended = was_asked = False
    drawn: Draws | None = None
    rows_of_model: ModelRows

    def propose(self, limit: int) -> Draft:
        """At most `limit` tokens; the first text that asks has all texts' drafts drawn."""
        if (drawn := self.asked(limit)) is None:
            alone: Draft = super().propose(limit)  # type: ignore[misc]
            return alone
        return drawn.draft(min(limit, len(drawn)))

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        """The part that is worth verifying; see `cut_while`."""
        if (drawn := self.asked(limit)) is None:
            alone: Draft = super().propose_while(limit, goes_on)  # type: ignore[misc]
            return alone
        return cut_while(drawn, goes_on)

    def asked(self, limit: int) -> Draws | None:
        """The tokens drawn for this text in this round; None where it is no row yet."""
        if limit == 0:
            return None
        if self.drawn is None:
            self.rows_of_model.draft(limit, self)
        self.was_asked = self.drawn is not None
        return self.drawn

    def hold(self, draws: Draws) -> None:
        """Take a draft."""
        self.drawn = draws


class RowSession(AsRow, ModelSession):
    """A draft model's side of one of several texts."""

    position = 0

    def __init__(self, rows: ModelRows, *of_session: Any) -> None:
        super().__init__(*of_session)
        self.rows_of_model = rows
        rows.joining.append(self)

    def read_alone(self) -> Rollback:
        """What is read before this is a row."""
        self.catch_up()
        self.position, self.base = (
            self.rollback.position,
            self.rollback.end - self.rollback.position,
        )
        return self.rollback

    def hold(self, draws: Draws) -> None:
        """Take a draft, which is in the row but for its last token."""
        super().hold(draws)
        self.position = len(self.tokens) + len(draws) - 1

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


class HeadRowSession(AsRow, RecurrentSession):
    """A head's side of one of several texts; until its first token it reads alone."""

    def __init__(self, rows: ModelRows, *of_session: Any) -> None:
        super().__init__(*of_session)
        self.rows_of_model = rows

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
        """What is read before this is a row, all pairs but the last; None if there are too few."""
        if self.num_pending > 0:
            self._read_pairs(but=1)
            if self.waiting.num_read:
                return self.waiting.rollback
        return None

    def observe(self, tokens: Sequence[int]) -> None:
        """Take the tokens emitted, of which the first make a row of this."""
        if len(self.tokens) == self.num_prompt:
            self.rows_of_model.joining.append(self)
        super().observe(tokens)
        self.drawn = None

    def _read_if_many(self) -> None:
        if self in self.rows_of_model.sessions:
            self.rows_of_model.catch_up()
        else:
            super()._read_if_many()

    def close(self, length: int) -> None:
        """Leave the rows."""
        self.has_ended = True
        super().close(length)
