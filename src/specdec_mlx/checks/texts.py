"""Greedy texts against mlx-lm's plain decoding, and passes over several positions against one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import mlx.nn as nn

from specdec_mlx.bench.contenders import plain
from specdec_mlx.bench.identity import EXCUSED_GAP, first_difference, top_two_gap
from specdec_mlx.checks.report import Part, Status
from specdec_mlx.checks.subject import Subject, Work
from specdec_mlx.loop import speculate
from specdec_mlx.target.exactness import ProbeReport, probe

WIDTHS_NAME = "widths"
GREEDY_NAME = "greedy text"
NUM_TOKENS = 64
FEWEST_TOKENS = 8
POSITIONS_OF_PROBE = 25
TIE_FACTOR = 4
"""How many times the probe's largest difference two logits may be apart and still be a near tie:
each of the two may move, and what was rounded before has moved the caches. A heuristic."""


def check_widths(model: nn.Module, work: Work) -> tuple[Part, ProbeReport]:
    """The probe; past the window only if its prefill fits into the time."""
    started = time.perf_counter()
    report = probe(model, past_window=False)
    seconds = time.perf_counter() - started
    prefill = seconds / POSITIONS_OF_PROBE * (report.window or 0)
    if report.window is None:
        return _judge_widths(report), report
    if not work.has_time_for(prefill):
        part = _judge_widths(report)
        verdict = (
            f"{part.verdict} Past the window of {report.window} tokens was not looked: it takes "
            f"about {prefill:.0f} s. Give more time (--budget), or run specdec-mlx probe."
        )
        status: Status = "failed" if part.status == "failed" else "not run"
        return Part(WIDTHS_NAME, status, verdict, part.numbers), report
    report = probe(model)
    return _judge_widths(report), report


def _judge_widths(report: ProbeReport) -> Part:
    numbers = {
        "caches": list(report.caches),
        "passes": [
            {
                "after": row.context,
                "positions": row.width,
                "largest_difference": row.max_difference,
                "spread": row.spread,
                "argmax_flips": row.argmax_flips,
            }
            for row in report.rows
        ],
    }
    if not report.exact:
        verdict = (
            "A pass over several positions gives other logits than one by one, beyond rounding. "
            "specdec_mlx drafts nothing there, so the text stays right and is no sooner; see "
            "specdec-mlx probe."
        )
        return Part(WIDTHS_NAME, "failed", verdict, numbers)
    same = all(row.bitwise for row in report.rows)
    how = "bit for bit" if same else "up to rounding"
    verdict = f"A pass over several positions gives the logits of single ones, {how}."
    return Part(WIDTHS_NAME, "passed", verdict, numbers)


def check_greedy(subject: Subject, work: Work, probed: ProbeReport | None) -> Part:
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
    for i, prompt in enumerate(subject.prompts):
        if i > 0 and not work.has_time:
            break
        expected = _plain(subject, prompt, work)
        got, num_drafted = _speculative(subject, prompt, len(expected))
        texts, tokens, drafted = texts + 1, tokens + len(expected), drafted + num_drafted
        work.say(f"{texts} texts")
        position = first_difference(got, expected)
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


def _speculative(subject: Subject, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], int]:
    """As many tokens by ours, and how many were drafted."""
    items = list(
        speculate(
            subject.model,
            prompt,
            subject.drafter,
            max_tokens=num_tokens,
            seed=subject.seed,
            rule=subject.rule,
            draft_length=subject.draft_length,
            tokenizer=subject.tokenizer,
        )
    )
    return [item.token for item in items], items[-1].stats.drafted
