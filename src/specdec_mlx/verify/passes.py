"""Passes of the target under way: one lazy graph, or row by row through a caller's callables.

With pure callables a round is one lazy graph, read by one host synchronisation. A sampler or
processor of the caller's may remember what it saw, so it is called row by row, as plain decoding
would, no further than the first rejected token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx

from specdec_mlx.contracts import ROOT, Decision, Draft, FeatureRows, Outcome
from specdec_mlx.errors import DraftError, LogitsError, VerdictError
from specdec_mlx.token_ids import read_all, to_ids, to_list
from specdec_mlx.verify.inputs import check_drafted
from specdec_mlx.verify.next_token import NextToken, clip_ids

NOT_FINITE = (
    "The target's logits for the next token are not finite. Check the weights, the dtype and the "
    "logits processors."
)
# most that a draft's distribution may be off from summing to 1, in float32
MASS_TOLERANCE = 1e-3


@dataclass
class LazyPass:
    """A round as one graph; see `contracts.PendingPass`.

    results: the small arrays that `read` waits for. is_sampled: by the caller's sampler: any ids.
    """

    draft: Draft
    num_fed: int
    logprobs: list[mx.array]
    decision: Decision
    results: dict[str, mx.array]
    features: FeatureRows | None = None
    is_sampled: bool = False

    @property
    def to_compute(self) -> list[mx.array]:
        """The arrays that the device begins with."""
        return [*self.results.values(), *self.logprobs]

    @property
    def next_token(self) -> mx.array:
        """Token after an empty draft, not computed yet."""
        tokens = self.results["target_tokens"]
        return (
            clip_ids(tokens, self.logprobs[0].shape[-1])
            if self.is_sampled
            else to_ids(tokens)
        )

    def wait(self) -> None:
        """Wait until it is computed."""
        mx.eval(*self.results.values())

    def read(self) -> Outcome:
        """The outcome; the only host synchronisation of a round."""
        vocab_size = self.logprobs[0].shape[-1]
        numbers = dict(zip(self.results, read_all(*self.results.values()), strict=True))
        drafted: Any = self.draft.tokens
        if "drafted" in numbers:
            drafted = numbers["drafted"]
            check_drafted(drafted, vocab_size)
        outcome = self.decision.outcome(numbers, drafted)
        for i, node in enumerate((ROOT, *outcome.kept)):
            if not math.isfinite(numbers["scales"][node + 1][0]):
                if i == 0:
                    raise LogitsError(NOT_FINITE)
                # what came before is handed out; the next round finds this row as its first
                outcome = Outcome(outcome.kept[:i], outcome.tokens[:i])
                break
        _check_next_token(outcome.tokens[-1], vocab_size)
        if "masses" in numbers:
            check_distribution(numbers["masses"], numbers["own"])
        return outcome


@dataclass
class StepwisePass:
    """A round whose rows go through callables of the caller's one at a time, in order.

    ends: tokens after which no draft is of use.
    """

    draft: Draft
    num_fed: int
    logits: mx.array
    target: NextToken
    position: int
    ends: Set[int] = frozenset()
    features: FeatureRows | None = None
    logprobs: list[mx.array] = field(default_factory=list)

    @property
    def to_compute(self) -> list[mx.array]:
        """The arrays that the device begins with."""
        return [self.logits]

    @cached_property
    def _first_row(self) -> tuple[mx.array, mx.array, mx.array]:
        if self.target.has_failed:  # the processors have seen it, in the round before
            raise LogitsError(NOT_FINITE)
        return self._row(0, [])

    @property
    def next_token(self) -> mx.array:
        """Token after an empty draft, not computed yet."""
        return clip_ids(self._first_row[0], self.logits.shape[-1])

    def wait(self) -> None:
        """Wait until the rows are computed."""
        mx.eval(self.logits)

    def read(self) -> Outcome:
        """The outcome."""
        drafted = to_list(self.draft.tokens)
        drafted = drafted[: len(Draft(drafted).until(self.ends))]
        check_drafted(drafted, self.logits.shape[-1])
        tokens: list[int] = []
        while len(tokens) <= len(drafted) and tokens == drafted[: len(tokens)]:
            row = len(tokens)
            token, bad, logprobs = (
                self._row(row, drafted[:row]) if row else self._first_row
            )
            token_id, is_bad = to_list(mx.concatenate([token, bad]))
            if is_bad and not row:
                raise LogitsError(NOT_FINITE)
            if is_bad:  # what came before is handed out first
                self.target.has_failed = True
                return Outcome(range(row), tokens)
            tokens.append(token_id)
            self.logprobs.append(logprobs)
        _check_next_token(tokens[-1], self.logits.shape[-1])
        return Outcome(range(len(tokens) - 1), tokens)

    def _row(self, row: int, before: list[int]) -> tuple[mx.array, mx.array, mx.array]:
        """The target's token [1] after draft tokens, 1 if its logits are not finite, [1, V]."""
        logits = self.target.process_row(self.logits[row : row + 1], before)
        scale = mx.logsumexp(logits, axis=-1, keepdims=True)
        token = self.target.draw(logits - scale, self.position + row)
        return token, ~mx.isfinite(scale[0]).astype(mx.bool_), logits - scale


def _check_next_token(token: int, vocab_size: int) -> None:
    """Raise VerdictError for a token that the target does not have: it would be fed next."""
    if not 0 <= token < vocab_size:
        raise VerdictError(
            f"The next token is {token}; the target has 0 to {vocab_size - 1}. Have your own "
            "sampler, or rule, draw it from the target's rows."
        )


def check_distribution(masses: Sequence[float], own: Sequence[Sequence[float]]) -> None:
    """Raise DraftError for a row of draft_probs that does not sum to 1 or excludes its token."""
    for i, (mass, (logprob,)) in enumerate(zip(masses, own, strict=True)):
        if not (abs(mass - 1) < MASS_TOLERANCE and logprob > -math.inf):
            raise DraftError(
                f"The distribution of draft token {i} is none: it must sum to 1 and give mass to "
                "the token drawn. Hand over the log-probabilities that it was drawn from."
            )
