"""One request while it is served: what it is written with, and what its client is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from specdec_mlx.contracts import LogitsProcessor
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.grammar import (
    Grammar,
    GrammarDrafter,
    GrammarProcessor,
    compiled_tokenizer,
)
from specdec_mlx.drafters.thoughts import ThoughtBudget
from specdec_mlx.loop import Token
from specdec_mlx.mlx_lm_plugin.conversation import keeping_caches, predicting
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.sampling import Sampling
from specdec_mlx.sequence import check_ids
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.forced import grammar_for, has_grammar, within
from specdec_mlx.server.models import Loaded, Models
from specdec_mlx.server.prefixes import Prefixes
from specdec_mlx.server.prompts import ReadPrompt, check_length, encoded, read_prompt
from specdec_mlx.server.requests import (
    Ended,
    Event,
    Failed,
    PromptProgress,
    RequestError,
    ServerEndingError,
    TextRequest,
)
from specdec_mlx.server.text.state import TextState
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.vision.prompts import embed

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Prepared:
    """What of a request is made for a loaded model before its turn, beside the texts that are
    written. prediction: token ids of the request's own one."""

    loaded: Loaded
    prompt: ReadPrompt
    prediction: list[int]
    grammar: Grammar | None


@dataclass(eq=False)
class Ticket:
    """A request and the way to its client; `cancel` may be called by any thread.

    names: of its model and adapter. prepared: None until the request is prepared.
    """

    request: TextRequest
    put: Callable[[Event], None]
    names: tuple[str, str | None] = ("", None)
    prepared: Prepared | None = None
    is_cancelled: bool = False
    has_ended: bool = False

    def cancel(self) -> None:
        """End the text between two passes: the client has gone."""
        self.is_cancelled = True

    def check(self) -> None:
        """Raise ConnectionError if the client has gone."""
        if self.is_cancelled:
            raise ConnectionError("The client has gone.")

    def tell(self, events: Iterable[Event]) -> None:
        """Hand events over, up to the first that is an end."""
        for event in events:
            if self.has_ended:
                return
            self.has_ended = isinstance(event, Ended | Failed)
            try:
                self.put(event)
            except Exception as error:  # of a client that is not there any more
                logging.info(f"A client cannot be reached: {error}")
                self.is_cancelled = True

    def fail(self, error: Exception) -> None:
        """Say why nothing more comes."""
        self.tell([Failed(error)])


