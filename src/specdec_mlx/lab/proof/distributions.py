"""Two chi-square tests: do drafts and texts follow the right distributions?

Drafts: the tokens of a declared distribution are sorted by probability, and divided into tenths by
the mass of the likelier tokens. The number of drawn tokens in each tenth is compared with the sum
of the declared probabilities. Every drafted token of every text counts.

Texts: the joint distribution of their first tokens. A text has its own cell if every token of it is
expected often enough at its place. The other texts share a cell for each place at which they leave
the expected tokens. Expected counts are products of the target's probabilities.

The counts that a named fault would give decide the probability to find this fault.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from specdec_mlx.contracts import Draft
from specdec_mlx.lab.proof.chi_square import (
    FALSE_ALARM,
    LEAST_EXPECTED,
    ChiSquare,
    Counts,
    growth_for,
    power,
)
from specdec_mlx.lab.proof.enumeration import total_variation as distance
from specdec_mlx.lab.proof.one_step import (
    DRAFT_FAULTS,
    VARIANTS,
    Masses,
    Variant,
    lossless,
    rejecting,
)
from specdec_mlx.lab.proof.report import Finding
from specdec_mlx.lab.proof.subject import (
    Alone,
    Place,
    Probs,
    Remembered,
    Subject,
    Work,
    first_probs,
    probabilities,
    with_remembered_models,
)
from specdec_mlx.token_ids import to_list
from specdec_mlx.trees.tree_rules import tree_rule_for

SURE = 0.9  # power from which a fault counts as one that would have been found

NUM_BINS = 10
NUM_RANKED = 1000  # likeliest tokens that are lined up; the others are in the last bin

NUM_TOKENS = 3
NUM_DRAFT = 2  # so that the bonus token is among the three
NUM_CONTEXTS = 3
NUM_IN_TREE = 4  # draft tokens where drafts are trees: levels, and siblings on them
TEXTS_PER_CONTEXT = 2000
UNDRAFTED = -1  # draft tokens left to verify in a round that has none
OTHER = -1  # last token of the cells that texts share
ROUNDING = 1e-12
CHUNK = 32
"""Positions of a remembered context at a time: nothing is computed for it, but a draft model that
asks for the last row of a pass gets all of its rows, each as wide as the vocabulary."""

Tokens = tuple[int, ...]


def judge(
    samples: str,
    aim: str,
    seen: Counts,
    right: Counts,
    faults: Mapping[str, Counts],
    numbers: dict[str, Any],
    diagnosis: Callable[[], str],
) -> Finding:
    """Compare counts with expected counts, and return the finding of a part of the check.

    The part counts as not run if none of the named faults would have been found.

    Args:
        samples: words for the samples.
        aim: words for the distribution that they should follow.
        seen: counts [cells].
        right: expected counts [cells].
        faults: name of a fault -> the counts [cells] that it would give.
        numbers: the part's other numbers.
        diagnosis: returns the cause of a failure and the next step.
    """
    test = ChiSquare.of(seen, right)
    powers = {fault: power(counts, right) for fault, counts in faults.items()}
    numbers = numbers | {
        "chi_square": test.statistic,
        "degrees_of_freedom": test.freedom,
        "p_value": test.p_value,
        "false_alarm": FALSE_ALARM,
        "power": powers,
    }
    if test.p_value < FALSE_ALARM:
        verdict = f"{samples} do not follow {aim} (p = {test.p_value:.1g}): {diagnosis()}"
        return Finding("failed", verdict, numbers)
    unsure = [fault for fault, chance in powers.items() if chance < SURE]
    if len(unsure) == len(powers):
        verdict = f"{samples} are too few for any of the named faults to be found. Give more time "
        return Finding("not run", f"{verdict}(--budget).", numbers)
    strength = f"each named fault would have been found, with a chance above {SURE}"
    strength = f"not enough to be sure of: {', '.join(unsure)}" if unsure else strength
    verdict = f"{samples} follow {aim} (p = {test.p_value:.2g}); {strength}."
    return Finding("passed", verdict, numbers)


# Drafts -------------------------------------------------------------------------------------------


@dataclass
class Draws:
    """Drafted tokens, by the mass of likelier tokens in the declared distribution.

    Attributes:
        counts: [2 + F, NUM_BINS] drawn, declared, and expected under each of the F faults.
        proposals: number of drafts.
        cut: drafts that are shorter than the limit.
        trees: drafts that fork.
    """

    counts: Counts = field(default_factory=lambda: np.zeros((2 + len(DRAFT_FAULTS), NUM_BINS)))
    proposals: int = 0
    cut: int = 0
    trees: int = 0

    def add(self, draft: Draft, limit: int) -> None:
        self.proposals += 1
        self.cut += len(draft) < limit
        self.trees += draft.parents is not None
        if draft.logprobs is None:
            return
        for token, row in zip(to_list(draft.tokens), draft.logprobs, strict=True):
            q = probabilities(row)
            bins = np.full(len(q), NUM_BINS - 1)
            # Sorting the whole vocabulary for every token would take most of the time.
            order = np.argpartition(-q, min(NUM_RANKED, len(q) - 1))[:NUM_RANKED]
            order = order[np.argsort(-q[order])]
            # The middle of a token's interval in the cumulative distribution chooses its bin.
            middles = np.cumsum(q[order]) - q[order] / 2
            bins[order] = np.minimum(NUM_BINS * middles, NUM_BINS - 1)
            # Expected counts are sums of declared probabilities, so each row may have its own q.
            drawn = np.eye(1, len(q), token)[0]
            for i, mass in enumerate((drawn, q, *(fault(q) for fault in DRAFT_FAULTS.values()))):
                self.counts[i] += np.bincount(bins, mass, NUM_BINS)

    def diagnosis(self) -> str:
        drawn, declared = self.counts[:2] @ np.arange(NUM_BINS)
        # The mean bin is lower if likely tokens come too often.
        is_sharper = drawn < declared
        if is_sharper and self.cut:
            return (
                f"unlikely ones are too few, and {self.cut} of {self.proposals} drafts are shorter "
                "than asked for: tokens are dropped after they were drawn. Decide whether to draft "
                "a token before drawing it."
            )
        return (
            f"they come from another one, which is {'sharper' if is_sharper else 'flatter'}. Hand "
            "over, as Draft.logprobs, the distribution that each token is really drawn from, after "
            "temperature and filters."
        )


def check_declared(draws: Draws) -> Finding:
    seen, due, *faulty = draws.counts
    num_draws = int(seen.sum())
    if draws.proposals and not num_draws:
        return Finding(
            "not applicable",
            "The drafter declares no distribution: its drafts are taken as point masses, and "
            "verified as such no token can come out of proportion.",
            {"proposals": draws.proposals},
        )
    samples, aim = f"{num_draws} drafted tokens", "the distributions declared for them"
    faults = dict(zip(DRAFT_FAULTS, faulty, strict=True))
    numbers: dict[str, Any] = {
        "draws": num_draws,
        "drawn_in_each_tenth": (seen / max(1, num_draws)).round(4).tolist(),
        "declared_in_each_tenth": (due / max(1, num_draws)).round(4).tolist(),
        "proposals_cut_short": draws.cut,
    }
    return judge(samples, aim, seen, due, faults, numbers, draws.diagnosis)


# Texts --------------------------------------------------------------------------------------------


class Texts:
    """Texts of `NUM_TOKENS` tokens after one context. Their drafts are counted in `draws`."""

    def __init__(self, subject: Subject, context: list[int], draws: Draws) -> None:
        self.context = context
        self.tokens: list[Tokens] = []
        self.drafted = self.accepted = 0
        self.target = Remembered(subject.model, context)
        drafter = with_remembered_models(subject.drafter, context)
        self.subject = replace(subject, drafter=drafter)
        session = self.subject.begin(context, prefill_step_size=CHUNK)
        # A tree needs room for siblings, or every draft would be a chain.
        forks = session.propose(NUM_IN_TREE).parents is not None
        length = NUM_IN_TREE if forks else NUM_DRAFT
        self.room = length - NUM_DRAFT
        alone = Alone(drafter, subject.model, draws.add)
        self.drawing = replace(subject, model=self.target, drafter=alone, num_draft_tokens=length)

    def draw(self, seed: int) -> None:
        items = replace(self.drawing, seed=seed).text(
            self.context,
            NUM_TOKENS,
            room=self.room,
            sampler=self.drawing.sampling,
            prefill_step_size=CHUNK,
        )
        self.tokens.append(tuple(item.token for item in items))
        self.drafted += items[-1].stats.drafted
        self.accepted += items[-1].stats.accepted

    def target_probs(self, continuation: Tokens) -> Probs:
        logits = self.target.after([*self.context, *continuation])
        return probabilities(self.subject.sampling.log_distribution(logits))

    def draft_probs(self, continuation: Tokens) -> Probs | None:
        """Probabilities [V] that the drafter declares there, or None if it proposes nothing."""
        text = [*self.context, *continuation]
        # A new session, so that no earlier draft can change the declared distribution.
        session = self.subject.begin(text, prefill_step_size=CHUNK)
        return first_probs(session.propose(1), self.subject.vocab_size)


class Cells:
    """The cells into which the texts after one context are sorted.

    Attributes:
        places: beginning of a text -> both distributions [V] after it, and the tokens that are
            expected often enough there to have cells.
    """

    def __init__(self, texts: Texts) -> None:
        self.texts = texts
        self.places: dict[Tokens, tuple[Probs, Probs | None, list[int]]] = {}
        self.cells = list(self.chances())

    def cell_of(self, tokens: Tokens) -> Tokens:
        for size, token in enumerate(tokens):
            if token not in self.places[tokens[:size]][2]:
                return (*tokens[:size], OTHER)
        return tokens

    def chances(self, variant: Variant = lossless) -> dict[Tokens, float]:
        """Probability of each cell, for texts made in rounds of up to `NUM_DRAFT` tokens."""
        return self._chances(variant, (), {_draft_length(0): 1.0})

    def _chances(
        self, variant: Variant, prefix: Tokens, arriving: dict[int, float]
    ) -> dict[Tokens, float]:
        """Probabilities of the cells of texts that begin with `prefix`.

        Args:
            variant: the rule, or a named fault of it.
            prefix: first tokens of the texts.
            arriving: draft tokens left to verify -> probability to reach the prefix with this
                number. At 0 the bonus token comes next.
        """
        chance = sum(arriving.values())
        if len(prefix) == NUM_TOKENS:
            return {prefix: chance}
        if prefix not in self.places:  # the first time, by the lossless variant
            p, num_texts = self.texts.target_probs(prefix), len(self.texts.tokens)
            likely = np.flatnonzero(num_texts * chance * p >= LEAST_EXPECTED).tolist()
            self.places[prefix] = p, self.texts.draft_probs(prefix), likely
        p, q, likely = self.places[prefix]
        # Without a draft, every token is the target's.
        accepted, replaced, bonus = (0 * p, p, p) if q is None else variant(p, q)
        after: dict[int, Any] = defaultdict(float)
        for left, weight in arriving.items():
            if left > 0:
                after[left - 1] += weight * accepted
            # A round ends with its last token, and the next round begins.
            ending = {UNDRAFTED: p, 0: bonus}.get(left, replaced)
            after[_draft_length(len(prefix) + 1)] += weight * ending
        total = np.sum(list(after.values()), axis=0)
        chances = {(*prefix, OTHER): total.sum() - total[likely].sum()}
        for token in likely:
            moved = {left: float(mass[token]) for left, mass in after.items()}
            chances |= self._chances(variant, (*prefix, token), moved)
        return chances

    def seen(self) -> Counts:
        counts = Counter(map(self.cell_of, self.texts.tokens))
        return np.array([float(counts[cell]) for cell in self.cells])

    def expected(self, variant: Variant = lossless) -> Counts:
        chances = np.array(list(self.chances(variant).values()))
        return len(self.texts.tokens) * np.where(chances < ROUNDING, 0, chances)


def _draft_length(num_tokens: int) -> int:
    """Draft tokens of a round that begins after `num_tokens`. The last token is never drafted."""
    return min(NUM_DRAFT, NUM_TOKENS - num_tokens - 1) or UNDRAFTED


def biased(p: Probs, q: Probs) -> Masses:
    """A fault that moves 1% of the probability from the likeliest token to the second."""
    moved, (first, second) = p.copy(), np.argsort(-p)[:2]
    share = min(0.01, p[first])
    moved[[first, second]] += [-share, share]
    return rejecting(moved, q, np.minimum(moved, q))


def check_joint(
    subject: Subject,
    work: Work,
    steps: Sequence[Place],
    draws: Draws,
    most_texts: int | None = None,
) -> Finding:
    """Compare the joint distribution of texts after the most telling places with the target's.

    Args:
        subject: target, drafter, sampling and rule.
        work: the time for this part.
        steps: places that the one-step part visited.
        draws: counts the drafts, for the part about declared distributions.
        most_texts: upper limit on texts. None for 6,000.
    """
    most = most_texts or TEXTS_PER_CONTEXT * NUM_CONTEXTS
    groups: list[Texts] = []
    count = 0
    # The first seeds drew the contexts. The texts have to be independent of them.
    first_seed = subject.seed + len(subject.prompts)  # those before drew the contexts
    for step in work.each(_most_telling(steps)):
        groups.append(Texts(subject, step.tokens, draws))
        # most / NUM_CONTEXTS, rounded up
        for _ in work.each(range(-(-most // NUM_CONTEXTS))):
            groups[-1].draw(first_seed + count)
            count += 1
    if not groups:
        return Finding(
            "not run",
            "The drafter proposed nothing at any place, so that there is nothing to test. "
            "Give prompts whose text repeats itself (--prompts).",
            {},
        )
    cells = [Cells(group) for group in groups]
    right, *faulty = (
        np.concatenate([one.expected(variant) for one in cells])
        for variant in (lossless, *VARIANTS.values())
    )
    faults = dict(zip(VARIANTS, faulty, strict=True))
    seen = np.concatenate([one.seen() for one in cells])
    numbers: dict[str, Any] = {
        "texts": count,
        "tokens_each": NUM_TOKENS,
        "contexts": len(groups),
        "cells": len(right),
        "draft_tokens": sum(group.drafted for group in groups),
        "accepted": sum(group.accepted for group in groups),
    }
    # The report says how small a bias this sample finds.
    off = np.concatenate([one.expected(biased) for one in cells])
    numbers |= {
        "trees": draws.trees if tree_rule_for(subject.rule) else 0,
        "power_against_bias": power(off, right),
        "texts_to_find_bias": math.ceil(count * growth_for(off, right, SURE)),
    }
    samples, aim = f"{count} texts of {NUM_TOKENS} tokens", "the target's distribution"
    diagnosis = partial(_diagnosis, cells, seen, faults)
    return judge(samples, aim, seen, right, faults, numbers, diagnosis)


def _most_telling(steps: Sequence[Place]) -> list[Place]:
    drafted = [s for s in steps if s.draft_probs is not None and len(s.tokens) > 1]
    return sorted(drafted, key=_tells, reverse=True)[:NUM_CONTEXTS]


def _tells(step: Place) -> float:
    """Smallest distance between the target's distribution and a fault's, over two tokens."""
    p, q = step.target_probs, step.draft_probs
    assert q is not None
    distances = []
    for accepted, replaced, bonus in (variant(p, q) for variant in VARIANTS.values()):
        # The bonus token comes only after NUM_DRAFT accepted tokens.
        second = float(accepted.sum()) ** NUM_DRAFT * distance(bonus, p)
        distances.append(distance(accepted + replaced, p) + second)
    return min(distances)


def _diagnosis(groups: Sequence[Cells], seen: Counts, faults: Mapping[str, Counts]) -> str:
    firsts = [(group.places[()][0], text[0]) for group in groups for text in group.texts.tokens]
    excluded = sorted({token for p, token in firsts if p[token] == 0})
    shape = f"tokens {excluded[:5]} came that the distribution excludes; " if excluded else ""
    chances = {fault: ChiSquare.of(seen, counts).p_value for fault, counts in faults.items()}
    # The fault that explains the counts best has the largest p-value.
    likest = max(chances, key=lambda name: chances[name])
    likeness = f"they look like: {likest} (p = {chances[likest]:.2g})."
    if chances[likest] < 0.01:
        likeness = "they are like none of the named faults."
    return (
        f"{shape}{likeness} The parts 'one-step distribution' and 'declared distribution' say "
        "whether it is the rule or the drafter."
    )
