"""What goes in and out of a batch: texts to write, their rows, and the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from specdec_mlx.loop import Generation, Token
from specdec_mlx.rounds.clock import Round
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.row_pass import ToVerify
from specdec_mlx.target.verifier import Verifier
from specdec_mlx.types import DraftContext, LogitsProcessor, Outcome, PendingPass


@dataclass
class Request:
    """One text to write.

    prompt: [n] token ids. max_tokens: most tokens to generate, -1 for no limit. sampler, seed,
    logits_processors: as in `speculate`. prompt_cache: the target's caches, which hold the prompt's
    first tokens; they are copied, and stay as they are.
    """

    prompt: Sequence[int] | mx.array
    max_tokens: int = 128
    sampler: Sampler | Sampling | None = None
    seed: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    prompt_cache: list[Any] | None = None


class RowToken(NamedTuple):
    """One emitted token of one text.

    uid: which text; see `BatchGeneration.insert`. token: the token. finish_reason: "stop" after a
    stop token, "length" after the last one wanted, else None. prompt_cache: of a text that has
    ended, if caches were asked for: they hold prompt + text.
    """

    uid: int
    token: Token
    finish_reason: str | None
    prompt_cache: list[Any] | None = None


@dataclass
class Row:
    """A text that is being written.

    finish_reason: why it ends with the tokens that are known. reading_seconds: of its prompt's
    steps but for the last one.
    """

    uid: int
    generation: Generation
    verifier: Verifier
    context: DraftContext
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None
    reading_seconds: float = 0.0

    def cut_at(self, stop_tokens: frozenset[int], outcome: Outcome) -> None:
        """End with the first stop token of a round, or with the last token wanted."""
        sequence, tokens = self.generation.sequence, outcome.tokens
        if not sequence.wants_more():
            self.finish_reason = "length"
        for i, token in enumerate(tokens):
            if token in stop_tokens:
                self.finish_reason = "stop"
                del sequence.tokens[len(sequence.tokens) - (len(tokens) - i - 1) :]
                outcome.tokens = tokens[: i + 1]
                return


Rounds = list[tuple[Row, Round]]
"""A pass under way, row by row."""


class Passes(Protocol):
    """The target of all rows: `target.row_pass.RowPasses`, or texts that are known already."""

    def add(self, verifier: Verifier) -> None:
        """Take over a text that was read alone; from now on it goes with the others."""

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order, and drop the others."""

    def read(self, texts: Sequence[Sequence[int]]) -> None:
        """Feed tokens to all rows for the caches alone, at least one to each."""

    def launch(self, rounds: Sequence[ToVerify]) -> list[PendingPass]:
        """Start a pass over all rows; what is to be read of each."""

    def settle(self) -> None:
        """Go back where rows asked to."""

    def extract(self, row: int) -> Rollback:
        """What the caches hold of a row, in caches of its own."""
