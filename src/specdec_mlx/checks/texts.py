"""Greedy texts against mlx-lm's plain decoding, and passes over several positions against one.

And whether a trained head's files were read as they were meant: what each other reading accepts.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from typing import Any

import mlx.nn as nn

from specdec_mlx.bench.contenders import plain
from specdec_mlx.bench.identity import EXCUSED_GAP, first_difference, top_two_gap
from specdec_mlx.checks.report import Part, Status
from specdec_mlx.checks.subject import Subject, Work, speculative
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.target.exactness import ProbeReport, probe
from specdec_mlx.types import Drafter, all_drafters

WIDTHS_NAME = "widths"
GREEDY_NAME = "greedy text"
VARIATIONS_NAME = "head's variants"
NUM_TOKENS = 64
FEWEST_TOKENS = 8
POSITIONS_OF_PROBE = 25
TIE_FACTOR = 4
"""How many times the probe's largest difference two logits may be apart and still be a near tie:
each of the two may move, and what was rounded before has moved the caches. A heuristic."""

VARIED_TOKENS = 48
"""Of each text."""

LEAST_GAIN = 0.05
"""Further share of accepted tokens that is worth a word."""

STANDARD_ERRORS = 3.0
"""By which the other reading has to be better: several are tried."""


def check_widths(model: nn.Module, work: Work) -> tuple[Part, ProbeReport]:
    """The probe; past the window only if its prefill fits into the time."""
    started = time.perf_counter()
    report = probe(model, past_window=False)
    part = _judge_widths(report)
    if report.window is None:
        return part, report
    prefill = (time.perf_counter() - started) / POSITIONS_OF_PROBE * report.window
    if work.has_time_for(prefill):
        report = probe(model)
        return _judge_widths(report), report
    verdict = (
        f"{part.verdict} Past the window of {report.window} tokens was not looked: it takes "
        f"about {prefill:.0f} s. Give more time (--budget), or run specdec-mlx probe."
    )
    status: Status = "failed" if part.status == "failed" else "not run"
    return replace(part, status=status, verdict=verdict), report


def _judge_widths(report: ProbeReport) -> Part:
    names = ("after", "positions", "largest_difference", "spread", "argmax_flips")
    passes = [
        (row.context, row.width, row.max_difference, row.spread, row.argmax_flips)
        for row in report.rows
    ]
    numbers = {
        "caches": list(report.caches),
        "passes": [dict(zip(names, row, strict=True)) for row in passes],
    }
    if not report.exact:
        verdict = "A pass over several positions gives other logits than one by one, beyond "
        verdict += "rounding. specdec_mlx drafts nothing there, so the text stays right and is no "
        verdict += "sooner; see specdec-mlx probe."
        return Part(WIDTHS_NAME, "failed", verdict, numbers)
    same = all(row.bitwise for row in report.rows)
    how = "bit for bit" if same else "up to rounding"
    verdict = f"A pass over several positions gives the logits of single ones, {how}."
    return Part(WIDTHS_NAME, "passed", verdict, numbers)


def check_greedy(subject: Subject, work: Work, probed: ProbeReport | None = None) -> Part:
    """Every prompt in turn, as far as time goes; at least one.

    Args:
        subject: what is checked.
        work: how long, and where to say how far it is.
        probed: how much passes differ on this machine; None if that was not measured.
    """
    gap = EXCUSED_GAP
    if probed is not None:
        gap = max([gap, *(TIE_FACTOR * row.max_difference for row in probed.rows if row.exact)])
    differences: list[dict[str, Any]] = []
    texts = tokens = drafted = 0
    for i, prompt in work.each(enumerate(subject.prompts)):
        expected = _plain(subject, prompt, work)
        got = speculative(subject, prompt, len(expected))
        texts, tokens = texts + 1, tokens + len(expected)
        drafted += got[-1].stats.drafted
        work.say(f"{texts} texts")
        position = first_difference([item.token for item in got], expected)
        if position is not None:
            found = top_two_gap(subject.model, prompt, position)
            verdict = "near tie" if found <= gap else "fault"
            differences.append(
                {"prompt": i, "token": position, "top_two_gap": found, "verdict": verdict}
            )
    numbers = {
        "texts": texts,
        "tokens": tokens,
        "draft_tokens": drafted,
        "near_tie_below": gap,
        "differences": differences,
    }
    return _judge_greedy(numbers, len(subject.prompts))


def _judge_greedy(numbers: dict[str, Any], num_prompts: int) -> Part:
    faults = [entry for entry in numbers["differences"] if entry["verdict"] == "fault"]
    texts, drafted = numbers["texts"], numbers["draft_tokens"]
    if faults:
        first = faults[0]
        verdict = (
            f"The text of prompt {first['prompt']} parts from plain decoding's at token "
            f"{first['token']}, where the two greatest logits are {first['top_two_gap']:.2g} "
            "apart: no rounding explains that. Run specdec-mlx probe; if it passes, the rule or a "
            "cache is at fault."
        )
        return Part(GREEDY_NAME, "failed", verdict, numbers)
    if drafted == 0:
        verdict = "Nothing was drafted, so nothing was compared. Give other prompts (--prompts)."
        return Part(GREEDY_NAME, "not run", verdict, numbers)
    ties = len(numbers["differences"])
    same = f"{texts - ties} of {texts} texts: the same tokens as by plain decoding"
    rest = (
        f"; {ties} part from it at a near tie, which rounding may turn either way" if ties else ""
    )
    skipped = f" ({num_prompts - texts} prompts had no time)" if texts < num_prompts else ""
    verdict = f"{same}{rest}{skipped}."
    return Part(GREEDY_NAME, "passed", verdict, numbers)


def _plain(subject: Subject, prompt: list[int], work: Work) -> list[int]:
    """By mlx-lm's own loop, up to the end of the text or of the time."""
    tokens: list[int] = []
    with closing(plain(subject.model).start(prompt, NUM_TOKENS, 0)) as steps:
        for step in steps:
            tokens.append(step.token)
            if step.token in subject.end_tokens:
                break
            if len(tokens) >= FEWEST_TOKENS and not work.has_time:
                break
    return tokens


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
    for prompt in work.each(subject.prompts):
        as_read.add(subject, greedy, prompt)
        for variation, acceptance in others.values():
            acceptance.add(subject, greedy, prompt, variation.applied())
        texts += 1
    numbers: dict[str, Any] = {
        "texts": texts,
        "accepted_as_read": as_read.share,
        "accepted_otherwise": {name: accepted.share for name, (_, accepted) in others.items()},
    }
    if not as_read.drafted:
        verdict = "Nothing was drafted. Give other prompts (--prompts)."
        return Part(VARIATIONS_NAME, "not run", verdict, numbers)
    better = {
        acceptance.share: variation
        for variation, acceptance in others.values()
        if acceptance.is_better_than(as_read)
    }
    found = "no other reading of its files does better"
    if better:
        best = max(better)
        found = f"{best:.0%} would be with {better[best].name}: {better[best].advice}"
    verdict = f"{as_read.share:.0%} of its tokens are accepted, and {found}."
    return Part(VARIATIONS_NAME, "passed", verdict, numbers)


class _Acceptance:
    """Drafted and accepted tokens of some texts."""

    def __init__(self) -> None:
        self.drafted = self.accepted = 0

    def add(
        self,
        subject: Subject,
        drafter: Drafter,
        prompt: list[int],
        reading: AbstractContextManager[Any] | None = None,
    ) -> None:
        """Those of another text, decoded greedily in this reading of the files."""
        with reading or nullcontext():
            stats = speculative(replace(subject, drafter=drafter), prompt, VARIED_TOKENS)[-1].stats
        self.drafted += stats.drafted
        self.accepted += stats.accepted

    @property
    def share(self) -> float:
        """Of drafted tokens, accepted ones."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def is_better_than(self, other: _Acceptance) -> bool:
        """True if by more than chance, and by enough to be worth a word."""
        if not self.drafted:
            return False
        pooled = (self.accepted + other.accepted) / (self.drafted + other.drafted)
        spread = pooled * (1 - pooled) * (1 / self.drafted + 1 / other.drafted)
        return self.share - other.share > max(LEAST_GAIN, STANDARD_ERRORS * math.sqrt(spread))
