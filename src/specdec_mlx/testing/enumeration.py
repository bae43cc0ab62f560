"""Exact distributions of speculative rounds, by going through every outcome in float64.

No sampling: every draft path, every outcome of the coins and every next token, weighted by its
probability. What decides are the very functions that the loop runs.

A source gives the distribution of the next token by the state of the text, one of a few, which
every token moves on. So distributions depend on the whole past, yet a round has to be enumerated
once a state only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, reduce
from itertools import product
from typing import Any, Protocol

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


def state_after(state: int, tokens: Tokens) -> int:
    """Where the tokens [n] lead; 0 is where a text begins."""
    return reduce(moved_on, tokens, state)


def moved_on(state: Any, token: Any) -> Any:
    """State after one more token; different tokens lead to different states."""
    return (3 * state + 2 * token + 1) % NUM_STATES


def sharpened(probs: Any, temp: float) -> Any:
    """Distribution [..., V] at another temperature; no mass where there was none."""
    powers = probs ** (1 / temp)
    return powers / powers.sum(axis=-1, keepdims=True)


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

    def along(self, state: Any, tokens: Any) -> np.ndarray:
        """Distributions [..., n + 1, V] before each of the tokens [..., n], and after the last."""
        states = [state]
        for i in range(np.shape(tokens)[-1]):
            states.append(moved_on(states[-1], np.asarray(tokens)[..., i]))
        rows: np.ndarray = self.probs[np.stack(states, axis=-1)]
        return rows

    def at_temperature(self, temp: float) -> Source:
        """The same source, sharper (temp < 1) or flatter."""
        return Source(sharpened(self.probs, temp))


class Drafting(Protocol):
    """All drafts that may be made in a state: chance, tokens [k], declared probs [k, V]."""

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """Each draft once; the chances add up to 1."""
        ...


@dataclass(frozen=True, eq=False)
class Drawn:
    """Tokens drawn from a source.

    go_on: whether to draft one more, by the state that the draft has led to and its length so
        far; known before that token is drawn.
    declared: the source that the draft says it was drawn from, where it lies.
    dropped_below: leave out a drawn token, and all after it, if its own chance is less; nobody may
        do that.
    """

    source: Source
    go_on: Callable[[int, int], bool]
    declared: Source | None = None
    dropped_below: float = 0.0

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """Every path that has a chance."""
        yield from self._continuations(state, (), 1.0, [])

    def _continuations(
        self, state: int, tokens: Tokens, weight: float, rows: list[np.ndarray]
    ) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        at = state_after(state, tokens)
        if not self.go_on(at, len(tokens)):
            yield weight, tokens, np.reshape(rows, (-1, self.source.vocab_size))
            return
        probs = self.source.probs[at]
        row = probs if self.declared is None else self.declared.probs[at]
        for token in np.flatnonzero(probs):
            chance = weight * probs[token]
            if probs[token] < self.dropped_below:
                yield chance, tokens, np.reshape(rows, (-1, self.source.vocab_size))
            else:
                longer = (*tokens, int(token))
                yield from self._continuations(state, longer, chance, [*rows, row])


@dataclass(frozen=True, eq=False)
class Copied:
    """A point mass: in each state the draft is a given one, [<= K] tokens."""

    copies: list[Tokens]
    vocab_size: int

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """The only one."""
        tokens = self.copies[state]
        yield 1.0, tokens, point_mass(np.array(tokens, int), np.zeros((1, self.vocab_size)))


def up_to(length: int) -> Callable[[int, int], bool]:
    """Always `length` tokens."""
    return lambda state, drafted: drafted < length


class Deciding(Protocol):
    """What one draft comes to."""

    def outcomes(self, target_probs: np.ndarray, tokens: Tokens, probs: np.ndarray) -> Outcomes:
        """Chances of all outcomes of a draft [k] with declared probs [k, V]; target [k+1, V]."""
        ...


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


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of drafting and deciding, one after the other."""

    target: Source
    drafting: Drafting
    deciding: Deciding
    _known: dict[int, Outcomes] = field(init=False, default_factory=dict)

    @property
    def outcomes(self) -> list[Outcomes]:
        """Outcomes of one round, for each state that it may begin in."""
        return [self.outcomes_from(state) for state in range(NUM_STATES)]

    def outcomes_from(self, state: int) -> Outcomes:
        """Outcomes of one round that begins in a state."""
        if state not in self._known:
            total: Outcomes = defaultdict(float)
            for weight, tokens, probs in self.drafting.drafts(state):
                rows = self.target.along(state, tokens)
                for outcome, chance in self.deciding.outcomes(rows, tokens, probs).items():
                    total[outcome] += weight * chance
            self._known[state] = {outcome: chance for outcome, chance in total.items() if chance}
        return self._known[state]

    def expected_accepted(self, state: int = 0) -> float:
        """Draft tokens kept in a round, on average."""
        return sum(n * chance for (_, n), chance in self.outcomes_from(state).items())

    def joint(self, num_rounds: int, length: int) -> np.ndarray:
        """Distribution [V, ..., V] of the first `length` tokens that so many rounds begin.

        What is shorter is continued by the target itself.
        """
        begun: dict[Tokens, float] = {(): 1.0}
        for _ in range(num_rounds):
            longer: dict[Tokens, float] = defaultdict(float)
            for tokens, weight in begun.items():
                if len(tokens) >= length:
                    longer[tokens] += weight
                    continue
                for (emitted, _), chance in self.outcomes_from(state_after(0, tokens)).items():
                    longer[(tokens + emitted)[:length]] += weight * chance
            begun = longer
        return continued(self.target, begun, length)

    def total_variation(self, num_rounds: int, length: int) -> float:
        """Distance of `joint` from the target's own distribution."""
        own = continued(self.target, {(): 1.0}, length)
        return total_variation(self.joint(num_rounds, length), own)


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
    """Every outcome of rounds on small vocabularies, with distributions that change with the text.

    Target and draft are unrelated, equal, or exclude tokens; drafts are drawn and point masses.
    """
    for vocab_size, num_draft in SHAPES:
        target, draft = sources(vocab_size, vocab_size + num_draft)
        some, others = _without(target, 0), _without(draft, 1)
        drawn = [(target, draft), (target, target), (some, others), (others, some)]
        coins = np.random.default_rng(0)
        copies = coins.integers(vocab_size, size=(NUM_STATES, num_draft)).tolist()
        copied = Copied([tuple(tokens) for tokens in copies], vocab_size)
        pairs: list[tuple[Source, Drafting, str]] = [
            *((p, Drawn(q, up_to(num_draft)), "drawn") for p, q in drawn),
            *((p, copied, "point masses") for p in (target, some)),
        ]
        for p, drafting, kind in pairs:
            yield Comparison(
                Rounds(p, drafting, ByRule(rule)).joint(1, num_draft + 1),
                continued(p, {(): 1.0}, num_draft + 1),
                f"K = {num_draft} {kind}, V = {vocab_size}",
            )


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
