"""Exact distributions of rounds: what the tests add to `specdec_mlx.lab.proof.enumeration`.

Match and its coupled form, drafts made in several ways; and named wrong rules, each of which the
same enumeration has to reject.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from specdec_mlx.contracts import Agreement, Draft, DraftContext, Drafter, Session, Verdict
from specdec_mlx.lab.papers.lossy import Lenient
from specdec_mlx.lab.proof.enumeration import NUM_STATES as NUM_STATES
from specdec_mlx.lab.proof.enumeration import ByRule as ByRule
from specdec_mlx.lab.proof.enumeration import Drawn as Drawn
from specdec_mlx.lab.proof.enumeration import Outcomes, Tokens
from specdec_mlx.lab.proof.enumeration import Rounds as Rounds
from specdec_mlx.lab.proof.enumeration import Source as Source
from specdec_mlx.lab.proof.enumeration import continued as continued
from specdec_mlx.lab.proof.enumeration import state_after as state_after
from specdec_mlx.lab.proof.enumeration import up_to as up_to
from specdec_mlx.lab.proof.rule import to_mlx as to_mlx
from specdec_mlx.rules import (
    Block,
    CoinRule,
    Rejection,
    acceptance_probability,
    at,
    leading_run,
    namespace_of,
    point_mass,
    residual,
)
from specdec_mlx.token_ids import to_ids

COIN_RULES: dict[str, CoinRule] = {"rejection": Rejection(), "block": Block()}
"""The lossless rules that decide by coins."""


def sharpened(probs: Any, temp: float) -> Any:
    """Distribution [..., V] at another temperature; no mass where there was none."""
    powers = probs ** (1 / temp)
    return powers / powers.sum(axis=-1, keepdims=True)


def at_temperature(source: Source, temp: float) -> Source:
    """The same source, sharper (temp < 1) or flatter."""
    return Source(sharpened(source.probs, temp))


class Drafting(Protocol):
    """All drafts that may be made in a state, each once."""

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """Chance, tokens [k], declared probs [k, V]."""
        ...


@dataclass(frozen=True, eq=False)
class Copied:
    """A point mass: in each state the draft is a given one, [<= K] tokens."""

    copies: list[Tokens]
    vocab_size: int

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """The only one."""
        tokens = self.copies[state]
        yield 1.0, tokens, point_mass(np.array(tokens, int), np.zeros((1, self.vocab_size)))


class Deciding(Protocol):
    """What one draft comes to; parents: how its tokens hang, None for a chain."""

    @property
    def parents(self) -> Sequence[int] | None: ...

    def outcomes(self, target_probs: np.ndarray, tokens: Tokens, probs: np.ndarray) -> Outcomes:
        """Of a draft [k] with declared probs [k, V]; target [k+1, V]."""
        ...


def rolled(probs: list[float]) -> Source:
    """A source with one distribution, turned by the state."""
    return Source(np.stack([np.roll(probs, state) for state in range(NUM_STATES)]))


TARGET, DRAFT = rolled([0.6, 0.3, 0.1]), rolled([0.3, 0.5, 0.2])  # the stated example: V = 3


def by_state(lengths: list[int]) -> Callable[[int, int], bool]:
    """Stop where the state that the draft has led to allows no more: 0, 1, ... tokens."""
    return lambda state, drafted: drafted < lengths[state]


@dataclass(frozen=True)
class ByMatch:
    """The target draws a token at each position on its own."""

    parents: ClassVar[None] = None

    def outcomes(self, target_probs: np.ndarray, tokens: Tokens, laws: np.ndarray) -> Outcomes:
        return matched(target_probs, tokens)


@dataclass(frozen=True)
class ByCoupling:
    """The target draws a token at each position from the noise that the draft's was drawn from."""

    parents: ClassVar[None] = None

    def outcomes(self, target_probs: np.ndarray, tokens: Tokens, laws: np.ndarray) -> Outcomes:
        own = [
            coupled_joint(p, q)[:, token] / q[token]
            for p, q, token in zip(target_probs[:-1], laws, tokens, strict=True)
        ]
        return matched(np.stack([*own, target_probs[-1]]), tokens)


def matched(own_laws: np.ndarray, tokens: Tokens) -> Outcomes:
    """What `match` makes of a draft over all that the target may draw; own_laws [K+1, V]."""
    vocab_size = own_laws.shape[-1]
    result: dict[Tokens, np.ndarray] = defaultdict(lambda: np.zeros(vocab_size))
    for own in product(range(vocab_size), repeat=len(tokens) + 1):
        *kept, after = Agreement.outcome({"target_tokens": list(own)}, tokens).tokens
        result[tuple(kept)][after] += np.prod(own_laws[range(len(own)), own])
    return iter(result.items())


