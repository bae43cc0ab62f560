"""What goes in and out of a batch: texts to write, their rows, and the tokens of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.draft_length.rows import RowLength, SharedLength
from specdec_mlx.loop import Generation, Token
from specdec_mlx.rounds.clock import Round
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.row_pass import ToVerify
from specdec_mlx.target.verifier import Verifier
from specdec_mlx.types import (
    AcceptanceRule,
    Draft,
    DraftContext,
    Drafter,
    LogitsProcessor,
    Outcome,
    PendingPass,
)


class Matcher(Protocol):
    """Looks for the end of a text, such as mlx-lm's `StopSequences.Matcher`."""

    def advance(self, token: int) -> bool:
        """Take the next token; whether the text ends with it."""
        ...


@dataclass(frozen=True)
class RowDrafting:
    """How one text is drafted for, where it is not as the others of its batch.

    drafter: None for plain decoding. rule: as in `speculate`. draft_length: as in `speculate`; None
    for that of the batch.
    """

    drafter: Drafter | None
    rule: str | AcceptanceRule = "auto"
    draft_length: int | str | DraftLength | None = None


@dataclass
class Request:
    """One text to write.

    prompt: [n] token ids. max_tokens: most tokens to generate, -1 for no limit. sampler, seed,
    logits_processors: as in `speculate`. prompt_cache: the target's caches, which hold what comes
    before the prompt, and the first `num_read` tokens of it; they stay as they are, and may be
    given to several texts. num_said: how many of the prompt's last tokens are the beginning of the
    text, written elsewhere; they count among max_tokens. drafting: None for the batch's own.
    matcher: is told each token, and ends the text where it answers with true; None for the batch's
    stop tokens alone. stats: an account to go on with; None for a new one.
    """

    prompt: Sequence[int] | mx.array
    max_tokens: int = 128
    sampler: Sampler | Sampling | None = None
    seed: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    prompt_cache: list[Any] | None = None
    num_read: int = 0
    num_said: int = 0
    drafting: RowDrafting | None = None
    matcher: Matcher | None = None
    stats: SpeculationStats | None = None


class RowToken(NamedTuple):
    """One emitted token of one text.

    uid: which text; see `BatchGeneration.insert`. token: the token. finish_reason: "stop" after a
    stop token, "length" after the last one wanted, else None. prompt_cache: of a text that has
    ended, if caches were asked for: they hold the first `num_cached` tokens of prompt + text.
    """

    uid: int
    token: Token
    finish_reason: str | None
    prompt_cache: list[Any] | None = None
    num_cached: int = 0


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
    matcher: Matcher | None = None
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None
    reading_seconds: float = 0.0
    num_cached: int = 0

    @property
    def length(self) -> DraftLength:
        """What chooses its draft lengths."""
        return self.generation.drafting.length

    def may_run_ahead(self, round_: Round) -> bool:
        """True if the next token may be fed before it is known, behind the pass of this round."""
        generation = self.generation
        waits = generation.drafting.session is not None and generation.sequence.num_generated == 0
        return not len(round_.draft) and not waits and generation.sequence.wants_more(besides=1)

    def complete(self, alone: Rollback) -> None:
        """Bring caches of its own to the end of the text."""
        self.verifier.model_pass.rollback = alone
        while (left := len(self.generation.sequence.tokens) - alone.position) > 0:
            self.generation.feed(left)

    def cut_at(self, stop_tokens: frozenset[int], outcome: Outcome) -> None:
        """End with the first stop token of a round, or with the last token wanted."""
        sequence, tokens = self.generation.sequence, outcome.tokens
        if not sequence.wants_more():
            self.finish_reason = "length"
        for i, token in enumerate(tokens):
            is_end = self.matcher is not None and self.matcher.advance(token)
            if is_end or token in stop_tokens:
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


def shared_drafts(
    shared: SharedLength, rows: Sequence[Row], drafts: Sequence[Draft]
) -> list[Draft]:
    """Drafts of all rows, cut to one width where a row has no draft length of its own."""
    cut = list(drafts)
    sharing = [
        (i, (drafting.length, drafting.part, drafts[i]))
        for i, drafting in enumerate(row.generation.drafting for row in rows)
        if isinstance(drafting.length, RowLength)
    ]
    if sharing:
        of_rows = shared.share([row for _, row in sharing])
        for (i, _), draft in zip(sharing, of_rows, strict=True):
            cut[i] = draft
    return cut
