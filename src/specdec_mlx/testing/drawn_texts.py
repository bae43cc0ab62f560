"""Texts that are drawn under any rule, and how they are distributed beside the target's own.

Many are written at once, each in rounds, with noise that is keyed by purpose and position as the
loop's is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.checks.statistics import ChiSquare
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.next_token import NextToken, RoundNoise, Rows
from specdec_mlx.testing.chi_square import limit
from specdec_mlx.testing.decisions import (
    AT_ONE,
    Answered,
    Question,
    check_shapes,
    log,
    outcome_of,
    to_float32,
)
from specdec_mlx.testing.enumeration import Source, Tokens, continued, moved_on, state_after
from specdec_mlx.testing.round_distribution import Comparison, sources
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import (
    AcceptanceRule,
    Agreement,
    Draft,
    DraftContext,
    Outcome,
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


def sampled(
    rule: AcceptanceRule, num_texts: int, collect: Callable[[Answered], Sequence[Outcome]]
) -> Iterator[tuple[Comparison, float, float]]:
    """Texts of three tokens, written in rounds of two draft tokens.

    Args:
        rule: what decides.
        num_texts: with each kind of draft.
        collect: what takes the outcomes, each of which may be an error.

    Yields:
        For drawn drafts, and for point masses: both distributions, the chi-square statistic, and
        its limit.
    """
    target, draft = sources(VOCAB_SIZE, 1)
    own = continued(target, {(): 1.0}, LENGTH)
    for source, kind in ((draft, "drawn"), (None, "point masses")):
        seen = np.zeros(own.shape)
        texts = _texts(rule, target, source, num_texts, collect)
        np.add.at(seen, tuple(np.array(texts).T), 1)
        test = ChiSquare.of(seen.ravel(), num_texts * own.ravel())
        how = f"{num_texts} texts, K = {NUM_DRAFT} {kind}, V = {VOCAB_SIZE}"
        yield Comparison(seen / num_texts, own, how), test.statistic, limit(test.freedom)


def _texts(
    rule: AcceptanceRule,
    target: Source,
    draft: Source | None,
    num_texts: int,
    collect: Callable[[Answered], Sequence[Outcome]],
) -> list[Tokens]:
    """So many texts of LENGTH tokens; those that have come equally far are asked about together."""
    keys = mx.random.split(mx.random.key(0), num_texts * len(PLACES))
    keys = keys.reshape(num_texts, len(PLACES), 2)
    texts: list[Tokens] = [()] * num_texts
    for position in range(LENGTH):
        here = [i for i, text in enumerate(texts) if len(text) == position]
        if here:
            states = np.array([state_after(0, texts[i]) for i in here])
            noise = _draft_noise(keys[mx.array(here)], position, coupled=shares_noise(rule))
            tokens = _drafted(draft, states, noise)
            drafts = Drafts(
                keys[mx.array(here)],
                _along(target, states, tokens),
                tokens,
                None if draft is None else _along(draft, states, tokens)[:, :-1],
                position,
            )
            for i, outcome in zip(here, collect(drafts.answered_by(rule)), strict=True):
                texts[i] = (*texts[i], *outcome.tokens)[:LENGTH]
    return texts


@dataclass(frozen=True)
class KeyedNoise(Noise):
    """Noise whose keys are given, so that MLX can trace many generations as one."""

    keys: Mapping[tuple[str, int], mx.array]

    @classmethod
    def of(cls, keys: mx.array) -> KeyedNoise:
        """From keys [len(PLACES), 2]."""
        return cls(0, dict(zip(PLACES, keys, strict=True)))

    def key(self, purpose: str, position: int) -> mx.array:
        """The key of a place."""
        return self.keys[purpose, position]

    def uniform(self, purpose: str, position: int, n: int = 1) -> mx.array:
        """Drawn by MLX, like the rest."""
        return mx.random.uniform(shape=(n,), key=self.key(purpose, position))

    def gumbels(self, places: Sequence[tuple[str, int]], vocab: int) -> mx.array:
        """Noise of several places, [n, V]."""
        return mx.stack([self.gumbel(*place, vocab) for place in places])


@dataclass(frozen=True, eq=False)
class Drafts:
    """Rounds of n texts that have come equally far.

    keys: [n, len(PLACES), 2]. target_probs: [n, K+1, V]. tokens: [n, K]. draft_probs: [n, K, V],
    None for point masses. position: tokens of the texts.
    """

    keys: mx.array
    target_probs: np.ndarray
    tokens: np.ndarray
    draft_probs: np.ndarray | None
    position: int

    def answered_by(self, rule: AcceptanceRule) -> Answered:
        """What a rule makes of them, in one trace where MLX can vectorise it."""
        answers: list[Verdict | Agreement] = []

        def decide(keys: mx.array, logprobs: mx.array, *draft: mx.array) -> dict[str, mx.array]:
            noise = KeyedNoise.of(keys)
            rows = Rows(logprobs, NextToken(AT_ONE, (), noise), self.position)
            given = Draft(draft[0], draft[1] if len(draft) > 1 else None)
            answers.append(rule.decide(rows, given, RoundNoise(noise, self.position)))
            check_shapes(answers[-1], NUM_DRAFT)
            return answers[-1].arrays()

        numbers = _vectorised(decide, self.keys, *self._arrays())
        for i, question in enumerate(self._questions()):
            own = {name: values[i] for name, values in numbers.items()}
            yield question, partial(outcome_of, answers[0], own, question)

    def _arrays(self) -> list[mx.array]:
        """What varies from text to text."""
        arrays = [to_float32(log(self.target_probs)), to_ids(self.tokens.tolist())]
        return arrays if self.draft_probs is None else [*arrays, to_float32(log(self.draft_probs))]

    def _questions(self) -> Iterator[Question]:
        """The same, one by one."""
        for i, tokens in enumerate(self.tokens.tolist()):
            drawn_from = None if self.draft_probs is None else log(self.draft_probs[i])
            yield Question(log(self.target_probs[i]), tuple(tokens), drawn_from)


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
        noise = KeyedNoise.of(keys)
        context = DraftContext(noise=noise, coupled=coupled, vocab_size=VOCAB_SIZE)
        return context.draft_gumbels(position, NUM_DRAFT)

    return np.array(mx.vmap(gumbels)(keys))


def _drafted(draft: Source | None, states: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Tokens [n, K] drawn after texts in these states [n]; of point masses, each in its turn."""
    tokens = []
    for i in range(NUM_DRAFT):
        if draft is None:
            tokens.append(np.arange(len(states)) // VOCAB_SIZE**i % VOCAB_SIZE)
        else:
            tokens.append(np.argmax(log(draft.probs[states]) + noise[:, i], axis=-1))
        states = moved_on(states, tokens[-1])
    return np.stack(tokens, axis=1)


def _along(source: Source, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """A source's distributions before each of the tokens [n, K] and after the last, [n, K+1, V]."""
    rows = [source.probs[states]]
    for column in tokens.T:
        states = moved_on(states, column)
        rows.append(source.probs[states])
    return np.stack(rows, axis=1)
