"""Several texts at once: each has its own drafts, and one pass verifies all of them.

Each text is a `loop.Generation`, so that it equals the text generated alone. Only passes are
shared, as rows. `schedule` knows which texts there are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.arguments import argument_error
from specdec_mlx.batch.passes import BatchPasses, SharedPasses, ToVerify, make_passes
from specdec_mlx.batch.schedule import BatchText, BatchToken, OwnDrafting, Request, Rounds, Schedule
from specdec_mlx.caches import note_other_thread
from specdec_mlx.contracts import NO_DRAFT, Draft, Drafter, Outcome
from specdec_mlx.draft_length.batches import RowLength, SharedLength
from specdec_mlx.draft_length.store import Tuning, tuning_with
from specdec_mlx.draft_length.value import DraftLength, make_draft_length
from specdec_mlx.drafters.shared_drafts import SharedDrafts
from specdec_mlx.kernels import Kernels, make_kernels
from specdec_mlx.loop import assemble
from specdec_mlx.options import Options
from specdec_mlx.sequence import close_all, split_cache


@dataclass
class PassClock:
    """Seconds of passes over all texts. `away` is the caller's time after the latest round."""

    away: float = 0.0
    _read_at: float = 0.0
    _uids: list[int] = field(default_factory=list)

    def time_of_pass(self, current: Rounds, ahead: Rounds) -> tuple[float, bool]:
        """Seconds since the last reading, and True if they are the time of one pass."""
        now = perf_counter()
        seconds, self._read_at = now - self._read_at, now
        before, self._uids = self._uids, [text.uid for text, _ in current]
        # They are if the texts are the same as before, this pass and the next were launched in the
        # same mode, and the caller was hardly away.
        in_step = all(round_.is_ahead == bool(ahead) for _, round_ in current)
        return seconds, before == self._uids and in_step and self.away < seconds / 2


