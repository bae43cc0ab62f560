"""How a round's tokens are distributed under a rule by coins: every outcome, in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.testing.enumeration import (
    NUM_STATES,
    ByRule,
    Copied,
    Drafting,
    Drawn,
    Rounds,
    Source,
    continued,
    up_to,
)

SHAPES = ((2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1))
"""Pairs (V, K) whose rounds are enumerated."""


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


def _pairs(vocab_size: int, num_draft: int) -> Iterator[tuple[Source, Drafting, str]]:
    """Targets, and drafts for them."""
    target, draft = sources(vocab_size, vocab_size + num_draft)
    some, others = _without(target, 0), _without(draft, 1)
    drawn = [(target, draft), (target, target), (some, others), (others, some)]
    for one, other in drawn:
        yield one, Drawn(other, up_to(num_draft)), "drawn"
    coins = np.random.default_rng(0)
    copies = [tuple(coins.integers(vocab_size, size=num_draft).tolist()) for _ in range(NUM_STATES)]
    for one in (target, some):
        yield one, Copied(copies, vocab_size), "point masses"


def sources(vocab_size: int, seed: int) -> tuple[Source, Source]:
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
