"""The exact distribution of one step: what is emitted after a text, whatever was drafted.

Both p and q are those of the user's own models; see `law` for the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from specdec_mlx.contracts import AcceptanceRule, rule_for
from specdec_mlx.lab.proof.law import ByRule, total_variation
from specdec_mlx.lab.proof.report import Finding
from specdec_mlx.lab.proof.subject import Place, Probs, Subject, Work, walk
from specdec_mlx.rules import CoinRule, capped_ratio, residual

Masses = tuple[Probs, Probs, Probs]
Variant = Callable[[Probs, Probs], Masses]

RARE = 0.2
SHARPER = 0.7


def rejecting(p: Probs, q: Probs, kept: Probs, replacement: Probs | None = None) -> Masses:
    """Draft tokens kept with these masses, and else a replacement, by default a residual one."""
    after = residual(p, q) if replacement is None else replacement
    return kept, (1 - kept.sum()) * after, p


def lossless(p: Probs, q: Probs) -> Masses:
    """Token-level rejection as it should be."""
    return rejecting(p, q, np.minimum(p, q))


def dropped(p: Probs, q: Probs) -> Masses:
    """A token drawn with a chance below 0.2 is taken back, and the round has no draft."""
    often = q >= RARE
    kept = np.where(often, np.minimum(p, q), 0)
    again = (q * often - kept).sum() * residual(p, q) + (q * ~often).sum() * p
    return kept, again, p


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
    """The distribution sharper (temp < 1) or flatter."""
    powers = np.power(probs, 1 / temp, out=np.zeros_like(probs), where=probs > 0)
    return normalised(powers, probs)


def normalised(mass: Probs, otherwise: Probs) -> Probs:
    """Mass as a distribution; where there is none, another one."""
    total = float(mass.sum())
    return mass / total if total > 0 else otherwise


STEPS = 16
TOLERANCE = 1e-9
MOST_TOKENS = 1500
"""Draft tokens that may be drawn in one place, the likeliest; the mass of the others is stated."""


def check_one_step(subject: Subject, work: Work, steps: list[Place]) -> Finding:
    """The exact distribution at places along texts of the target's own, which `steps` takes."""
    seen: list[tuple[AcceptanceRule, StepResult]] = []
    for i, prompt in work.each(enumerate(subject.prompts)):
        for step in walk(replace(subject, seed=subject.seed + i), prompt, STEPS):
            steps.append(step)
            work.say(len(steps))
            rule = rule_for(subject.rule, step.draft)
            if isinstance(rule, CoinRule) and step.draft_probs is not None:
                seen.append((rule, masses_of(rule, step.target_probs, step.draft_probs)))
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
    distances, bonus_distances, left_out, kept, overlaps, _ = zip(*results, strict=True)
    numbers |= {
        "largest_total_variation": max(distances),
        "largest_of_the_token_after": max(bonus_distances),
        "draft_mass_left_out": max(left_out),
        "expected_acceptance": float(np.mean(kept)),
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

    distance: total variation of what is emitted from p; bonus_distance: of the token after a draft
    accepted whole. left_out: draft mass of tokens that were not drawn. kept: chance that the draft
    token is kept. overlap: sum of min(p, q), the largest lossless chance. fault: the named fault
    that emits the same, or None.
    """

    distance: float
    bonus_distance: float
    left_out: float
    kept: float
    overlap: float
    fault: str | None

    @property
    def furthest(self) -> float:
        """The larger distance."""
        return max(self.distance, self.bonus_distance)


def masses_of(rule: CoinRule, target_probs: Probs, draft_probs: Probs) -> StepResult:
    """What a rule emits with p and q [V], q cut to its likeliest tokens."""
    support = np.flatnonzero((target_probs > 0) | (draft_probs > 0))
    p, drawn = target_probs[support], draft_probs[support]
    likeliest = np.argsort(-drawn, kind="stable")[:MOST_TOKENS]
    q = np.zeros_like(drawn)
    q[likeliest] = drawn[likeliest]
    left_out = max(0.0, 1 - float(q.sum()))
    q = normalised(q, p)
    kept, again, after = np.zeros_like(p), np.zeros_like(p), p
    deciding, rows = ByRule(rule), np.stack([p, p])
    for x in np.flatnonzero(q).tolist():
        for emitted, masses in deciding.outcomes(rows, (x,), q[None]):
            if not emitted:
                again += q[x] * masses
                continue
            after = after if kept.any() else normalised(masses, p)
            kept[x] = q[x] * masses.sum()
    faults = (
        name
        for name, variant in VARIANTS.items()
        if np.allclose((kept, again, after), variant(p, q), atol=TOLERANCE)
    )
    return StepResult(
        total_variation(kept + again, p),
        total_variation(after, p),
        left_out,
        float(kept.sum()),
        float(np.minimum(p, q).sum()),
        next(faults, None),
    )