@dataclass
class BatchGeneration:
    """Several texts of one model, generated together. Texts may join and leave at any time.

    Attributes:
        model: the target.
        drafter: of all texts without their own, or None.
        options: options that all texts share. A draft length that is an object is copied for each
            text.
        schedule: the texts that wait, are read and are written.
        stop_tokens: tokens that end a text.
        returns_caches: return a text's caches with its last token.
        completes_caches: feed all of the text to these caches first.
        on_error: called with uid and error of a text that cannot go on, while others can. None
            raises the error.
        num_rounds: passes so far.
        passes: runs the passes.
        shared: the draft length that all texts share, or None.
        kernels: other kernels for passes over several rows, or None.
    """

    model: nn.Module
    drafter: Drafter | None = None
    options: Options = field(default_factory=Options)
    schedule: Schedule = field(default_factory=Schedule)
    stop_tokens: frozenset[int] = frozenset()
    returns_caches: bool = False
    completes_caches: bool = True
    on_error: Callable[[int, Exception], None] | None = None
    clock: PassClock = field(default_factory=PassClock)
    num_rounds: int = 0
    is_pipelined: bool = False
    passes: BatchPasses = field(init=False)
    shared: SharedLength | None = field(default=None, init=False)
    kernels: Kernels | None = field(default=None, init=False)
    _shared_drafts: SharedDrafts = field(default_factory=SharedDrafts)

    def __post_init__(self) -> None:
        if self.options.ties is not None:
            instead = "None for several texts, whose rows share passes; generate takes it"
            raise argument_error("ties", self.options.ties, instead)
        self.passes = self.make_passes()
        self.kernels = make_kernels(self.options.kernels)
        if not self.passes.is_together:
            self.schedule.max_texts = 1
        elif self.options.num_draft_tokens == "auto":
            self.shared = SharedLength(self.tuning)

    @property
    def tuning(self) -> Tuning:
        chosen = self.options.tuning
        return tuning_with(self.model, self.kernels) if chosen is None else chosen

    def make_passes(self) -> BatchPasses:
        with mx.stream(self.options.stream):
            return make_passes(self.model, self.options, self.drafter)

    def insert(self, request: Request) -> int:
        return self.schedule.insert(request)

    @property
    def num_cache_bytes(self) -> int:
        caches = (cache for text in self.schedule.reading for cache in text.reader.caches.caches)
        return self.passes.num_bytes + sum(int(cache.nbytes) for cache in caches)

    def run(self) -> Generator[BatchToken, None, None]:
        """Write all texts. The tokens of a round come text by text."""
        with closing(self.steps()) as steps:
            yield from (token for token in steps if token is not None)

    def steps(self) -> Generator[BatchToken | None, None, None]:
        """Like `run`, with a None after each part of a prompt that was read."""
        try:
            yield from self._steps()
        except RuntimeError as error:
            note_other_thread(error)
            raise
        finally:
            if left := self.schedule.clear():
                self.passes.verifiers = []
                if self.passes.is_together:  # the contents of the old caches are unknown
                    self.passes = self.make_passes()
                with mx.stream(self.options.stream):
                    close_all(*(text.generation.finish for text in left))

    def _steps(self) -> Iterator[BatchToken | None]:
        """The algorithm of `loop.Generation.run`, with one pass for all texts."""
        current: Rounds = []
        while True:
            if not current:
                yield from self._admit()
                self._leave()  # the caller may have removed texts at a yield
                if not self.schedule.num_open:
                    return
                if not self.schedule.writing:
                    continue
                current = self._verify(self._propose())
            ahead = self._verify_ahead(current)
            outcomes = self._accept(current, ahead)
            with mx.stream(self.options.stream):
                # Each text has moved its own position back by now. One operation then moves the
                # rows.
                self.passes.apply_rewinds()
            following, failure = ahead, None
            try:
                for (text, round_), outcome in zip(current, outcomes, strict=True):
                    with self._alone(text.uid, text):
                        text.generation.observe(round_, outcome)
                self._leave()
                following = self._next_pass(ahead)
            # A drafter failed. Emit the accepted tokens first.
            except Exception as error:
                failure = error
            handed_over = perf_counter()
            yield from self._emit(current, outcomes, following)
            if self.kernels is not None and not self.schedule.may_join:
                with mx.stream(self.options.stream):
                    self.kernels.measure()
            self.clock.away = perf_counter() - handed_over
            if failure is not None:
                raise failure
            self._leave()  # the caller may have removed texts at a yield
            current = [pair for pair in following if pair[0].finish_reason is None]

    def _next_pass(self, ahead: Rounds) -> Rounds:
        if ahead:
            self.is_pipelined = not self._would_draft()
            # The pass may have rows of texts that have just ended. Their tokens are dropped.
            return [pair for pair in ahead if pair[0].finish_reason is None]
        if not self.schedule.writing or self.schedule.may_join:
            return []
        return self._verify(self._propose())

    def _admit(self) -> Iterator[None]:
        self._begin()
        self._read_together()
        for text in self.schedule.to_read():
            size = 0
            if text.finish_reason is None:
                with self._alone(text.uid, text):
                    size = text.reader.read()
            if size:
                yield None
            self._let_in(text)
            self._begin()

    def _begin(self) -> None:
        while taken := self.schedule.take():
            uid, request = taken
            with self._alone(uid):
                self.schedule.reading.append(self.begin_text(uid, request))

    def _let_in(self, text: BatchText) -> None:
        with self._alone(text.uid, text), mx.stream(self.options.stream):
            if text.finish_reason is not None:
                self.schedule.reading.remove(text)
                text.generation.drafting.close(0)
            elif text.reader.num_left <= 0:
                text.generation.prefill()
                self.schedule.share(text)
                self.passes.add(text.verifier)
                self.schedule.join([text])

    def _read_together(self) -> None:
        """Read new, short prompts in one padded pass, if this costs less than a pass for each."""
        started = perf_counter()
        # prior(5) is the cost of a pass over 5 positions in plain passes, so that a further
        # position costs a quarter of the excess.
        texts = self.schedule.to_read_together((self.tuning.prior(5) - 1.0) / 4)
        if not texts:
            return
        with mx.stream(self.options.stream):
            for text in texts:
                self.passes.add(text.verifier)
            assert isinstance(self.passes, SharedPasses), "to_read_together is empty elsewhere"
            self.passes.read([text.generation.sequence.tokens[:-1] for text in texts])
        for text in texts:
            text.generation.prefill()
            seconds = (perf_counter() - started) / len(texts)
            text.generation.stats.prefill_seconds = seconds
        self.schedule.join(texts)

    def begin_text(self, uid: int, request: Request) -> BatchText:
        drafting = request.drafting or OwnDrafting(self.drafter, self.options.rule)
        # A deep copy shares the buffers until one of the copies is written to.
        caches = copy.deepcopy(request.prompt_cache)
        options = replace(
            self.options,
            max_tokens=request.max_tokens,
            sampler=request.sampler,
            seed=request.seed,
            rule=drafting.rule,
            logits_processors=request.logits_processors,
            prefill_stops=request.prefill_stops,
            prompt_progress_callback=request.prompt_progress_callback,
        )
        caches, _ = split_cache(self.model, caches, options)
        self.passes.check(caches)
        generation = assemble(
            self.model,
            request.prompt,
            drafting.drafter,
            options,
            caches,
            length=self.length_of_text(drafting.num_draft_tokens),
            num_read=request.num_read,
            num_said=request.num_said,
            stats=request.stats,
            of_batch={
                "target_caches": None,
                "shared_drafts": self._shared_drafts if self.passes.is_together else None,
                "num_unseen": request.num_read,
                "drafter_states": request.drafter_states,
            },
        )
        generation.begin()
        return BatchText(uid, request, generation, generation.target)

    def length_of_text(self, choice: int | str | DraftLength | None = None) -> DraftLength:
        if choice is None and self.shared is not None:
            return RowLength(self.shared)
        choice = copy.deepcopy(self.options.num_draft_tokens if choice is None else choice)
        return make_draft_length(choice, self.tuning)

    def _propose(self) -> list[Draft]:
        drafts = []
        for text in self.schedule.writing:
            draft = NO_DRAFT
            if text.generation.may_draft:
                with self._alone(text.uid, text):
                    proposed = text.generation.propose()
                    if len(proposed.tokens):
                        draft = text.verifier.checked(
                            proposed, may_fork=not self.passes.is_together
                        )
            drafts.append(draft)
        if self.shared is not None:
            self._share(self.shared, drafts)
        return drafts

    def _share(self, shared: SharedLength, drafts: list[Draft]) -> None:
        """Cut, in place, the drafts of the texts that share a draft length."""
        shared.resize(len(self.schedule.writing))
        places, rows = [], []
        for i, text in enumerate(self.schedule.writing):
            drafting = text.generation.drafting
            if isinstance(drafting.length, RowLength):
                places.append(i)
                rows.append((drafting.length, drafting.part, drafts[i]))
        for i, draft in zip(places, shared.share(rows) if rows else (), strict=True):
            drafts[i] = draft

    @contextmanager
    def _alone(self, uid: int, text: BatchText | None = None) -> Iterator[None]:
        """End only this text if the block raises and there is an `on_error`."""
        try:
            yield
        except Exception as error:
            if self.on_error is None:
                raise
            if text is None or text.finish_reason != "removed":
                self.on_error(uid, error)
            if text is not None:
                text.finish_reason = "removed"

    def _verify(self, drafts: Sequence[Draft]) -> Rounds:
        self.is_pipelined = not any(map(len, drafts))
        to_verify = []
        for text, draft in zip(self.schedule.writing, drafts, strict=True):
            sequence, start = text.generation.sequence, text.verifier.rollback.position
            to_verify.append(ToVerify(sequence.tokens[start:], draft, sequence.num_generated))
        return self._launch(to_verify, is_ahead=False)

    def _would_draft(self) -> bool:
        """True if there would be a draft now, without the pass that was launched ahead."""
        selections = [text.generation.drafting.selection for text in self.schedule.writing]
        if all(selection is None or selection.is_free for selection in selections):
            return any(map(len, self._propose()))
        for text in self.schedule.writing:
            with self._alone(text.uid, text):
                drafting = text.generation.drafting
                if drafting.selection and drafting.selection.may_find(drafting.room):
                    return True
        return False

    def _verify_ahead(self, current: Rounds) -> Rounds:
        """Start the next pass before the tokens of this pass are known, if nothing is drafted.

        A draft found meanwhile begins one token later. Waiting for it would cost all texts host
        time.
        """
        if not (self.is_pipelined and self.schedule.may_run_ahead(current)):
            return []
        to_verify = []
        with mx.stream(self.options.stream):
            for text, round_ in current:
                # The caller's own sampler runs here, and may raise.
                with self._alone(text.uid, text):
                    token = round_.under_way.draw_next()
                    position = text.generation.sequence.num_generated + 1
                    to_verify.append(ToVerify(token, NO_DRAFT, position))
        if len(to_verify) < len(current):
            return []
        for (text, _), row in zip(current, to_verify, strict=True):
            text.verifier.extend_history(row.pending)
        return self._launch(to_verify, is_ahead=True)

    def _launch(self, to_verify: Sequence[ToVerify], *, is_ahead: bool) -> Rounds:
        for text in self.schedule.writing:
            text.generation.clock.launch_begins()
        with mx.stream(self.options.stream):
            under_way = self.passes.launch(to_verify)
        self.num_rounds += 1
        rounds = []
        for text, pass_ in zip(self.schedule.writing, under_way, strict=True):
            part = text.generation.drafting.part if len(pass_.draft) else ""
            round_ = text.generation.clock.launched(pass_, is_ahead=is_ahead, part=part)
            rounds.append((text, round_))
        return rounds

    def _accept(self, current: Rounds, ahead: Rounds) -> list[Outcome]:
        with mx.stream(self.options.stream):
            for _, round_ in current:
                # Wait for all texts before the clock is read. The loop below then runs on the host
                # alone.
                round_.under_way.wait()
        seconds, is_steady = self.clock.time_of_pass(current, ahead)
        next_of = {text.uid: round_ for text, round_ in ahead}
        outcomes = []
        for text, round_ in current:
            outcome = Outcome(range(0), [])
            with self._alone(text.uid, text):
                outcome = text.generation.accept(round_, next_of.get(text.uid))
                if text.finish_reason is None:
                    text.cut_at(self.stop_tokens, round_, outcome)
                if len(outcome.tokens) <= round_.num_drafted:
                    text.generation.roll_back(round_, outcome)
            outcomes.append(outcome)
        if self.shared is not None:
            width = max(round_.num_drafted for _, round_ in current)
            rows = [
                (text.generation.drafting.length, len(outcome.tokens))
                for (text, _), outcome in zip(current, outcomes, strict=True)
            ]
            parts = {round_.part for _, round_ in current}
            self.shared.record(width, rows, seconds, steady=is_steady, parts=parts)
        return outcomes

    def _leave(self) -> None:
        texts = self.schedule.writing
        staying = [i for i, text in enumerate(texts) if text.finish_reason is None]
        if len(staying) == len(texts):
            return
        for i, text in enumerate(texts):
            if self.returns_caches and text.finish_reason in ("stop", "length"):
                with self._alone(text.uid, text), mx.stream(self.options.stream):
                    # Rows can be extracted only while they are in the shared caches.
                    text.keep_caches(self.passes.extract(i), complete=self.completes_caches)
        with mx.stream(self.options.stream):
            self.passes.keep(staying)
        self.schedule.move_ended()

        def finish(text: BatchText) -> None:
            with self._alone(text.uid, text):
                text.generation.finish()

        close_all(*(partial(finish, text) for text in self.schedule.leaving))

    def _emit(
        self, current: Rounds, outcomes: Sequence[Outcome], following: Rounds
    ) -> Iterator[BatchToken]:
        next_of = {text.uid: round_ for text, round_ in following}
        for (text, round_), outcome in zip(current, outcomes, strict=True):
            left = len(outcome.tokens)
            with self._alone(text.uid, text):
                for token in text.generation.emit(round_, outcome, next_of.get(text.uid)):
                    if text.finish_reason == "removed":
                        break
                    left -= 1
                    reason = None if left else text.finish_reason
                    caches = text.prompt_cache if reason else None
                    yield BatchToken(text.uid, token, reason, caches, text.num_cached)
