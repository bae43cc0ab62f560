"""Do texts follow the target's distribution? A chi-square test of the joint of their first tokens.

The texts of a few contexts are sorted into the cells of a tree: a token that is expected often
enough is a branch of its own, all others of its place share a cell. The exact chance of a cell is a
product of the target's own probabilities, so nothing has to be estimated; and going down the same
tree with the probabilities of a named fault gives the chance to find that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.checks import declared, one_step
from specdec_mlx.checks.chi_square import (
    FALSE_ALARM,
    LEAST_EXPECTED,
    ChiSquare,
    Counts,
    power,
    together,
)
from specdec_mlx.checks.declared import Draws, Recording
from specdec_mlx.checks.report import Part, judge_power
from specdec_mlx.checks.stand_ins import Remembered, with_remembered_models
from specdec_mlx.checks.subject import Probs, Step, Subject, Work, first_probs, probabilities
from specdec_mlx.checks.variants import VARIANTS, Variant, lossless
from specdec_mlx.loop import speculate
from specdec_mlx.sampling.noise import Noise

NAME = "joint distribution"
NUM_TOKENS = 3
NUM_DRAFT = 2  # so that the bonus token is among the three
NUM_CONTEXTS = 3
FEWEST_TEXTS = 100
TEXTS_PER_CONTEXT = 2000
UNDRAFTED = -1
"""Stands for the draft tokens of a round that has none."""
ROUNDING = 1e-12
CHUNK = 32
"""Positions of a remembered context at a time: nothing is computed for it, but a draft model that
asks for the last row of a pass gets all of its rows, each as wide as the vocabulary."""


@dataclass(eq=False)
class Texts:
    """Texts of `NUM_TOKENS` tokens after one context.

    The first token of a generation is never drafted. So each begins before the context's last
    token, which the target then gives with certainty.
    """

    subject: Subject
    context: list[int]
    draws: Draws
    tokens: list[tuple[int, ...]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        """Remember the logits of both models from here on."""
        self.target = Remembered(self.subject.model, self.context, gives_last=True)
        self.drafter = with_remembered_models(self.subject.drafter, self.context)

    def draw(self, seed: int) -> None:
        """One more text, by the loop."""
        items = list(
            speculate(
                self.target,
                self.context[:-1],
                Recording(self.drafter, self.draws),
                max_tokens=1 + NUM_TOKENS,
                sampler=self.subject.sampling,
                seed=seed,
                rule=self.subject.rule,
                draft_length=NUM_DRAFT,
                tokenizer=self.subject.tokenizer,
                prefill_step_size=CHUNK,
                probe=False,
            )
        )
        self.tokens.append(tuple(item.token for item in items[1:]))
        self.drafted += items[-1].stats.drafted
        self.accepted += items[-1].stats.accepted

    def target_probs(self, continuation: Sequence[int]) -> Probs:
        """Probabilities [V] of the token after the context and a continuation."""
        logits = self.target.after([*self.context, *continuation]).astype(mx.float32)
        return probabilities(self.subject.sampling.log_distribution(logits - mx.logsumexp(logits)))

    def draft_probs(self, continuation: Sequence[int]) -> Probs | None:
        """Probabilities [V] that the drafter declares there; None where it proposes nothing."""
        tokens = [*self.context, *continuation]
        context = self.subject.context(Noise(self.subject.seed))
        session = self.drafter.begin(tokens, replace(context, prefill_step_size=CHUNK))
        return first_probs(session.propose(1), self.subject.vocab_size)


@dataclass
class Node:
    """A place in the tree. p, q: both distributions there; branches: what follows, by token.

    A branch is a further place, or the number of a cell; `rest` is the cell of all other tokens.
    """

    p: Probs
    q: Probs | None
    branches: dict[int, Node | int]
    rest: int


class Tree:
    """The cells that the texts after one context are sorted into."""

    def __init__(self, texts: Texts) -> None:
        """Grow branches for what so many texts are expected to hold often enough."""
        self.texts, self.num_cells = texts, 0
        self.root = self._grow((), float(len(texts.tokens)))

    def _grow(self, prefix: tuple[int, ...], expected: float) -> Node:
        p = self.texts.target_probs(prefix)
        node = Node(p, self.texts.draft_probs(prefix), {}, self._new_cell())
        for token in map(int, np.flatnonzero(expected * p >= LEAST_EXPECTED)):
            is_last = len(prefix) + 1 == NUM_TOKENS
            node.branches[token] = (
                self._new_cell() if is_last else self._grow((*prefix, token), expected * p[token])
            )
        return node

    def _new_cell(self) -> int:
        self.num_cells += 1
        return self.num_cells - 1

    def seen(self) -> Counts:
        """Texts in each cell."""
        cells = [self._cell_of(tokens) for tokens in self.texts.tokens]
        return np.bincount(cells, minlength=self.num_cells).astype(float)

    def _cell_of(self, tokens: tuple[int, ...]) -> int:
        node: Node | int = self.root
        for token in tokens:
            if isinstance(node, Node):
                node = node.branches.get(token, node.rest)
        assert not isinstance(node, Node)
        return node

    def excluded(self) -> list[int]:
        """Tokens that came first after the context and that the target's distribution excludes."""
        return [tokens[0] for tokens in self.texts.tokens if self.root.p[tokens[0]] == 0]

    def chances(self, variant: Variant = lossless) -> Probs:
        """Chance of each cell, for texts emitted by rounds of up to `NUM_DRAFT` draft tokens."""
        chances = np.zeros(self.num_cells)
        self._descend(self.root, {draft_length(0): 1.0}, variant, chances, 0)
        return np.where(chances < ROUNDING, 0, chances)

    def _descend(
        self, node: Node, weights: dict[int, float], variant: Variant, chances: Probs, depth: int
    ) -> None:
        """Spread mass over the cells below a place, `depth` tokens into the texts.

        weights: by how many draft tokens of the round are yet to verify; at 0 the bonus token is
        due, and `UNDRAFTED` is a round of the target's own.
        """
        arriving: dict[int, Probs] = defaultdict(lambda: np.zeros_like(node.p))
        kept, again, bonus = (0 * node.p, node.p, node.p)
        if node.q is not None:
            kept, again, bonus = variant(node.p, node.q)
        for left, weight in weights.items():
            if left > 0:
                arriving[left - 1] += weight * kept
            ending = {UNDRAFTED: node.p, 0: bonus}.get(left, again)
            arriving[draft_length(depth + 1)] += weight * ending
        total = np.sum(list(arriving.values()), axis=0)
        chances[node.rest] += total.sum() - total[list(node.branches)].sum()
        for token, branch in node.branches.items():
            if isinstance(branch, Node):
                below = {left: float(mass[token]) for left, mass in arriving.items()}
                self._descend(branch, below, variant, chances, depth + 1)
            else:
                chances[branch] += total[token]


