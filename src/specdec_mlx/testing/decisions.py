"""Questions to a rule in its conformance test, and what it may answer; and texts drawn under it.

The target's rows and the randomness are the loop's own; only the logits are made up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.checks.chi_square import ChiSquare, limit
from specdec_mlx.contracts import (
    AcceptanceRule,
    Agreement,
    Draft,
    DraftContext,
    Outcome,
    Verdict,
    shares_noise,
)
from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.next_token import NextToken, RoundNoise, Rows
from specdec_mlx.testing.enumeration import (
    Comparison,
    Source,
    Tokens,
    continued,
    moved_on,
    sources,
    state_after,
)
from specdec_mlx.token_ids import to_ids

AT_ONE, GREEDY = Sampling(temp=1.0), Sampling()

NUM_DRAFT, VOCAB_SIZE, LENGTH = 2, 3, 3  # K, V and tokens of the texts

PLACES = [
    *((purpose, p) for purpose in ("accept", "next") for p in range(LENGTH)),
    *((f"draft {i}", p) for i in range(NUM_DRAFT) for p in range(LENGTH)),
    *(("target", p) for p in range(LENGTH + NUM_DRAFT)),
]
"""Purposes and positions that are drawn for."""


class AnswerError(Exception):
    """An answer that breaks the contract: what it is, and what to do."""


@dataclass(frozen=True, eq=False)
class Question:
    """A draft, and the target at its positions.

    target_probs: [K+1, V]. tokens: [K]. draft_probs: [K, V], None for a point mass. sampler: one
    that is no `Sampling` gives no distribution. is_extreme: a distribution excludes tokens or
    equals another.
    """

    target_probs: np.ndarray
    tokens: tuple[int, ...]
    draft_probs: np.ndarray | None
    sampler: Callable[[mx.array], mx.array]
    seed: int = 0
    is_extreme: bool = False

    def __str__(self) -> str:
        """The question in words, for error messages."""
        kind = "point-mass" if self.draft_probs is None else "drawn"
        temp = self.sampler.temp if isinstance(self.sampler, Sampling) else None
        how = "with a sampler that can only be called" if temp is None else f"at temp {temp:g}"
        return f"{kind} draft {list(self.tokens)}, V = {self.target_probs.shape[-1]}, {how}"

    def rows(self, logprobs: mx.array | None = None) -> Rows:
        """The target, as the loop shows it; of other log-probabilities [K+1, V] if given."""
        given = log(self.target_probs) if logprobs is None else logprobs
        return Rows(given, NextToken(self.sampler, (), Noise(self.seed)), 0)

    def ask(
        self, rule: AcceptanceRule, logprobs: mx.array | None = None, evidence: Any = None
    ) -> Verdict | Agreement:
        """The lazy answer of a rule."""
        probs = None if self.draft_probs is None else log(self.draft_probs)
        draft = Draft(to_ids(self.tokens), probs, evidence=evidence)
        return rule.decide(self.rows(logprobs), draft, RoundNoise(Noise(self.seed), 0))

    def outcome(self, rule: AcceptanceRule, evidence: Any = None) -> Outcome:
        """The outcome of a rule's answer; raises AnswerError."""
        try:
            answer = self.ask(rule, evidence=evidence)
        except Exception as error:
            what = f"decide() raised {type(error).__name__}: {error}."
            raise AnswerError(what, "Any draft of at least one token has a verdict") from error
        check_shapes(answer, len(self.tokens))
        numbers = {name: array.tolist() for name, array in answer.arrays().items()}
        possible = np.ones(self.target_probs.shape, bool)
        if isinstance(self.sampler, Sampling):
            greedy = self.sampler.greedy
            possible = (one_hots(self.target_probs) if greedy else self.target_probs) > 0
        return outcome_of(answer, numbers, self.tokens, possible)


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
                "See Verdict and Agreement in specdec_mlx.contracts",
            )


