"""The exact distribution of speculative rounds, enumerated in float64.

A draft token is drawn from q. It is kept with probability a(x), and otherwise replaced by a draw
from r. The emitted token then follows $q(y) a(y) + \\sum_x q(x) (1 - a(x)) r(y | x)$, and this must
be the target's p. The coins of a whole draft are independent. Each result of all coins gives a
number of kept tokens and a distribution of the next token. The loop runs the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from specdec_mlx.contracts import chain
from specdec_mlx.rules import CoinRule
from specdec_mlx.trees.shape import path_to
from specdec_mlx.trees.tree_rules import TreeCoinRule

NUM_STATES = 7
SHAPES = ((2, 1), (2, 3), (3, 2), (3, 3), (4, 2), (5, 1))
"""Vocabulary and draft length, V and K, of each of the `pairs`."""

Tokens = tuple[int, ...]

Outcomes = Iterator[tuple[Tokens, np.ndarray]]
"""Tokens that are kept of a draft, and the chances [V] that they are and each token comes next."""


def state_after(state: int, tokens: Tokens) -> int:
    return reduce(moved_on, tokens, state)


def moved_on(state: Any, token: Any) -> Any:
    """State after one more token. Different tokens lead to different states."""
    # An arbitrary map. It makes the next distribution depend on all tokens so far.
    return (3 * state + 2 * token + 1) % NUM_STATES


@dataclass(frozen=True, eq=False)
class Source:
    """A language model: the distribution of the next token by the text's state, [NUM_STATES, V]."""

    probs: np.ndarray

    @property
    def vocab_size(self) -> int:
        return int(self.probs.shape[-1])

    def after(self, state: int, tokens: Tokens) -> np.ndarray:
        row: np.ndarray = self.probs[state_after(state, tokens)]
        return row

    def along(self, state: int, tokens: Tokens) -> np.ndarray:
        """Distributions [n + 1, V] before each of the tokens, and after the last."""
        return np.stack([self.after(state, tokens[:i]) for i in range(len(tokens) + 1)])


@dataclass(frozen=True, eq=False)
class Drawn:
    """Drafts drawn from a source.

    Attributes:
        go_on: (state, number drafted) -> True if another token is drafted.
        declared: the source that the drafter declares. None for the source that it draws from.
        dropped_below: a fault: drop a drawn token if its probability was lower.
    """

    source: Source
    go_on: Callable[[int, int], bool]
    declared: Source | None = None
    dropped_below: float = 0.0

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """Probability, tokens [k] and declared probs [k, V] of every possible draft."""
        declared = self.declared or self.source
        begun: list[tuple[float, Tokens, bool]] = [(1.0, (), True)]
        while begun:
            weight, tokens, may_go_on = begun.pop()
            here = state_after(state, tokens)
            if not (may_go_on and self.go_on(here, len(tokens))):
                yield weight, tokens, declared.along(state, tokens)[:-1]
                continue
            probs = self.source.probs[here]
            for token in np.flatnonzero(probs).tolist():
                # A dropped token leaves the draft as it was, and ends it.
                stays = bool(probs[token] >= self.dropped_below)
                longer = (*tokens, token) if stays else tokens
                begun.append((weight * probs[token], longer, stays))


def up_to(length: int) -> Callable[[int, int], bool]:
    return lambda state, num_drafted: num_drafted < length


@dataclass(frozen=True, eq=False)
class ByRule:
    """A rule that decides by coins.

    Attributes:
        parents: parent of each draft token in a tree. None for a chain.
        to: converts arrays to the library that the rule computes with.
    """

    rule: CoinRule | TreeCoinRule
    parents: Sequence[int] | None = None
    to: Callable[[Any], Any] = field(default=np.asarray, repr=False)
    _falls: dict[int, tuple[np.ndarray, list[Tokens], list[int]]] = field(
        default_factory=dict, init=False, repr=False
    )

    def outcomes(
        self, target_probs: np.ndarray, tokens: Tokens, draft_probs: np.ndarray
    ) -> Outcomes:
        """Outcomes of a draft [k] with declared probs [k, V]. The target has probs [k+1, V]."""
        rule: Any = self.rule
        arrays = self.to(target_probs), self.to(np.array(tokens, int)), self.to(draft_probs)
        if self.parents is None:
            accept_probs, rows = rule.accept_probs(*arrays), None
        else:
            accept_probs, rows = rule.judge(*arrays, self.parents)
        accept_probs = np.array(accept_probs, np.float64)
        coins, paths, path_of = self.falls(len(tokens))
        chances = np.where(coins, accept_probs, 1 - accept_probs).prod(
            axis=1
        )  # coins are independent
        for path, chance in zip(paths, np.bincount(path_of, chances), strict=True):
            if chance > 0:
                # Row 0 follows the text, and row i + 1 follows draft token i.
                end = path[-1] + 1 if path else 0
                after = rule.next_probs(*arrays, self.to(end)) if rows is None else rows[end]
                accepted = tuple(tokens[node] for node in path)
                yield accepted, chance * np.array(after, np.float64)

    def falls(self, size: int) -> tuple[np.ndarray, list[Tokens], list[int]]:
        """All results of `size` coins.

        Returns the coins [2^size, size], the different paths of accepted nodes, and the index of
        the path for each row of coins.
        """
        if size not in self._falls:
            rule: Any = self.rule
            coins = np.array(list(product([False, True], repeat=size)), bool)
            if self.parents is None:
                accepted = [tuple(range(int(rule.num_accepted(self.to(row))))) for row in coins]
            else:
                accepted = [tuple(rule.find_path(row.tolist(), self.parents)) for row in coins]
            paths = list(dict.fromkeys(accepted))
            self._falls[size] = coins, paths, [paths.index(path) for path in accepted]
        return self._falls[size]


