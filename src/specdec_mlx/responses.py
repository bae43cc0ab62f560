"""Results of a generation: mlx-lm's responses with their account, and a text that shows it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import GenerationResponse, wired_limit

from specdec_mlx.contracts import Origin
from specdec_mlx.loop import Token as Token
from specdec_mlx.progress import progress_bar
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stop_strings import StopStrings
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
