"""The exact distribution of the next token after one step, over all possible drafts.

p and q come from the user's own models. `enumeration` has the formula.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from specdec_mlx.contracts import AcceptanceRule, rule_for
from specdec_mlx.lab.proof.enumeration import ByRule, total_variation
from specdec_mlx.lab.proof.report import Finding
from specdec_mlx.lab.proof.subject import Place, Probs, Subject, Work, walk
from specdec_mlx.rules import CoinRule, capped_ratio, residual

Masses = tuple[Probs, Probs, Probs]
Variant = Callable[[Probs, Probs], Masses]

RARE = 0.2
SHARPER = 0.7


def rejecting(p: Probs, q: Probs, accepted: Probs, replacement: Probs | None = None) -> Masses:
    """Accept draft tokens with these masses, and replace the others from the residual."""
    after = residual(p, q) if replacement is None else replacement
    # The rejected mass is 1 - sum(accepted). After a full draft the next token comes from p.
    return accepted, (1 - accepted.sum()) * after, p


def lossless(p: Probs, q: Probs) -> Masses:
    """Token-level rejection without a fault."""
    return rejecting(p, q, np.minimum(p, q))


def dropped(p: Probs, q: Probs) -> Masses:
    """A fault: a token drawn with a probability below 0.2 is dropped, and the draft ends there."""
    often = q >= RARE
    accepted = np.where(often, np.minimum(p, q), 0)
    # A rejected token is replaced from the residual, and a dropped token by plain decoding.
    replaced = (q * often - accepted).sum() * residual(p, q) + (q * ~often).sum() * p
    return accepted, replaced, p


DRAFT_FAULTS: dict[str, Callable[[Probs], Probs]] = {
    "declared at temperature 0.7": lambda q: at_temperature(q, 1 / SHARPER),
    "a drawn token dropped": lambda q: normalised(np.where(q >= RARE, q, 0), q),
}
"""A drafter's fault -> the distribution that tokens follow where q is declared."""

VARIANTS: dict[str, Variant] = {
    "residual replaced by p": lambda p, q: rejecting(p, q, np.minimum(p, q), p),
    "bonus at temperature 0.5": lambda p, q: (*lossless(p, q)[:2], at_temperature(p, 0.5)),
    "p and q swapped": lambda p, q: rejecting(p, q, q * capped_ratio(q, p), residual(q, p)),
    "lenience 1.2": lambda p, q: rejecting(p, q, np.minimum(1.2 * p, q)),
    "declared q other than the drawn": lambda p, q: rejecting(
        p, q, at_temperature(q, 1 / SHARPER) * capped_ratio(p, q)
    ),
    "a drawn token dropped": dropped,
}
"""A fault of rule or drafter -> masses of what is emitted with p and q."""


def at_temperature(probs: Probs, temp: float) -> Probs:
    powers = np.power(probs, 1 / temp, out=np.zeros_like(probs), where=probs > 0)
    return normalised(powers, probs)


def normalised(mass: Probs, otherwise: Probs) -> Probs:
    total = float(mass.sum())
    return mass / total if total > 0 else otherwise


STEPS = 16
TOLERANCE = 1e-9
MOST_TOKENS = 1500
"""Draft tokens that may be drawn in one place, the likeliest; the mass of the others is stated."""


