"""What a rule is asked in its conformance test, and what it may answer: one draft at a time.

The target's rows and the randomness are the loop's own; only the logits are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.next_token import NextToken, RoundNoise, Rows
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import AcceptanceRule, Agreement, Draft, Outcome, Verdict

AT_ONE, GREEDY = Sampling(temp=1.0), Sampling()


class AnswerError(Exception):
    """An answer that breaks the contract: what it is, and what to do."""


@dataclass(frozen=True, eq=False)
class Question:
    """A draft, and the target at its positions.

    target_probs: [K+1, V]. tokens: [K]. draft_probs: [K, V], None for a point mass.
    sampler: how the target draws; a callable that is no `Sampling` gives no distribution.
    seed: of all noise.
    is_extreme: whether a distribution excludes tokens or equals another.
    """

    target_probs: np.ndarray
    tokens: tuple[int, ...]
    draft_probs: np.ndarray | None
    sampler: Callable[[mx.array], mx.array]
    seed: int = 0
    is_extreme: bool = False

    def __str__(self) -> str:
        """Which it is, for the message of an error."""
        kind = "point-mass" if self.draft_probs is None else "drawn"
        temp = self.sampler.temp if isinstance(self.sampler, Sampling) else None
        how = "with a sampler that can only be called" if temp is None else f"at temp {temp:g}"
        return f"{kind} draft {list(self.tokens)}, V = {self.target_probs.shape[-1]}, {how}"

    def rows(self, logprobs: mx.array | None = None) -> Rows:
        """The target, as the loop shows it."""
        given = log(self.target_probs) if logprobs is None else logprobs
        return Rows(given, NextToken(self.sampler, (), Noise(self.seed)), 0)

    def draft(self) -> Draft:
        """The draft, with its tokens on the device."""
        probs = self.draft_probs
        return Draft(to_ids(self.tokens), None if probs is None else log(probs))

    def ask(
        self, rule: AcceptanceRule, draft: Draft | None = None, logprobs: mx.array | None = None
    ) -> Verdict | Agreement:
        """The answer of a rule, lazy; to another draft or logprobs [K+1, V] if these are given."""
        randomness = RoundNoise(Noise(self.seed), 0)
        return rule.decide(self.rows(logprobs), draft or self.draft(), randomness)

    def outcome(self, rule: AcceptanceRule, draft: Draft) -> Outcome:
        """The outcome of a rule's answer; raises AnswerError."""
        try:
            answer = self.ask(rule, draft)
        except Exception as error:
            what = f"decide() raised {type(error).__name__}: {error}."
            raise AnswerError(what, "Any draft of at least one token has a verdict") from error
        check_shapes(answer, len(self.tokens))
        numbers = {name: array.tolist() for name, array in answer.arrays().items()}
        return outcome_of(answer, numbers, self.tokens, self.possible())

    def possible(self) -> np.ndarray:
        """Tokens that the target may draw, [K+1, V]; all where that is not known."""
        if not isinstance(self.sampler, Sampling):
            return np.ones(self.target_probs.shape, bool)
        probs = one_hots(self.target_probs) if self.sampler.greedy else self.target_probs
        possible: np.ndarray = probs > 0
        return possible


def check_shapes(answer: Any, num_tokens: int) -> None:
    """Raise AnswerError for what the loop could not read."""
    if isinstance(answer, Agreement):
        expected: dict[str, tuple[int, ...]] = {"target_tokens": (num_tokens + 1,)}
    elif isinstance(answer, Verdict):
        expected = {"num_accepted": (), "next_token": ()}
        expected |= {} if answer.nodes is None else {"nodes": (num_tokens,)}
    else:
        what = f"decide() returned {type(answer).__name__}."
        raise AnswerError(what, "Return Verdict or Agreement")
    for name, shape in expected.items():
        array = getattr(answer, name)
        is_ids = isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.integer)
        if not is_ids or array.shape != shape:
            kind, got = getattr(array, "dtype", type(array).__name__), getattr(array, "shape", None)
            raise AnswerError(
                f"{name} is {kind} of shape {got}; expected an mx.array of integers, shape "
                f"{shape}, for a draft of {num_tokens} tokens.",
                "See Verdict and Agreement in specdec_mlx.types",
            )


def outcome_of(
    answer: Verdict | Agreement,
    numbers: dict[str, Any],
    tokens: tuple[int, ...],
    possible: np.ndarray,
) -> Outcome:
    """The outcome of an answer; raises AnswerError for one that cannot be.

    Args:
        answer: with the right shapes.
        numbers: its arrays, as they were read.
        tokens: [K] of the draft.
        possible: [K+1, V] tokens that the target may draw.
    """
    n = numbers["verdict"][0] if "verdict" in numbers else 0
    nodes = numbers["nodes"][: max(0, n)] if "nodes" in numbers else list(range(n))
    if not 0 <= n <= len(tokens) or nodes != list(range(n)):
        raise AnswerError(
            f"it kept {n} of {len(tokens)} tokens: {nodes}; expected the first 0 to {len(tokens)}.",
            "Count the tokens kept from the first one on; nodes are for trees",
        )
    outcome = answer.outcome(numbers, tokens)
    n, after = outcome.num_accepted, outcome.tokens[-1]
    if not (0 <= after < possible.shape[-1] and possible[n, after]):
        raise AnswerError(
            f"the token after {n} kept ones is {after}, to which the target gives no chance there; "
            f"it has one of {np.flatnonzero(possible[n]).tolist()}.",
            "Draw it from the target at row n: target.tokens[n], or argmax(log(probs) + gumbel)",
        )
    return outcome


def questions(sampler: Callable[[mx.array], mx.array]) -> Iterator[Question]:
    """Drafts of 1 to 3 tokens, drawn and point masses, easy ones and the extremes."""
    for seed, vocab_size in enumerate((2, 3, 5, 9) * 2):
        rng = np.random.default_rng(seed)
        num_tokens = 1 + seed % 3
        p = rng.dirichlet(np.ones(vocab_size), num_tokens + 1)
        other = rng.dirichlet(np.ones(vocab_size), num_tokens)
        likely = np.where(p >= np.median(p, axis=-1, keepdims=True), p, 0)
        without_some = likely / likely.sum(axis=-1, keepdims=True)
        for q in (other, p[:-1], one_hots(other), one_hots(-p[:-1])):
            tokens = tuple(int(rng.choice(vocab_size, p=row)) for row in q)
            for own in (p, one_hots(p), without_some):
                is_extreme = own is not p or q is not other
                yield Question(own, tokens, q, sampler, seed, is_extreme=is_extreme)
        for copied in (rng.integers(vocab_size, size=num_tokens), np.argmax(p[:-1], axis=-1)):
            yield Question(p, tuple(copied.tolist()), None, sampler, seed)


def one_hots(scores: np.ndarray) -> np.ndarray:
    """All mass on the largest, by rows."""
    one_hots: np.ndarray = point_mass(np.argmax(scores, axis=-1), scores)
    return one_hots


def log(probs: np.ndarray) -> mx.array:
    """Log-probabilities as the loop has them, float32; -inf where there is no mass."""
    nothing = np.full(probs.shape, -np.inf)
    return mx.array(np.log(probs, where=probs > 0, out=nothing).astype(np.float32))
