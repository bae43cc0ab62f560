"""What a rule is asked in its conformance test, and what it may answer: one draft at a time.

The target's rows and the randomness are the loop's own; only the logits are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.next_token import NextToken, RoundNoise, Rows
from specdec_mlx.token_ids import read_all, to_ids
from specdec_mlx.types import AcceptanceRule, Agreement, Draft, Evidence, Outcome, Verdict

AT_ONE = Sampling(temp=1.0)
GREEDY = Sampling()


class AnswerError(Exception):
    """An answer that breaks the contract: what it is, and what to do."""

    def __init__(self, what: str, next_step: str) -> None:
        """Both in words."""
        super().__init__(what)
        self.next_step = next_step


@dataclass(frozen=True, eq=False)
class Question:
    """A draft, and the target at its positions.

    target_logprobs: [K+1, V]. tokens: [K]. draft_logprobs: [K, V], None for a point mass.
    sampler: how the target draws; a callable that is no `Sampling` gives no distribution.
    seed: of all noise.
    is_extreme: whether a distribution excludes tokens or equals another.
    """

    target_logprobs: np.ndarray
    tokens: tuple[int, ...]
    draft_logprobs: np.ndarray | None
    sampler: Callable[[mx.array], mx.array] = AT_ONE
    seed: int = 0
    is_extreme: bool = False

    def __str__(self) -> str:
        """Which it is, for the message of an error."""
        kind = "point-mass" if self.draft_logprobs is None else "drawn"
        how = "with a sampler that can only be called"
        if isinstance(self.sampler, Sampling):
            how = f"at temperature {self.sampler.temp:g}"
        return f"{kind} draft {list(self.tokens)}, V = {self.vocab_size}, {how}"

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.target_logprobs.shape[-1])

    def rows(self, logprobs: mx.array | None = None) -> Rows:
        """The target, as the loop shows it."""
        given = to_float32(self.target_logprobs) if logprobs is None else logprobs
        return Rows(given, NextToken(self.sampler, (), Noise(self.seed)), 0)

    def draft(self) -> Draft:
        """The draft, with its tokens on the device."""
        drawn_from = self.draft_logprobs
        return Draft(to_ids(self.tokens), None if drawn_from is None else to_float32(drawn_from))

    def ask(
        self, rule: AcceptanceRule, draft: Draft | None = None, logprobs: mx.array | None = None
    ) -> Verdict | Agreement:
        """What a rule answers; lazy.

        Args:
            rule: what is asked.
            draft: in place of its own.
            logprobs: [K+1, V] in place of its own.
        """
        given = self.draft() if draft is None else draft
        return rule.decide(self.rows(logprobs), given, RoundNoise(Noise(self.seed), 0))

    def target_probs(self) -> np.ndarray | None:
        """Distribution of the target's own draws, [K+1, V]; None if that is not known."""
        if not isinstance(self.sampler, Sampling):
            return None
        if self.sampler.greedy:
            return _one_hots(self.target_logprobs)
        probs: np.ndarray = np.exp(self.target_logprobs)
        return probs

    def own_tokens(self) -> list[int]:
        """The target's own draws, [K+1]."""
        tokens: list[int] = self.rows().tokens.tolist()  # type: ignore[assignment]
        return tokens


def to_float32(array: np.ndarray) -> mx.array:
    """An array as the loop has it."""
    return mx.array(array.astype(np.float32))


Answered = Iterator[tuple[Question, Callable[[], Outcome]]]
"""Questions, each with a call that gives its outcome, or raises AnswerError if it cannot be."""


def read(answers: list[Verdict | Agreement], questions: list[Question]) -> Answered:
    """The outcomes, after a single wait for all numbers."""
    arrays = [answer.arrays() for answer in answers]
    numbers = iter(read_all(*(array for named in arrays for array in named.values())))
    for answer, named, question in zip(answers, arrays, questions, strict=True):
        read_numbers = {name: next(numbers) for name in named}
        yield question, partial(outcome_of, answer, read_numbers, question)


def outcome_of(answer: Verdict | Agreement, numbers: dict[str, Any], question: Question) -> Outcome:
    """What an answer comes to, from the numbers that were read; raises AnswerError."""
    num_drafted = len(question.tokens)
    n = numbers["verdict"][0] if "verdict" in numbers else 0
    nodes = numbers["nodes"][: max(0, n)] if "nodes" in numbers else list(range(n))
    if not 0 <= n <= num_drafted or nodes != list(range(n)):
        raise AnswerError(
            f"it kept {n} of {num_drafted} tokens: {nodes}; expected the first 0 to {num_drafted}.",
            "Count the tokens kept from the first one on; nodes are for trees",
        )
    outcome = answer.outcome(numbers, question.tokens)
    _check_next_token(outcome, question)
    return outcome


