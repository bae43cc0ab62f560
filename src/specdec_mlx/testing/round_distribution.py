"""What a round's tokens are distributed as under a rule, beside the target's own distribution.

A rule by coins is enumerated in float64. Any other is asked many times: `Question`s under seeds of
their own, with the noise that the loop would use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specdec_mlx.checks.statistics import ChiSquare
from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.testing.chi_square import limit
from specdec_mlx.testing.decisions import AT_ONE, Question, log
from specdec_mlx.testing.enumeration import (
    NUM_STATES,
    ByRule,
    Copied,
    Drafting,
    Drawn,
    Rounds,
    Source,
    Tokens,
    continued,
    state_after,
    up_to,
)
from specdec_mlx.types import DraftContext, Outcome

SHAPES = ((2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1))
"""Pairs (V, K) whose rounds are enumerated."""

NUM_DRAFT, VOCAB_SIZE, LENGTH = 2, 3, 3
"""K, V and tokens of the texts that are drawn."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """The first tokens of a text under a rule, beside the target's own.

    got, own: [V, ..., V] joint distributions. how: what was drafted, in words.
    """

    got: np.ndarray
    own: np.ndarray
    how: str

    @cached_property
    def total_variation(self) -> float:
        """Distance of the two."""
        return _distance(self.got, self.own)

    def __str__(self) -> str:
        """The first position that is off, and how the token there is distributed."""
        for position in range(self.got.ndim):
            later = tuple(range(position + 1, self.got.ndim))
            got, own = self.got.sum(axis=later), self.own.sum(axis=later)
            if _distance(got, own) >= self.total_variation / 2:
                break
        off = np.abs(got - own).sum(axis=-1)
        before = np.unravel_index(np.argmax(off), off.shape)
        return (
            f"{self.how}: token {position}, after {[int(token) for token in before]}, "
            f"is distributed as {_normalised(got[before])}; expected the target's "
            f"{_normalised(own[before])}. Over {self.got.ndim} tokens the total variation is "
            f"{self.total_variation:.2g}."
        )


def enumerated(rule: CoinRule) -> Iterator[Comparison]:
    """Every outcome of rounds on small vocabularies, with distributions that change with the text.

    Target and draft are unrelated, equal, or exclude tokens; drafts are drawn and point masses.
    """
    for vocab_size, num_draft in SHAPES:
        for target, drafting, kind in _pairs(vocab_size, num_draft):
            yield Comparison(
                Rounds(target, drafting, ByRule(rule)).joint(1, num_draft + 1),
                continued(target, {(): 1.0}, num_draft + 1),
                f"K = {num_draft} {kind}, V = {vocab_size}",
            )


def sampled(
    outcomes: Callable[[list[Question]], Sequence[Outcome]], num_draws: int, *, coupled: bool
) -> Iterator[tuple[Comparison, float, float]]:
    """Texts of three tokens, written in rounds of two draft tokens.

    Args:
        outcomes: what the rule makes of drafts.
        num_draws: texts with each kind of draft.
        coupled: whether drafts are drawn from the noise of the target's own draws.

    Yields:
        For drawn drafts, and for point masses: both distributions, the chi-square statistic, and
        its limit.
    """
    target, draft = _sources(VOCAB_SIZE, 1)
    own = continued(target, {(): 1.0}, LENGTH)
    for source, kind in ((draft, "drawn"), (None, "point masses")):
        texts: list[Tokens] = [()] * num_draws
        while unfinished := [seed for seed, text in enumerate(texts) if len(text) < LENGTH]:
            asked = [_question(target, source, seed, texts[seed], coupled) for seed in unfinished]
            for seed, outcome in zip(unfinished, outcomes(asked), strict=True):
                texts[seed] = (*texts[seed], *outcome.tokens)[:LENGTH]
        seen = np.zeros(own.shape)
        np.add.at(seen, tuple(np.array(texts).T), 1)
        test = ChiSquare.of(seen.ravel(), num_draws * own.ravel())
        how = f"{num_draws} texts, K = {NUM_DRAFT} {kind}, V = {VOCAB_SIZE}"
        yield Comparison(seen / num_draws, own, how), test.statistic, limit(test.freedom)


def _question(
    target: Source, draft: Source | None, seed: int, text: Tokens, coupled: bool
) -> Question:
    """The next round of a text: its draft drawn as a drafter would, or a point mass.

    Which point mass depends on the seed, so that likely tokens and unlikely ones come up.
    """
    state, position = state_after(0, text), len(text)
    if draft is None:
        tokens: Tokens = (seed % VOCAB_SIZE, seed // VOCAB_SIZE % VOCAB_SIZE)
        drawn_from = None
    else:
        context = DraftContext(noise=Noise(seed), coupled=coupled, vocab_size=VOCAB_SIZE)
        tokens = ()
        for gumbel in np.array(context.draft_gumbels(position, NUM_DRAFT)):
            tokens = (*tokens, int(np.argmax(log(draft.after(state, tokens)) + gumbel)))
        drawn_from = log(draft.along(state, tokens)[:-1])
    target_logprobs = log(target.along(state, tokens))
    return Question(target_logprobs, tokens, drawn_from, AT_ONE, seed, position)


def _pairs(vocab_size: int, num_draft: int) -> Iterator[tuple[Source, Drafting, str]]:
    """Targets, and drafts for them."""
    target, draft = _sources(vocab_size, vocab_size + num_draft)
    some, others = _without(target, 0), _without(draft, 1)
    drawn = [(target, draft), (target, target), (some, others), (others, some)]
    for one, other in drawn:
        yield one, Drawn(other, up_to(num_draft)), "drawn"
    coins = np.random.default_rng(0)
    copies = [tuple(coins.integers(vocab_size, size=num_draft).tolist()) for _ in range(NUM_STATES)]
    for one in (target, some):
        yield one, Copied(copies, vocab_size), "point masses"


def _sources(vocab_size: int, seed: int) -> tuple[Source, Source]:
    """Target and draft."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab_size, 2.0), (2, NUM_STATES))
    return Source(p), Source(q)


def _without(source: Source, shift: int) -> Source:
    """The same source, with one token excluded in each state."""
    states = np.arange(NUM_STATES)
    probs = source.probs.copy()
    probs[states, (states + shift) % source.vocab_size] = 0
    return Source(probs / probs.sum(axis=-1, keepdims=True))


def _distance(got: np.ndarray, own: np.ndarray) -> float:
    """Total variation."""
    return float(np.abs(got - own).sum() / 2)


def _normalised(weights: np.ndarray) -> list[float]:
    """A distribution, for reading."""
    shares: list[float] = np.round(weights / max(weights.sum(), 1e-300), 4).tolist()
    return shares
