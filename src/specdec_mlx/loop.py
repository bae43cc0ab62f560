"""The loop: propose, verify, accept, roll back, emit. The page to read first.

The state is one sequence, prompt + generated tokens, and the target's caches, which hold its first
`position` tokens. Tokens that are not in the caches yet are *pending*: the next pass feeds them in
front of the draft. Normally only the last token is pending. After a rejection on recurrent caches
a few more are.

`Generation.run` is the algorithm. The next pass is always under way before the tokens of a round
are handed out. Where drafts are rare, the loop works like mlx-lm's own: it launches the next pass
before it knows the token of this one, so that the device never waits for Python. That is *pipelined
mode*. A pass launched ahead cannot verify a draft, so a draft that is found meanwhile begins one
token later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float

from specdec_mlx.arguments import argument_error, check_names
from specdec_mlx.caches import Rollback, mark_unusable, note_other_thread
from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    DrafterStates,
    Origin,
    Outcome,
    RoundRecord,
)
from specdec_mlx.draft_length.drafting import Drafting
from specdec_mlx.draft_length.store import tuning_for, tuning_with
from specdec_mlx.draft_length.value import DraftLength, make_draft_length
from specdec_mlx.duck_typed import as_drafter
from specdec_mlx.kernels import Kernels
from specdec_mlx.memory.drafter_states import StatesOnCache
from specdec_mlx.models.anatomy import group_of
from specdec_mlx.options import OptionArguments, Options, noise_of
from specdec_mlx.ranks import Ranks, SharedDrafting
from specdec_mlx.sequence import (
    PromptReader,
    SequenceState,
    bring_caches_to,
    check_ids,
    check_prompt,
    close_all,
    history_of,
    remember,
    split_cache,
)
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target import LazyPass, StepwisePass, Verifier, check_model

if TYPE_CHECKING:
    from specdec_mlx.exactness.feature_feed import FeatureFeed

SHORT = 8  # texts of at most so many tokens are drafted from their first pass on

CLEAR_CACHE_EVERY = 256
"""Tokens after which MLX's buffer cache is cleared, as in mlx-lm's `generate_step`."""

HIT_RATE_DECAY = 0.8  # decay of the moving average of "this round kept something of its draft"

FIRST_HIT_RATE = 0.3  # initial value of that average

LOW_HIT_RATE = 0.08
"""Rate below which pipelined mode pays. A pass that is not overlapped takes longer by the time that
Python needs to build it: 0.05 of a plain round of SmolLM2 on a CPU, and more on a GPU. A draft that
has to begin one token later loses about 0.6 of a round."""

HARDLY = 0.1
"""Share of a round's seconds for which the caller may be away, and they count as the round's."""


@dataclass(slots=True)
class Token:
    """One emitted token.

    Attributes:
        token: its id.
        origin: "draft" (accepted), "correction" (after a rejection), "bonus" (after a draft that
            was accepted as a whole) or "plain" (no draft).
        stats: the running account.
        own_row: [1, V] log-probabilities of this position, in memory that no other position shares.
        row: index of this position in the pass. 0 follows the last pending token.
    """

    token: int
    origin: Origin
    stats: SpeculationStats
    own_row: Float[mx.array, "1 vocab"] = field(repr=False)
    row: int = field(repr=False)

    @property
    def logprobs(self) -> Float[mx.array, " vocab"]:
        """Log-probabilities [V] as mlx-lm reports them, before temperature and filters."""
        return self.own_row[0]

    @property
    def from_draft(self) -> bool:
        """True if the drafter proposed this token."""
        return self.origin == "draft"


def speculate(
    model: nn.Module,
    prompt_tokens: Sequence[int] | mx.array,
    drafter: Any = None,
    options: Options | None = None,
    **fields: Unpack[OptionArguments],
) -> Generator[Token, None, None]:
    """Yield the target's own continuation of a prompt, sooner: tokens in, tokens out.

    However the generation ends (length, close, an exception), the caches hold exactly the prompt
    and the emitted tokens. If this is impossible, a note on the exception gives the reason, and
    later calls refuse these caches.

    Args:
        model: any mlx-lm model.
        prompt_tokens: [n] token ids.
        drafter: a `Drafter`, or an object with its `begin`; None for plain decoding.
        options: how the text is generated; None makes them of `fields`.
        fields: the fields of `Options`, by name, such as `max_tokens`.

    Raises:
        PromptError: for what cannot be a prompt of this model.
        DraftError: a drafter broke its contract.
        LogitsError: the target's logits are not numbers.
        RankError: of a model on several ranks, others were called otherwise, or failed.
        CacheRollbackError: the caches cannot be used, or not be brought in order at the end.
        ValueError: for other bad input.
    """
    check_model(model)
    check_names(fields, speculate, Options)
    how = options or Options(**fields)
    if how.stop:
        instead = "no stop strings for tokens; stream_generate takes them"
        raise argument_error("stop", how.stop, instead)
    caches, draft_cache = split_cache(model, how.prompt_cache, how)
    history, num_unnamed = history_of(how.prompt_cache and caches, how.history)
    # A drafter's state would begin with the wrong positions behind unnamed tokens.
    drafter_states = (
        None if how.prompt_cache is None or num_unnamed else StatesOnCache(how.prompt_cache)
    )
    generation = assemble(
        model,
        prompt_tokens,
        drafter,
        how,
        caches,
        draft_cache=draft_cache,
        drafter_states=drafter_states,
        group=group_of(model),
        history=history,
    )
    generation.stats.num_unnamed = 0 if drafter is None else num_unnamed
    return generation.generate()


@dataclass
class Generation:
    """The continuation of one sequence.

    Attributes:
        target: the model, its caches and its rule.
        sequence: the prompt and the generated tokens.
        drafting: the drafter's side.
        context: facts about the target that a drafter may use.
        options: `prompt_cache` is the caller's list, which holds the caches at the end, or None.
        is_pipelined: each pass is launched before the token of the pass before it is known.
        hit_rate: moving average of the rounds that accepted at least one draft token.
        failure: exception of the drafter, raised after the accepted tokens were handed out.
        fed_from: first position of the latest pass.
    """

    target: Verifier
    sequence: SequenceState
    drafting: Drafting
    context: DraftContext
    options: Options = field(default_factory=Options)
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    clock: RoundClock = field(default_factory=lambda: RoundClock())
    is_pipelined: bool = True
    hit_rate: float = FIRST_HIT_RATE
    has_begun: bool = False
    has_ended: bool = False
    is_prefilled: bool = False
    failure: Exception | None = None
    fed_from: int = 0

    @cached_property
    def reader(self) -> PromptReader:
        options, before = self.options, self.sequence.num_history
        callback = options.prompt_progress_callback
        return PromptReader(
            self.sequence.tokens[: self.sequence.prompt_length],
            self.target.rollback,
            self.feed,
            options.prefill_step_size,
            [before + stop for stop in options.prefill_stops],
            lambda done, total: callback and callback(done - before, total - before),
            options.stream,
        )

    def generate(self) -> Generator[Token, None, None]:
        """Yield the tokens. On several ranks, every rank yields what rank 0's caller has taken."""
        return self.drafting.as_on_first(self.run())

    def begin(self) -> None:
        # Apart from `run`, because a batch begins all drafters before it reads any prompt.
        self.has_begun = True
        self.drafting.begin(self.context)

    def run(self) -> Generator[Token, None, None]:
        """The algorithm (Leviathan et al. 2023, Algorithm 1, round by round)."""
        try:
            if not self.has_begun:
                self.begin()
            self.prefill()
            # The caches lack the last prompt token, which this pass feeds. A draft may follow it.
            current = self.verify(self.propose() if self.may_draft else NO_DRAFT)
            emits_first = self.emits_first_token_at_once
            while current is not None:
                # In pipelined mode the device gets its next pass before the host waits for this
                # one.
                ahead = None if emits_first else self.verify_ahead(current)
                outcome = self.accept(current, ahead)
                # A round of K + 1 tokens accepted the whole draft. The last token, which was never
                # fed, becomes the next pending token, so there is nothing to take back.
                if len(outcome.tokens) <= current.num_drafted:
                    self.roll_back(current, outcome)
                # A caller may leave before the position at which plain decoding quantizes.
                if self.options.kv_bits is not None and len(outcome.tokens) > 1:
                    emits_first |= self.target.must_quantize
                # The next pass runs on the device while the caller handles the tokens of this
                # round.
                following = self.next_round(current, outcome, ahead, emits_first)
                yield from self.emit(current, outcome, following)
                if self.target.kernels is not None:
                    self.measure_kernels(self.target.kernels)
                # `following` is None where the tokens had to be handed out before the drafter was
                # asked.
                current = following or self.verify(self.propose())
                emits_first = self.drafting.is_shared
        except RuntimeError as error:
            note_other_thread(error)
            raise
        finally:
            try:
                self.finish()
            finally:
                # Ctrl-C may come before the caches are in order.
                if not self.has_ended:
                    mark_unusable(self.target.rollback.caches, "a generation was interrupted.")

    def prefill(self) -> None:
        """Feed the prompt except for its last token, in chunks."""
        reader = self.reader
        # In a batch the text has joined the shared caches since the reader was made.
        caches = reader.caches = self.target.rollback
        started = perf_counter() - reader.seconds  # parts of the prompt that were read before
        if reader.num_read == self.sequence.num_history:
            reader.on_progress(reader.num_read, self.sequence.prompt_length)
        caches.checkpoint()
        reader.read_all()
        # The first call for a model runs probe passes, which must not count as a round's time.
        self.target.measure_width()
        caches.drop_checkpoints()
        self.is_prefilled = True
        if self.sequence.has_prompt:
            self.target.extend_history(self.sequence.shown_at_first)
        self.stats.prefill_seconds = perf_counter() - started
        self.clock.start()

    @property
    def may_draft(self) -> bool:
        """True after the first token. Only short texts are drafted before it."""
        sequence = self.sequence
        return sequence.num_generated > 0 or 0 < sequence.max_tokens <= SHORT

    @property
    def emits_first_token_at_once(self) -> bool:
        """True if the first token is handed out before a drafter is asked for the next tokens.

        With several ranks this holds for every round, because the ranks meet after the tokens were
        handed out.
        """
        has_session = self.drafting.session is not None
        return self.drafting.is_shared or (has_session and not self.target.remembers)

    def propose(self) -> Draft:
        self.clock.draft_begins()
        return self.drafting.propose()

    def verify(self, draft: Draft) -> Round | None:
        """Start the pass over pending tokens and draft. None if no more tokens are wanted."""
        sequence = self.sequence
        if not sequence.wants_more():
            return None
        self.choose_mode(len(draft.tokens) > 0)
        self.clock.launch_begins()
        # Pending tokens are in the text and not in the caches. After a rejection on recurrent
        # caches there are several.
        self.fed_from = start = self.target.rollback.position
        pending, embeddings = sequence.tokens[start:], None
        if sequence.embeddings is not None:
            embeddings = sequence.embeddings_from(start, len(pending))
        with mx.stream(self.options.stream):
            under_way = self.target.launch(pending, draft, sequence.num_generated, embeddings)
        self.drafting.is_under_way = True
        return self.clock.launched(under_way, part=self.drafting.part)

    def verify_ahead(self, current: Round) -> Round | None:
        """In pipelined mode, start the next pass while the token of this pass is still unknown."""
        is_plain = self.is_pipelined and not current.num_drafted
        if not is_plain or not self.sequence.wants_more(besides=1):
            return None
        self.clock.launch_begins()
        self.fed_from = self.target.rollback.position
        with mx.stream(self.options.stream):
            # `token` is a lazy array: its value stays on the device, and the host does not wait for
            # it.
            token = current.under_way.draw_next()
            self.target.extend_history(token)
            ahead = self.target.launch(token, NO_DRAFT, self.sequence.num_generated + 1)
        return self.clock.launched(ahead, is_ahead=True)

    def choose_mode(self, has_draft: bool) -> None:
        """Choose pipelined mode if there is no draft, and a draft after the next token is unlikely.

        A pass launched ahead costs the first token of the next draft. Waiting costs the overlap of
        host and device.
        """
        may_wait = self.hit_rate >= LOW_HIT_RATE and self.drafting.may_find
        self.is_pipelined = not has_draft and not may_wait

    def accept(self, current: Round, ahead: Round | None) -> Outcome:
        """Wait for a pass, and append its accepted draft tokens and the next token to the text."""
        sequence, drafting = self.sequence, self.drafting
        started = self.clock.now()
        with mx.stream(self.options.stream):
            outcome = current.under_way.read()
        num_known = len(sequence.tokens)
        # The pass that has just been read fed the last prompt token.
        if num_known == sequence.prompt_length:
            self.reader.on_progress(num_known, num_known)
        outcome.tokens = sequence.append(outcome.tokens)
        # `verify_ahead` has shown the token to the processors already.
        if ahead is None:
            self.target.extend_history(outcome.tokens)
        # Positions that were in the caches before this pass.
        context = num_known - current.num_pending
        record = self.clock.record(current, outcome, ahead, context, started)
        if drafting.drafter is not None:
            drafting.record(record)
        hit = (1 - HIT_RATE_DECAY) * (record.accepted > 0)
        self.hit_rate = HIT_RATE_DECAY * self.hit_rate + hit
        self.stats.record(record)
        self.stats.why_none = drafting.why_none
        return outcome

    def roll_back(self, current: Round, outcome: Outcome) -> None:
        # max_tokens may have cut the round. Draft tokens behind the cut are rejected too.
        accepted = outcome.accepted[: len(outcome.tokens) - 1]
        draft_began = len(self.sequence.tokens) - len(outcome.tokens)
        self.target.rollback.keep(draft_began, accepted)

    def next_round(
        self, current: Round, outcome: Outcome, ahead: Round | None, emits_first: bool
    ) -> Round | None:
        """Launch the pass of the next round. None if this round's tokens are handed out first.

        An exception of the drafter is raised after the accepted tokens were handed out.
        """
        drafting = self.drafting
        if drafting.drafter is None:
            return ahead or (None if emits_first else self.verify(NO_DRAFT))
        try:
            self.observe(current, outcome)
            if emits_first:
                return None
            if ahead is None:
                # Nothing was launched ahead, so the next pass may verify a draft.
                return self.verify(self.propose())
            # The pass launched ahead cannot take a draft. If there would be one now, leave
            # pipelined mode so that the next pass can.
            selection = drafting.selection
            may_find = selection is not None and selection.may_find(drafting.room)
            self.choose_mode(may_find)
        except Exception as error:
            self.failure = error
        return ahead

    def observe(self, current: Round, outcome: Outcome) -> None:
        if self.drafting.features is not None:
            num_known = len(self.sequence.tokens) - len(outcome.tokens)
            start = num_known - current.num_pending
            self.drafting.features.show_round(current, outcome, start)
        if self.drafting.session is not None:
            self.drafting.session.observe(self.sequence.not_handed_out)

    def emit(self, current: Round, outcome: Outcome, following: Round | None) -> Iterator[Token]:
        """Hand out the tokens of a round while the next pass runs."""
        self.stats.other_seconds += self.clock.handed_over(following, self.drafting)
        for n, token in enumerate(tokens_of(current, outcome, self.stats), start=1):
            if self.target.remembers and n == len(outcome.tokens) > len(outcome.accepted):
                self.step_ahead(current, following)
            # Count before the yield: a caller who closes the generator here has this token.
            self.sequence.num_handed_out += 1
            if self.sequence.num_handed_out % CLEAR_CACHE_EVERY == 0:
                mx.clear_cache()
            yield token
        self.clock.resumed()
        if self.failure is not None:
            raise self.failure
        has_drafter = self.drafting.drafter is not None
        # A pass without a draft needs no rollback. Its checkpoint would keep the old buffers alive,
        # and MLX would copy each buffer that the pass writes to.
        if has_drafter and following and not following.num_drafted:
            self.target.rollback.drop_checkpoints()

    def step_ahead(self, current: Round, following: Round | None) -> None:
        """Show a token to processors that remember before it is handed out, as mlx-lm does."""
        if following is not None:
            following.under_way.draw_next()
        elif not self.sequence.wants_more():
            self.target.show_end(current.under_way.logprobs[-1])

    def feed(self, num_tokens: int) -> None:
        """Feed at most `num_tokens` of the next tokens of the text, to fill the caches only."""
        self.fed_from = start = self.target.rollback.position
        size = min(num_tokens, self.options.prefill_step_size)
        tokens = mx.array(self.sequence.tokens[start : start + size], mx.uint32)
        self.target.feed(tokens, self.sequence.embeddings_from(start, size))
        if self.drafting.features is not None:
            self.drafting.features.show_fed(start)

    def measure_kernels(self, kernels: Kernels) -> None:
        """Let kernels measure while no token of this text waits."""
        with mx.stream(self.options.stream):
            kernels.measure()
        # The time counts as the caller's, so that no round is learned from that contains it.
        self.clock.resumed()

    def finish(self) -> None:
        """Bring the caches to the prompt and the tokens handed out.

        After a failed prefill the caches return to where they were before it.
        """
        features, self.drafting.features = self.drafting.features, None
        with mx.stream(self.options.stream):
            caches = self.options.prompt_cache if self.drafting.agree_on_end() else None
            sequence = self.sequence
            # Tokens that were generated and not handed out leave the caches as well.
            end = sequence.end if self.is_prefilled else sequence.num_history
            close_all(
                lambda: self.end_caches(end, caches),
                lambda: remember(caches if sequence.has_prompt else None, sequence.tokens[:end]),
                lambda: self.show_last(features, end),
                lambda: self.drafting.close(end),
            )

    def end_caches(self, end: int, caches: list[Any] | None) -> None:
        bring_caches_to(end, self.target, caches, self.feed)
        self.has_ended = True

    def show_last(self, features: FeatureFeed | None, end: int) -> None:
        # A drafter that keeps its state goes on behind the row of the last token.
        if features is not None and self.context.drafter_states is not None:
            features.show_last(self.fed_from, end)


