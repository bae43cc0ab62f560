"""The loop: propose, verify, accept, roll back, emit. The page to read first.

The state is one sequence, prompt + generated tokens, and the target's caches, which hold its first
`position` tokens. What is not in the caches yet is *pending*: the next pass feeds it in front of
the draft. Normally that is the last token; after a rejection on recurrent caches a few more.

`Generation.run` is the algorithm. The next pass is always under way before this round's tokens are
handed out; `pipeline` says when it may even be launched before they are known.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float
from mlx_lm.generate import generation_stream

from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    Origin,
    Outcome,
    Target,
)
from specdec_mlx.engine.assemble import Assembled, assemble
from specdec_mlx.engine.clock import Round, RoundClock
from specdec_mlx.engine.drafting import Drafting
from specdec_mlx.engine.history import history_of, remember
from specdec_mlx.engine.options import Options
from specdec_mlx.engine.pipeline import Pipeline
from specdec_mlx.engine.prompt_reader import PromptReader
from specdec_mlx.engine.ranks import SharedDrafting, ranks_of
from specdec_mlx.engine.sequence import SequenceState, bring_caches_to, close_all
from specdec_mlx.options import check_names
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.token_ids import to_ids
from specdec_mlx.verify.inputs import check_model, split_cache

# most tokens of a text that is drafted from its first pass on, since each pass counts
SHORT = 8
CLEAR_CACHE_EVERY = 256
"""Tokens after which MLX's buffer cache is cleared, as in mlx-lm's `generate_step`."""


@dataclass(slots=True)
class Token:
    """One emitted token.

    origin: "draft" (accepted), "correction" (after a rejection), "bonus" (after a draft accepted
    whole) or "plain" (no draft). stats: the running account. own_row: [1, V] its log-probabilities,
    which keep no others in memory. row: its place in the pass, 0 after the pending tokens.
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
    drafter: Drafter | None = None,
    options: Options | None = None,
    **given: Any,
) -> Generator[Token, None, None]:
    """Yield the target's own continuation of a prompt, sooner: tokens in, tokens out.

    However the generation ends (length, close, an exception), the caches hold exactly the prompt
    and the tokens handed out. Where that cannot be had, a note on the exception says why, and later
    calls refuse these caches.

    Args:
        model: any mlx-lm model.
        prompt_tokens: [n] token ids.
        drafter: None for plain decoding.
        options: how; None makes them of `given`.
        given: fields of `engine.options.Options`, which lists them, such as `max_tokens`.

    Raises:
        PromptError: for what cannot be a prompt of this model.
        DraftError: a drafter broke its contract.
        LogitsError: the target's logits are not numbers.
        RankError: of a model on several ranks, others were called otherwise, or failed.
        CacheRollbackError: the caches cannot be used, or not be brought in order at the end.
        ValueError: for other bad input.
    """
    check_model(model)
    check_names(given, speculate, Options)
    how = options or Options(**given)
    caches, draft_cache = split_cache(model, how.prompt_cache, how)
    history, num_unnamed = history_of(how.prompt_cache and caches, how.history)
    ranks = ranks_of(model, how.stream)
    parts = assemble(
        *(model, prompt_tokens, drafter, how, caches),
        draft_cache=draft_cache,
        ranks=ranks,
        history=history,
    )
    parts.stats.num_unnamed = 0 if drafter is None else num_unnamed
    tokens = Generation.of(parts, how, callers_cache=how.prompt_cache).run(
        parts.context
    )
    drafting = parts.drafting
    return (
        drafting.as_on_first(tokens) if isinstance(drafting, SharedDrafting) else tokens
    )