def check_one_step(subject: Subject, work: Work, steps: list[Place]) -> Finding:
    """Compute the exact distribution of the next token at places along the target's own texts.

    Args:
        subject: target, drafter, sampling, rule and prompts.
        work: the time for this part.
        steps: receives the places, for the parts that follow.
    """
    seen: list[tuple[AcceptanceRule, StepResult]] = []
    for i, prompt in work.each(enumerate(subject.prompts)):
        for step in walk(replace(subject, seed=subject.seed + i), prompt, STEPS):
            steps.append(step)
            work.say(len(steps))
            rule = rule_for(subject.rule, step.draft)
            if isinstance(rule, CoinRule) and step.draft_probs is not None:
                seen.append((rule, masses_of(rule, step.target_probs, step.draft_probs)))
            # Half a text is walked in any case, so that there are places to test.
            if len(steps) > STEPS // 2 and not work.has_time():
                break
    num_drafts = sum(step.draft_probs is not None for step in steps)
    numbers: dict[str, Any] = {"places": len(steps), "with_a_draft": num_drafts}
    if num_drafts == 0:
        verdict = f"The drafter proposed nothing in {len(steps)} places, so there was nothing to "
        verdict += "verify. Give prompts whose text repeats itself (--prompts)."
        return Finding("not run", verdict, numbers)
    if not seen:
        verdict = "Only the target's own draws are emitted here (rule match or coupled), whatever "
        verdict += "is drafted; the joint distribution is tested below."
        return Finding("not applicable", verdict, numbers)
    *_, results = zip(*seen, strict=True)
    distances, bonus_distances, left_out, accepted, overlaps, _ = zip(*results, strict=True)
    numbers |= {
        "largest_total_variation": max(distances),
        "largest_of_the_token_after": max(bonus_distances),
        "draft_mass_left_out": max(left_out),
        "expected_acceptance": float(np.mean(accepted)),
        "sum_of_min_p_q": float(np.mean(overlaps)),
    }
    rule, worst = max(seen, key=lambda entry: entry[1].furthest)
    if worst.furthest < TOLERANCE:
        verdict = f"In {len(seen)} places the distribution of the emitted token, summed over every "
        return Finding("passed", f"{verdict}draft token, is the target's.", numbers)
    verdict = (
        f"Rule {rule.name!r} changes the distribution of the text by a total variation of "
        f"{worst.furthest:.2g}: this is {worst.fault or 'none of the named faults'}. Use "
        "rule='auto', or mend the rule."
    )
    return Finding("failed", verdict, numbers)


class StepResult(NamedTuple):
    """Result of a rule on all drafts of one token.

    Attributes:
        distance: total variation between the emitted token's distribution and p.
        bonus_distance: total variation of the token after an accepted draft.
        left_out: draft mass of tokens that were not enumerated.
        accepted: probability that the draft token is accepted.
        overlap: sum of min(p, q), the largest probability of a lossless rule.
        fault: the named fault that emits the same distribution, or None.
    """

    distance: float
    bonus_distance: float
    left_out: float
    accepted: float
    overlap: float
    fault: str | None

    @property
    def furthest(self) -> float:
        return max(self.distance, self.bonus_distance)


def masses_of(rule: CoinRule, target_probs: Probs, draft_probs: Probs) -> StepResult:
    """Distribution that a rule emits for p and q [V], with q cut to its likeliest tokens."""
    # Tokens outside both supports are never emitted, and the enumeration is over tokens.
    support = np.flatnonzero((target_probs > 0) | (draft_probs > 0))
    p, drawn = target_probs[support], draft_probs[support]
    likeliest = np.argsort(-drawn, kind="stable")[:MOST_TOKENS]
    q = np.zeros_like(drawn)
    q[likeliest] = drawn[likeliest]
    left_out = max(0.0, 1 - float(q.sum()))
    # The cut changes q, so the rule is tested on the cut q, for which it must be exact too.
    q = normalised(q, p)
    accepted, replaced, after = np.zeros_like(p), np.zeros_like(p), p
    # After the accepted token the target is p again, which stands for any distribution.
    deciding, rows = ByRule(rule), np.stack([p, p])
    for x in np.flatnonzero(q).tolist():
        for emitted, masses in deciding.outcomes(rows, (x,), q[None]):
            if not emitted:
                replaced += q[x] * masses
                continue
            # The bonus distribution is the same for each accepted token.
            after = after if accepted.any() else normalised(masses, p)
            accepted[x] = q[x] * masses.sum()
    faults = (
        name
        for name, variant in VARIANTS.items()
        if np.allclose((accepted, replaced, after), variant(p, q), atol=TOLERANCE)
    )
    return StepResult(
        total_variation(accepted + replaced, p),
        total_variation(after, p),
        left_out,
        float(accepted.sum()),
        float(np.minimum(p, q).sum()),
        next(faults, None),
    )
