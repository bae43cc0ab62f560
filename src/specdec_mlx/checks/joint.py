"""Do texts follow the target's distribution? A chi-square test of the joint of their first tokens.

A text whose every token is expected often enough at its place has a cell of its own, the others
share one for each place that they leave from. Expected counts are products of the target's own
probabilities; those of a named fault give the chance to find it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
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
from specdec_mlx.checks.one_step import VARIANTS, Variant, lossless
from specdec_mlx.checks.report import Part, judge_power
from specdec_mlx.checks.stand_ins import Remembered, with_remembered_models
from specdec_mlx.checks.subject import Probs, Step, Subject, Work, first_probs, probabilities
from specdec_mlx.loop import speculate
from specdec_mlx.sampling.noise import Noise

NAME = "joint distribution"
NUM_TOKENS = 3
NUM_DRAFT = 2  # so that the bonus token is among the three
NUM_CONTEXTS = 3
FEWEST_TEXTS = 100
TEXTS_PER_CONTEXT = 2000
UNDRAFTED = -1  # draft tokens left to verify in a round that has none
OTHER = -1  # last token of the cells that texts share
ROUNDING = 1e-12
CHUNK = 32
"""Positions of a remembered context at a time: nothing is computed for it, but a draft model that
asks for the last row of a pass gets all of its rows, each as wide as the vocabulary."""

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Texts:
    """Texts of `NUM_TOKENS` tokens after one context.

    Each begins before the context's last token, since the first token of a generation is never
    drafted; the target then gives that one with certainty.
    """

    subject: Subject
    context: list[int]
    draws: Draws
    tokens: list[Tokens] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        self.target = Remembered(self.subject.model, self.context, gives_last=True)
        self.drafter = with_remembered_models(self.subject.drafter, self.context)

    def draw(self, seed: int) -> None:
        """One more text, by the loop."""
        stream = speculate(
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
        items = list(stream)
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


class Cells:
    """The cells that the texts after one context are sorted into, by what they hold in common.

    places: beginning of a text -> both distributions [V] after it, and the tokens that are expected
    often enough there.
    """

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.places: dict[Tokens, tuple[Probs, Probs | None, list[int]]] = {}
        self.cells: list[Tokens] = []
        self._add_place((), float(len(texts.tokens)))

    def _add_place(self, prefix: Tokens, expected: float) -> None:
        p = self.texts.target_probs(prefix)
        likely = np.flatnonzero(expected * p >= LEAST_EXPECTED).tolist()
        self.places[prefix] = p, self.texts.draft_probs(prefix), likely
        self.cells.append((*prefix, OTHER))
        for token in likely:
            if len(prefix) + 1 == NUM_TOKENS:
                self.cells.append((*prefix, token))
            else:
                self._add_place((*prefix, token), expected * p[token])

    def cell_of(self, tokens: Tokens) -> Tokens:
        """The cell of a text."""
        for size, token in enumerate(tokens):
            if token not in self.places[tokens[:size]][2]:
                return (*tokens[:size], OTHER)
        return tokens

    def seen(self) -> Counts:
        """Texts in each cell."""
        counts = Counter(map(self.cell_of, self.texts.tokens))
        return np.array([float(counts[cell]) for cell in self.cells])

    def expected(self, variant: Variant = lossless) -> Counts:
        """Texts expected in each cell, emitted by rounds of up to `NUM_DRAFT` draft tokens.

        Mass arrives at a place by draft tokens left to verify; at 0 the bonus token is due.
        """
        chances = dict.fromkeys(self.cells, 0.0)
        arriving: dict[Tokens, dict[int, float]] = {(): {_draft_length(0): 1.0}}
        for prefix, (p, q, likely) in self.places.items():  # a place comes after its beginnings
            after: dict[int, Any] = defaultdict(float)
            kept, again, bonus = (0 * p, p, p) if q is None else variant(p, q)
            for left, weight in arriving[prefix].items():
                if left > 0:
                    after[left - 1] += weight * kept
                ending = {UNDRAFTED: p, 0: bonus}.get(left, again)
                after[_draft_length(len(prefix) + 1)] += weight * ending
            total = np.sum(list(after.values()), axis=0)
            chances[*prefix, OTHER] = total.sum() - total[likely].sum()
            for token in likely:
                longer = (*prefix, token)
                if longer in self.places:
                    arriving[longer] = {left: float(mass[token]) for left, mass in after.items()}
                else:
                    chances[longer] = total[token]
        found = np.array(list(chances.values()))
        return len(self.texts.tokens) * np.where(found < ROUNDING, 0, found)


def _draft_length(num_tokens: int) -> int:
    """Draft tokens of a round that begins after so many tokens: the last one is never drafted."""
    return min(NUM_DRAFT, NUM_TOKENS - num_tokens - 1) or UNDRAFTED


def check_joint(subject: Subject, work: Work, steps: Sequence[Step], draws: Draws) -> Part:
    """Draw texts after some places, and hold them to the target's; `draws` takes the drafts."""
    groups: list[Texts] = []
    count = 0
    first_seed = subject.seed + len(subject.prompts)  # those before drew the contexts
    for step in _most_telling(steps):
        groups.append(Texts(subject, step.tokens, draws))
        while len(groups[-1].tokens) < TEXTS_PER_CONTEXT and (work.has_time() or count == 0):
            groups[-1].draw(first_seed + count)
            count += 1
            work.say(f"{count} texts")
        if not work.has_time():
            break
    if not groups:
        verdict = "The drafter proposed nothing at any place, so that there is nothing to test. "
        verdict += "Give prompts whose text repeats itself (--prompts)."
        return Part(NAME, "not run", verdict)
    if count < FEWEST_TEXTS:
        verdict = f"Only {count} texts were drawn in the time there was; {FEWEST_TEXTS} are needed."
        return Part(NAME, "not run", f"{verdict} Give more time (--budget).", {"texts": count})
    return _judge([Cells(group) for group in groups])