@dataclass
class Generation:
    """The continuation of one sequence.

    sequence: prompt + generated tokens. drafting: the drafter's side. callers_cache: the list that
    is to hold the caches at the end, None if the caller has none. reading: of the prompt.
    """

    target: Target
    sequence: SequenceState
    drafting: Drafting
    stats: SpeculationStats
    stream: Any = generation_stream
    callers_cache: list[Any] | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    clock: RoundClock = field(default_factory=RoundClock)
    is_prefilled: bool = False
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.pipeline = Pipeline(self.target, self.sequence, self.clock, self.stream)
        prompt = self.sequence.tokens[: self.sequence.prompt_length]
        caches, how = self.target.rollback, self.reading
        self.reader = PromptReader(prompt, caches, self.feed, stream=self.stream, **how)

    def use_clock(self, clock: RoundClock) -> None:
        """Take the time of rounds from another clock."""
        self.clock = self.pipeline.clock = clock

    @classmethod
    def of(
        cls, parts: Assembled, options: Options, callers_cache: list[Any] | None = None
    ) -> Generation:
        """The generation of what was put together."""
        before, told = parts.sequence.num_history, options.prompt_progress_callback
        reading: dict[str, Any] = {
            "step_size": options.prefill_step_size,
            "stops": [before + stop for stop in options.prefill_stops],
        }
        if told is not None:
            reading["on_progress"] = lambda done, total: told(
                done - before, total - before
            )
        four = parts.target, parts.sequence, parts.drafting, parts.stats
        return cls(*four, options.stream, callers_cache, reading)

    def run(self, context: DraftContext) -> Generator[Token, None, None]:
        """The algorithm (Leviathan et al. 2023, Algorithm 1, round by round)."""
        try:
            self.drafting.begin(context)
            self.prefill()
            current = self.verify(self.propose() if self.may_draft else NO_DRAFT)
            has_session = self.drafting.session is not None
            waits = self.drafting.is_shared or (
                has_session and not self.target.remembers
            )
            while current is not None:
                following = ahead = (
                    None if waits else self.pipeline.verify_ahead(current)
                )
                outcome = self.accept(current, ahead)
                self.roll_back(current, outcome)
                try:
                    self.observe(current, outcome)
                    # as for the first token: it is handed out before any drafting
                    if not waits:
                        following = self.stay_ahead(ahead) or self.verify(
                            self.propose()
                        )
                # of the drafter; what was accepted is emitted first
                except Exception as error:
                    self.failure = error
                yield from self.emit(current, outcome, following)
                current = following or self.verify(self.propose())
                waits = self.drafting.is_shared
        finally:
            self.finish()

    def prefill(self) -> None:
        """Feed the prompt but for its last token, in chunks."""
        reader = self.reader
        # in a batch, a place among the others
        caches = reader.caches = self.target.rollback
        started = perf_counter() - reader.seconds  # of parts that were read before
        if reader.num_read == self.sequence.num_history:
            reader.on_progress(reader.num_read, self.sequence.prompt_length)
        caches.checkpoint()
        reader.read_all()
        # a model's first time is measured here, and not in a round
        self.target.widest_pass()
        caches.drop_checkpoints()
        self.is_prefilled = True
        if self.sequence.has_prompt:
            self.target.extend_history(self.sequence.shown_at_first)
        self.stats.prefill_seconds = perf_counter() - started
        self.clock.start()

    @property
    def may_draft(self) -> bool:
        """True after the first token, which comes before any drafting but in short texts."""
        sequence = self.sequence
        return sequence.num_generated > 0 or 0 < sequence.max_tokens <= SHORT

    def propose(self) -> Draft:
        """A draft for the text so far, no longer than is worth verifying."""
        self.clock.draft_begins()
        return self.drafting.propose()

    def verify(self, draft: Draft) -> Round | None:
        """Start the pass over the pending tokens and the draft; None when enough is known."""
        if not self.sequence.wants_more():
            return None
        self.pipeline.choose(len(draft.tokens) > 0, self.drafting.may_find)
        self.clock.launch_begins()
        start = self.target.rollback.position
        pending = self.sequence.tokens[start:]
        embeddings = self.sequence.embeddings_from(start, len(pending))
        with mx.stream(self.stream):
            under_way = self.target.launch(
                pending, draft, self.sequence.num_generated, embeddings
            )
        self.drafting.is_under_way = True
        return self.clock.launched(under_way, part=self.drafting.part)

    def accept(self, current: Round, ahead: Round | None) -> Outcome:
        """Wait for a pass; what the rule kept of its draft, and the token after, join the text."""
        started = self.clock.now()
        with mx.stream(self.stream):
            outcome = current.under_way.read()
        self.clock.was_read(started)
        if self.sequence.num_generated == 0:
            self.reader.on_progress(
                self.sequence.prompt_length, self.sequence.prompt_length
            )
        context = len(self.sequence.tokens) - current.num_pending
        outcome.tokens = self.sequence.append(outcome.tokens)
        if ahead is None:
            self.target.extend_history(outcome.tokens)
        record = self.clock.record(current, outcome, ahead, context)
        if self.drafting.drafter is not None:
            self.drafting.record(record)
        self.pipeline.record(record.accepted)
        self.stats.record(record)
        self.stats.why_none = self.drafting.why_none
        return outcome

    def roll_back(self, current: Round, outcome: Outcome) -> None:
        """Take the rejected positions back out of the caches."""
        if current.num_drafted:
            kept = outcome.kept[: len(outcome.tokens) - 1]
            draft_began = len(self.sequence.tokens) - len(outcome.tokens)
            self.target.rollback.keep(draft_began, kept)

    def observe(self, current: Round, outcome: Outcome) -> None:
        """Tell the drafter what became of its draft."""
        if self.drafting.features is not None:
            start = (
                len(self.sequence.tokens) - len(outcome.tokens) - current.num_pending
            )
            self.drafting.features.show_round(current, outcome, start)
        if self.drafting.drafter is not None:
            self.drafting.observe()

    def stay_ahead(self, ahead: Round | None) -> Round | None:
        """If a pass runs ahead, see whether there is something to draft again after it."""
        if ahead is not None:
            found = self.drafting.drafter is not None and self.drafting.has_draft()
            self.pipeline.choose(found, self.drafting.may_find)
        return ahead

    def emit(
        self, current: Round, outcome: Outcome, following: Round | None
    ) -> Iterator[Token]:
        """Hand out the tokens of a round, while the next one is under way."""
        self.stats.other_seconds += self.clock.other_seconds()
        if self.drafting.values is not None:
            self.clock.time_if_hidden(following, self.drafting.values)
        started = self.clock.now()
        tokens = tokens_of(current, outcome, self.stats)
        for n, token in enumerate(tokens, start=1):
            if self.target.remembers and n == len(outcome.tokens) > len(outcome.kept):
                self.step_ahead(current, following)
            self.sequence.num_handed_out += 1
            if self.sequence.num_handed_out % CLEAR_CACHE_EVERY == 0:
                mx.clear_cache()
            yield token
        self.clock.resumed(started)
        if self.failure is not None:
            raise self.failure
        if (
            self.drafting.drafter is not None
            and following
            and not following.num_drafted
        ):
            self.target.rollback.drop_checkpoints()

    def step_ahead(self, current: Round, following: Round | None) -> None:
        """Show processors that remember a token before it is handed out, as mlx-lm's loop does."""
        if following is not None:
            _ = following.under_way.next_token
        elif not self.sequence.wants_more():
            self.target.show_end(current.under_way.logprobs[-1])

    def feed(self, num_tokens: int) -> None:
        """Feed the next tokens of the text, at most so many, for the caches alone."""
        start, size = (
            self.target.rollback.position,
            min(num_tokens, self.reader.step_size),
        )
        tokens = to_ids(self.sequence.tokens[start : start + size])
        self.target.feed(tokens, self.sequence.embeddings_from(start, size))
        if self.drafting.features is not None:
            self.drafting.features.show_fed(start)

    def finish(self) -> None:
        """Bring the caches to prompt + tokens handed out; after a failed prefill, as before it."""
        self.drafting.features = None
        with mx.stream(self.stream):
            caches = self.callers_cache if self.drafting.agree_on_end() else None
            sequence = self.sequence
            end = sequence.end if self.is_prefilled else sequence.num_history
            close_all(
                lambda: bring_caches_to(end, self.target, caches, self.feed),
                lambda: remember(
                    caches if sequence.has_prompt else None, sequence.tokens[:end]
                ),
                lambda: self.drafting.close(end),
            )


def tokens_of(
    current: Round, outcome: Outcome, stats: SpeculationStats
) -> Iterator[Token]:
    """Each token of a round with where it came from, and the row of its log-probabilities."""
    rows, origins = [0], list[Origin](["plain"])
    if current.num_drafted:
        rows = [0, *[node + 1 for node in outcome.kept]]
        last: Origin = "correction" if len(rows) <= current.num_drafted else "bonus"
        origins = [*["draft"] * len(outcome.kept), last]  # type: ignore[list-item]
    for token, origin, row in zip(outcome.tokens, origins, rows, strict=False):
        yield Token(token, origin, stats, current.under_way.logprobs[row], row)
