"""One request while it is served: what it is written with, and what its client is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors

from specdec_mlx.contracts import Drafter, LogitsProcessor
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.grammar import (
    Grammar,
    GrammarDrafter,
    GrammarProcessor,
    compiled_tokenizer,
)
from specdec_mlx.loop import Token
from specdec_mlx.mlx_lm_plugin.drafter_wrappers import keeping_caches, predicting
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.sampling import Sampling
from specdec_mlx.sequence import check_ids
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.forced import ThoughtBudget, grammar_for, has_grammar, within
from specdec_mlx.server.models import Loaded, Models
from specdec_mlx.server.prefixes import Prefixes
from specdec_mlx.server.prompts import check_length, encoded, read_prompt, too_long
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

GONE = "The client has gone."


@dataclass(eq=False)
class Ticket:
    """A request and the way to its client; `cancel` may be called by any thread.

    names: of its model and adapter. text: what is made of the request before its turn.
    """

    request: TextRequest
    put: Callable[[Event], None]
    names: tuple[str, str | None] = ("", None)
    text: AskedText | None = None
    is_cancelled: bool = False
    has_ended: bool = False

    def cancel(self) -> None:
        """End the text between two passes: the client has gone."""
        self.is_cancelled = True

    def check(self) -> None:
        """Raise ConnectionError if the client has gone."""
        if self.is_cancelled:
            raise ConnectionError(GONE)

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


class AskedText:
    """A request that is being served.

    events: of tokens that were taken, for the client. num_given: tokens whose events it has.
    is_batched: it was written beside others at its end. is_begun: its client knows how much of its
    prompt was found.
    """

    sampling: Sampling
    processors: list[LogitsProcessor]
    drafter: Drafter | None
    drafter_name: str
    state: TextState

    def __init__(self, ticket: Ticket, loaded: Loaded, settings: ServerSettings) -> None:
        """Read the prompt, and compile the grammar; raises what is wrong with them.

        Any thread may do so, while other texts are written.
        """
        self.ticket, self.loaded, self.flags = ticket, loaded, settings.flags
        self.written, self.events, self.num_given = list[int](), list[Event](), 0
        self.stats: SpeculationStats | None = None
        self.num_cached = 0
        self.is_begun = self.is_batched = False
        request, tokenizer, most = ticket.request, loaded.tokenizer, loaded.longest_text
        self.prompt = read_prompt(
            request,
            tokenizer,
            settings,
            most=most,
            finds_ends=loaded.is_stateful,
            sight=loaded.sight,
        )
        check_length(request.prediction, tokenizer, most, "prediction")
        self.prediction = encoded(tokenizer, request.prediction)
        check_ids(self.prompt.tokens, vocab_size_of(loaded.model))
        num_tokens = len(self.prompt.tokens)
        if (room := most - num_tokens + 1) < 1:  # the last token is not fed
            raise too_long(num_tokens, most)
        self.max_tokens = min(given(given(request.max_tokens, settings.max_tokens), room), room)
        self.num_draft_tokens = given(request.num_draft_tokens, self.flags.num_draft_tokens)
        self.rule = given(request.rule, self.flags.rule)
        self.grammar = compile_grammar(request, tokenizer)

    def equip(self, models: Models, prefixes: Prefixes, draft_caches: Prefixes) -> None:
        """Make all that the text is written with; raises what is wrong.

        draft_caches: where draft models keep theirs.
        """
        self.prefixes = prefixes
        request, prompt, loaded = self.request, self.prompt, self.loaded
        tokenizer, vocab_size = loaded.tokenizer, vocab_size_of(loaded.model)
        sampling = Sampling(**{**loaded.sampling, **request.sampling})
        self.sampling = sampling_for(sampling, tokenizer, vocab_size)
        check_bias(request.penalties.get("logit_bias"), vocab_size)
        self.processors = make_logits_processors(**request.penalties)
        self.drafter, self.drafter_name = models.drafter(request, loaded)
        if self.drafter is not None:
            if self.prediction:
                self.drafter = predicting(self.drafter, self.prediction)
            self.drafter = keeping_caches(self.drafter, draft_caches)
        thought, budget = prompt.thought, request.thought_budget
        if thought is not None and budget is not None and budget < self.max_tokens:
            self.processors.append(ThoughtBudget(thought, budget, len(prompt.tokens)))
        elif self.grammar is None:
            thought = None  # the text alone tells where it ends
        if self.grammar is not None:
            guarded = GuardedGrammar(self.grammar, tokenizer, len(prompt.tokens), thought)
            self.processors.append(guarded)
            if self.drafter is not None:
                self.drafter = FirstOf(GrammarDrafter(), self.drafter)
        self.state = TextState(tokenizer, request, prompt.tokens, prompt.in_thought, thought)

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

    def begin(self) -> tuple[list[Any] | None, int]:
        """The caches that are kept of the text, or None, and how much of it they hold.

        The client is told, the first time, how much of its prompt need not be read.
        """
        keys, loaded = self.keys, self.loaded
        caches, rest = self.prefixes.fetch_nearest_cache(loaded.place, keys, loaded.prefix_files)
        num_read = len(keys) - len(rest)
        if not self.is_begun:
            self.is_begun, self.num_cached = True, num_read
            self._show_progress(num_read)
        return caches, num_read

    def keep(self, num_tokens: int, caches: list[Any], *, has_ended: bool = False) -> None:
        """Keep caches that hold the first tokens of prompt and text; has_ended: in a file too."""
        loaded, files = self.loaded, self.loaded.prefix_files if has_ended else None
        self.prefixes.insert_cache(loaded.place, self.keys[:num_tokens], caches, files)

    def was_read(self, keep: Callable[[AskedText], None], done: int, total: int) -> None:
        """Note how far the prompt is read. `keep` keeps what could not be gone back to."""
        self._show_progress(done)
        if self.loaded.is_stateful and 0 < done < total:
            keep(self)

    def _show_progress(self, done: int) -> None:
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

    def give(self, token: Token) -> bool:
        """Give the client the next token, which may have been taken; True if it is the last."""
        self.num_given += 1
        if self.num_given > len(self.written):
            self.take(token)
        if self.num_given == len(self.written) and self.has_ended:
            self.end()
            return True
        self.hand_over()
        return False

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
