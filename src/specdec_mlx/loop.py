"""The loop: propose, verify, accept, roll back. The page to read first.

The state is one list, `text` = prompt + emitted tokens, and one tape, the target's caches. Whatever
of the text is not on the tape yet is *pending*: it is fed by the next pass, in front of the draft.
Normally that is the last emitted token; after a rejection on recurrent caches it is a few more.

There are two gears. A speculative round has to read its tokens before the next draft can be made.
With nothing worth drafting the loop runs in the plain gear, like mlx-lm's own: the next pass is
launched on a token that the host has not seen yet, so that the device never waits for Python.
In both, the next pass is under way before this round's tokens are handed out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from jaxtyping import Float
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream

from specdec_mlx.draft_length.policy import DraftLength, make_draft_length
from specdec_mlx.draft_length.tuning import Tuning, tuning_for
from specdec_mlx.errors import CacheRollbackError, PromptError
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stats.counterfactual import Counterfactual
from specdec_mlx.target.inputs import check_prompt, split_cache
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.verifier import Block, Verifier
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import (
    AcceptanceRule,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    LogitsProcessor,
    Origin,
    RoundRecord,
    key_of,
    keyed_parts,
)

HOPE_MEMORY = 0.8
"""Share of the hope for a draft that is left after a round without one."""

LITTLE_HOPE = 0.05
"""Share of rounds with a draft below which the plain gear pays."""


@dataclass(frozen=True)
class Token:
    """One emitted token.

    logprobs: [V] the target's log-probabilities at this position, after the logits processors and
        before temperature and filters, as mlx-lm reports them.
    origin: "draft" (accepted), "correction" (after a rejection), "bonus" (after a draft accepted
        whole) or "plain" (no draft).
    stats: the generation's running account.
    """

    token: int
    logprobs: Float[mx.array, " vocab"]
    origin: Origin
    stats: SpeculationStats

    @property
    def from_draft(self) -> bool:
        """Whether the drafter proposed this token."""
        return self.origin == "draft"


def speculate(
    model: nn.Module,
    prompt_tokens: Sequence[int] | mx.array,
    drafter: Drafter | None = None,
    *,
    max_tokens: int = 256,
    sampling: Sampling | Sampler | None = None,
    seed: int | None = None,
    rule: str | AcceptanceRule = "auto",
    draft_length: int | str | DraftLength = "auto",
    tuning: Tuning | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    max_kv_size: int | None = None,
    prefill_step_size: int = 2048,
    kv_bits: int | None = None,
    kv_group_size: int = 64,
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START,
    prompt_progress_callback: Callable[[int, int], None] | None = None,
    input_embeddings: mx.array | None = None,
    tokenizer: Any = None,
    probe: bool = True,
    counterfactual: bool = False,
    stream: Any = generation_stream,
) -> Generator[Token, None, None]:
    """Yield the target's own continuation of a prompt, sooner: tokens in, tokens out.

    model: any mlx-lm model. prompt_tokens: [n] token ids. drafter: None for plain decoding.
    max_tokens: tokens to emit, -1 for no limit. sampling: how the target's tokens are drawn,
    greedy if None; any mlx-lm sampler will do. seed: makes the draws reproducible; None takes one
    from MLX's global random state. rule: acceptance rule; "auto" takes match for greedy decoding,
    opaque samplers and point-mass drafts, and block for drafts drawn at random; "coupled" gives
    one text for a seed, with any drafter and draft length; "lenient" and "typical" change the
    text's law (see `acceptance`, whose rules may be given as objects too). draft_length: most
    tokens to draft a round, K; "auto" takes what pays, 0 included, from measured cost and
    acceptance; "heuristic" follows the last verdict. tuning: what "auto" has learned and goes
    on learning; None takes the one that is kept with the loaded model. tokenizer: the target's,
    for drafters that compare it. probe: measure once, for each loaded model, whether passes over
    several positions are exact, and do not draft where they are not. counterfactual: also work
    out, in `stats.counterfactual`, what every rule would have accepted; the text stays the same.
    The rest is as in mlx-lm's `generate_step`.

    prompt_cache may hold the target's caches alone or, as mlx-lm lays them out, the target's and
    then a draft model's. However the generation ends (length, close, an exception), the caches
    hold exactly the prompt and the tokens handed out.

    Raises PromptError, DraftError, LogitsError and ValueError for bad input.
    """
    prompt = check_prompt(prompt_tokens, input_embeddings, drafter)
    if max_tokens < -1:
        raise ValueError(f"max_tokens={max_tokens}: expected an int >= 0, or -1 for no limit.")
    caches, draft_cache = split_cache(model, prompt_cache, max_kv_size)
    verifier = Verifier(
        model,
        Rollback(caches),
        sampler=Sampling() if sampling is None else sampling,
        processors=logits_processors or (),
        rule=rule,
        noise=Noise.from_global_state() if seed is None else Noise(seed),
        kv_bits=kv_bits,
        kv_group_size=kv_group_size,
        quantized_kv_start=quantized_kv_start,
        probe=probe and drafter is not None,
        counterfactual=Counterfactual() if counterfactual else None,
    )
    generation = Generation(
        verifier=verifier,
        length=make_draft_length(draft_length, tuning or tuning_for(model)),
        prompt=prompt,
        max_tokens=max_tokens,
        prefill_step_size=prefill_step_size,
        on_progress=prompt_progress_callback or (lambda done, total: None),
        embeddings=input_embeddings,
        stream=stream,
        callers_cache=prompt_cache,
        stats=SpeculationStats(counterfactual=verifier.counterfactual),
    )
    context = verifier.draft_context(tokenizer, draft_cache, prefill_step_size)
    if drafter is not None and hasattr(drafter, "check"):
        drafter.check(context)
    return generation.run(drafter, context)


@dataclass
class _UnderWay:
    """A pass that was launched, and the host time that it took to get there.

    part: key of the drafter whose draft it verifies.
    """

    block: Block
    draft_seconds: float
    launch_seconds: float
    is_ahead: bool = False
    part: str = ""

    @property
    def seconds(self) -> float:
        """Host time until it was under way."""
        return self.draft_seconds + self.launch_seconds


@dataclass
class Generation:
    """Everything that changes while one prompt is continued.

    text: prompt + tokens read. num_read: tokens known here. num_handed_out: tokens that the caller
    has. plain_gear: whether the next pass may start before this one's token is known. hope: share
    of the rounds lately that had a draft.
    """

    verifier: Verifier
    length: DraftLength
    prompt: InitVar[list[int]]
    max_tokens: int
    prefill_step_size: int
    on_progress: Callable[[int, int], None]
    embeddings: mx.array | None
    stream: Any
    callers_cache: list[Any] | None
    session: DraftSession | None = None
    key: str = ""
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    num_read: int = 0
    num_handed_out: int = 0
    plain_gear: bool = True
    hope: float = 1.0
    is_prefilled: bool = False
    last_read_at: float = 0.0
    waited: float = 0.0
    away: float = 0.0

    def __post_init__(self, prompt: list[int]) -> None:
        """Start with the prompt as the text."""
        self.tape = self.verifier.tape
        self.text = list(prompt)
        self.prompt_length = len(prompt)

    def run(self, drafter: Drafter | None, context: DraftContext) -> Generator[Token, None, None]:
        """The whole generation."""
        try:
            self.prefill()
            if drafter is not None:
                vocab_size = self.verifier.find_vocab_size()
                self.session = drafter.begin(self.text, replace(context, vocab_size=vocab_size))
                self.key = key_of(drafter)
            self.last_read_at = time.perf_counter()
            current = self.launch_with_draft()
            resumed = time.perf_counter()
            while current is not None:
                following = self.run_ahead(current.block)
                origins = self.read(current, is_ahead=following is not None)
                failure: Exception | None = None
                try:
                    following = self.follow_up(following)
                except Exception as error:  # of the drafter; what was read is handed out first
                    failure = error
                spent = time.perf_counter() - resumed - self.waited
                self.stats.other_seconds += spent - (following.seconds if following else 0.0)
                handed_over = time.perf_counter()
                yield from self.hand_out(origins, current.block.logprobs)
                if failure is not None:
                    raise failure
                resumed = time.perf_counter()
                self.away = resumed - handed_over
                if following is not None and not len(following.block.draft):
                    self.tape.forget()
                current = following
        finally:
            self.finish()

    def prefill(self) -> None:
        """Feed the prompt but for its last token, in chunks."""
        started = time.perf_counter()
        self.on_progress(0, self.prompt_length)
        self.tape.mark()
        while (left := self.prompt_length - 1 - self.tape.position) > 0:
            with mx.stream(self.stream):
                self.feed_chunk(min(left, self.prefill_step_size))
                self.check_ids()
                mx.eval([cache.state for cache in self.tape.caches])
                mx.clear_cache()
            self.on_progress(self.tape.position, self.prompt_length)
        self.check_ids()
        self.verifier.widest_pass()  # a model's first time is probed here, and not in a round
        self.tape.forget()
        self.is_prefilled = True
        self.verifier.observe(self.text)
        self.stats.prefill_seconds = time.perf_counter() - started

    def launch_with_draft(self) -> _UnderWay | None:
        """Draft, and start the pass that verifies it; None when enough tokens are known."""
        if not self.more_to_come():
            return None
        started = time.perf_counter()
        draft, part = self.propose()
        self.choose_gear(len(draft) > 0)
        drafted = time.perf_counter()
        pending = self.text[self.tape.position :]
        embeddings = self.embeddings_from(self.tape.position, len(pending))
        with mx.stream(self.stream):
            block = self.verifier.launch(pending, draft, self.num_read, embeddings)
        launch_seconds = time.perf_counter() - drafted
        return _UnderWay(block, drafted - started, launch_seconds, part=part)

    def run_ahead(self, block: Block) -> _UnderWay | None:
        """In the plain gear, start the pass after this one before its token is read."""
        if not self.plain_gear or len(block.draft) or not self.more_to_come(1):
            return None
        started = time.perf_counter()
        with mx.stream(self.stream):
            self.verifier.observe(block.next_token)
            ahead = self.verifier.launch(block.next_token, Draft(), self.num_read + 1)
        return _UnderWay(ahead, 0.0, time.perf_counter() - started, is_ahead=True)

    def propose(self) -> tuple[Draft, str]:
        """A draft for the text so far, no longer than is worth verifying, and whose it is."""
        for key, part, limit in self.parts():
            draft = self.ask(key, part, limit)
            if len(draft):
                return draft, key
        return Draft(), ""

    def parts(self) -> Iterator[tuple[str, DraftSession, int]]:
        """The sessions to ask now, in order, each with the most tokens that it may draft."""
        for key, part in self.sessions():
            if limit := self.draft_limit(key, is_cheap(part)):
                yield key, part, limit

    def sessions(self) -> Sequence[tuple[str, DraftSession]]:
        """The drafter's session, or those that it is made of, each with its drafter's key."""
        return [] if self.session is None else keyed_parts(self.session, self.key)

    def ask(self, key: str, part: DraftSession, limit: int) -> Draft:
        """A session's draft, cut to what is worth verifying if that may be done."""
        with mx.stream(self.stream):
            draft = part.propose(limit).head(limit)
        return draft if draft.logprobs is not None else draft.head(self.length.cut(key, draft))

    def draft_limit(self, key: str, cheap: bool) -> int:
        """Most tokens to draft now: by choice, by max_tokens, and by what the caches can undo.

        key: of the drafter that is asked. cheap: whether the proposal costs nothing.
        """
        limit = self.length.limit(key, cheap)
        if self.embeddings_from(self.tape.position, 1) is not None:
            return 0
        if self.max_tokens >= 0:
            limit = min(limit, self.max_tokens - self.num_read)
        room = self.verifier.widest_pass()
        if room is not None:
            limit = min(limit, room - max(1, len(self.text) - self.tape.position))
        return max(0, limit)

    def read(self, launched: _UnderWay, *, is_ahead: bool) -> list[Origin]:
        """Wait for a pass, roll the caches back, and count.

        Adds the round's tokens to the text, cut at max_tokens, and says where each came from.
        """
        block = launched.block
        started = time.perf_counter()
        with mx.stream(self.stream):
            tokens, num_accepted = block.read()
        now = time.perf_counter()
        self.waited = now - started
        seconds = now - self.last_read_at
        if self.num_read == 0:
            self.on_progress(self.prompt_length, self.prompt_length)
        origins = _origins(len(block.draft), num_accepted)
        context = len(self.text) - (block.num_fed - len(block.draft))
        if self.max_tokens >= 0:
            tokens = tokens[: self.max_tokens - self.num_read]
        self.text += tokens
        self.num_read += len(tokens)
        if len(block.draft):
            self.tape.rewind_to(len(self.text) - 1)
        if not is_ahead:
            self.verifier.observe(tokens)
        record = RoundRecord(
            drafted=len(block.draft),
            accepted=num_accepted,
            emitted=len(tokens),
            fed=block.num_fed,
            tokens=tokens,
            seconds=seconds,
            draft_seconds=launched.draft_seconds,
            verify_seconds=launched.launch_seconds + self.waited,
            steady=launched.is_ahead == is_ahead and self.away < seconds / 2,
            ahead=launched.is_ahead,
            context=context,
            part=launched.part,
        )
        self.last_read_at = now
        self.length.record(record)
        self.stats.record(record)
        return origins[: len(tokens)]

    def follow_up(self, ahead: _UnderWay | None) -> _UnderWay | None:
        """Tell the drafter what was read, and start the next pass if none is under way.

        If one is, look whether there is something to draft again, and leave the plain gear then:
        the draft itself is made when that pass's token is known.
        """
        if self.session is not None:
            self.session.observe(self.text[self.prompt_length + self.num_handed_out :])
        if ahead is None:
            return self.launch_with_draft()
        self.choose_gear(
            any(
                len(self.ask(key, part, limit)) > 0 if is_cheap(part) else True
                for key, part, limit in self.parts()
            )
        )
        return ahead

    def choose_gear(self, found: bool) -> None:
        """Run ahead while there is no draft, and little hope for one after the next token.

        found: whether there is one. A pass that was launched ahead leaves no room for a draft
        before its token, which costs the first token of the next draft; waiting costs the overlap.
        """
        self.hope = HOPE_MEMORY * self.hope + (1 - HOPE_MEMORY) * found
        may_wait = self.hope >= LITTLE_HOPE and any(is_cheap(part) for _, part in self.sessions())
        self.plain_gear = not found and not may_wait

    def hand_out(self, origins: list[Origin], logprobs: mx.array) -> Iterator[Token]:
        """Yield the tokens of the round that was read last, one per origin."""
        for i, origin in enumerate(origins):
            token = self.text[self.prompt_length + self.num_handed_out]
            self.num_handed_out += 1
            if self.num_handed_out % 256 == 0:
                mx.clear_cache()
            yield Token(token, logprobs[i], origin, self.stats)

    def finish(self) -> None:
        """Bring the caches to exactly prompt + tokens handed out.

        After an error during prefill they are as before the call instead. Caches that the caller
        cannot see are only wound back.
        """
        error = sys.exception()
        end = self.prompt_length + self.num_handed_out if self.is_prefilled else 0
        try:
            self.tape.rewind_to(end)
        except CacheRollbackError as failure:
            if error is None or isinstance(error, GeneratorExit):
                raise
            error.add_note(str(failure))
            return
        finally:
            if self.session is not None and hasattr(self.session, "close"):
                self.session.close(end)
        if self.callers_cache is None:
            return
        with mx.stream(self.stream):
            while (left := end - self.tape.position) > 0:
                self.feed_chunk(min(left, self.prefill_step_size))
            self.verifier.quantize()
            mx.async_eval([cache.state for cache in self.tape.caches])
        self.callers_cache[: len(self.tape.caches)] = self.tape.caches

    def feed_chunk(self, size: int) -> None:
        """Feed the next `size` tokens of the text, for the caches alone."""
        start = self.tape.position
        tokens = to_ids(self.text[start : start + size])
        self.verifier.feed(tokens, self.embeddings_from(start, size))

    def embeddings_from(self, start: int, size: int) -> mx.array | None:
        """The caller's embeddings of a part of the prompt, if there are any."""
        if self.embeddings is None or start >= self.prompt_length:
            return None
        return self.embeddings[start : start + size]

    def more_to_come(self, besides: int = 0) -> bool:
        """Whether tokens are wanted beyond those read and `besides` more."""
        return self.max_tokens < 0 or self.num_read + besides < self.max_tokens

    def check_ids(self) -> None:
        """Raise PromptError for ids that the target does not have, before they are computed with.

        Which ids it has is known from the shape of its first, lazy, logits.
        """
        vocab_size = self.verifier.find_vocab_size()
        if (highest := max(self.text)) >= vocab_size:
            raise PromptError(
                f"The prompt holds token {highest}; the target has 0 to {vocab_size - 1}. Encode "
                "the prompt with the target's own tokenizer."
            )


def is_cheap(session: DraftSession) -> bool:
    """Whether a proposal may be asked for and thrown away."""
    return getattr(session, "cheap", False)


def _origins(num_drafted: int, num_accepted: int) -> list[Origin]:
    """Where each of the n + 1 tokens of a round came from."""
    last: Origin = "correction" if num_accepted < num_drafted else "bonus"
    return [*["draft"] * num_accepted, last if num_drafted else "plain"]  # type: ignore[list-item]
