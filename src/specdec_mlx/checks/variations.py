"""Whether a trained head's files were read as they were meant: what each other reading accepts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from specdec_mlx.checks.report import Part
from specdec_mlx.checks.subject import Subject, Work
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.loop import speculate
from specdec_mlx.types import Drafter, all_drafters

NAME = "head's variants"

NUM_TOKENS = 48
"""Of each text."""

LEAST_GAIN = 0.05
"""Further share of accepted tokens that is worth a word."""

STANDARD_ERRORS = 3.0
"""By which the other reading has to be better: several are tried."""


def heads_of(drafter: Drafter) -> list[HeadDrafter]:
    """The trained heads among what a drafter is made of."""
    return [part for part in all_drafters(drafter) if isinstance(part, HeadDrafter)]


def check_variations(subject: Subject, drafter: HeadDrafter, work: Work) -> Part:
    """Greedy texts with the head as it was read, and read otherwise.

    The text is the target's own in any case, so that the part passes even if another reading would
    do better; the verdict then says which.

    Args:
        subject: what is checked.
        drafter: the head.
        work: the time for it.
    """
    greedy = replace(drafter, greedy=True)
    as_read = _Acceptance()
    others = {one.name: (one, _Acceptance()) for one in greedy.head.variations()}
    texts = 0
    for prompt in subject.prompts:
        if texts and not work.has_time:
            break
        as_read.add(subject, greedy, prompt)
        for variation, acceptance in others.values():
            with variation.applied():
                acceptance.add(subject, greedy, prompt)
        texts += 1
    numbers: dict[str, Any] = {
        "texts": texts,
        "accepted_as_read": as_read.share,
        "accepted_otherwise": {name: accepted.share for name, (_, accepted) in others.items()},
    }
    if not as_read.drafted:
        return Part(
            NAME, "not run", "Nothing was drafted. Give other prompts (--prompts).", numbers
        )
    better = [
        (acceptance.share, variation)
        for variation, acceptance in others.values()
        if acceptance.is_better_than(as_read)
    ]
    share = f"{as_read.share:.0%} of its tokens are accepted"
    if not better:
        verdict = f"{share}, and no other reading of its files does better."
        return Part(NAME, "passed", verdict, numbers)
    best, variation = max(better, key=lambda found: found[0])
    verdict = f"{share}, and {best:.0%} would be with {variation.name}: {variation.advice}."
    return Part(NAME, "passed", verdict, numbers)


class _Acceptance:
    """Drafted and accepted tokens of some texts."""

    def __init__(self) -> None:
        """None yet."""
        self.drafted = 0
        self.accepted = 0

    def add(self, subject: Subject, drafter: Drafter, prompt: list[int]) -> None:
        """Those of another text, decoded greedily."""
        stats = None
        for token in speculate(
            subject.model,
            prompt,
            drafter,
            max_tokens=NUM_TOKENS,
            draft_length=subject.draft_length,
            tokenizer=subject.tokenizer,
        ):
            stats = token.stats
        if stats is not None:
            self.drafted += stats.drafted
            self.accepted += stats.accepted

    @property
    def share(self) -> float:
        """Of drafted tokens, accepted ones."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def is_better_than(self, other: _Acceptance) -> bool:
        """Whether by more than chance, and by enough to be worth a word."""
        if not self.drafted:
            return False
        pooled = (self.accepted + other.accepted) / (self.drafted + other.drafted)
        spread = pooled * (1 - pooled) * (1 / self.drafted + 1 / other.drafted)
        gain = self.share - other.share
        return gain > max(LEAST_GAIN, STANDARD_ERRORS * math.sqrt(spread))