def outcome_of(
    answer: Verdict | Agreement,
    numbers: dict[str, Any],
    tokens: tuple[int, ...],
    possible: np.ndarray,
) -> Outcome:
    """The outcome of an answer that was read; AnswerError if it cannot be.

    tokens: [K] of the draft. possible: [K+1, V] tokens that the target may draw.
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
    """Log-probabilities in float32; -inf where there is no mass."""
    nothing = np.full(probs.shape, -np.inf)
    return mx.array(np.log(probs, where=probs > 0, out=nothing).astype(np.float32))


def sampled(rule: AcceptanceRule, num_texts: int) -> Iterator[tuple[Comparison, float, float]]:
    """Texts of drawn drafts, and of point masses: distributions, chi-square, limit."""
    target, draft = sources(VOCAB_SIZE, 1)
    own = continued(target, {(): 1.0}, LENGTH)
    for source, kind in ((draft, "drawn"), (None, "point masses")):
        seen = np.zeros(own.shape)
        np.add.at(seen, tuple(np.array(_texts(rule, target, source, num_texts)).T), 1)
        test = ChiSquare.of(seen.ravel(), num_texts * own.ravel())
        how = f"{num_texts} texts, K = {NUM_DRAFT} {kind}, V = {VOCAB_SIZE}"
        yield Comparison(seen / num_texts, own, how), test.statistic, limit(test.freedom)


def _texts(
    rule: AcceptanceRule, target: Source, draft: Source | None, num_texts: int
) -> list[Tokens]:
    """Texts of LENGTH tokens; those that are equally long are asked about together."""
    keys = mx.random.split(mx.random.key(0), num_texts * len(PLACES))
    keys = keys.reshape(num_texts, len(PLACES), 2)
    texts: list[Tokens] = [()] * num_texts
    any_token = np.ones((NUM_DRAFT + 1, VOCAB_SIZE), bool)
    tables = log(target.probs), None if draft is None else log(draft.probs)
    for position in range(LENGTH):
        here = [i for i, text in enumerate(texts) if len(text) == position]
        if here:
            states = mx.array([state_after(0, texts[i]) for i in here])
            round_ = _Round(rule, position, *tables)
            numbers = _vectorised(round_, keys[mx.array(here)], states, mx.arange(len(here)))
            for i, *values in zip(here, *numbers.values(), strict=True):
                own = dict(zip(numbers, values, strict=True))
                outcome = outcome_of(round_.answers[0], own, own.pop("drafted"), any_token)
                texts[i] = (*texts[i], *outcome.tokens)[:LENGTH]
    return texts


@dataclass(frozen=True, eq=False)
class _KeyedNoise(Noise):
    """Noise whose keys [len(PLACES), 2] are given: MLX can trace many generations as one."""

    keys: mx.array

    def key(self, purpose: str, position: int) -> mx.array:
        return self.keys[PLACES.index((purpose, position))]

    def uniform(self, purpose: str, position: int, n: int = 1) -> mx.array:
        """Drawn by MLX, not on the host."""
        return mx.random.uniform(shape=(n,), key=self.key(purpose, position))

    def gumbels(self, places: Sequence[tuple[str, int]], vocab: int) -> mx.array:
        return mx.stack([self.gumbel(*place, vocab) for place in places])


@dataclass(eq=False)
class _Round:
    """A round of a text, which MLX can trace: the draft, and the rule's answers of each trace.

    target, draft: log-probabilities by state, [NUM_STATES, V]; no draft is a point mass.
    """

    rule: AcceptanceRule
    position: int
    target: mx.array
    draft: mx.array | None
    answers: list[Verdict | Agreement] = field(default_factory=list)

    def __call__(self, keys: mx.array, state: mx.array, index: mx.array) -> dict[str, mx.array]:
        """Numbers of the answer, and the drafted tokens [K]; point masses take turns by index."""
        noise = _KeyedNoise(0, keys)
        context = DraftContext(noise=noise, coupled=shares_noise(self.rule), vocab_size=VOCAB_SIZE)
        gumbels = context.draft_gumbels(self.position, NUM_DRAFT)
        tokens, states = [], [state]
        for i in range(NUM_DRAFT):
            token = index // VOCAB_SIZE**i % VOCAB_SIZE
            if self.draft is not None:
                token = mx.argmax(self.draft[states[-1]] + gumbels[i])
            tokens.append(token)
            states.append(moved_on(states[-1], token.astype(mx.int32)))
        drafted, passed = to_ids(mx.stack(tokens)), mx.stack(states)
        rows = Rows(self.target[passed], NextToken(AT_ONE, (), noise), self.position)
        given = Draft(drafted, None if self.draft is None else self.draft[passed[:-1]])
        self.answers.append(self.rule.decide(rows, given, RoundNoise(noise, self.position)))
        check_shapes(self.answers[-1], NUM_DRAFT)
        return {"drafted": drafted, **self.answers[-1].arrays()}


def _vectorised(
    decide: Callable[..., dict[str, mx.array]], *arrays: mx.array
) -> dict[str, list[Any]]:
    """Results for each row of the arguments; one by one where MLX has to."""
    try:
        results = mx.vmap(decide)(*arrays)
        mx.eval(results)
    except ValueError as error:
        if "vmap" not in str(error):
            raise
        rows = [decide(*row) for row in zip(*arrays, strict=True)]
        results = {name: mx.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: list(values.tolist()) for name, values in results.items()}  # type: ignore[arg-type]
