"""Greedy texts against plain decoding, wide passes against single ones, a head's readings."""

from __future__ import annotations

import math
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import mlx.nn as nn

from specdec_mlx.bench.contenders import plain
from specdec_mlx.bench.summary import EXCUSED_GAP, first_difference, top_two_gap
from specdec_mlx.checks.report import Part, Status
from specdec_mlx.checks.subject import Subject, Work
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.target.exactness import ProbeReport, probe

WIDTHS_NAME = "widths"
GREEDY_NAME = "greedy text"
VARIATIONS_NAME = "head's variants"
NUM_TOKENS = 64
FEWEST_TOKENS = 8
POSITIONS_OF_PROBE = 25
TIE_FACTOR = 4
"""Logits so many times the probe's largest difference apart are still a near tie: each of the two
may move, and earlier rounding has moved the caches. A heuristic."""

VARIED_TOKENS = 48  # of each text
LEAST_GAIN = 0.05  # further share of accepted tokens that is worth a word

STANDARD_ERRORS = 3.0
"""Gain of another reading, in standard errors, that is worth a word: several are tried."""


def check_widths(model: nn.Module, work: Work, probed: list[ProbeReport]) -> Part:
    """The probe, which `probed` takes; past the window only if its prefill fits into the time."""
    started = time.perf_counter()
    report = probe(model, past_window=False)
    prefill = (time.perf_counter() - started) / POSITIONS_OF_PROBE * (report.window or 0)
    looks_past = report.window is not None and work.has_time(prefill)
    report = probe(model) if looks_past else report
    probed.append(report)
    passes = [
        {
            "after": row.context,
            "positions": row.width,
            "largest_difference": row.max_difference,
            "spread": row.spread,
            "argmax_flips": row.argmax_flips,
        }
        for row in report.rows
    ]
    status: Status = "passed" if report.exact else "failed"
    how = "bit for bit" if all(row.bitwise for row in report.rows) else "up to rounding"
    verdict = f"A pass over several positions gives the logits of single ones, {how}."
    if not report.exact:
        verdict = "A pass over several positions gives other logits than one by one, beyond "
        verdict += "rounding. specdec_mlx drafts nothing there, so the text stays right and is no "
        verdict += "sooner; see specdec-mlx probe."
    if report.window is not None and not looks_past:
        status = "not run" if report.exact else "failed"
        verdict += f" Past the window of {report.window} tokens was not looked: it takes about "
        verdict += f"{prefill:.0f} s. Give more time (--budget), or run specdec-mlx probe."
    return Part(WIDTHS_NAME, status, verdict, {"caches": list(report.caches), "passes": passes})


def check_greedy(subject: Subject, work: Work, probed: ProbeReport | None = None) -> Part:
    """Every prompt in turn, as far as time goes, at least one; probed: passes' differences."""
    gap = EXCUSED_GAP
    if probed is not None:
        gap = max([gap, *(TIE_FACTOR * row.max_difference for row in probed.rows if row.exact)])
    differences: list[dict[str, Any]] = []
    texts = tokens = drafted = 0
    for i, prompt in work.each(enumerate(subject.prompts)):
        expected = _plain(subject, prompt, work)
        got = subject.greedy_text(prompt, len(expected))
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
    for first in differences:
        if first["verdict"] == "fault":
            verdict = (
                f"The text of prompt {first['prompt']} parts from plain decoding's at token "
                f"{first['token']}, where the two greatest logits are {first['top_two_gap']:.2g} "
                "apart: no rounding explains that. Run specdec-mlx probe; if it passes, the rule "
                "or a cache is at fault."
            )
            return Part(GREEDY_NAME, "failed", verdict, numbers)
    if drafted == 0:
        verdict = "Nothing was drafted, so nothing was compared. Give other prompts (--prompts)."
        return Part(GREEDY_NAME, "not run", verdict, numbers)
    ties, skipped = len(differences), len(subject.prompts) - texts
    verdict = f"{texts - ties} of {texts} texts: the same tokens as by plain decoding"
    if ties:
        verdict += f"; {ties} part from it at a near tie, which rounding may turn either way"
    if skipped:
        verdict += f" ({skipped} prompts had no time)"
    return Part(GREEDY_NAME, "passed", f"{verdict}.", numbers)


def _plain(subject: Subject, prompt: list[int], work: Work) -> list[int]:
    """By mlx-lm's own loop, up to the end of the text or of the time."""
    tokens: list[int] = []
    with closing(plain(subject.model).start(prompt, NUM_TOKENS, 0)) as steps:
        for step in steps:
            tokens.append(step.token)
            if step.token in subject.end_tokens:
                break
            if len(tokens) >= FEWEST_TOKENS and not work.has_time():
                break
    return tokens


def check_variations(subject: Subject, drafter: HeadDrafter, work: Work) -> Part:
    """Greedy texts with the head as it was read, and read otherwise.

    The text is the target's own in any case, so the part passes; the verdict says what does better.
    """
    subject = replace(subject, drafter=replace(drafter, greedy=True))
    variations = drafter.head.variations()
    readings: list[Any] = [nullcontext, *(variation.applied for variation in variations)]
    accepted = [_Accepted()] * len(readings)
    texts = 0
    for prompt in work.each(subject.prompts):
        for i, reading in enumerate(readings):
            with reading():
                stats = subject.greedy_text(prompt, VARIED_TOKENS)[-1].stats
            drafted, kept = accepted[i]
            accepted[i] = _Accepted(drafted + stats.drafted, kept + stats.accepted)
        texts += 1
    as_read, *others = accepted
    pairs = list(zip(variations, others, strict=True))
    numbers: dict[str, Any] = {
        "texts": texts,
        "accepted_as_read": as_read.share,
        "accepted_otherwise": {variation.name: other.share for variation, other in pairs},
    }
    if not as_read.drafted:
        verdict = "Nothing was drafted. Give other prompts (--prompts)."
        return Part(VARIATIONS_NAME, "not run", verdict, numbers)
    better = [(other.share, v) for v, other in pairs if other.is_better_than(as_read)]
    found = "no other reading of its files does better"
    if better:
        share, best = max(better, key=lambda pair: pair[0])
        found = f"{share:.0%} would be with {best.name}: {best.advice}"
    verdict = f"{as_read.share:.0%} of its tokens are accepted, and {found}."
    return Part(VARIATIONS_NAME, "passed", verdict, numbers)


class _Accepted(NamedTuple):
    """Drafted and accepted tokens of some texts."""

    drafted: int = 0
    accepted: int = 0

    @property
    def share(self) -> float:
        """Accepted tokens, of drafted ones."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def is_better_than(self, other: _Accepted) -> bool:
        """True if by more than chance, and by enough to be worth a word."""
        if not self.drafted:
            return False
        pooled = (self.accepted + other.accepted) / (self.drafted + other.drafted)
        spread = pooled * (1 - pooled) * (1 / self.drafted + 1 / other.drafted)
        return self.share - other.share > max(LEAST_GAIN, STANDARD_ERRORS * math.sqrt(spread))
