"""One request while it is served: its client, what was prepared for it, and its text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

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
from specdec_mlx.loop import Token
from specdec_mlx.mlx_lm_plugin.drafter_wrappers import predicting
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.sampling import Sampling
from specdec_mlx.sequence import check_ids
from specdec_mlx.server.constraints import ThoughtBudget, grammar_for, within
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.loading import LoadedModel
from specdec_mlx.server.models import Models
from specdec_mlx.server.prefix_files import ServedStates
from specdec_mlx.server.prefixes import Prefixes
from specdec_mlx.server.prompts import ReadPrompt, check_length, encoded, read_prompt, too_long
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

GONE = "The client has gone."


@dataclass(eq=False)
class Ticket:
    """A request and the way to its client. Any thread may call `cancel`.

    Attributes:
        put: takes each event for the client.
        names: of the model and the adapter.
        preparation: what was made for the request before its turn.
    """

    request: TextRequest
    put: Callable[[Event], None]
    names: tuple[str, str | None] = ("", None)
    preparation: Preparation | None = None
    is_cancelled: bool = False
    has_ended: bool = False

    def cancel(self) -> None:
        """End the text between two passes, because the client has gone."""
        self.is_cancelled = True

    def check(self) -> None:
        if self.is_cancelled:
            raise ConnectionError(GONE)

    def send(self, events: Iterable[Event]) -> None:
        """Send events to the client, up to the first `Ended` or `Failed`."""
        for event in events:
            # A text and an ending server may both send an end. Clients get the first.
            if self.has_ended:
                return
            self.has_ended = isinstance(event, Ended | Failed)
            try:
                self.put(event)
            except Exception as error:  # of a client that is not there any more
                logging.info(f"A client cannot be reached: {error}")
                self.is_cancelled = True

    def fail(self, error: Exception) -> None:
        """Send the client the reason why nothing more comes."""
        self.send([Failed(error)])


@dataclass(frozen=True)
class Preparation:
    """What takes long to make of a request, and needs no pass of the model.

    Attributes:
        loaded: the model that it was made for.
        prediction: token ids of the expected text.
        max_tokens: tokens that the text may have.
    """

    loaded: LoadedModel
    prompt: ReadPrompt
    prediction: list[int]
    max_tokens: int
    grammar: Grammar | None


def prepare(request: TextRequest, loaded: LoadedModel, settings: ServerSettings) -> Preparation:
    """Read the prompt and compile the grammar; any thread may do this beside other texts.

    Raises RequestError, GrammarError and PromptError.
    """
    tokenizer, longest = loaded.tokenizer, loaded.longest_text
    prompt = read_prompt(
        request,
        tokenizer,
        settings,
        most=longest,
        finds_stops=loaded.is_stateful,
        sight=loaded.sight,
    )
    # Checked first, because megabytes of text take seconds to tokenize.
    check_length(request.prediction, tokenizer, longest, "prediction")
    prediction = encoded(tokenizer, request.prediction)
    check_ids(prompt.tokens, vocab_size_of(loaded.model))
    num_tokens = len(prompt.tokens)
    if (room := longest - num_tokens + 1) < 1:  # the last token is not fed
        raise too_long(num_tokens, longest)
    wanted = settings.max_tokens if request.max_tokens is None else request.max_tokens
    max_tokens = room if wanted is None else min(wanted, room)
    grammar = None
    if request.has_grammar:
        grammar = within(partial(compile_grammar, request, tokenizer))
    return Preparation(loaded, prompt, prediction, max_tokens, grammar)


def compile_grammar(request: TextRequest, tokenizer: Any) -> Grammar | None:
    """The compiled grammar of a text, None for any text; raises RequestError and GrammarError."""
    grammar = grammar_for(request, tokenizer)
    if grammar is not None:
        # Compiles the grammar here, and not at the first token on the engine's thread.
        grammar.begin(compiled_tokenizer(tokenizer))
    return grammar


class GuardedGrammar(GrammarProcessor):
    """A grammar that keeps its error and answers with NaN, which ends its own text alone."""

    error: Exception | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        try:
            return super().__call__(tokens, logits)
        except Exception as error:
            self.error = error
            return logits * mx.nan


class ServedText:
    """The text of a request while it is written. All of it belongs to the engine's thread.

    Attributes:
        generated: token ids so far.
        prefixes: where the target's caches are stored.
        drafter_states: where drafters keep their states.
        may_end_early: another token than the end token may end the text.
        is_batched: the text was written beside others at its end.
        stats: the account of the speculation, None before the first token.
    """

    def __init__(
        self,
        ticket: Ticket,
        preparation: Preparation,
        models: Models,
        prefixes: Prefixes,
        draft_caches: Prefixes,
    ) -> None:
        """Raises RequestError and ValueError for a wrong request.

        Args:
            draft_caches: where drafters store their states.
        """
        self.ticket, self.request, self.prefixes = ticket, ticket.request, prefixes
        self.loaded, self.prompt = preparation.loaded, preparation.prompt
        self.max_tokens, self.flags = preparation.max_tokens, models.flags
        self.generated = list[int]()
        self.stats: SpeculationStats | None = None
        self.num_cached: int | None = None
        self.is_batched = False
        request, prompt, tokenizer = self.request, self.prompt, self.loaded.tokenizer
        # A drafter reads the conversation again only from where it has changed.
        self.drafter_states = ServedStates(draft_caches, self.loaded, prompt.tokens, prompt.keys)
        by_request, by_flags = request.num_draft_tokens, self.flags.num_draft_tokens
        self.num_draft_tokens = by_flags if by_request is None else by_request
        self.rule = request.rule or self.flags.rule
        self.sampling = sampling_for(request, self.loaded)
        check_bias(request.penalties.get("logit_bias"), vocab_size_of(self.loaded.model))
        processors = make_logits_processors(**request.penalties)
        self.processors: list[LogitsProcessor] = processors
        self.drafter, self.drafter_name = models.drafters.choose(request, self.loaded)
        if self.drafter is not None and preparation.prediction:
            self.drafter = predicting(self.drafter, preparation.prediction)
        grammar, thought, budget = preparation.grammar, prompt.thought, request.thought_budget
        if thought is not None and budget is not None and budget < self.max_tokens:
            processors.append(ThoughtBudget(thought, budget, len(prompt.tokens)))
        elif grammar is None:
            thought = None  # the text alone shows where it ends
        if grammar is not None:
            processors.append(GuardedGrammar(grammar, tokenizer, len(prompt.tokens), thought))
            if self.drafter is not None:
                # Tokens that the grammar leaves no choice of are drafted first, at no cost.
                self.drafter = FirstOf(GrammarDrafter(), self.drafter)
        is_bounded = bool(request.stop) or not request.parallel_calls
        self.may_end_early = is_bounded or request.has_grammar
        self.state = TextState(tokenizer, request, prompt.tokens, prompt.in_thought, thought)

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt.tokens, *self.generated]

    @property
    def keys(self) -> list[int]:
        """The keys under which caches of the prompt and the text are stored, one for each token."""
        return [*self.prompt.keys, *self.generated]

    @property
    def has_ended(self) -> bool:
        """True if no more tokens are wanted."""
        return self.state.ended is not None or len(self.generated) >= self.max_tokens

    def embeddings(self, caches: list[Any]) -> mx.array | None:
        """What a vision model reads in the place of the prompt's tokens, [n, D]; else None.

        A prompt without pictures has embeddings too: its caches may be of a prompt with pictures.
        """
        if self.loaded.sight is None:
            return None
        seen = self.prompt.seen
        inputs = {"input_ids": mx.array([self.prompt.tokens])} if seen is None else seen.inputs
        return embed(self.loaded.model, caches, inputs)

    def fetch_caches(self) -> tuple[list[Any] | None, int]:
        """The stored caches of the text, or None, and how many of its tokens are in them."""
        keys, loaded = self.keys, self.loaded
        caches, rest = self.prefixes.fetch_nearest_cache(loaded.place, keys, loaded.prefix_files)
        num_read = len(keys) - len(rest)
        if self.num_cached is None:
            self.num_cached = num_read
            self._show_progress(num_read)
        return caches, num_read

    def store_caches(self, num_tokens: int, caches: list[Any], *, has_ended: bool = False) -> None:
        """Store caches of the first tokens of prompt and text; in a file too if it `has_ended`."""
        loaded, files = self.loaded, self.loaded.prefix_files if has_ended else None
        self.prefixes.insert_cache(loaded.place, self.keys[:num_tokens], caches, files)

    def was_read(self, store: Callable[[ServedText], None], done: int, total: int) -> None:
        """Note how far the prompt is read. `store` stores caches that cannot be shortened."""
        self._show_progress(done)
        if self.loaded.is_stateful and 0 < done < total:
            store(self)

    def _show_progress(self, done: int) -> None:
        if not self.generated:
            total = len(self.prompt.tokens)
            self.ticket.send([PromptProgress(min(done, total), total, self.num_cached or 0)])

    def take(self, token: Token) -> bool:
        """Add the next token and send what it shows; True if the text ends with it."""
        self.generated.append(token.token)
        self.stats = token.stats
        logprobs = None if self.request.num_logprobs is None else token.logprobs
        self.ticket.send(self.state.add(token.token, logprobs, token.from_draft))
        return self.has_ended

    def end(self) -> None:
        """Send the rest of the text, and its account."""
        *events, ended = self.state.end(self.state.ended or "length")
        assert isinstance(ended, Ended)
        drafted = 0 if self.stats is None else self.stats.drafted
        account = replace(
            ended,
            num_prompt=len(self.prompt.tokens),
            num_cached=self.num_cached or 0,
            rejected=max(0, drafted - ended.accepted),
            model=self.loaded.name,
            drafter=self.drafter_name,
            is_batched=self.is_batched,
            stats=self.stats,
        )
        self.ticket.send([*events, account])
        if self.flags.stats:
            logging.info(f"Speculation: {self.stats}")

    def fail(self, error: Exception) -> None:
        """Send the reason why nothing more comes; an error of the grammar comes first."""
        if not isinstance(error, ConnectionError | ServerEndingError):
            logging.error("A request failed.", exc_info=error)
        errors = [getattr(processor, "error", None) for processor in self.processors]
        self.ticket.fail(next(filter(None, errors), error))


def sampling_for(request: TextRequest, loaded: LoadedModel) -> Sampling:
    """The sampling of a text; XTC excludes the tokens that it excludes in mlx-lm's server."""
    fields: dict[str, Any] = {**loaded.sampling, **request.sampling}
    if fields.get("top_k", 0) >= vocab_size_of(loaded.model):
        fields["top_k"] = 0  # all of them
    if fields.get("xtc_probability") and not fields.get("xtc_special_tokens"):
        tokenizer = loaded.tokenizer
        special = [*tokenizer.encode("\n"), *tokenizer.eos_token_ids]
        fields["xtc_special_tokens"] = special
    return Sampling(**fields)


def check_bias(bias: dict[int, float] | None, vocab_size: int) -> None:
    """Raise RequestError for a biased token that the model does not have."""
    for token in bias or ():
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"logit_bias: there is no token {token}; the model has 0 to {vocab_size - 1}."
            )