class GuardedGrammar(GrammarProcessor):
    """A grammar that keeps its error; it answers with NaN, which ends its own text alone."""

    error: Exception | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V]; see `GrammarProcessor`."""
        try:
            return super().__call__(tokens, logits)
        except Exception as error:
            self.error = error
            return logits * mx.nan


def compile_grammar(request: TextRequest, tokenizer: Any) -> Grammar | None:
    """What a text must match, compiled, None for any text.

    Raises RequestError and GrammarError, after a while at the latest.
    """

    def make() -> Grammar | None:
        grammar = grammar_for(request, tokenizer)
        if grammar is not None:
            grammar.begin(compiled_tokenizer(tokenizer))
        return grammar

    return within(make) if has_grammar(request) else None


def prepare(request: TextRequest, loaded: Loaded, settings: ServerSettings) -> Prepared:
    """Read the prompt of a request, and compile its grammar; raises what is wrong with them.

    Any thread may do so, while other texts are written.
    """
    tokenizer, most = loaded.tokenizer, loaded.longest_text
    prompt = read_prompt(
        request, tokenizer, settings, most=most, finds_ends=loaded.is_stateful, sight=loaded.sight
    )
    check_length(request.prediction, tokenizer, most, "prediction")
    prediction = encoded(tokenizer, request.prediction)
    return Prepared(loaded, prompt, prediction, compile_grammar(request, tokenizer))


class AskedText:
    """A request that is being served.

    events: of tokens that were taken, for the client. is_batched: it was written beside others at
    its end. is_begun: its client knows how much of its prompt was found.
    """

    def __init__(
        self, ticket: Ticket, loaded: Loaded, models: Models, draft_caches: Prefixes
    ) -> None:
        """Make all that the text is written with; raises what is wrong.

        draft_caches: where draft models keep theirs.
        """
        self.ticket, self.loaded, self.flags = ticket, loaded, models.flags
        self.written, self.events = list[int](), list[Event]()
        self.stats: SpeculationStats | None = None
        self.num_cached = 0
        self.is_begun = self.is_batched = False
        request, tokenizer, settings = ticket.request, loaded.tokenizer, models.settings
        prepared, ticket.prepared = ticket.prepared, None
        if prepared is None or prepared.loaded is not loaded:
            prepared = prepare(request, loaded, settings)
        self.prompt = prepared.prompt
        tokens, vocab_size = self.prompt.tokens, vocab_size_of(loaded.model)
        check_ids(tokens, vocab_size)
        num_tokens, most = len(tokens), loaded.longest_text
        if (room := most - num_tokens + 1) < 1:  # the last token is not fed
            words = f"The prompt has {num_tokens} tokens; there are {most} positions for a text."
            raise RequestError(words, "context_length_exceeded", num_tokens, most)
        wanted = given(request.max_tokens, settings.max_tokens)
        self.max_tokens = min(given(wanted, room), room)
        self.num_draft_tokens = given(request.num_draft_tokens, self.flags.num_draft_tokens)
        self.rule = given(request.rule, self.flags.rule)
        self.sampling = sampling_for(
            Sampling(**{**loaded.sampling, **request.sampling}), tokenizer, vocab_size
        )
        self.processors: list[LogitsProcessor] = make_logits_processors(**request.penalties)
        check_bias(request.penalties.get("logit_bias"), vocab_size)
        self.drafter, self.drafter_name = models.drafter(request, loaded)
        if self.drafter is not None:
            if prepared.prediction:
                self.drafter = predicting(self.drafter, prepared.prediction)
            self.drafter = keeping_caches(self.drafter, draft_caches)
        thought, budget = self.prompt.thought, request.thought_budget
        if thought is not None and budget is not None and budget < self.max_tokens:
            self.processors.append(ThoughtBudget(thought, budget, num_tokens))
        elif prepared.grammar is None:
            thought = None  # the text alone tells where it ends
        if prepared.grammar is not None:
            guarded = GuardedGrammar(prepared.grammar, tokenizer, num_tokens, thought)
            self.processors.append(guarded)
            if self.drafter is not None:
                self.drafter = FirstOf(GrammarDrafter(), self.drafter)
        self.state = TextState(tokenizer, request, tokens, self.prompt.in_thought, thought)

    @property
    def request(self) -> TextRequest:
        """What was asked for."""
        return self.ticket.request

    @property
    def tokens(self) -> list[int]:
        """Prompt and text so far."""
        return [*self.prompt.tokens, *self.written]

    @property
    def keys(self) -> list[int]:
        """What caches of prompt and text so far are kept by."""
        return [*self.prompt.keys, *self.written]

    @cached_property
    def may_end_early(self) -> bool:
        """True if it may end at another token than the end token."""
        return (
            bool(self.request.stop) or not self.request.parallel_calls or has_grammar(self.request)
        )

    def embeddings(self, caches: list[Any]) -> mx.array | None:
        """What a vision model reads in the place of the prompt's tokens, [n, D]; else None.

        Of a prompt without pictures too, whose caches may come from a prompt that had some.
        """
        if self.loaded.sight is None:
            return None
        seen = self.prompt.seen
        inputs = {"input_ids": mx.array([self.prompt.tokens])} if seen is None else seen.inputs
        return embed(self.loaded.model, caches, inputs)

    def begin(self, prefixes: Prefixes) -> tuple[list[Any] | None, int]:
        """The caches that are kept of the text, or None, and how much of it they hold.

        The client is told, the first time, how much of its prompt need not be read.
        """
        keys = self.keys
        caches, rest = prefixes.fetch_nearest_cache(self.loaded.place, keys)
        num_read = len(keys) - len(rest)
        if not self.is_begun:
            self.is_begun, self.num_cached = True, num_read
            self.show_progress(num_read)
        return caches, num_read

    def show_progress(self, done: int) -> None:
        """Tell the client how much of the prompt is read, unless there is text already."""
        if not self.written:
            total = len(self.prompt.tokens)
            self.ticket.tell([PromptProgress(min(done, total), total, self.num_cached)])

    def take(self, token: Token) -> bool:
        """Add the next token; True if the text ends with it, other than by its length."""
        self.written.append(token.token)
        self.stats = token.stats
        logprobs = None if self.request.num_logprobs is None else token.logprobs
        self.events += self.state.add(token.token, logprobs, token.from_draft)
        return self.state.ended is not None

    def hand_over(self) -> None:
        """Give the client the events so far."""
        events, self.events = self.events, []
        self.ticket.tell(events)

    @property
    def has_ended(self) -> bool:
        """True if no more tokens are wanted."""
        return self.state.ended is not None or len(self.written) >= self.max_tokens

    def end(self) -> None:
        """Give the client what is left of the text, and its account."""
        self.hand_over()
        self.ticket.tell(
            self._told(event) if isinstance(event, Ended) else event
            for event in self.state.end(self.state.ended or "length")
        )
        if self.flags.stats:
            logging.info(f"Speculation: {self.stats}")

    def _told(self, ended: Ended) -> Ended:
        drafted = 0 if self.stats is None else self.stats.drafted
        return replace(
            ended,
            num_prompt=len(self.prompt.tokens),
            num_cached=self.num_cached,
            rejected=max(0, drafted - ended.accepted),
            model=self.loaded.name,
            drafter=self.drafter_name,
            is_batched=self.is_batched,
            stats=self.stats,
        )

    def fail(self, error: Exception) -> None:
        """Say why nothing more comes: its grammar's reason, if that has one."""
        if not isinstance(error, ConnectionError | ServerEndingError):
            logging.error("A request failed.", exc_info=error)
        own = [getattr(processor, "error", None) for processor in self.processors]
        self.ticket.fail(next(filter(None, own), error))


def given(value: T | None, otherwise: T) -> T:
    """What was given, or else another value."""
    return otherwise if value is None else value


def sampling_for(sampling: Sampling, tokenizer: Any, vocab_size: int) -> Sampling:
    """The sampling for a model, with what mlx-lm's server excludes from XTC."""
    if sampling.top_k >= vocab_size:
        sampling = replace(sampling, top_k=0)  # all of them
    if sampling.xtc_probability > 0 and not sampling.xtc_special_tokens:
        special: Sequence[int] = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        sampling = replace(sampling, xtc_special_tokens=special)
    return sampling


def check_bias(bias: dict[int, float] | None, vocab_size: int) -> None:
    """Raise RequestError for a biased token that the model does not have."""
    for token in bias or ():
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias: there is no token {token}; the model has 0 to {vocab_size - 1}."
            )
