r"""The exact distribution of one step: what is emitted after a text, whatever was drafted.

For a draft token drawn from q, kept with chance a(x), and else replaced by a draw from r, what is
emitted follows $q(y) a(y) + \sum_x q(x) (1 - a(x)) r(y | x)$, the sum taken over every possible
draft token, and that must be the target's p. Both p and q are those of the user's own models; a and
r are asked of the rule, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec_mlx.checks.report import Part
from specdec_mlx.checks.subject import Probs, Step, Subject, Work, total_variation, walk
from specdec_mlx.rules.arithmetic import residual
from specdec_mlx.rules.coins import CoinRule

NAME = "one-step distribution"
STEPS = 16
TOLERANCE = 1e-9
MOST_TOKENS = 1500
"""Draft tokens gone through in one place, the likeliest first; the mass of the others is stated."""


@dataclass(frozen=True)
class Emitted:
    """What a rule makes of one draft token.

    Attributes:
        distance: total variation of what is emitted from p; where draft tokens were left out, at
            least that, and at most their mass more.
        bonus_distance: the same for the token after a draft accepted whole.
        left_out: mass of the draft tokens that were not gone through.
        kept: chance that the draft token is kept.
    """

    distance: float
    bonus_distance: float
    left_out: float
    kept: float

    @property
    def is_lossless(self) -> bool:
        """Whether both distributions are the target's."""
        return max(self.distance, self.bonus_distance) < TOLERANCE


def check_one_step(subject: Subject, work: Work, steps: list[Step]) -> Part:
    """The exact distribution at places along texts of the target's own.

    Args:
        subject: what is checked.
        work: how long, and where to say how far it is.
        steps: filled with the places, for later parts.
    """
    seen: list[tuple[Step, Emitted]] = []
    for i, prompt in enumerate(subject.prompts):
        if i > 0 and not work.has_time:
            break
        for step in walk(subject, prompt, STEPS, subject.seed + i):
            steps.append(step)
            work.say(f"{len(steps)} places")
            rule = subject.rule_for(step.draft)
            if rule is not None and step.draft_probs is not None:
                seen.append((step, emitted(rule, step.target_probs, step.draft_probs)))
            if len(steps) > STEPS // 2 and not work.has_time:
                break
    return _judge(subject, steps, seen)


def emitted(rule: CoinRule, target_probs: Probs, draft_probs: Probs) -> Emitted:
    """Go through the draft tokens, the likeliest first.

    Args:
        rule: what decides about a draft of one token.
        target_probs: [V] p, float64.
        draft_probs: [V] q, float64.
    """
    support = np.flatnonzero((target_probs > 0) | (draft_probs > 0))
    p, q = target_probs[support], draft_probs[support]
    rows, draft_rows = np.stack([p, p]), q[None]
    mass, kept = np.zeros(len(p)), 0.0
    bonus_distance: float | None = None
    order = np.argsort(-q, kind="stable")[:MOST_TOKENS]
    for x in order[q[order] > 0]:
        token = np.array([x])
        chance = float(rule.accept_probs(rows, token, draft_rows)[0])
        mass[x] += q[x] * chance
        kept += q[x] * chance
        if chance < 1:
            mass += q[x] * (1 - chance) * _drawn(rule.next_probs(rows, token, draft_rows, 0))
        if chance > 0 and bonus_distance is None:
            after = _drawn(rule.next_probs(rows, token, draft_rows, 1))
            bonus_distance = total_variation(after, p)
    left_out = max(0.0, 1 - float(q[order].sum()))
    too_often = float(np.maximum(0, mass - p).sum())
    too_seldom = float(np.maximum(0, p - mass).sum()) - left_out
    return Emitted(max(too_often, too_seldom), bonus_distance or 0.0, left_out, kept)


def _drawn(probs: Probs) -> Probs:
    """The distribution that a draw from `probs` follows, whatever they add up to."""
    distribution: Probs = probs / probs.sum()
    return distribution


