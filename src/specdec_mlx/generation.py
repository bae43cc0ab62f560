"""Text in, text out: `mlx_lm.stream_generate` and `mlx_lm.generate` with one argument more."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx.arguments import DEFAULT_DRAFTER, argument_error, check_names
from specdec_mlx.contracts import Origin, models_of
from specdec_mlx.drafters.choosing.choice import AnyDrafter, resolve
from specdec_mlx.drafters.grammar import with_forced
from specdec_mlx.errors import PromptError
from specdec_mlx.loop import Token as Token
from specdec_mlx.loop import speculate
from specdec_mlx.options import Options, TextArguments, max_tokens_of, processors_of
from specdec_mlx.progress import progress_bar
from specdec_mlx.sequence import prompt_ids
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stop_strings import StopStrings
from specdec_mlx.target import check_model
from specdec_mlx.views.html import Piece, text_html


@dataclass
class SpeculativeResponse(GenerationResponse):  # type: ignore[misc]
    """mlx-lm's response, and the origin of its token.

    Attributes:
        stats: the running metrics.
        origin: "draft", "correction", "bonus" or "plain".
        drafter: name of the drafter.
        index: in a batch, index of the prompt.
        sample: in a batch, index of the text among the samples of its prompt.
        num_rounds: in a batch, passes over all rows so far.
        prompt_cache: in a batch, the text's caches, with its last token, if
            `return_prompt_caches` is true.
    """

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    origin: Origin = "plain"
    drafter: str = ""
    index: int = 0
    sample: int = 0
    num_rounds: int = 0
    prompt_cache: list[Any] | None = None

    def _repr_html_(self) -> str:
        return text_html([self.piece], self.stats, self.drafter)

    @property
    def piece(self) -> Piece:
        return Piece(self.text, self.token, self.origin)


class Text(str):
    """A generated text: a str with metrics. Slices and sums are plain str.

    Attributes:
        pieces: text, id and origin of each token.
        stats: the metrics.
        drafter: name of the drafter.
    """

    pieces: tuple[Piece, ...]
    stats: SpeculationStats
    drafter: str

    @classmethod
    def of(cls, responses: Iterable[SpeculativeResponse]) -> Text:
        """The text of a stream of responses."""
        # Keep pieces, not responses: each response refers to a row of logits.
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
    """A text that is being generated.

    Attributes:
        detokenizer: turns its tokens into text.
        num_prompt: tokens of its prompt.
        drafter: name of its drafter.
        strings: stop strings, or None.
        num_tokens: tokens so far.
        started: time at which the first token came, in seconds, or 0.
    """

    detokenizer: Any
    num_prompt: int
    drafter: str
    strings: StopStrings | None
    num_tokens: int = 0
    started: float = 0.0

    def response(
        self, token: Token, finish_reason: str | None, prompt_seconds: float
    ) -> SpeculativeResponse:
        """mlx-lm's response for the next token. Its reason is "stop" if a string ends the text."""
        self.num_tokens += 1
        self.started = self.started or time.perf_counter()
        if finish_reason != "stop":
            self.detokenizer.add_token(token.token)
        if finish_reason is not None:
            self.detokenizer.finalize()
        segment = self.detokenizer.last_segment
        if self.strings is not None:
            # Characters that may begin a stop string are held back until later tokens decide.
            segment = self.strings.add(segment)
            if self.strings.matched is not None:
                finish_reason = "stop"
            elif finish_reason is not None:
                segment += self.strings.finish()
        seconds = time.perf_counter() - self.started
        return SpeculativeResponse(
            text=segment,
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
    """Detokenize, end at an end token, a stop string or max_tokens, and measure time."""
    began = time.perf_counter()
    with wired_limit(models, [stream]), closing(tokens):
        for n, token in enumerate(tokens, start=1):
            # As in mlx-lm, an end token counts as "stop" even if it is the last token allowed.
            reason = "length" if n == max_tokens else None
            reason = "stop" if token.token in end_tokens else reason
            prompt_seconds = (text.started or time.perf_counter()) - began
            response = text.response(token, reason, prompt_seconds)
            yield response
            if response.finish_reason is not None:
                return


def prefill_bar() -> Callable[[int, int], None]:
    """A progress bar that appears if reading a prompt takes longer than a second."""
    bar = progress_bar(desc="prefill", unit="token", delay=1, leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def printed(responses: Iterable[SpeculativeResponse]) -> Iterator[SpeculativeResponse]:
    print("=" * 10)
    response = None
    for response in responses:
        print(response.text, end="", flush=True)
        yield response
    if response is not None:
        print("\n" + "=" * 10, *speeds(response), f"Speculation: {response.stats}", sep="\n")


def speeds(stats: Any) -> list[str]:
    return [
        f"Prompt: {stats.prompt_tokens} tokens, {stats.prompt_tps:.3f} tokens-per-sec",
        f"Generation: {stats.generation_tokens} tokens, {stats.generation_tps:.3f} tokens-per-sec",
        f"Peak memory: {stats.peak_memory:.3f} GB",
    ]


Prompt = str | mx.array | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or chat messages."""


class GenerateArguments(TextArguments, total=False):
    max_tokens: int
    draft_model: nn.Module | str | None
    drafter: AnyDrafter


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    max_tokens: int = 256,
    draft_model: nn.Module | str | None = None,
    drafter: AnyDrafter = DEFAULT_DRAFTER,
    **options: Unpack[TextArguments],
) -> Generator[SpeculativeResponse, None, None]:
    """Stream the same text as `mlx_lm.stream_generate`, sooner.

    Args:
        model: a loaded mlx-lm model.
        tokenizer: its tokenizer, as `mlx_lm.load` gives it.
        prompt: text, token ids, or chat messages, which go through the chat template.
        max_tokens: tokens to generate, -1 for no limit.
        draft_model: a loaded small model, as in mlx-lm, which competes with the drafter for each
            draft; "auto" for a model or a head on this machine that fits.
        drafter: a drafter, or its name with options ("ngram:max_order=3"). The folder or Hugging
            Face repository of a model or a trained head is loaded for this call. The drafters of a
            list compete. None for plain decoding.
        options: the fields of `Options`, by name.

    Yields:
        mlx-lm's response for each token, with `stats`, `origin` and `drafter` added.

    Raises:
        UnknownNameError: no drafter, rule or policy has this name.
        TokenizerMismatchError: the draft model's tokenizer, or the target's, does not give back
            text.
        ModelFolderError, HeadError: the model does not exist, or the head does not fit the target.
        PromptError, DraftError, LogitsError, CacheRollbackError: see `speculate`.
        ValueError: for other bad input.
    """
    check_names(options, stream_generate, Options)
    how = replace(
        Options(**options),
        max_tokens=max_tokens_of(max_tokens, 1),
        tokenizer=loaded(model, tokenizer),
    )
    chosen = resolve(drafter, draft_model, model, how.tokenizer)
    if how.logits_processors:
        # A grammar's processor also drafts the tokens that the grammar forces.
        chosen = with_forced(chosen, processors_of(how.logits_processors))
    prompt_tokens = encode(how.tokenizer, prompt)
    # Stop strings are found in the text here. `speculate` has only tokens.
    tokens = speculate(model, prompt_tokens, chosen, options=replace(how, stop=()))
    read = prompt_tokens if how.input_embeddings is None else how.input_embeddings
    # A caller who passed a name sees that name in the responses.
    name = drafter if isinstance(drafter, str) else ""
    if not name and chosen is not None:
        name = chosen.class_name
    strings = StopStrings(how.stop) if how.stop else None
    text = TextUnderWay(how.tokenizer.detokenizer, len(read), name, strings)
    models = [model, *models_of(chosen)]
    return respond(tokens, text, models, how.max_tokens, how.tokenizer.eos_token_ids, how.stream)


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: Prompt,
    verbose: bool = False,
    **options: Unpack[GenerateArguments],
) -> Text:
    """Generate the same text as `mlx_lm.generate`, sooner.

    Args:
        model: a loaded mlx-lm model.
        tokenizer: its tokenizer, as `mlx_lm.load` gives it.
        prompt: text, token ids, or chat messages, which go through the chat template.
        verbose: print the text as it comes, then speeds, peak memory and the account.
        options: `drafter` and `draft_model` as in `stream_generate`, and the fields of `Options`.

    Returns:
        A str with `stats`, `tokens` and `pieces`, which a notebook shows in colour.

    Raises:
        ValueError: for bad input, and its subclasses as in `stream_generate`.
    """
    check_names(options, generate, stream_generate, Options)
    if verbose and options.get("prompt_progress_callback") is None:
        options["prompt_progress_callback"] = prefill_bar()
    responses = stream_generate(model, tokenizer, prompt, **options)
    return Text.of(printed(responses) if verbose else responses)


def loaded(model: Any, tokenizer: Any) -> TokenizerWrapper:
    check_model(model)
    if tokenizer is None or isinstance(tokenizer, str | Path):
        raise argument_error("tokenizer", tokenizer, "the tokenizer that mlx_lm.load(...) gave")
    return tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)


def encode(tokenizer: TokenizerWrapper, prompt: Prompt) -> list[int]:
    """Token ids of a prompt, special tokens and chat template as in mlx-lm.

    Raises PromptError for messages where the tokenizer has no chat template.
    """
    if isinstance(prompt, str):
        # A prompt that begins with the BOS token, such as a formatted template, must not get a
        # second one.
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        return list(tokenizer.encode(prompt, add_special_tokens=special))
    if isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        if not tokenizer.has_chat_template:
            raise PromptError(
                "The prompt is a list of chat messages, and the tokenizer has no chat template. "
                "Give the text itself, or a tokenizer with a template."
            )
        return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True))
    return prompt_ids(prompt)