def check_shapes(answer: Any, num_tokens: int) -> None:
    """Raise AnswerError for what the loop could not read."""
    if isinstance(answer, Agreement):
        expected: dict[str, tuple[Any, tuple[int, ...]]] = {
            "target_tokens": (answer.target_tokens, (num_tokens + 1,))
        }
    elif isinstance(answer, Verdict):
        expected = {
            "num_accepted": (answer.num_accepted, ()),
            "next_token": (answer.next_token, ()),
        }
        if answer.nodes is not None:
            expected["nodes"] = (answer.nodes, (num_tokens,))
    else:
        raise AnswerError(
            f"decide() returned {type(answer).__name__}.", "Return Verdict or Agreement"
        )
    for name, (array, shape) in expected.items():
        is_ids = isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.integer)
        if not is_ids or array.shape != shape:
            kind, got = getattr(array, "dtype", type(array).__name__), getattr(array, "shape", None)
            raise AnswerError(
                f"{name} is {kind} of shape {got}; expected an mx.array of integers, shape "
                f"{shape}, for a draft of {num_tokens} tokens.",
                "See Verdict and Agreement in specdec_mlx.types",
            )


def _check_next_token(outcome: Outcome, question: Question) -> None:
    """Raise AnswerError for a token after the kept ones that cannot be."""
    n, next_token = outcome.num_accepted, outcome.tokens[-1]
    if not 0 <= next_token < question.vocab_size:
        raise AnswerError(
            f"the token after {n} kept ones is {next_token}; the target has 0 to "
            f"{question.vocab_size - 1}.",
            "Draw it from the target at row n: target.tokens[n], or with randomness.gumbel",
        )
    probs = question.target_probs()
    if probs is not None and not probs[n, next_token] > 0:
        raise AnswerError(
            f"the token after {n} kept ones is {next_token}, to which the target gives no chance "
            f"there: {np.round(probs[n], 4).tolist()}.",
            "Draw it from the target at row n; argmax(log(probs) + gumbel) never draws it",
        )


def with_evidence(draft: Draft) -> Draft:
    """The same draft, with something that no rule may read."""
    return replace(draft, evidence=[Evidence(match=9 - i) for i in range(len(draft))])


# Questions --------------------------------------------------------------------------------------


def questions(sampler: Callable[[mx.array], mx.array]) -> Iterator[Question]:
    """Drafts of 1 to 3 tokens, drawn and point masses, easy ones and the extremes."""
    for seed, vocab_size in enumerate((2, 3, 5, 9) * 2):
        rng = np.random.default_rng(seed)
        num_tokens = 1 + seed % 3
        p = rng.dirichlet(np.ones(vocab_size), num_tokens + 1)
        other = rng.dirichlet(np.ones(vocab_size), num_tokens)
        for q in (other, p[:-1], _one_hots(other), _one_hots(-p[:-1])):
            tokens = tuple(int(rng.choice(vocab_size, p=row)) for row in q)
            for own in (p, _one_hots(p), _without_some(p)):
                is_extreme = own is not p or q is not other
                yield Question(log(own), tokens, log(q), sampler, seed, is_extreme=is_extreme)
        for copied in (rng.integers(vocab_size, size=num_tokens), np.argmax(p[:-1], axis=-1)):
            yield Question(log(p), tuple(copied.tolist()), None, sampler, seed)


def _one_hots(scores: np.ndarray) -> np.ndarray:
    """All mass on the largest, by rows."""
    one_hots: np.ndarray = point_mass(np.argmax(scores, axis=-1), scores)
    return one_hots


def _without_some(probs: np.ndarray) -> np.ndarray:
    """The same without the least likely half, by rows."""
    kept = np.where(probs >= np.median(probs, axis=-1, keepdims=True), probs, 0)
    rest: np.ndarray = kept / kept.sum(axis=-1, keepdims=True)
    return rest


def log(probs: np.ndarray) -> np.ndarray:
    """Log-probabilities, -inf where there is no mass."""
    nothing = np.full(probs.shape, -np.inf)
    logprobs: np.ndarray = np.log(probs, where=probs > 0, out=nothing)
    return logprobs