@dataclass(frozen=True, eq=False)
class Rounds:
    """Rounds of drafting and deciding.

    Attributes:
        target: the source whose distribution the text should have.
        drafting: a `Drawn`, or another object with `drafts(state)`.
        deciding: a `ByRule`, or another object with `outcomes` and `parents`.
    """

    target: Source
    drafting: Any
    deciding: Any
    _known: dict[int, dict[Tokens, np.ndarray]] = field(default_factory=dict, init=False)

    def outcomes_from(self, state: int) -> dict[Tokens, np.ndarray]:
        if state not in self._known:
            total: dict[Tokens, Any] = {}
            for weight, tokens, probs in self.drafting.drafts(state):
                # sum over drafts: P(draft) P(accepted, next | draft)
                rows = self.rows(state, tokens)
                for accepted, masses in self.deciding.outcomes(rows, tokens, probs):
                    total[accepted] = total.get(accepted, 0) + weight * masses
            self._known[state] = total
        return self._known[state]

    def rows(self, state: int, tokens: Tokens) -> np.ndarray:
        """The target's distributions [k+1, V] at each row of a draft [k]."""
        size = len(tokens)
        parents = self.deciding.parents or chain(size)
        paths = [path_to(row - 1, parents) for row in range(size + 1)]
        texts = [tuple(tokens[node] for node in path) for path in paths]
        return np.stack([self.target.after(state, text) for text in texts])

    def joint(self, num_rounds: int, length: int) -> np.ndarray:
        """Distribution [V, ..., V] of the first `length` tokens of `num_rounds` rounds."""
        begun: dict[Tokens, float] = {(): 1.0}
        for _ in range(num_rounds):
            longer: dict[Tokens, float] = {}
            for text, weight in begun.items():
                if len(text) >= length:
                    longer[text] = longer.get(text, 0) + weight
                    continue
                for accepted, masses in self.outcomes_from(state_after(0, text)).items():
                    for token in np.flatnonzero(masses).tolist():
                        emitted = (*text, *accepted, token)[:length]
                        longer[emitted] = longer.get(emitted, 0) + weight * masses[token]
            # Texts that are long enough keep their weight in later rounds.
            begun = longer
        return continued(self.target, begun, length)

    def expected_accepted(self, state: int = 0) -> float:
        outcomes = self.outcomes_from(state).items()
        return float(sum(len(accepted) * masses.sum() for accepted, masses in outcomes))

    def total_variation(self, num_rounds: int, length: int) -> float:
        expected = continued(self.target, {(): 1.0}, length)
        return total_variation(self.joint(num_rounds, length), expected)


def continued(source: Source, begun: dict[Tokens, float], length: int) -> np.ndarray:
    """Distribution [V, ..., V] of texts that `source` continues to `length` tokens."""
    vocab = np.arange(source.vocab_size)
    joint, states = np.zeros(()), np.zeros((), int)
    for size in range(length + 1):
        for tokens, weight in begun.items():
            if len(tokens) == size:
                joint[tokens] += weight
        if size < length:
            # chain rule: P(text, token) = P(text) P(token | state of the text)
            joint = joint[..., None] * source.probs[states]
            states = moved_on(states[..., None], vocab)
    return joint


def total_variation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum() / 2)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The first tokens of a text under a rule, and under the target.

    Attributes:
        got: probabilities [V, ..., V] under the rule.
        expected: probabilities [V, ..., V] under the target.
        how: the setting in words.
    """

    got: np.ndarray
    expected: np.ndarray
    how: str

    @property
    def total_variation(self) -> float:
        return total_variation(self.got, self.expected)

    def __str__(self) -> str:
        worst = np.unravel_index(np.argmax(np.abs(self.got - self.expected)), self.got.shape)
        return (
            f"{self.how}: the text {list(map(int, worst))} comes with a chance of "
            f"{self.got[worst]:.4f}; expected {self.expected[worst]:.4f}."
            f" Over {self.got.ndim} tokens the total variation is {self.total_variation:.2g}."
        )


def enumerated(rule: CoinRule, to: Callable[[Any], Any] = np.asarray) -> Iterator[Comparison]:
    for target, draft, num_draft, how in pairs():
        rounds = Rounds(target, Drawn(draft, up_to(num_draft)), ByRule(rule, to=to))
        expected = continued(target, {(): 1.0}, num_draft + 1)
        yield Comparison(rounds.joint(1, num_draft + 1), expected, how)


def pairs() -> Iterator[tuple[Source, Source, int, str]]:
    for vocab_size, num_draft in SHAPES:
        p, q = sources(vocab_size, vocab_size + num_draft)
        sure, certain = Source(one_hots(q.probs)), Source(one_hots(p.probs))
        # Zeros in p and in q test the divisions of a rule.
        likely = p.probs * (1 - one_hots(-p.probs))
        some = Source(likely / likely.sum(axis=-1, keepdims=True))
        drawn = (p, q), (p, p), (some, q), (q, some), (certain, q)
        for target, draft in (*drawn, (p, sure), (some, sure), (certain, sure)):
            kind = "point masses" if draft is sure else "drawn"
            yield target, draft, num_draft, f"K = {num_draft} {kind}, V = {vocab_size}"


def sources(vocab_size: int, seed: int) -> tuple[Source, Source]:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(vocab_size, 2.0), (2, NUM_STATES))
    return Source(p), Source(q)


def one_hots(scores: np.ndarray) -> np.ndarray:
    certain: np.ndarray = np.eye(scores.shape[-1])[np.argmax(scores, axis=-1)]
    return certain
