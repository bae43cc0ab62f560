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
from specdec_mlx.checks.variants import VARIANTS, Masses, normalised
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
        fault: the named fault that emits the same; None if there is none.
    """

    distance: float
    bonus_distance: float
    left_out: float
    kept: float
    fault: str | None

    @property
    def is_lossless(self) -> bool:
        """True if both distributions are the target's."""
        return max(self.distance, self.bonus_distance) < TOLERANCE


def check_one_step(subject: Subject, work: Work, steps: list[Step]) -> Part:
    """The exact distribution at places along texts of the target's own.

    Args:
        subject: what is checked.
        work: how long, and where to say how far it is.
        steps: filled with the places, for later parts.
    """
    seen: list[tuple[Step, Emitted]] = []
    for i, prompt in work.each(enumerate(subject.prompts)):
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
    kept, again, after = np.zeros(len(p)), np.zeros(len(p)), None
    order = np.argsort(-q, kind="stable")[:MOST_TOKENS]
    for x in order[q[order] > 0]:
        given = rows, np.array([x]), draft_rows
        chance = float(rule.accept_probs(*given)[0])
        kept[x] = q[x] * chance
        if chance < 1:
            again += q[x] * (1 - chance) * normalised(rule.next_probs(*given, 0), p)
        if chance > 0 and after is None:
            after = normalised(rule.next_probs(*given, 1), p)
    after = p if after is None else after
    left_out = max(0.0, 1 - float(q[order].sum()))
    too_often = float(np.maximum(0, kept + again - p).sum())
    too_seldom = float(np.maximum(0, p - kept - again).sum()) - left_out
    distances = max(too_often, too_seldom), total_variation(after, p)
    fault = None
    if max(distances) >= TOLERANCE:
        fault = _fault((kept, again, after), p, q, TOLERANCE + left_out)
    return Emitted(*distances, left_out, float(kept.sum()), fault)


def _fault(masses: Masses, p: Probs, q: Probs, tolerance: float) -> str | None:
    """The named fault that emits these masses."""
    for name, variant in VARIANTS.items():
        pairs = zip(masses, variant(p, q), strict=True)
        if all(np.allclose(ours, theirs, atol=tolerance) for ours, theirs in pairs):
            return name
    return None


def _judge(subject: Subject, steps: list[Step], seen: list[tuple[Step, Emitted]]) -> Part:
    num_drafts = sum(step.draft_probs is not None for step in steps)
    numbers: dict[str, Any] = {"places": len(steps), "with_a_draft": num_drafts}
    if num_drafts == 0:
        verdict = f"The drafter proposed nothing in {len(steps)} places, so there was nothing to "
        verdict += "verify. Give prompts whose text repeats itself (--prompts)."
        return Part(NAME, "not run", verdict, numbers)
    if not seen:
        verdict = "Only the target's own draws are emitted here (rule match or coupled), whatever "
        verdict += "is drafted; the joint distribution is tested below."
        return Part(NAME, "not applicable", verdict, numbers)
    results = [result for _, result in seen]
    numbers |= {
        "largest_total_variation": max(result.distance for result in results),
        "largest_of_the_token_after": max(result.bonus_distance for result in results),
        "draft_mass_left_out": max(result.left_out for result in results),
        "expected_acceptance": float(np.mean([result.kept for result in results])),
        "sum_of_min_p_q": float(np.mean([1 - step.distance for step, _ in seen])),
    }
    if all(result.is_lossless for result in results):
        verdict = f"In {len(seen)} places the distribution of the emitted token, summed over every "
        return Part(NAME, "passed", f"{verdict}draft token, is the target's.", numbers)
    step, worst = max(seen, key=lambda entry: entry[1].distance + entry[1].bonus_distance)
    rule = subject.rule_for(step.draft)
    assert rule is not None
    likeness = f"this is {worst.fault}" if worst.fault else "this is none of the named faults"
    verdict = (
        f"Rule {rule.name!r} changes the distribution of the text by a total variation of "
        f"{max(worst.distance, worst.bonus_distance):.2g}: {likeness}. Use rule='auto', or mend "
        "the rule."
    )
    return Part(NAME, "failed", verdict, numbers)
