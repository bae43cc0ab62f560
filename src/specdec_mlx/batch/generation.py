"""Several texts at once: each row drafts for itself, and one pass verifies all drafts.

A row is a `loop.Generation` like any other: the same text, session, rule, noise and account. Only
its passes are made together with those of the other rows, and so it is written what it would be
alone. Rows leave when they end, and others take their place.
"""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from specdec_mlx.batch.pace import Pace
from specdec_mlx.batch.reading import Reading
from specdec_mlx.batch.rows import (
    Passes,
    Request,
    Rounds,
    Row,
    RowDrafting,
    RowToken,
    shared_drafts,
)
from specdec_mlx.draft_length.policy import DraftLength, make_draft_length
from specdec_mlx.draft_length.rows import SharedLength
from specdec_mlx.draft_length.store import tuning_for
from specdec_mlx.loop import Generation, Token
from specdec_mlx.rounds.drafting import Drafting
from specdec_mlx.rounds.ending import close_all
from specdec_mlx.rounds.sequence import SequenceState
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target.inputs import (
    CacheOptions,
    check_fits,
    check_ids,
    check_prompt,
    noise_of,
    split_cache,
)
from specdec_mlx.target.model_pass import ModelPass
from specdec_mlx.target.next_token import NextToken
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.row_pass import RowPasses, ToVerify, wait_for
from specdec_mlx.target.verifier import Verifier
from specdec_mlx.types import (
    NO_DRAFT,
    AcceptanceRule,
    Draft,
    Drafter,
    Outcome,
    ReadsTarget,
    all_drafters,
)


