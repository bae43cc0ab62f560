"""Results of a generation: mlx-lm's responses with their account, and a text that shows it."""

from __future__ import annotations

import time
from collections.abc import (
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx.arguments import check_names, wrong
from specdec_mlx.contracts import (
    AcceptanceRule,
    Drafter,
    LogitsProcessor,
    Origin,
    models_of,
)
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.drafters.choosing.choice import resolve
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER
from specdec_mlx.drafters.guided import with_forced
from specdec_mlx.errors import PromptError
from specdec_mlx.loop import Token as Token
from specdec_mlx.loop import speculate
from specdec_mlx.options import Options, max_tokens_of, processors_of
from specdec_mlx.progress import progress_bar
from specdec_mlx.sampling import Sampler, Sampling
from specdec_mlx.sequence import prompt_ids
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stop_strings import StopStrings
from specdec_mlx.target import check_model
from specdec_mlx.views.html import Piece, text_html


@dataclass
class SpeculativeResponse(GenerationResponse):  # type: ignore[misc]
    """mlx-lm's response, and where its token came from.

    stats: the running account. origin: "draft", "correction", "bonus" or "plain". drafter: its
    name.
    """

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    origin: Origin = "plain"
    drafter: str = ""

    def _repr_html_(self) -> str:
        return text_html([self.piece], self.stats, self.drafter)

    @property
    def piece(self) -> Piece:
        """This token as a part of the text."""
        return Piece(self.text, self.token, self.origin)


class Text(str):
    """A generated text: a str with its account, shown in a notebook; slices and sums are plain str.

    pieces: text, id and origin of each token. stats: the account. drafter: its name.
    """

    pieces: tuple[Piece, ...]
    stats: SpeculationStats
    drafter: str

    @classmethod
    def of(cls, responses: Iterable[SpeculativeResponse]) -> Text:
        """The text of a stream of responses, none of which is kept: each has a row of logits."""
        pieces, stats, drafter = [], SpeculationStats(), ""
        for response in responses:
            pieces.append(response.piece)
            stats, drafter = response.stats, response.drafter
        text = cls("".join(piece.text for piece in pieces))
        text.pieces, text.stats, text.drafter = tuple(pieces), stats, drafter
        return text

    @property
    def tokens(self) -> list[int]:
        """Ids of its tokens."""
        return [piece.token for piece in self.pieces]

    def _repr_html_(self) -> str:
        return text_html(self.pieces, self.stats, self.drafter)


@dataclass
class TextUnderWay:
    """A text that is being written. started: when its first token came."""

    detokenizer: Any
    num_prompt: int
    drafter: str
    strings: StopStrings
    num_tokens: int = 0
    started: float = 0.0

    def response(
        self, token: Token, finish_reason: str | None, prompt_seconds: float
    ) -> SpeculativeResponse:
        """mlx-lm's response for the next token; its reason is "stop" where a string ends it.

        Of the text, what may become a stop string waits for the tokens that decide it.
        """
        self.num_tokens += 1
        self.started = self.started or time.perf_counter()
        if finish_reason != "stop":
            self.detokenizer.add_token(token.token)
        if finish_reason is not None:
            self.detokenizer.finalize()
        shown = self.strings.add(self.detokenizer.last_segment)
        if self.strings.found is not None:
            finish_reason = "stop"
        elif finish_reason is not None:
            shown += self.strings.finish()
        seconds = time.perf_counter() - self.started
        return SpeculativeResponse(
            text=shown,
            token=token.token,
            logprobs=token.logprobs,
            from_draft=token.from_draft,
            prompt_tokens=self.num_prompt,
            prompt_tps=self.num_prompt / prompt_seconds if prompt_seconds else 0.0,
            generation_tokens=self.num_tokens,
            generation_tps=self.num_tokens / seconds if seconds else 0.0,
            peak_memory=mx.get_peak_memory() / 1e9,
            finish_reason=finish_reason,
            stats=token.stats,
            origin=token.origin,
            drafter=self.drafter,
        )


def respond(
    tokens: Generator[Token, None, None],
    text: TextUnderWay,
    models: list[nn.Module],
    max_tokens: int,
    end_tokens: Collection[int],
    stream: Any,
) -> Generator[SpeculativeResponse, None, None]:
    """Detokenize, end at an end token, a stop string or max_tokens, and keep time, as mlx-lm."""
    began = time.perf_counter()
    with wired_limit(models, [stream]), closing(tokens):
        for n, token in enumerate(tokens, start=1):
            reason = "length" if n == max_tokens else None
            reason = "stop" if token.token in end_tokens else reason
            prompt_seconds = (text.started or time.perf_counter()) - began
            response = text.response(token, reason, prompt_seconds)
            yield response
            if response.finish_reason is not None:
                return


def prefill_bar() -> Callable[[int, int], None]:
    """A progress bar for prompts that take longer than a second to read."""
    bar = progress_bar(desc="prefill", unit="token", delay=1, leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def printed(responses: Iterable[SpeculativeResponse]) -> Iterator[SpeculativeResponse]:
    """The responses, printed as mlx-lm prints them, with the account as a last line."""
    print("=" * 10)
    response = None
    for response in responses:
        print(response.text, end="", flush=True)
        yield response
    if response is not None:
        print(
            "\n" + "=" * 10,
            *speeds(response),
            f"Speculation: {response.stats}",
            sep="\n",
        )


def speeds(told: Any) -> list[str]:
    """mlx-lm's closing lines, of a response or a `BatchStats`."""
    return [
        f"Prompt: {told.prompt_tokens} tokens, {told.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {told.generation_tokens} tokens, {told.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {told.peak_memory:.3f} GB",
    ]


Prompt = str | mx.array | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    max_tokens: int = 256,
    drafter: Drafter | str | None = DEFAULT_DRAFTER,
    draft_model: nn.Module | Drafter | str | Path | None = None,
    rule: str | AcceptanceRule = "auto",
    draft_length: int | str | DraftLength = "auto",
    seed: int | None = None,
    temp: float | None = None,
    sampler: Sampler | Sampling | None = None,
    logits_processors: Sequence[LogitsProcessor] | None = None,
    prompt_cache: list[Any] | None = None,
    num_draft_tokens: int | None = None,
    top_p: float = 0.0,
    min_p: float = 0.0,
    top_k: int = 0,
    stop: str | Iterable[str] = (),
    temperature: float | None = None,
    **options: Any,
) -> Generator[SpeculativeResponse, None, None]:
    """Stream the same text as `mlx_lm.stream_generate`, sooner.

    Args:
        model: a loaded mlx-lm model.
        tokenizer: its tokenizer, as `mlx_lm.load` gives it.
        prompt: text; token ids; or chat messages, which go through the chat template.
        max_tokens: tokens to generate, -1 for no limit.
        drafter: a drafter, or the name of one with options ("ngram:max_order=3"); None for plain
            decoding.
        draft_model: a small model with the same tokenizer, or the folder or Hugging Face name of
            one with any, or of a trained head; "auto" for one here that fits. It competes with
            look-up; a drafter that is named is asked first.
        rule: acceptance rule, by name or as an object; see `speculate`.
        draft_length: most tokens to draft a round, or "auto" for what pays; see `speculate`.
        seed: one text for each, with any drafter and draft length; None takes one from MLX's global
            random state, and what a draft model drafts then has a say in the text.
        temp: temperature; short for `sampler=Sampling(temp=...)`.
        sampler: how tokens are drawn, a `Sampling` or any mlx-lm sampler; greedy if None.
        logits_processors: mlx-lm's; (tokens [n], logits [1, V]) -> logits [1, V].
        prompt_cache: caches of earlier turns, which the prompt continues; those of one draft model
            may follow, to be kept in step.
        num_draft_tokens: mlx-lm's name for `draft_length`, which it overrides.
        top_p: likeliest tokens to draw from, by the sum of their probabilities; 0 for all.
        min_p: least probability of these, relative to the likeliest token's.
        top_k: number of these; 0 for all.
        stop: strings, or one, that end the text wherever tokens fall; they are not part of it.
        temperature: another name for `temp`.
        options: all others of `options.Options`, which are mlx-lm's and a few of ours.

    Yields:
        mlx-lm's response for each token, with `stats`, `origin` and `drafter` besides.

    Raises:
        UnknownNameError: no drafter, rule or policy has this name.
        TokenizerMismatchError: the draft model's tokenizer, or the target's, does not give back
            text.
        ModelFolderError: there is no draft model of this name.
        PromptError, DraftError, LogitsError, CacheRollbackError: see `speculate`.
        ValueError: for other bad input.
    """
    check_names(options, stream_generate, Options)
    how = replace(
        Options(**options),
        max_tokens=max_tokens_of(max_tokens, 1),
        sampler=choose_sampler(
            sampler, temp, temperature, top_p=top_p, min_p=min_p, top_k=top_k
        ),
        seed=seed,
        rule=rule,
        draft_length=draft_length if num_draft_tokens is None else num_draft_tokens,
        logits_processors=logits_processors,
        prompt_cache=prompt_cache,
        tokenizer=loaded(model, tokenizer),
    )
    chosen = resolve(drafter, draft_model, model, how.tokenizer)
    chosen = with_forced(chosen, processors_of(logits_processors or ()))
    prompt_tokens = encode(how.tokenizer, prompt)
    tokens = speculate(model, prompt_tokens, chosen, options=how)
    num_prompt = len(prompt_tokens) or len(
        () if how.input_embeddings is None else how.input_embeddings
    )
    name = (
        drafter
        if isinstance(drafter, str)
        else ""
        if chosen is None
        else type(chosen).__name__
    )
    strings = StopStrings([stop] if isinstance(stop, str) else stop)
    text = TextUnderWay(how.tokenizer.detokenizer, num_prompt, name, strings)
    models = [model, *models_of(chosen)]
    return respond(
        tokens, text, models, how.max_tokens, how.tokenizer.eos_token_ids, how.stream
    )


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    verbose: bool = False,
    max_tokens: int = 256,
    drafter: Drafter | str | None = DEFAULT_DRAFTER,
    draft_model: nn.Module | Drafter | str | Path | None = None,
    rule: str | AcceptanceRule = "auto",
    draft_length: int | str | DraftLength = "auto",
    seed: int | None = None,
    temp: float | None = None,
    sampler: Sampler | Sampling | None = None,
    **options: Any,
) -> Text:
    """Generate the same text as `mlx_lm.generate`, sooner.

    Args:
        model: the target, as `mlx_lm.load` gives it.
        tokenizer: the target's.
        prompt: text; token ids; or chat messages, which go through the chat template.
        verbose: print the text as it comes, then speeds, peak memory and the account.
        max_tokens: tokens to generate, -1 for no limit.
        drafter: a drafter, or the name of one with options; None for plain decoding.
        draft_model: a small model, or the folder or Hugging Face name of one, or of a trained head.
        rule: acceptance rule, by name or as an object.
        draft_length: most tokens to draft a round, or "auto" for what pays.
        seed: one text for each, with any drafter and draft length.
        temp: temperature, 0 for greedy; short for `sampler=Sampling(temp=...)`.
        sampler: how tokens are drawn, a `Sampling` or any mlx-lm sampler.
        options: all else that `stream_generate` takes: `top_p`, `stop`, `prompt_cache` ...

    Returns:
        A str with `stats`, `tokens` and `pieces`, which a notebook shows in colour.

    Raises:
        ValueError: for bad input, and its subclasses as in `stream_generate`.
    """
    check_names(options, generate, stream_generate, Options)
    if verbose and options.get("prompt_progress_callback") is None:
        options["prompt_progress_callback"] = prefill_bar()
    how = (drafter, draft_model, rule, draft_length, seed, temp, sampler)
    responses = stream_generate(model, tokenizer, prompt, max_tokens, *how, **options)
    return Text.of(printed(responses) if verbose else responses)