def tokens_of(current: Round, outcome: Outcome, stats: SpeculationStats) -> list[Token]:
    logprobs, tokens = current.under_way.logprobs, outcome.tokens
    num_kept = len(outcome.accepted)
    last: Origin = "plain"
    if current.num_drafted:
        last = "correction" if num_kept < current.num_drafted else "bonus"
    emitted, row = [], 0
    for i, token in enumerate(tokens):
        origin: Origin = "draft" if i < num_kept else last
        emitted.append(Token(token, origin, stats, logprobs[row], row))
        # Row 0 follows the pending tokens, and row k + 1 follows draft token k. In a tree accepted
        # tokens need not be neighbours.
        row = outcome.accepted[i] + 1 if i < num_kept else 0
    return emitted


@dataclass(slots=True)
class Round:
    """A pass under way, and the host time that it took to launch it.

    Attributes:
        under_way: the pass, whose results are lazy.
        num_drafted: draft tokens that it verifies.
        num_pending: known tokens that it feeds before the draft.
        draft_seconds, launch_seconds: host seconds for proposing, and for building the pass.
        is_ahead: launched before the round before it was read.
        part: key of the draft's drafter, or "".
    """

    under_way: LazyPass | StepwisePass
    num_drafted: int
    num_pending: int
    draft_seconds: float
    launch_seconds: float
    is_ahead: bool = False
    part: str = ""


