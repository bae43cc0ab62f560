"""Exact distributions of speculative rounds, by going through every outcome in float64.

No sampling: every draft path, every outcome of the coins and every next token, weighted by its
probability. What decides are the very functions that the loop runs.

A source gives the distribution of the next token by the state of the text, one of a few, which
every token moves on. So distributions depend on the whole past.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from itertools import product
from typing import Any

import numpy as np

from specdec_mlx.checks.subject import total_variation
from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.rules.coins import CoinRule

NUM_STATES = 7
SHAPES = ((2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1))
"""Pairs (V, K) whose rounds `enumerated` goes through."""

Tokens = tuple[int, ...]
Outcomes = dict[tuple[Tokens, int], float]
"""Chance of each (tokens emitted [n + 1], n) of a round."""

Drafts = list[tuple[Tokens, np.ndarray]]
"""Tokens [K], and the distributions [K, V] that they were drawn from."""


def state_after(state: int, tokens: Tokens) -> int:
    """Where the tokens [n] lead; 0 is where a text begins."""
    return reduce(moved_on, tokens, state)


def moved_on(state: Any, token: Any) -> Any:
    """State after one more token; different tokens lead to different states."""
    return (3 * state + 2 * token + 1) % NUM_STATES


@dataclass(frozen=True, eq=False)
class Source:
    """A language model: the distribution of the next token by the state, [NUM_STATES, V]."""

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


@dataclass(frozen=True)
class ByRule:
    """Coins, as many heads and tails as there can be, and then a token."""

    rule: CoinRule

    def outcomes(self, target_probs: np.ndarray, tokens: Tokens, probs: np.ndarray) -> Outcomes:
        """Coins are independent; the token after follows from how many are kept."""
        given = target_probs, np.array(tokens, int), probs
        heads = self.rule.accept_probs(*given)
        kept: dict[int, float] = defaultdict(float)
        for coins in product([False, True], repeat=len(tokens)):
            kept[self._num_accepted(coins)] += np.prod(np.where(coins, heads, 1 - heads))
        result: Outcomes = {}
        for n, weight in kept.items():
            after = self.rule.next_probs(*given, n)
            result |= {((*tokens[:n], t), n): weight * after[t] for t in range(len(after))}
        return result

    @cached_property
    def _num_accepted(self) -> Callable[[tuple[bool, ...]], int]:
        """What the rule makes of the coins, as an int."""
        return cache(lambda coins: int(self.rule.num_accepted(np.array(coins, bool))))


def continued(source: Source, begun: dict[Tokens, float], length: int) -> np.ndarray:
    """Distribution [V, ..., V] of texts that a source continues to a length.

    begun: chance of each text so far.
    """
    vocab = np.arange(source.vocab_size)
    joint, states = np.zeros(()), np.zeros((), int)
    for size in range(length):
        _add(joint, begun, size)
        joint = joint[..., None] * source.probs[states]
        states = moved_on(states[..., None], vocab)
    _add(joint, begun, length)
    return joint


def _add(joint: np.ndarray, begun: dict[Tokens, float], size: int) -> None:
    for tokens, weight in begun.items():
        if len(tokens) == size:
            joint[tokens] += weight


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
        return total_variation(self.got, self.own)

    def __str__(self) -> str:
        """The first position that is off, and how the token there is distributed."""
        for position in range(self.got.ndim):
            later = tuple(range(position + 1, self.got.ndim))
            got, own = self.got.sum(axis=later), self.own.sum(axis=later)
            if total_variation(got, own) >= self.total_variation / 2:
                break
        off = np.abs(got - own).sum(axis=-1)
        before = tuple(map(int, np.unravel_index(np.argmax(off), off.shape)))
        shown = [np.round(x[before] / max(x[before].sum(), 1e-300), 4).tolist() for x in (got, own)]
        return (
            f"{self.how}: token {position}, after {list(before)}, is distributed as {shown[0]}; "
            f"expected the target's {shown[1]}. Over {self.got.ndim} tokens the total variation is "
            f"{self.total_variation:.2g}."
        )


def enumerated(rule: CoinRule) -> Iterator[Comparison]:
    """Every outcome of a round on small vocabularies, with distributions that change with the text.

    Target and draft are unrelated, equal, or exclude tokens; drafts are drawn and point masses.
    """
    for vocab_size, num_draft in SHAPES:
        target, draft = sources(vocab_size, vocab_size + num_draft)
        some, others = _without(target, 0), _without(draft, 1)
        drawn = [(target, draft), (target, target), (some, others), (others, some)]
        tokens = tuple(np.random.default_rng(0).integers(vocab_size, size=num_draft).tolist())
        copied = [(tokens, point_mass(np.array(tokens), np.zeros((1, vocab_size))))]
        pairs: list[tuple[Source, Drafts, str]] = [
            *((p, _drafts(q, num_draft), "drawn") for p, q in drawn),
            *((p, copied, "point masses") for p in (target, some)),
        ]
        for p, drafts, kind in pairs:
            yield Comparison(
                continued(p, _after_one_round(rule, p, drafts), num_draft + 1),
                continued(p, {(): 1.0}, num_draft + 1),
                f"K = {num_draft} {kind}, V = {vocab_size}",
            )


def _drafts(source: Source, num_draft: int) -> Drafts:
    """All drafts of a text's first round, with the distributions [K, V] they are drawn from."""
    paths = product(range(source.vocab_size), repeat=num_draft)
    return [(tokens, source.along(0, tokens)[:-1]) for tokens in paths]


def _after_one_round(rule: CoinRule, target: Source, drafts: Drafts) -> dict[Tokens, float]:
    """Chance of each text that the first round emits."""
    deciding, begun = ByRule(rule), defaultdict[Tokens, float](float)
    for tokens, probs in drafts:
        weight = float(np.prod(probs[range(len(tokens)), tokens]))
        if weight:
            outcomes = deciding.outcomes(target.along(0, tokens), tokens, probs)
            for (emitted, _), chance in outcomes.items():
                begun[emitted] += weight * chance
    return begun


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
