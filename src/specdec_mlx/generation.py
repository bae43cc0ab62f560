"""Text in, text out: `mlx_lm.stream_generate` and `mlx_lm.generate` with one argument more."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, generation_stream, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.registry import make_drafter
from specdec_mlx.loop import speculate
from specdec_mlx.notebook.views import Piece, text_html
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import AcceptanceRule, Drafter, Origin, models_of


@dataclass
class SpeculativeResponse(GenerationResponse):  # type: ignore[misc]
    """mlx-lm's response, and where its token came from.

    stats: the generation's running account. origin: "draft", "correction", "bonus" or "plain".
    drafter: what the drafter is called.
    """

    stats: SpeculationStats = field(default_factory=SpeculationStats)
    origin: Origin = "plain"
    drafter: str = ""

    def _repr_html_(self) -> str:
        return text_html([self.piece], self.stats, self.drafter)

    @property
    def piece(self) -> Piece:
        """What this token is to the whole text."""
        return Piece(self.text, self.token, self.origin)


class Text(str):
    """A generated text: a str that also knows how it came about, and shows it in a notebook.

    pieces: one for each token, with its text, id and origin. stats: the account of the generation.
    drafter: what the drafter is called. What is made of it (a slice, a sum) is a plain str.
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


def stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    max_tokens: int = 256,
    drafter: Drafter | str | None = None,
    draft_model: nn.Module | Drafter | str | None = None,
    rule: str | AcceptanceRule = "auto",
    draft_length: int | str | DraftLength = "auto",
    seed: int | None = None,
    sampler: Sampler | Sampling | None = None,
    stream: Any = generation_stream,
    **kwargs: Any,
) -> Generator[SpeculativeResponse, None, None]:
    """Stream the same text as `mlx_lm.stream_generate`, sooner.

    drafter: a drafter, or the name of one with options ("ngram:max_order=3"). draft_model: instead
    of a drafter, a mlx-lm model with the same tokenizer. rule, draft_length, seed: see
    `speculate`. kwargs: all that `mlx_lm.stream_generate` takes; `num_draft_tokens`, mlx-lm's name
    for the draft length, overrides draft_length.

    Raises what `speculate` raises, UnknownNameError, and TokenizerMismatchError for a draft model
    that was given with its tokenizer.
    """
    if max_tokens == 0:
        raise ValueError("max_tokens=0: expected a number of tokens, or -1 for no limit.")
    chosen = choose_drafter(drafter, draft_model)
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    num_draft_tokens = kwargs.pop("num_draft_tokens", None)
    prompt_tokens = encode(tokenizer, prompt)
    tokens = speculate(
        model,
        prompt_tokens,
        chosen,
        max_tokens=max_tokens,
        sampling=sampler,
        seed=seed,
        rule=rule,
        draft_length=draft_length if num_draft_tokens is None else num_draft_tokens,
        tokenizer=tokenizer,
        stream=stream,
        **kwargs,
    )
    models = [model, *models_of(chosen)]
    num_prompt = len(prompt_tokens) or len(kwargs.get("input_embeddings", ()))
    return _respond(
        tokens,
        tokenizer,
        models,
        num_prompt,
        max_tokens,
        stream,
        drafter if isinstance(drafter, str) else _kind(chosen),
    )


def generate(
    model: nn.Module,
    tokenizer: Any,
    prompt: str | mx.array | Sequence[int],
    verbose: bool = False,
    **kwargs: Any,
) -> Text:
    """Generate the same text as `mlx_lm.generate`, sooner; takes what `stream_generate` takes.

    verbose: print the text as it comes, then speeds, peak memory and the speculation's stats.
    The text is a str with `stats`, `tokens` and `pieces`, which a notebook shows in colour.
    """
    if verbose:
        kwargs.setdefault("prompt_progress_callback", _prefill_bar())
    responses = stream_generate(model, tokenizer, prompt, **kwargs)
    return Text.of(_printed(responses) if verbose else responses)


def _prefill_bar() -> Callable[[int, int], None]:
    """A progress bar for prompts that take longer than a second to read."""
    from tqdm.auto import tqdm

    bar = tqdm(desc="prefill", unit="token", delay=1, leave=False)

    def show(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()

    return show


def _printed(responses: Iterable[SpeculativeResponse]) -> Iterator[SpeculativeResponse]:
    """The same responses, printed as mlx-lm prints them."""
    print("=" * 10)
    response = None
    for response in responses:
        print(response.text, end="", flush=True)
        yield response
    if response is not None:
        print("\n" + "=" * 10)
        print(summary(response))


def _kind(drafter: Drafter | None) -> str:
    """What a drafter without a name is called."""
    return "" if drafter is None else type(drafter).__name__


def summary(response: SpeculativeResponse) -> str:
    """Closing lines for a finished generation: mlx-lm's three, then ours."""
    return (
        f"Prompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB\n"
        f"Speculation: {response.stats}"
    )


def choose_drafter(
    drafter: Drafter | str | None, draft_model: nn.Module | Drafter | str | None
) -> Drafter | None:
    """The drafter that the two arguments name; None for plain decoding."""
    if drafter is not None and draft_model is not None:
        raise ValueError("Give drafter= or draft_model=, not both.")
    choice = drafter if draft_model is None else draft_model
    if isinstance(choice, nn.Module):
        return ModelDrafter(choice)
    if isinstance(choice, str):
        return make_drafter(choice)
    if choice is None or isinstance(choice, Drafter):
        return choice
    raise ValueError(
        f"drafter={choice!r} has no begin(prompt, context). Give a drafter, the name of one, or a "
        "mlx-lm model as draft_model=."
    )


def encode(tokenizer: TokenizerWrapper, prompt: str | mx.array | Sequence[int]) -> list[int]:
    """Token ids of a prompt; as in mlx-lm, special tokens are added unless it begins with one."""
    if not isinstance(prompt, str):
        return to_list(prompt)
    special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
    return list(tokenizer.encode(prompt, add_special_tokens=special))


def _respond(
    tokens: Generator[Any, None, None],
    tokenizer: TokenizerWrapper,
    models: list[nn.Module],
    num_prompt: int,
    max_tokens: int,
    stream: Any,
    drafter: str,
) -> Generator[SpeculativeResponse, None, None]:
    """Detokenize, stop at an end token or at max_tokens, and keep time, as mlx-lm does."""
    detokenizer = tokenizer.detokenizer
    started = time.perf_counter()
    prompt_seconds = 0.0
    with wired_limit(models, [stream]), closing(tokens):
        for n, token in enumerate(tokens, start=1):
            if n == 1:
                prompt_seconds = time.perf_counter() - started
                started = time.perf_counter()
            is_end = token.token in tokenizer.eos_token_ids
            finished = is_end or n == max_tokens
            if not is_end:
                detokenizer.add_token(token.token)
            if finished:
                detokenizer.finalize()
            yield SpeculativeResponse(
                text=detokenizer.last_segment,
                token=token.token,
                logprobs=token.logprobs,
                from_draft=token.from_draft,
                prompt_tokens=num_prompt,
                prompt_tps=num_prompt / prompt_seconds,
                generation_tokens=n,
                generation_tps=n / (time.perf_counter() - started),
                peak_memory=mx.get_peak_memory() / 1e9,
                finish_reason=("stop" if is_end else "length") if finished else None,
                stats=token.stats,
                origin=token.origin,
                drafter=drafter,
            )
            if finished:
                return
