"""Exact distributions of speculative rounds, by going through every outcome in float64.

The functions that decide are those that the loop runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from specdec_mlx.lab.proof.one_step import ends
from specdec_mlx.lab.proof.subject import total_variation
from specdec_mlx.rules import CoinRule

NUM_STATES = 7
SHAPES = ((2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1))
"""Pairs (V, K) whose rounds `enumerated` goes through."""

Tokens = tuple[int, ...]


def state_after(state: int, tokens: Tokens) -> int:
    """State that the tokens [n] lead to; 0 is where a text begins."""
    return reduce(moved_on, tokens, state)


def moved_on(state: Any, token: Any) -> Any:
    """State after one more token; different tokens lead to different states."""
    return (3 * state + 2 * token + 1) % NUM_STATES


@dataclass(frozen=True, eq=False)
class Source:
    """A language model: the distribution of the next token by the text's state, [NUM_STATES, V]."""

    probs: np.ndarray

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.probs.shape[-1])

    def after(self, state: int, tokens: Tokens) -> np.ndarray:
        """Distribution [V] of the token after `tokens`."""
        row: np.ndarray = self.probs[state_after(state, tokens)]
        return row

    def along(self, state: int, tokens: Tokens) -> np.ndarray:
        """Distributions [n + 1, V] before each of the tokens, and after the last."""
        return np.stack([self.after(state, tokens[:i]) for i in range(len(tokens) + 1)])


def continued(source: Source, begun: dict[Tokens, float], length: int) -> np.ndarray:
    """Distribution [V, ..., V] of texts that a source continues to a length."""
    vocab = np.arange(source.vocab_size)
    joint, states = np.zeros(()), np.zeros((), int)
    for size in range(length + 1):
        for tokens, weight in begun.items():
            if len(tokens) == size:
                joint[tokens] += weight
        if size < length:
            joint = joint[..., None] * source.probs[states]
            states = moved_on(states[..., None], vocab)
    return joint


@dataclass(frozen=True, eq=False)
class Comparison:
    """The first tokens of a text under a rule, beside the target's own; [V, ..., V] both."""

    got: np.ndarray
    own: np.ndarray
    how: str

    @property
    def total_variation(self) -> float:
        """Distance of the two."""
        return total_variation(self.got, self.own)

    def __str__(self) -> str:
        """The text whose chance is furthest off."""
        worst = np.unravel_index(np.argmax(np.abs(self.got - self.own)), self.got.shape)
        return (
            f"{self.how}: the text {list(map(int, worst))} comes with a chance of "
            f"{self.got[worst]:.4f}; expected {self.own[worst]:.4f}. Over {self.got.ndim} tokens "
            f"the total variation is {self.total_variation:.2g}."
        )


def enumerated(rule: CoinRule, to: Callable[[Any], Any] = np.asarray) -> Iterator[Comparison]:
    """Every outcome of a round on small vocabularies; distributions change with the text."""
    for vocab_size, num_draft in SHAPES:
        p, q = sources(vocab_size, vocab_size + num_draft)
        sure = Source(one_hots(q.probs))
        likely = p.probs * (1 - one_hots(-p.probs))
        some = Source(likely / likely.sum(axis=-1, keepdims=True))
        pairs = (p, q), (p, p), (some, q), (q, some), (p, sure), (some, sure)
        for target, draft in pairs:
            begun = defaultdict[Tokens, float](float)
            for tokens in product(range(vocab_size), repeat=num_draft):
                probs = draft.along(0, tokens)[:num_draft]
                weight = float(np.prod(probs[range(num_draft), tokens]))
                if weight == 0:
                    continue
                rows = target.along(0, tokens)
                for n, chance, after in ends(rule, rows, tokens, probs, to):
                    for token, mass in enumerate(after.tolist()):
                        begun[*tokens[:n], token] += weight * chance * mass
            joint = continued(target, begun, num_draft + 1)
            own = continued(target, {(): 1.0}, num_draft + 1)
            kind = "point masses" if draft is sure else "drawn"
            yield Comparison(joint, own, f"K = {num_draft} {kind}, V = {vocab_size}")


def sources(vocab_size: int, seed: int) -> tuple[Source, Source]:
    """Target and draft."""
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab_size, 2.0), (2, NUM_STATES))
    return Source(p), Source(q)


def one_hots(scores: np.ndarray) -> np.ndarray:
    """Distributions with all mass on the largest of each row."""
    certain: np.ndarray = np.eye(scores.shape[-1])[np.argmax(scores, axis=-1)]
    return certain