def draft_length(num_tokens: int) -> int:
    """Draft tokens of a round that begins after so many tokens: the last one is never drafted."""
    return min(NUM_DRAFT, NUM_TOKENS - num_tokens - 1) or UNDRAFTED


def check_joint(subject: Subject, work: Work, steps: Sequence[Step], draws: Draws) -> Part:
    """Draw texts after the contexts that tell most, and hold them to the target's distribution.

    Args:
        subject: what is checked.
        work: how long, and where to say how far it is.
        steps: places that were seen; the contexts are chosen from them.
        draws: filled with what the drafter draws.
    """
    groups: list[Texts] = []
    count = 0
    first_seed = subject.seed + len(subject.prompts)  # those before drew the contexts
    for step in _most_telling(steps):
        groups.append(Texts(subject, step.tokens, draws))
        while len(groups[-1].tokens) < TEXTS_PER_CONTEXT and (work.has_time or count == 0):
            groups[-1].draw(first_seed + count)
            count += 1
            work.say(f"{count} texts")
        if not work.has_time:
            break
    if not groups:
        verdict = "The drafter proposed nothing at any place, so that there is nothing to test. "
        verdict += "Give prompts whose text repeats itself (--prompts)."
        return Part(NAME, "not run", verdict)
    if count < FEWEST_TEXTS:
        verdict = f"Only {count} texts were drawn in the time there was; {FEWEST_TEXTS} are needed."
        return Part(NAME, "not run", f"{verdict} Give more time (--budget).", {"texts": count})
    return _judge([Tree(group) for group in groups])


