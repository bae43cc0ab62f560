"""Texts that are drawn under any rule, and how they are distributed beside the target's own.

Many are written at once, each in rounds, with noise that is keyed by purpose and position as the
loop's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.checks.chi_square import ChiSquare, limit
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.next_token import NextToken, RoundNoise, Rows
from specdec_mlx.testing.decisions import AT_ONE, check_shapes, log, outcome_of
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
from specdec_mlx.types import (
    AcceptanceRule,
    Agreement,
    Draft,
    DraftContext,
    Verdict,
    shares_noise,
)

NUM_DRAFT, VOCAB_SIZE, LENGTH = 2, 3, 3
"""K, V and tokens of the texts."""

PLACES = [
    *((purpose, p) for purpose in ("accept", "next") for p in range(LENGTH)),
    *((f"draft {i}", p) for i in range(NUM_DRAFT) for p in range(LENGTH)),
    *(("target", p) for p in range(LENGTH + NUM_DRAFT)),
]
"""Purposes and positions that are drawn for."""


def sampled(rule: AcceptanceRule, num_texts: int) -> Iterator[tuple[Comparison, float, float]]:
    """Texts of three tokens, written in rounds of two draft tokens.

    Args:
        rule: what decides; AnswerError if it does what it may not.
        num_texts: with each kind of draft.

    Yields:
        For drawn drafts, and for point masses: both distributions, the chi-square statistic, and
        its limit.
    """
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
    """So many texts of LENGTH tokens; those that have come equally far are asked about together."""
    keys = mx.random.split(mx.random.key(0), num_texts * len(PLACES))
    keys = keys.reshape(num_texts, len(PLACES), 2)
    texts: list[Tokens] = [()] * num_texts
    any_token = np.ones((NUM_DRAFT + 1, VOCAB_SIZE), bool)
    tables = log(target.probs), None if draft is None else log(draft.probs)
    for position in range(LENGTH):
        here = [i for i, text in enumerate(texts) if len(text) == position]
        if here:
            states = mx.array([state_after(0, texts[i]) for i in here])
            round_ = Round(rule, position, *tables)
            numbers = _vectorised(round_, keys[mx.array(here)], states, mx.arange(len(here)))
            for i, *values in zip(here, *numbers.values(), strict=True):
                own = dict(zip(numbers, values, strict=True))
                outcome = outcome_of(round_.answers[0], own, own.pop("drafted"), any_token)
                texts[i] = (*texts[i], *outcome.tokens)[:LENGTH]
    return texts


@dataclass(frozen=True, eq=False)
class KeyedNoise(Noise):
    """Noise whose keys [len(PLACES), 2] are given: MLX can trace many generations as one."""

    keys: mx.array

    def key(self, purpose: str, position: int) -> mx.array:
        """The key of a place."""
        return self.keys[PLACES.index((purpose, position))]

    def uniform(self, purpose: str, position: int, n: int = 1) -> mx.array:
        """Drawn by MLX, like the rest."""
        return mx.random.uniform(shape=(n,), key=self.key(purpose, position))

    def gumbels(self, places: Sequence[tuple[str, int]], vocab: int) -> mx.array:
        """Noise of several places, [n, V]."""
        return mx.stack([self.gumbel(*place, vocab) for place in places])


@dataclass(eq=False)
class Round:
    """A round of a text, which MLX can trace: the draft, and what a rule answers.

    position: tokens of the text. target, draft: log-probabilities by state, [NUM_STATES, V]; no
        draft is a point mass. answers: the rule's, of each trace.
    """

    rule: AcceptanceRule
    position: int
    target: mx.array
    draft: mx.array | None
    answers: list[Verdict | Agreement] = field(default_factory=list)

    def __call__(self, keys: mx.array, state: mx.array, index: mx.array) -> dict[str, mx.array]:
        """Numbers of the answer, and the drafted tokens [K]; point masses take turns by index."""
        noise = KeyedNoise(0, keys)
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
    """Results of a function for each row of its arguments; one by one where MLX has to."""
    try:
        results = mx.vmap(decide)(*arrays)
        mx.eval(results)
    except ValueError as error:
        if "vmap" not in str(error):
            raise
        rows = [decide(*row) for row in zip(*arrays, strict=True)]
        results = {name: mx.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: list(values.tolist()) for name, values in results.items()}  # type: ignore[arg-type]
