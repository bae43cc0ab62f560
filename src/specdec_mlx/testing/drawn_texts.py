"""Texts that are drawn under any rule, and how they are distributed beside the target's own.

Many are written at once, each in rounds, with noise that is keyed by purpose and position as the
loop's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    for position in range(LENGTH):
        here = [i for i, text in enumerate(texts) if len(text) == position]
        if here:
            states = np.array([state_after(0, texts[i]) for i in here])
            own_keys = keys[mx.array(here)]
            noise = _draft_noise(own_keys, position, coupled=shares_noise(rule))
            tokens = _drafted(draft, states, noise)
            arrays = [own_keys, log(target.along(states, tokens)), to_ids(tokens.tolist())]
            if draft is not None:
                arrays.append(log(draft.along(states, tokens)[:, :-1]))
            for i, emitted in zip(here, _emitted(rule, position, arrays), strict=True):
                texts[i] = (*texts[i], *emitted)[:LENGTH]
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


def _emitted(
    rule: AcceptanceRule, position: int, arrays: list[mx.array]
) -> Iterator[Sequence[int]]:
    """Tokens that one round of each text emits, in one trace where MLX can vectorise it.

    arrays: [n, ...] of keys, the target's log-probabilities, draft tokens, and those drawn from.
    """
    answers: list[Verdict | Agreement] = []

    def decide(keys: mx.array, logprobs: mx.array, *draft: Any) -> dict[str, mx.array]:
        noise = KeyedNoise(0, keys)
        rows = Rows(logprobs, NextToken(AT_ONE, (), noise), position)
        answers.append(rule.decide(rows, Draft(*draft), RoundNoise(noise, position)))
        check_shapes(answers[-1], NUM_DRAFT)
        return answers[-1].arrays()

    numbers = _vectorised(decide, *arrays)
    any_token = np.ones((NUM_DRAFT + 1, VOCAB_SIZE), bool)
    drafted: Any = arrays[2].tolist()
    for i, tokens in enumerate(drafted):
        own = {name: values[i] for name, values in numbers.items()}
        yield outcome_of(answers[0], own, tokens, any_token).tokens


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


def _draft_noise(keys: mx.array, position: int, *, coupled: bool) -> np.ndarray:
    """What a drafter draws with, [n, K, V]; coupled: from the noise of the target's own draws."""

    def gumbels(keys: mx.array) -> mx.array:
        context = DraftContext(noise=KeyedNoise(0, keys), coupled=coupled, vocab_size=VOCAB_SIZE)
        return context.draft_gumbels(position, NUM_DRAFT)

    return np.array(mx.vmap(gumbels)(keys))


def _drafted(draft: Source | None, states: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Tokens [n, K] drawn after texts in these states [n]; of point masses, each in its turn."""
    tokens = []
    for i in range(NUM_DRAFT):
        if draft is None:
            tokens.append(np.arange(len(states)) // VOCAB_SIZE**i % VOCAB_SIZE)
        else:
            tokens.append(np.argmax(np.log(draft.probs[states]) + noise[:, i], axis=-1))
        states = moved_on(states, tokens[-1])
    return np.stack(tokens, axis=1)