def loaded(model: Any, tokenizer: Any) -> TokenizerWrapper:
    """mlx-lm's wrapper around the tokenizer; ValueError for what is not loaded."""
    check_model(model)
    if tokenizer is None or isinstance(tokenizer, str | Path):
        raise wrong("tokenizer", tokenizer, "the tokenizer that mlx_lm.load(...) gave")
    return (
        tokenizer
        if isinstance(tokenizer, TokenizerWrapper)
        else TokenizerWrapper(tokenizer)
    )


def choose_sampler(
    sampler: Sampler | Sampling | None,
    temp: float | None,
    temperature: float | None = None,
    **filters: Any,
) -> Sampler | Sampling | None:
    """The sampler that the arguments name; None for greedy. Raises ValueError.

    filters: `top_p`, `min_p` and `top_k` of a `Sampling`, 0 for none.
    """
    if temp is not None and temperature is not None:
        raise ValueError("Give temp= or temperature=, not both: they are one.")
    temp = temperature if temp is None else temp
    used = {name: value for name, value in filters.items() if value != 0}
    if temp is None and not used:
        return sampler
    if sampler is not None:
        name = next(iter(used), "temp")
        raise ValueError(
            f"Give {name}= or sampler=, not both: a sampler has its own {name}."
        )
    return Sampling(0.0 if temp is None else temp, **used)


def encode(tokenizer: TokenizerWrapper, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, special tokens and chat template as in mlx-lm.

    Raises PromptError for messages where the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(
            tokenizer.bos_token
        )
        return list(tokenizer.encode(prompt, add_special_tokens=special))
    if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        if not tokenizer.has_chat_template:
            raise PromptError(
                "The prompt is a list of chat messages, and the tokenizer has no chat template. "
                "Give the text itself, or a tokenizer with a template."
            )
        return list(
            tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True)
        )
    return prompt_ids(prompt)