def _judge(subject: Subject, steps: list[Step], seen: list[tuple[Step, Emitted]]) -> Part:
    num_drafts = sum(step.draft_probs is not None for step in steps)
    numbers: dict[str, Any] = {"places": len(steps), "with_a_draft": num_drafts}
    if num_drafts == 0:
        return Part(
            NAME,
            "not run",
            f"The drafter proposed nothing in {len(steps)} places, so there was nothing to verify. "
            "Give prompts whose text repeats itself (--prompts).",
            numbers,
        )
    if not seen:
        return Part(
            NAME,
            "not applicable",
            "Only the target's own draws are emitted here (rule match or coupled), whatever is "
            "drafted; the joint distribution is tested below.",
            numbers,
        )
    results = [result for _, result in seen]
    worst = max(seen, key=lambda entry: entry[1].distance + entry[1].bonus_distance)
    numbers |= {
        "largest_total_variation": max(result.distance for result in results),
        "largest_of_the_token_after": max(result.bonus_distance for result in results),
        "draft_mass_left_out": max(result.left_out for result in results),
        "expected_acceptance": float(np.mean([result.kept for result in results])),
        "sum_of_min_p_q": float(np.mean([1 - step.distance for step, _ in seen])),
    }
    if all(result.is_lossless for result in results):
        return Part(
            NAME,
            "passed",
            f"In {len(seen)} places the distribution of the emitted token, summed over every draft "
            "token, is the target's.",
            numbers,
        )
    rule = subject.rule_for(worst[0].draft)
    assert rule is not None
    return Part(NAME, "failed", _diagnosis(rule, *worst), numbers)


def _diagnosis(rule: CoinRule, step: Step, result: Emitted) -> str:
    """What is wrong with a rule, from where it is most wrong, and what to do."""
    assert step.draft_probs is not None
    p, q = step.target_probs, step.draft_probs
    fault = _bonus_fault(p, result) or _accept_fault(rule, p, q) or _residual_fault(rule, p, q)
    size = max(result.distance, result.bonus_distance)
    return (
        f"Rule {rule.name!r} changes the distribution of the text by a total variation of "
        f"{size:.2g}: {fault} Use rule='auto', or mend the rule."
    )


def _bonus_fault(p: Probs, result: Emitted) -> str | None:
    if result.bonus_distance < TOLERANCE:
        return None
    return (
        "the bonus token, after a draft accepted whole, is not drawn from the target's own "
        "distribution (at another temperature, perhaps)."
    )


def _accept_fault(rule: CoinRule, p: Probs, q: Probs) -> str | None:
    """Against min(1, p/q), at all tokens that both distributions allow."""
    tokens = np.flatnonzero((p > 0) & (q > 0))[:MOST_TOKENS]
    if not len(tokens):
        return None
    rows, draft_rows = np.stack([p, p]), q[None]
    chances = np.array([rule.accept_probs(rows, np.array([x]), draft_rows)[0] for x in tokens])
    right = np.minimum(1, p[tokens] / q[tokens])
    swapped = np.minimum(1, q[tokens] / p[tokens])
    if np.allclose(chances, right, atol=TOLERANCE):
        return None
    if np.allclose(chances, swapped, atol=TOLERANCE):
        return "p and q have changed places: a draft token is kept with chance min(1, q/p)."
    if (chances > right + TOLERANCE).any() and (chances >= right - TOLERANCE).all():
        return "more draft tokens are kept than min(1, p/q) allows."
    return "draft tokens are not kept with chance min(1, p/q)."


def _residual_fault(rule: CoinRule, p: Probs, q: Probs) -> str:
    rows, x = np.stack([p, p]), np.array([int(np.argmax(q - p))])
    drawn_from = _drawn(rule.next_probs(rows, x, q[None], 0))
    due = residual(p, q)
    if total_variation(drawn_from, p) < TOLERANCE < total_variation(due, p):
        return "after a rejection a token of p is drawn, where one of norm(max(0, p - q)) is due."
    return "after a rejection the token is not drawn from norm(max(0, p - q))."