def _most_telling(steps: Sequence[Step]) -> list[Step]:
    """Places with a draft where even the fault that is hardest to see shows most."""
    drafted = [s for s in steps if s.draft_probs is not None and len(s.tokens) > 1]
    return sorted(drafted, key=_tells, reverse=True)[:NUM_CONTEXTS]


def _tells(step: Step) -> float:
    """How far the distributions of the named faults are from the target's, the nearest of them.

    Of the next token, and of the one after a draft accepted whole as if p and q were the same.
    """
    p, q = step.target_probs, step.draft_probs
    assert q is not None
    return min(
        _discrimination(kept + again, p)
        + float(kept.sum()) ** NUM_DRAFT * _discrimination(bonus, p)
        for kept, again, bonus in (variant(p, q) for variant in VARIANTS.values())
    )


def _discrimination(a: Probs, b: Probs) -> float:
    """The sum of (a - b)^2 / (a + b): chi-square that rare tokens cannot dominate."""
    total = a + b
    return float(np.divide((a - b) ** 2, total, out=np.zeros_like(a), where=total > 0).sum())


def _judge(trees: Sequence[Tree]) -> Part:
    right = _expected(trees, lossless)
    wrong = {name: _expected(trees, variant) for name, variant in VARIANTS.items()}
    test = _compare(trees, right)
    count = sum(len(tree.texts.tokens) for tree in trees)
    numbers: dict[str, Any] = {
        "texts": count,
        "tokens_each": NUM_TOKENS,
        "contexts": len(trees),
        "cells": sum(tree.num_cells for tree in trees),
        "draft_tokens": sum(tree.texts.drafted for tree in trees),
        "accepted": sum(tree.texts.accepted for tree in trees),
        **test.numbers(),
        "power": {name: power(expected, right) for name, expected in wrong.items()},
    }
    if test.p_value < FALSE_ALARM:
        return Part(NAME, "failed", _diagnosis(trees, test.p_value, wrong), numbers)
    same = f"{count} texts of {NUM_TOKENS} tokens follow the target's distribution (p = "
    return judge_power(NAME, f"{count} texts", f"{same}{test.p_value:.2g})", numbers)


def _expected(trees: Sequence[Tree], variant: Variant) -> list[Counts]:
    """Texts expected in each cell of each tree."""
    return [len(tree.texts.tokens) * tree.chances(variant) for tree in trees]


def _compare(trees: Sequence[Tree], expected: Sequence[Counts]) -> ChiSquare:
    pairs = zip(trees, expected, strict=True)
    return together([ChiSquare.of(tree.seen(), due) for tree, due in pairs])


def _diagnosis(trees: Sequence[Tree], p_value: float, wrong: dict[str, list[Counts]]) -> str:
    """What the texts are like, by the named faults."""
    count = sum(len(tree.texts.tokens) for tree in trees)
    excluded = sorted({token for tree in trees for token in tree.excluded()})
    shape = f"tokens {excluded[:5]} came that the distribution excludes; " if excluded else ""
    chances = {name: _compare(trees, expected).p_value for name, expected in wrong.items()}
    likest = max(chances, key=lambda name: chances[name])
    likeness = f"they look like: {likest} (p = {chances[likest]:.2g})."
    if chances[likest] < 0.01:
        likeness = "they are like none of the named faults."
    return (
        f"{count} texts do not follow the target's distribution (p = {p_value:.1g}): {shape}"
        f"{likeness} The parts {one_step.NAME!r} and {declared.NAME!r} say whether it is the rule "
        "or the drafter."
    )