def _most_telling(steps: Sequence[Step]) -> list[Step]:
    """Places with a draft where even the fault that is hardest to see shows most."""
    drafted = [s for s in steps if s.draft_probs is not None and len(s.tokens) > 1]
    return sorted(drafted, key=_tells, reverse=True)[:NUM_CONTEXTS]


def _tells(step: Step) -> float:
    """Least distance of the named faults' distributions from the target's, for two tokens."""
    p, q = step.target_probs, step.draft_probs
    assert q is not None
    distances = []
    for kept, again, bonus in (variant(p, q) for variant in VARIANTS.values()):
        second = float(kept.sum()) ** NUM_DRAFT * _discrimination(bonus, p)
        distances.append(_discrimination(kept + again, p) + second)
    return min(distances)


def _discrimination(a: Probs, b: Probs) -> float:
    """The sum of (a - b)^2 / (a + b): chi-square that rare tokens cannot dominate."""
    return float(np.divide((a - b) ** 2, a + b, out=np.zeros_like(a), where=a + b > 0).sum())


def _judge(groups: Sequence[Cells]) -> Part:
    right = [group.expected() for group in groups]
    wrong = {name: [g.expected(variant) for g in groups] for name, variant in VARIANTS.items()}
    test = compared(groups, right)
    count = sum(len(group.texts.tokens) for group in groups)
    numbers: dict[str, Any] = {
        "texts": count,
        "tokens_each": NUM_TOKENS,
        "contexts": len(groups),
        "cells": sum(len(group.cells) for group in groups),
        "draft_tokens": sum(group.texts.drafted for group in groups),
        "accepted": sum(group.texts.accepted for group in groups),
        **test.numbers(),
        "power": {name: power(expected, right) for name, expected in wrong.items()},
    }
    if test.p_value < FALSE_ALARM:
        return Part(NAME, "failed", _diagnosis(groups, test.p_value, wrong), numbers)
    same = f"{count} texts of {NUM_TOKENS} tokens follow the target's distribution (p = "
    return judge_power(NAME, f"{count} texts", f"{same}{test.p_value:.2g})", numbers)


def compared(groups: Sequence[Cells], expected: Sequence[Counts]) -> ChiSquare:
    """One test of all groups."""
    return together(ChiSquare.of(g.seen(), due) for g, due in zip(groups, expected, strict=True))


def _diagnosis(groups: Sequence[Cells], p_value: float, wrong: dict[str, list[Counts]]) -> str:
    """How the texts are wrong, by the named faults."""
    count = sum(len(group.texts.tokens) for group in groups)
    firsts = [(group.places[()][0], text[0]) for group in groups for text in group.texts.tokens]
    excluded = sorted({token for p, token in firsts if p[token] == 0})
    shape = f"tokens {excluded[:5]} came that the distribution excludes; " if excluded else ""
    chances = {name: compared(groups, expected).p_value for name, expected in wrong.items()}
    likest = max(chances, key=lambda name: chances[name])
    likeness = f"they look like: {likest} (p = {chances[likest]:.2g})."
    if chances[likest] < 0.01:
        likeness = "they are like none of the named faults."
    return (
        f"{count} texts do not follow the target's distribution (p = {p_value:.1g}): {shape}"
        f"{likeness} The parts {one_step.NAME!r} and {declared.NAME!r} say whether it is the rule "
        "or the drafter."
    )
