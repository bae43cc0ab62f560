"""Texts to write, their rows in a batch, and the tokens of each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.contracts import AcceptanceRule, DraftContext, Drafter, LogitsProcessor, Outcome
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.engine.clock import Round
from specdec_mlx.engine.prompt_reader import PromptReader
from specdec_mlx.loop import Generation, Token
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.verify.inputs import CacheOptions, check_ids, check_prompt, split_cache
from specdec_mlx.verify.model_pass import vocab_size_of
from specdec_mlx.verify.rollback import Rollback
from specdec_mlx.verify.verifier import Verifier


@dataclass(frozen=True)
class RowDrafting:
    """Drafter, rule and draft length of one text that has its own; None is the batch's."""

    drafter: Drafter | None
    rule: str | AcceptanceRule = "auto"
    draft_length: int | str | DraftLength | None = None


@dataclass
class Request:
    """One text to write.

    prompt: [n] token ids. prompt_cache: caches that hold what comes before it and its first
    `num_read` tokens; shared, never changed. num_said: the prompt's last tokens that are the text's
    beginning, written elsewhere; they count among max_tokens. drafting: None for the batch's own.
    matcher: `advance(token)` returns True to end the text, as mlx-lm's `StopSequences.Matcher`.
    stats: an account to go on with.
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
    matcher: Any = None
    stats: SpeculationStats | None = None


class RowToken(NamedTuple):
    """One emitted token of one text, by its uid.

    finish_reason: "stop", "length" or None. prompt_cache: of an ended text, if asked for: the first
    `num_cached` tokens of prompt + text.
    """

    uid: int
    token: Token
    finish_reason: str | None
    prompt_cache: list[Any] | None = None
    num_cached: int = 0


@dataclass(eq=False)
class Row:
    """A text that is being written; finish_reason is also "removed"."""

    uid: int
    generation: Generation
    verifier: Verifier
    context: DraftContext
    matcher: Any = None
    finish_reason: str | None = None
    prompt_cache: list[Any] | None = None
    num_cached: int = 0

    @property
    def is_new(self) -> bool:
        """True if nothing of its prompt is read, it is wanted, and no drafter reads the target."""
        is_new = self.generation.target.rollback.position == 0 and self.finish_reason is None
        return is_new and self.generation.drafting.features is None

    def may_run_ahead(self, round_: Round) -> bool:
        """True if the next token may be fed before it is known, after the pass of this round."""
        generation = self.generation
        waits = generation.drafting.session is not None and generation.sequence.num_generated == 0
        return not round_.num_drafted and not waits and generation.sequence.wants_more(besides=1)

    def read_on(self) -> bool:
        """Read a step of the prompt, which is what one pass may have of it; True after the last."""
        reader = self.generation.reader
        if reader.num_left > reader.step_size:
            reader.read()
            return False
        self.generation.prefill()
        return True

    def keep_caches(self, alone: Rollback, *, complete: bool) -> None:
        """Hand these caches out at the end; complete: feed what they lack of the text."""
        self.verifier.model_pass.rollback = alone
        while complete and (left := len(self.generation.sequence.tokens) - alone.position) > 0:
            self.generation.feed(left)
        self.prompt_cache, self.num_cached = alone.caches, alone.position

    def cut_at(self, stop_tokens: frozenset[int], outcome: Outcome) -> None:
        """End with the first stop token of a round, or with the last token wanted."""
        sequence, tokens = self.generation.sequence, outcome.tokens
        if not sequence.wants_more():
            self.finish_reason = "length"
        for i, token in enumerate(tokens):
            is_end = self.matcher is not None and self.matcher.advance(token)
            if is_end or token in stop_tokens:
                self.finish_reason = "stop"
                sequence.max_tokens = sequence.num_generated - (len(tokens) - i - 1)
                del sequence.tokens[len(sequence.tokens) - (len(tokens) - i - 1) :]
                outcome.tokens = tokens[: i + 1]
                return


Rounds = list[tuple[Row, Round]]  # A pass under way, row by row


def samples_of(
    model: nn.Module, request: Request, num_samples: int, options: CacheOptions, stream: Any
) -> Iterator[Request]:
    """Several texts of one prompt, read once, when the first is asked for; else PromptError."""
    if num_samples == 1:
        yield request
        return
    prompt = check_prompt(request.prompt, None, None)
    check_ids(prompt, vocab_size_of(model))
    caches, _ = split_cache(model, copy.deepcopy(request.prompt_cache), options)
    step_size = options.prefill_step_size
    reader = PromptReader.of_model(
        model, prompt, Rollback(caches), step_size=step_size, stream=stream
    )
    reader.read_all()
    for _ in range(num_samples):
        yield replace(request, prompt=prompt, prompt_cache=caches, num_read=reader.num_read)