@dataclass
class RoundClock:
    """Host time of rounds.

    Attributes:
        seconds: from the reading of the round before to the reading of the latest round.
        waited: seconds of waiting for the latest round.
        away: seconds that the caller took between two rounds.
        now: returns the time, in seconds.
    """

    seconds: float = 0.0
    waited: float = 0.0
    away: float = 0.0
    now: Callable[[], float] = field(default_factory=lambda: perf_counter)
    _read_at: float = 0.0
    _resumed_at: float = 0.0
    _handed_over_at: float = 0.0
    _draft_began: float | None = None
    _launch_began: float = 0.0
    _launching: float = 0.0
    _finished_at: float | None = None

    def start(self) -> None:
        self._read_at = self._resumed_at = self.now()

    def draft_begins(self) -> None:
        self._draft_began = self.now()

    def launch_begins(self) -> None:
        self._launch_began = self.now()

    def launched(
        self, under_way: LazyPass | StepwisePass, *, is_ahead: bool = False, part: str = ""
    ) -> Round:
        """The round of a pass that was just launched. `part` is the key of its draft's drafter."""
        # A pass launched ahead has no draft, so no drafting began before it.
        began = self._launch_began if self._draft_began is None else self._draft_began
        self._draft_began = None
        draft_seconds = self._launch_began - began
        launch_seconds = self.now() - self._launch_began
        self._launching += draft_seconds + launch_seconds
        drafted = len(under_way.draft.tokens)
        pending = under_way.num_fed - drafted
        return Round(under_way, drafted, pending, draft_seconds, launch_seconds, is_ahead, part)

    @property
    def was_undisturbed(self) -> bool:
        """True if `seconds` measure the device: the caller was away for less than the wait."""
        return self.away < max(self.waited, HARDLY * self.seconds)

    def record(
        self, current: Round, outcome: Outcome, ahead: Round | None, context: int, started: float
    ) -> RoundRecord:
        """The account of the round that was just read.

        Args:
            current: the round.
            outcome: its tokens, cut at max_tokens.
            ahead: the pass launched before this round was read, or None.
            context: positions in the caches before the pass.
            started: time at which waiting for the pass began.
        """
        read_at = self.now()
        self.waited = read_at - started
        self.seconds = (self._finished_at or read_at) - self._read_at
        if self._finished_at is not None:
            self.away = 0.0
        self._read_at, self._finished_at = self._finished_at or read_at, None
        return RoundRecord(
            drafted=current.num_drafted,
            accepted=len(outcome.accepted),
            emitted=len(outcome.tokens),
            fed=current.under_way.num_fed,
            tokens=outcome.tokens,
            seconds=self.seconds,
            draft_seconds=current.draft_seconds,
            verify_seconds=current.launch_seconds + self.waited,
            # A pass launched ahead overlaps the pass before it. Two readings are one pass apart
            # only if this pass and the next pass were launched in the same mode.
            steady=current.is_ahead == (ahead is not None)
            and self.was_undisturbed
            and not outcome.is_tied,
            ahead=current.is_ahead,
            context=context,
            part=current.part,
            tied=outcome.is_tied,
        )

    def handed_over(self, following: Round | None, drafting: Drafting) -> float:
        """Note that the caller gets the tokens now; return the host's seconds of other work.

        A slow caller hides when the pass has ended. Wait for the pass if the draft length needs its
        time.
        """
        if (
            following is not None
            and drafting.selection is not None
            and drafting.selection.length.wants_timing(following.num_drafted)
            and not self.was_undisturbed
        ):
            following.under_way.wait()
            self._finished_at = self.now()
        self._handed_over_at = self.now()
        return self._handed_over_at - self._resumed_at - self.waited - self._launching

    def resumed(self) -> None:
        self._resumed_at, self._launching = self.now(), 0.0
        self.away = self._resumed_at - self._handed_over_at