def coupled_joint(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Chance [V, V] of x = argmax(log p + g) and y = argmax(log q + g), g the same Gumbel noise."""
    joint = np.zeros((len(p), len(q)))
    for x, y in product(np.flatnonzero(p), np.flatnonzero(q)):
        to_target, to_draft = p / p[x], q / q[y]
        if x == y:
            joint[x, x] = 1 / np.maximum(to_target, to_draft).sum()
        elif to_target[y] * to_draft[x] < 1:
            ends = to_target[y], np.inf if to_draft[x] == 0 else 1 / to_draft[x]
            others = [i for i in range(len(p)) if i not in (x, y)]
            joint[x, y] = _first_of_both(to_target[others], to_draft[others], *ends)
    return joint


def _first_of_both(a: np.ndarray, b: np.ndarray, start: float, end: float) -> float:
    """Integral of 1 / (1 + t + sum max(a, b t))^2 from start to end, piece by piece."""
    turns = a[b > 0] / b[b > 0]
    ends = [start, *np.sort(turns[(turns > start) & (turns < end)]), end]
    total = 0.0
    for left, right in pairwise(ends):
        middle = left + 1 if right == np.inf else (left + right) / 2
        steep = b * middle > a
        slope, level = 1 + b[steep].sum(), 1 + a[~steep].sum()
        upper = 0.0 if right == np.inf else 1 / (level + slope * right)
        total += (1 / (level + slope * left) - upper) / slope
    return total


def longest_joint(vocab_size: int, num_rounds: int, num_draft: int) -> int:
    """How many tokens of a text to look at: all that the rounds may emit, or the first few."""
    most = {2: 12, 3: 7, 4: 6, 5: 5}[vocab_size]
    return min(most, num_rounds * (num_draft + 1))


class ResidualIsTarget(Rejection):
    """Wrong: after a rejection a token of p, where one of the residual is due."""

    def next_probs(self, target_probs: Any, *others: Any) -> Any:
        return target_probs[others[-1]]


class SharpBonus(Rejection):
    """Wrong: the token after a draft accepted whole is drawn at temperature 0.5."""

    def next_probs(self, target_probs: Any, *others: Any) -> Any:
        right = super().next_probs(target_probs, *others)
        bonus, is_whole = sharpened(target_probs[-1], 0.5), others[-1] == len(target_probs) - 1
        return namespace_of(bonus).where(is_whole, bonus, right)


class Swapped(Rejection):
    """Wrong: p and q have changed places."""

    def accept_probs(self, target_probs: Any, draft_tokens: Any, draft_probs: Any) -> Any:
        return acceptance_probability(draft_probs, target_probs[:-1], draft_tokens)

    def next_probs(self, target_probs: Any, *others: Any) -> Any:
        (_, draft_probs, n), xp = others, namespace_of(target_probs)
        padded = xp.concatenate([draft_probs, target_probs[-1:]])
        swapped = residual(padded[n], target_probs[n])
        return xp.where(n == len(draft_probs), target_probs[-1], swapped)


@dataclass(frozen=True, eq=False)
class Given:
    """Randomness that is known beforehand: uniform [K], gumbel [V]."""

    uniforms: mx.array
    gumbels: mx.array

    def uniform(self, n: int) -> mx.array:
        assert n == self.uniforms.size
        return self.uniforms

    def gumbel(self, vocab: int) -> mx.array:
        assert vocab == self.gumbels.size
        return self.gumbels


def decide(rule: CoinRule, p: Any, tokens: Any, q: Any, *randomness: mx.array) -> Verdict:
    """Verdict of a rule on target_probs, tokens and draft_probs, given uniform and gumbel."""
    draft = Draft(tokens)
    vars(draft).update(probs=q)  # not rounded by log and exp
    target: Any = SimpleNamespace(greedy=False, probs=p)
    verdict = rule.decide(target, draft, Given(*randomness))
    assert isinstance(verdict, Verdict)
    return verdict


WRONG_RULES: dict[str, CoinRule] = {
    "residual replaced by p": ResidualIsTarget(),
    "bonus at temperature 0.5": SharpBonus(),
    "p and q swapped": Swapped(),
    "lenience 1.2": Lenient(lenience=1 / 1.2),
}


@dataclass(frozen=True, eq=False)
class Altered(Drafter):
    """A drafter's drawn drafts, changed before they are handed over."""

    drafter: Drafter
    alter: Callable[[Draft], Draft]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
        session: Any = self.drafter.begin(prompt, context)
        propose = session.propose

        def altered(limit: int) -> Draft:
            draft = propose(limit)
            return draft if draft.logprobs is None else self.alter(draft)

        session.propose = altered
        return session  # type: ignore[no-any-return]


def declared_at_power(power: float) -> Callable[[Draft], Draft]:
    """Wrong: the distribution handed over is another one than was drawn from."""

    def altered(draft: Draft) -> Draft:
        assert draft.logprobs is not None
        return Draft(draft.tokens, nn.log_softmax(draft.logprobs * power))

    return altered


def dropped(draft: Draft) -> Draft:
    """Wrong: a token drawn by less than a chance of 0.2 is taken back, and all after it."""
    assert draft.logprobs is not None
    return draft.head(int(leading_run(at(mx.exp(draft.logprobs), to_ids(draft.tokens)) >= 0.2)))
