"""Several texts at once: each row drafts for itself, and one pass verifies all drafts.

A row is a `loop.Generation` like any other; only its passes are shared, so its text is what it
would be alone.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from specdec_mlx.batch.rows import Request, Rounds, Row, RowDrafting, RowToken
from specdec_mlx.contracts import NO_DRAFT, AcceptanceRule, Draft, Drafter, Outcome
from specdec_mlx.draft_length.policy import DraftLength, make_draft_length
from specdec_mlx.draft_length.rows import RowLength, SharedLength
from specdec_mlx.draft_length.store import tuning_for
from specdec_mlx.drafters.shared_drafts import SharedDrafts
from specdec_mlx.engine.assemble import assemble
from specdec_mlx.engine.options import Options
from specdec_mlx.engine.sequence import close_all
from specdec_mlx.loop import Generation
from specdec_mlx.verify.inputs import (
    split_cache,
)
from specdec_mlx.verify.row_pass import SharedPasses, ToVerify, passes_over

MOST_AT_ONCE = 8  # prompts that are read at the same time, as in mlx-lm's batches


@dataclass
class BatchGeneration:
    """Several texts of one model, written together; texts may be added and taken out at any time.

    rule, draft_length, probe: as in `speculate`; a draft length that is an object is copied for
    each text. stop_tokens end a text. max_rows: texts at a time; more wait. returns_caches: give a
    text's caches with its last token; completes_caches: with all of it fed. on_error: takes uid and
    error of a text that cannot go on, while others do; None raises it.
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
    on_error: Callable[[int, Exception], None] | None = None
    stream: Any = generation_stream
    num_rounds: int = 0
    _waiting: deque[tuple[int, Request]] = field(default_factory=deque)
    _reading: list[Row] = field(default_factory=list)
    _rows: list[Row] = field(default_factory=list)
    _leaving: list[Row] = field(default_factory=list)  # their last tokens are being emitted
    _shared_drafts: SharedDrafts = field(default_factory=SharedDrafts)
    _num_inserted: int = 0
    _is_pipelined: bool = False
    _read_at: float = 0.0
    _away: float = 0.0
    _uids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._passes = self.make_passes()
        self._shared: SharedLength | None = None
        if self._passes.is_together and self.draft_length == "auto":
            self._shared = SharedLength(tuning_for(self.model))

    def make_passes(self) -> SharedPasses:
        """The passes over all rows, or over one text after the other."""
        with mx.stream(self.stream):
            return passes_over(self.model, self.max_kv_size, self.drafter)

    def insert(self, request: Request) -> int:
        """Add a text; returns the uid that its tokens come with."""
        uid = self._num_inserted
        self._num_inserted += 1
        self._waiting.append((uid, request))
        return uid

    @property
    def num_cache_bytes(self) -> int:
        """Bytes of the caches of all rows."""
        return self._passes.caches.num_bytes

    @property
    def num_open(self) -> int:
        """Texts that are being written, and those that wait."""
        return len(self._rows) + len(self._reading) + len(self._waiting)

    def remove(self, uid: int) -> None:
        """Take a text out; none of its tokens comes after those of the round that is under way."""
        self._waiting = deque(waiting for waiting in self._waiting if waiting[0] != uid)
        for row in (*self._rows, *self._reading, *self._leaving):
            if row.uid == uid:
                row.finish_reason = "removed"

    def run(self) -> Generator[RowToken, None, None]:
        """Write all texts; the tokens of a round come row by row."""
        try:
            yield from self._run()
        finally:
            left = [*self._rows, *self._reading]
            self._rows, self._reading = [], []
            if left:
                self._passes.verifiers = []
                if self._passes.is_together:  # what the old ones hold is not known
                    self._passes = self.make_passes()
                with mx.stream(self.stream):
                    close_all(*(row.generation.finish for row in left))

    def _run(self) -> Generator[RowToken, None, None]:
        """The algorithm of `loop`, with one pass for all rows."""
        current: Rounds = []
        while True:
            if not current:
                self._admit()
                while not self._rows and self.num_open:
                    self._admit()
                if not self._rows:
                    return
                current = self._verify(self._propose())
            ahead = self._verify_ahead(current)
            outcomes = self._accept(current, ahead)
            with mx.stream(self.stream):
                self._passes.settle()
            following, failure = ahead, None
            try:
                for (row, round_), outcome in zip(current, outcomes, strict=True):
                    with self._alone(row.uid, row):
                        row.generation.observe(round_, outcome)
                self._leave()
                following = self._follow(ahead)
            except Exception as error:  # of a drafter; what was accepted is emitted first
                failure = error
            handed_over = perf_counter()
            yield from self._emit(current, outcomes, following)
            self._away = perf_counter() - handed_over
            if failure is not None:
                raise failure
            self._leave()  # some may have been taken out meanwhile
            current = [pair for pair in following if pair[0].finish_reason is None]

    def _follow(self, ahead: Rounds) -> Rounds:
        """The next pass under way; none where a text waits for a place, or all have ended."""
        if ahead:
            self._is_pipelined = not self._would_draft()
            return [pair for pair in ahead if pair[0].finish_reason is None]
        if not self._rows or self._may_join:
            return []
        return self._verify(self._propose())

    @property
    def _has_place(self) -> bool:
        most = self.max_rows if self._passes.is_together else 1
        return len(self._rows) + len(self._reading) < most

    @property
    def _may_join(self) -> bool:
        """True if a text waits for a place that is there, or is being read."""
        return bool(self._reading) or (bool(self._waiting) and self._has_place)

    def _admit(self) -> None:
        """Read on in prompts, as far as there are places: a step of each between two rounds."""
        while self._waiting and self._has_place and len(self._reading) < MOST_AT_ONCE:
            uid, request = self._waiting.popleft()
            with self._alone(uid):
                row = self.begin_row(uid, request)
                row.generation.drafting.begin(row.context)
                self._reading.append(row)
        if not self._rows and len(self._reading) > 1:
            self._read_together()
        for row in list(self._reading):
            with self._alone(row.uid, row), mx.stream(self.stream):
                if row.finish_reason is not None:
                    self._reading.remove(row)
                    row.generation.drafting.close(0)
                elif row.read_on():
                    self._passes.add(row.verifier)
                    self._reading.remove(row)
                    self._rows.append(row)

    def _read_together(self) -> None:
        """Read new, short prompts in one padded pass, where that costs less than a pass of each."""
        started, count = perf_counter(), len(self._reading)
        prompts = [row.generation.sequence.tokens[:-1] for row in self._reading]
        longest = max(map(len, prompts))
        slope = (tuning_for(self.model).prior(5) - 1.0) / 4  # cost of a position, in plain passes
        is_cheapest = (longest * count - sum(map(len, prompts))) * slope <= count - 1
        are_short = all(prompts) and longest < self.prefill_step_size
        if not (is_cheapest and are_short and all(row.is_new for row in self._reading)):
            return
        with mx.stream(self.stream):
            for row in self._reading:
                self._passes.add(row.verifier)
            self._passes.read(prompts)
        for row in self._reading:
            row.generation.prefill()
            row.generation.stats.prefill_seconds = (perf_counter() - started) / count
        self._rows, self._reading = self._reading, []

    def begin_row(self, uid: int, request: Request) -> Row:
        """A text before anything is read."""
        own = request.drafting or RowDrafting(self.drafter, self.rule)
        given, is_together = request.prompt_cache, self._passes.is_together
        if not is_together or request.num_read < len(request.prompt) - 1:
            given = copy.deepcopy(given)  # else a row is a copy
        options = Options(
            max_tokens=request.max_tokens,
            sampler=request.sampler,
            seed=request.seed,
            rule=own.rule,
            logits_processors=request.logits_processors,
            max_kv_size=self.max_kv_size,
            prefill_step_size=self.prefill_step_size,
            tokenizer=self.tokenizer,
            probe=self.probe,
            stream=self.stream,
        )
        of_batch = {
            "target_caches": None,
            "shared_drafts": self._shared_drafts if is_together else None,
            "num_unseen": request.num_read,
        }
        parts = assemble(
            *(self.model, request.prompt, own.drafter, options),
            split_cache(self.model, given, options.caches)[0],
            length=self.draft_length_of_row(own.draft_length),
            num_read=request.num_read,
            num_said=request.num_said,
            stats=request.stats,
            of_batch=of_batch,
        )
        generation = Generation.of(parts, options)
        return Row(uid, generation, parts.target, parts.context, request.matcher)

    def draft_length_of_row(self, own: int | str | DraftLength | None = None) -> DraftLength:
        """The draft length of one text: its own, or that of the batch."""
        if own is None and self._shared is not None:
            return RowLength(self._shared.tuning, shared=self._shared)
        choice = copy.deepcopy(self.draft_length if own is None else own)
        return make_draft_length(choice, tuning_for(self.model))

    def _propose(self) -> list[Draft]:
        """A draft for each row that may have one, cut to one width if lengths are shared."""
        drafts = []
        for row in self._rows:
            draft = NO_DRAFT
            if row.generation.may_draft:
                with self._alone(row.uid, row):
                    proposed = row.generation.propose()
                    is_told = self.on_error is not None
                    draft = row.verifier.checked(proposed, may_fork=False) if is_told else proposed
            drafts.append(draft)
        if self._shared is not None:
            self._share(self._shared, drafts)
        return drafts

    def _share(self, shared: SharedLength, drafts: list[Draft]) -> None:
        """Cut the drafts, in place, of the rows without a length of their own."""
        shared.resize(len(self._rows))
        places, rows = [], []
        for i, row in enumerate(self._rows):
            drafting = row.generation.drafting
            if isinstance(drafting.length, RowLength):
                places.append(i)
                rows.append((drafting.length, drafting.part, drafts[i]))
        for i, draft in zip(places, shared.share(rows) if rows else (), strict=True):
            drafts[i] = draft

    @contextmanager
    def _alone(self, uid: int, row: Row | None = None) -> Iterator[None]:
        """An error in this block ends one text alone, if there is an `on_error`."""
        try:
            yield
        except Exception as error:
            if self.on_error is None:
                raise
            if row is None or row.finish_reason != "removed":
                self.on_error(uid, error)
            if row is not None:
                row.finish_reason = "removed"

    def _verify(self, drafts: Sequence[Draft]) -> Rounds:
        """Start the pass over all rows' pending tokens and drafts."""
        self._is_pipelined = not any(map(len, drafts))
        to_verify = []
        for row, draft in zip(self._rows, drafts, strict=True):
            sequence, start = row.generation.sequence, row.generation.target.rollback.position
            to_verify.append(ToVerify(sequence.tokens[start:], draft, sequence.num_generated))
        return self._launch(to_verify, is_ahead=False)

    def _would_draft(self) -> bool:
        """True if there would be a draft now, were no pass ahead of it."""
        if all(row.generation.drafting.is_free for row in self._rows):
            return any(map(len, self._propose()))
        for row in self._rows:
            with self._alone(row.uid, row):
                if row.generation.drafting.has_draft():
                    return True
        return False

    def _verify_ahead(self, current: Rounds) -> Rounds:
        """Start the pass after this one before its tokens are known, where nothing is drafted.

        A draft found meanwhile begins one token later; to wait for it would cost all rows host
        time.
        """
        may_run = self._is_pipelined and not self._may_join
        if not (may_run and all(row.may_run_ahead(round_) for row, round_ in current)):
            return []
        to_verify = []
        with mx.stream(self.stream):
            for row, round_ in current:
                with self._alone(row.uid, row):  # a sampler of the caller's draws it now
                    token = round_.under_way.next_token
                    position = row.generation.sequence.num_generated + 1
                    to_verify.append(ToVerify(token, NO_DRAFT, position))
        if len(to_verify) < len(current):
            return []
        for (row, _), (token, _, _) in zip(current, to_verify, strict=True):
            row.verifier.extend_history(token)
        return self._launch(to_verify, is_ahead=True)

    def _launch(self, to_verify: Sequence[ToVerify], *, is_ahead: bool) -> Rounds:
        for row in self._rows:
            row.generation.clock.launch_begins()
        with mx.stream(self.stream):
            under_way = self._passes.launch(to_verify)
        self.num_rounds += 1
        rounds = []
        for row, pass_ in zip(self._rows, under_way, strict=True):
            part = row.generation.drafting.part if len(pass_.draft) else ""
            round_ = row.generation.clock.launched(pass_, is_ahead=is_ahead, part=part)
            rounds.append((row, round_))
        return rounds

    def _accept(self, current: Rounds, ahead: Rounds) -> list[Outcome]:
        """Wait for the pass; what was kept of each draft, and the token after, join the texts."""
        with mx.stream(self.stream):
            for _, round_ in current:
                round_.under_way.wait()
        seconds, is_steady = self.time_of_pass(current, ahead)
        next_of = {row.uid: round_ for row, round_ in ahead}
        lengths = [row.generation.drafting.length for row, _ in current]
        outcomes = []
        for row, round_ in current:
            outcome = Outcome(range(0), [])
            with self._alone(row.uid, row):
                outcome = row.generation.accept(round_, next_of.get(row.uid))
                if row.finish_reason is None:
                    row.cut_at(self.stop_tokens, outcome)
                row.generation.roll_back(round_, outcome)
            outcomes.append(outcome)
        if self._shared is not None:
            width = max(round_.num_drafted for _, round_ in current)
            tokens = [len(outcome.tokens) for outcome in outcomes]
            rows = [*zip(lengths, tokens, strict=True)]
            parts = {round_.part for _, round_ in current}
            self._shared.record(width, rows, seconds, steady=is_steady, parts=parts)
        return outcomes

    def time_of_pass(self, current: Rounds, ahead: Rounds) -> tuple[float, bool]:
        """Seconds between readings, and True if they are one pass's: same rows, caller idle."""
        now = perf_counter()
        seconds, self._read_at = now - self._read_at, now
        before, self._uids = self._uids, [row.uid for row, _ in current]
        in_step = all(round_.is_ahead == bool(ahead) for _, round_ in current)
        return seconds, before == self._uids and in_step and self._away < seconds / 2

    def _leave(self) -> None:
        """Take out the rows that end with the tokens that are known."""
        staying = [i for i, row in enumerate(self._rows) if row.finish_reason is None]
        if len(staying) == len(self._rows):
            return
        for i, row in enumerate(self._rows):
            if self.returns_caches and row.finish_reason in ("stop", "length"):
                with self._alone(row.uid, row), mx.stream(self.stream):
                    row.keep_caches(self._passes.extract(i), complete=self.completes_caches)
        with mx.stream(self.stream):
            self._passes.keep(staying)
        self._leaving = [row for row in self._rows if row.finish_reason is not None]
        self._rows = [self._rows[i] for i in staying]

        def finish(row: Row) -> None:
            with self._alone(row.uid, row):
                row.generation.finish()

        close_all(*(partial(finish, row) for row in self._leaving))

    def _emit(
        self, current: Rounds, outcomes: Sequence[Outcome], following: Rounds
    ) -> Iterator[RowToken]:
        """Hand out the tokens of a round, while the next one is under way."""
        next_of = {row.uid: round_ for row, round_ in following}
        for (row, round_), outcome in zip(current, outcomes, strict=True):
            left = len(outcome.tokens)
            with self._alone(row.uid, row):
                for token in row.generation.emit(round_, outcome, next_of.get(row.uid)):
                    if row.finish_reason == "removed":
                        break
                    left -= 1
                    reason = None if left else row.finish_reason
                    caches = row.prompt_cache if reason else None
                    yield RowToken(row.uid, token, reason, caches, row.num_cached)