def assemble(
    model: nn.Module,
    prompt_tokens: Any,
    drafter: Any,
    options: Options,
    caches: list[Any],
    *,
    draft_cache: list[Any] | None = None,
    drafter_states: DrafterStates | None = None,
    group: mx.distributed.Group | None = None,
    length: DraftLength | None = None,
    num_read: int = 0,
    num_said: int = 0,
    history: Sequence[int] = (),
    stats: SpeculationStats | None = None,
    of_batch: dict[str, Any] | None = None,
) -> Generation:
    """Check the parts of a generation, and put them together.

    Args:
        model: the target.
        prompt_tokens: [n] token ids.
        drafter: a drafter, or None for plain decoding.
        options: how the text is generated.
        caches: the target's caches, which hold the prompt's first `num_read` tokens.
        draft_cache: a draft model's caches, kept by the caller.
        drafter_states: where drafters keep their states of the conversation, or None.
        group: the ranks that the model is spread over. None for a model that is complete on each.
        length: a draft length that replaces the draft length of `options`.
        num_read: tokens of the prompt that are in the caches.
        num_said: the prompt's last tokens that are the beginning of the text, generated elsewhere.
        history: [n] tokens that are in the caches before the prompt.
        stats: an account to continue.
        of_batch: fields of the drafter's context that differ where passes are shared.

    Raises:
        PromptError: the prompt is none for this model.
        ValueError: other bad input.
    """
    if not isinstance(drafter, Drafter | None):
        drafter = as_drafter(drafter)
    prompt = [*history, *check_prompt(prompt_tokens, options.input_embeddings, drafter)]
    rollback = Rollback(caches, num_read + len(history))
    probe, noise = options.probe and drafter is not None, noise_of(options.seed)
    kind: Callable[..., Drafting] = Drafting
    if group is not None:
        ranks = Ranks(group, options.stream)
        kind, noise = partial(SharedDrafting, ranks), ranks.share_noise(noise)
    target = Verifier(model, rollback, options, noise=noise, probe=probe)
    check_ids(prompt, target.vocab_size)
    context = target.draft_context(options.tokenizer, draft_cache)
    context = replace(
        context, **{"num_unseen": len(history), "drafter_states": drafter_states} | (of_batch or {})
    )
    if drafter is not None:
        drafter.check(context)
    if length is None:
        tuning = options.tuning
        if tuning is None:
            kernels = target.kernels
            tuning = tuning_for(model) if kernels is None else tuning_with(model, kernels)
        length = make_draft_length(options.num_draft_tokens, tuning)
    sequence = SequenceState(
        prompt,
        len(prompt) - num_said,
        options.max_tokens,
        options.input_embeddings,
        num_said,
        has_prompt=len(prompt_tokens) > 0,
        num_history=len(history),
    )
    drafting = kind(
        drafter,
        length,
        target,
        sequence,
        keeps_cache=options.prompt_cache is not None,
        stream=options.stream,
    )
    return Generation(target, sequence, drafting, context, options, stats or SpeculationStats())