@dataclass
class BatchGeneration:
    """Several texts of one model, written together; texts may be added and taken out at any time.

    model: any mlx-lm model. drafter: None for plain decoding. rule, draft_length, probe: as in
    `speculate`; a draft length that is an object is copied for each text. stop_tokens: tokens that
    end a text. max_rows: texts written at a time; more of them wait. returns_caches: True to hand
    out a text's caches with its last token; completes_caches: with all of it fed. is_open: True if
    more texts may come at any time. on_error: told of a text, by its uid, that cannot go on, while
    the others do; None to raise what happened.
    """

    model: nn.Module
    drafter: Drafter | None = None
    rule: str | AcceptanceRule = "auto"
    draft_length: int | str | DraftLength = "auto"
    stop_tokens: frozenset[int] = frozenset()
    max_rows: int = 32
    prefill_step_size: int = 2048
    max_kv_size: int | None = None
    tokenizer: Any = None
    probe: bool = True
    returns_caches: bool = False
    completes_caches: bool = True
    is_open: bool = False
    on_error: Callable[[int, Exception], None] | None = None
    stream: Any = generation_stream
    pace: Pace = field(default_factory=Pace)
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    num_rounds: int = 0
    _waiting: deque[tuple[int, Request]] = field(default_factory=deque)
    _rows: list[Row] = field(default_factory=list)
    _leaving: list[Row] = field(default_factory=list)  # their last tokens are being handed out
    _num_inserted: int = 0
    _is_pipelined: bool = False

    def __post_init__(self) -> None:
        """See whether the texts can be rows of one batch."""
        self._passes = self.make_passes()
        self._reading = Reading(self.stream)
        self._shared: SharedLength | None = None
        if self._passes is not None and self.draft_length == "auto":
            self._shared = SharedLength(tuning_for(self.model))

    def make_passes(self) -> Passes | None:
        """The passes over all rows; None where texts have to be written one by one."""
        reading = [part for part in all_drafters(self.drafter) if isinstance(part, ReadsTarget)]
        if reading:
            warnings.warn(
                f"specdec_mlx: {type(reading[0]).__name__} reads the target's states, which it "
                "cannot of several texts at once. They are written one by one.",
                stacklevel=4,
            )
            return None
        with mx.stream(self.stream):
            return RowPasses.of(self.model, self.max_kv_size)

    def insert(self, request: Request) -> int:
        """Add a text; the uid that its tokens come with."""
        uid = self._num_inserted
        self._num_inserted += 1
        self._waiting.append((uid, request))
        return uid

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of the caches of all rows."""
        return self._passes.caches.num_bytes if isinstance(self._passes, RowPasses) else 0

    @property
    def num_open(self) -> int:
        """Texts that are being written, and those that wait."""
        return len(self._rows) + len(self._reading.rows) + len(self._waiting)

    def remove(self, uid: int) -> None:
        """Take a text out; none of its tokens comes after those of the round that is under way."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != uid)
        for row in (*self._rows, *self._reading.rows, *self._leaving):
            if row.uid == uid:
                row.finish_reason = "removed"

    def run(self) -> Generator[RowToken, None, None]:
        """Write all texts; the tokens of a round come row by row."""
        try:
            yield from self._run_alone() if self._passes is None else self._run_rows(self._passes)
        finally:
            left = [*self._rows, *self._reading.rows]
            self._rows, self._reading.rows = [], []
            if self._passes is not None and left:
                self._passes = self.make_passes()  # what the old ones hold is not known
                with mx.stream(self.stream):
                    close_all(*(row.generation.finish for row in left))

    def _run_rows(self, passes: Passes) -> Generator[RowToken, None, None]:
        """The algorithm of `loop`, with one pass for all rows."""
        current: Rounds = []
        while True:
            if not current:
                self._admit(passes)
                while not self._rows and self.num_open:
                    self._admit(passes)
                if not self._rows:
                    return
                current = self._verify(passes, self._propose())
            ahead = self._verify_ahead(passes, current)
            outcomes = self._accept(current, ahead)
            with mx.stream(self.stream):
                passes.settle()
            following, failure = ahead, None
            try:
                for row, _ in outcomes:
                    with self._alone(row.uid, row):
                        row.generation.drafting.observe()
                self._leave(passes)
                following = self._follow(passes, ahead)
            except Exception as error:  # of a drafter; what was accepted is emitted first
                failure = error
            handed_over = perf_counter()
            yield from self._emit(current, outcomes, following)
            self.pace.away = perf_counter() - handed_over
            if failure is not None:
                raise failure
            current = self._still_there(passes, following)

    def _follow(self, passes: Passes, ahead: Rounds) -> Rounds:
        """The next pass under way; none where a text waits for a place, or all have ended."""
        if ahead:
            self._is_pipelined = not self._would_draft()
            return [pair for pair in ahead if pair[0].finish_reason is None]
        if not self._rows or self._may_join:
            return []
        return self._verify(passes, self._propose())

    @property
    def _has_place(self) -> bool:
        return len(self._rows) + len(self._reading.rows) < self.max_rows

    @property
    def _may_join(self) -> bool:
        """True if a text waits for a place that is there, or is being read."""
        return bool(self._reading.rows) or (bool(self._waiting) and self._has_place)

    def _admit(self, passes: Passes) -> None:
        """Read on in the prompts of those that wait, as far as there are places."""
        while self._waiting and self._has_place and self._reading.has_room:
            uid, request = self._waiting.popleft()
            with self._alone(uid):
                self._reading.begin(self.begin_row(uid, request))
        if not self._rows:
            slope = (tuning_for(self.model).prior(5) - 1.0) / 4
            self._rows = self._note_read(self._reading.read_together(passes, slope))
        self._rows += self._note_read(self._reading.go_on(passes, self._alone))

    def _note_read(self, rows: list[Row]) -> list[Row]:
        """Count the prompts of rows that were read."""
        self.prompt_tokens += sum(row.generation.sequence.prompt_length for row in rows)
        self.prompt_seconds += sum(row.generation.stats.prefill_seconds for row in rows)
        return rows

    def begin_row(self, uid: int, request: Request) -> Row:
        """A text before anything is read."""
        own = request.drafting or RowDrafting(self.drafter, self.rule)
        prompt = check_prompt(request.prompt, None, own.drafter)
        given = request.prompt_cache
        if self._passes is None or request.num_read < len(prompt) - 1:  # else a row is a copy
            given = copy.deepcopy(given)
        options = CacheOptions(self.max_kv_size, self.prefill_step_size)
        caches, _ = split_cache(self.model, given, options)
        probe = self.probe and own.drafter is not None
        rollback = Rollback(caches, request.num_read)
        model_pass = ModelPass(self.model, rollback, options, probe=probe)
        noise = noise_of(request.seed)
        next_token = NextToken(request.sampler or Sampling(), request.logits_processors, noise)
        verifier = Verifier(model_pass, next_token, own.rule)
        check_ids(prompt, verifier.vocab_size())
        context = replace(verifier.draft_context(self.tokenizer, None), target_caches=None)
        check_fits(own.drafter, context)
        num_said, wanted = request.num_said, request.max_tokens
        sequence = SequenceState(prompt, len(prompt) - num_said, wanted, None, num_said)
        length = self.draft_length_of_row(own.draft_length)
        drafting = Drafting(
            own.drafter, length, verifier, sequence, keeps_cache=False, stream=self.stream
        )
        stats = request.stats or SpeculationStats()
        generation = Generation(
            verifier, sequence, drafting, stats, self.stream, self.prefill_step_size
        )
        return Row(uid, generation, verifier, context, request.matcher)

    def draft_length_of_row(self, own: int | str | DraftLength | None = None) -> DraftLength:
        """The draft length of one text: its own, or that of the batch."""
        if own is None and self._shared is not None:
            return self._shared.of_row()
        choice = copy.deepcopy(self.draft_length if own is None else own)
        return make_draft_length(choice, tuning_for(self.model))

    def _propose(self) -> list[Draft]:
        """A draft for each row; the first token of a text waits for none."""
        if self._shared is not None:
            self._shared.resize(len(self._rows))
        drafts = []
        for row in self._rows:
            draft = NO_DRAFT
            if row.generation.sequence.num_generated > 0:
                with self._alone(row.uid, row):
                    proposed = row.generation.propose()
                    draft = proposed if self.on_error is None else row.verifier.chain_of(proposed)
            drafts.append(draft)
        return drafts if self._shared is None else shared_drafts(self._shared, self._rows, drafts)

    @contextmanager
    def _alone(self, uid: int, row: Row | None = None) -> Iterator[None]:
        """What goes wrong with one text ends it alone, if there is somebody to be told."""
        try:
            yield
        except Exception as error:
            if self.on_error is None:
                raise
            if row is None or row.finish_reason != "removed":
                self.on_error(uid, error)
            if row is not None:
                row.finish_reason = "removed"

    def _verify(self, passes: Passes, drafts: Sequence[Draft]) -> Rounds:
        """Start the pass over all rows' pending tokens and drafts."""
        self._is_pipelined = not any(map(len, drafts))
        to_verify = []
        for row, draft in zip(self._rows, drafts, strict=True):
            generation = row.generation
            pending = generation.sequence.tokens[generation.target.rollback.position :]
            to_verify.append(ToVerify(pending, draft, generation.sequence.num_generated))
        return self._launch(passes, to_verify, is_ahead=False)

    def _would_draft(self) -> bool:
        """True if there would be a draft now, were no pass ahead of it."""
        if all(row.generation.drafting.is_free for row in self._rows):
            return any(map(len, self._propose()))
        for row in self._rows:
            with self._alone(row.uid, row):
                if row.generation.drafting.has_draft():
                    return True
        return False

    def _verify_ahead(self, passes: Passes, current: Rounds) -> Rounds:
        """Start the pass after this one before its tokens are known, where nothing is drafted.

        A draft that is found while it runs begins one token later. That costs its row a part of a
        token; to wait for it would cost all rows the host's time in every pass.
        """
        may_not = self._may_join or not self._is_pipelined
        if may_not or not all(row.may_run_ahead(round_) for row, round_ in current):
            return []
        tokens, to_verify = [], []
        with mx.stream(self.stream):
            for row, round_ in current:
                with self._alone(row.uid, row):  # a sampler of the caller's draws it now
                    tokens.append(round_.under_way.next_token)
            if len(tokens) < len(current):
                return []
            for (row, _), token in zip(current, tokens, strict=True):
                row.verifier.extend_history(token)
                position = row.generation.sequence.num_generated + 1
                to_verify.append(ToVerify(token, NO_DRAFT, position))
        return self._launch(passes, to_verify, is_ahead=True)

    def _launch(self, passes: Passes, to_verify: Sequence[ToVerify], *, is_ahead: bool) -> Rounds:
        """One pass for all rows."""
        for row in self._rows:
            row.generation.clock.launch_begins()
        with mx.stream(self.stream):
            under_way = passes.launch(to_verify)
        self.num_rounds += 1
        rounds = []
        for row, pass_ in zip(self._rows, under_way, strict=True):
            part = row.generation.drafting.part if len(pass_.draft) else ""
            round_ = row.generation.clock.launched(pass_, is_ahead=is_ahead, part=part)
            rounds.append((row, round_))
        return rounds

    def _accept(self, current: Rounds, ahead: Rounds) -> list[tuple[Row, Outcome]]:
        """Wait for the pass; what was kept of each draft, and the token after, join the texts."""
        with mx.stream(self.stream):
            wait_for([round_.under_way for _, round_ in current])
        self.pace.was_read(current, ahead)
        next_of = {row.uid: round_ for row, round_ in ahead}
        lengths = [row.length for row, _ in current]
        outcomes = []
        for row, round_ in current:
            outcome = Outcome(range(0), [])
            with self._alone(row.uid, row):
                outcome = row.generation.accept(round_, next_of.get(row.uid))
                if row.finish_reason is None:
                    row.cut_at(self.stop_tokens, outcome)
                row.generation.roll_back(round_, outcome)
            outcomes.append((row, outcome))
        if self._shared is not None:
            width = max(len(round_.draft) for _, round_ in current)
            tokens = [len(outcome.tokens) for _, outcome in outcomes]
            rows = [*zip(lengths, tokens, strict=True)]
            self._shared.record(width, rows, self.pace.seconds, steady=self.pace.is_steady)
        return outcomes

    def _leave(self, passes: Passes) -> None:
        """Take out the rows that end with the tokens that are known."""
        staying = [i for i, row in enumerate(self._rows) if row.finish_reason is None]
        for i, row in enumerate(self._rows):
            if self.returns_caches and row.finish_reason in ("stop", "length"):
                with self._alone(row.uid, row), mx.stream(self.stream):
                    alone = passes.extract(i)
                    if self.completes_caches:
                        row.complete(alone)
                    row.prompt_cache, row.num_cached = alone.caches, alone.position
        if len(staying) < len(self._rows):
            with mx.stream(self.stream):
                passes.keep(staying)
            self._leaving = [row for row in self._rows if row.finish_reason is not None]
            self._rows = [self._rows[i] for i in staying]
            close_all(*(partial(self._finish, row) for row in self._leaving))

    def _finish(self, row: Row) -> None:
        """End a row that has left."""
        with self._alone(row.uid, row):
            row.generation.finish()

    def _still_there(self, passes: Passes, following: Rounds) -> Rounds:
        """The pass under way, without the rows that were taken out while tokens were handed out."""
        self._leave(passes)
        return [pair for pair in following if pair[0].finish_reason is None]

    def _emit(
        self, current: Rounds, outcomes: list[tuple[Row, Outcome]], following: Rounds
    ) -> Iterator[RowToken]:
        """Hand out the tokens of a round, while the next one is under way."""
        next_of = {row.uid: round_ for row, round_ in following}
        for (row, round_), (_, outcome) in zip(current, outcomes, strict=True):
            left = len(outcome.tokens)
            for token in row.generation.emit(round_, outcome, next_of.get(row.uid)):
                if row.finish_reason == "removed":
                    break
                left -= 1
                reason = None if left else row.finish_reason
                caches = row.prompt_cache if reason else None
                yield RowToken(row.uid, token, reason, caches, row.num_cached)

    def _run_alone(self) -> Generator[RowToken, None, None]:
        """The texts one by one, each by the loop."""
        while self._waiting:
            uid, request = self._waiting.popleft()
            with self._alone(uid):
                self._rows = [self.begin_row(uid, request)]
            if not self._rows:
                continue
            row = self._rows[0]
            if self.returns_caches:
                row.prompt_cache = row.generation.callers_cache = [*row.verifier.rollback.caches]
            last: RowToken | None = None
            with closing(row.generation.run(row.context)) as tokens:
                while (token := self._next_of(row, tokens)) is not None:
                    if last is not None:
                        yield last
                    is_stop = token.token in self.stop_tokens
                    last = RowToken(row.uid, token, "stop" if is_stop else None)
                    if is_stop or row.finish_reason == "removed":
                        break
            self._rows = []
            self._note_read([row])
            self.num_rounds += row.generation.stats.target_passes
            if last is not None and row.finish_reason != "removed":
                yield RowToken(uid, last.token, last.finish_reason or "length", row.prompt_cache)

    def _next_of(self, row: Row, tokens: Iterator[Token]) -> Token | None:
        with self._alone(row.uid, row):
            return next(tokens, None)
        return None
