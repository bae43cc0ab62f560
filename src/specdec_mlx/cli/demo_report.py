"""The demo's table: a line for each text and contender, and a summary below it."""

from __future__ import annotations

import os
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.bench.contenders import PLAIN
from specdec_mlx.bench.identity import find_differences
from specdec_mlx.bench.machine import describe_dtype, describe_machine
from specdec_mlx.bench.timing import Sample
from specdec_mlx.cli.plan import Scene

IDENTICAL, TIE, DIFFERENT = VERDICTS = ("identical", "parts at a tie", "DIFFERENT")
"""Plain decoding's tokens; other ones from a place on where the target's two greatest logits are
equal up to rounding, which on a GPU may fall either way; other ones."""

WIDTH = 100  # columns of the lines beneath the table


@dataclass(frozen=True)
class Row:
    """A line of the table: one text by one contender.

    speed: in times plain decoding's, median over the repeats, or None. verdict: the worst of
    `VERDICTS`.
    """

    first: Sample
    speed: float | None
    verdict: str


def compare(model: nn.Module, scene: Scene, samples: Sequence[Sample]) -> list[Row]:
    """A row for each contender but plain decoding, with which it is compared repeat by repeat."""
    own = [sample for sample in samples if sample.id == scene.task.id]
    verdicts = dict.fromkeys((sample.key for sample in own), IDENTICAL)
    for repeat in {sample.repeat for sample in own}:
        beside = [replace(sample, repeat=0) for sample in own if sample.repeat == repeat]
        for difference in find_differences(model, [scene.task], beside):
            found = TIE if difference.excused else DIFFERENT
            verdicts[difference.key] = max(found, verdicts[difference.key], key=VERDICTS.index)
    bases = {sample.repeat: sample for sample in own if sample.drafter == PLAIN}
    return [
        make_row([s for s in own if s.key == contender.key], bases, verdicts[contender.key])
        for contender in scene.contenders[1:]
    ]


def make_row(own: Sequence[Sample], bases: Mapping[int, Sample], verdict: str) -> Row:
    """The row of one contender's samples, one a repeat; `bases` are plain decoding's, by repeat."""
    ratios = [
        base / pace
        for sample in own
        if (base := bases[sample.repeat].seconds_per_token) and (pace := sample.seconds_per_token)
    ]
    return Row(own[0], statistics.median(ratios) if ratios else None, verdict)


def format_table(rows: Sequence[Row]) -> str:
    """The comparison as text, one line a row."""
    head = (
        f"{'text':<10}{'drafter':<15}{'K':<6}{'tokens':>6}  {'speed':<18}{'tokens a pass':>13}"
        f"{'accepted':>13}  text"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        run, num_tokens = row.first, len(row.first.tokens)
        speed = "too short to time" if row.speed is None else f"{row.speed:.2f} times plain"
        lines.append(
            f"{run.id:<10}{run.drafter:<15}{run.draft_length:<6}{num_tokens:>6}  "
            f"{speed:<18}{num_tokens / run.passes:>13.2f}"
            f"{f'{run.accepted} of {run.drafted}':>13}  {row.verdict}"
        )
    return "\n".join(lines)


def legend(rows: Sequence[Row], model: nn.Module, first: Scene, samples: Sequence[Sample]) -> str:
    """The outcome, how to read the table, and the machine."""
    paces = [s.seconds_per_token for s in samples if s.drafter == PLAIN and s.id == first.task.id]
    step = statistics.median([pace for pace in paces if pace] or [first.pace.step])
    num_same = sum(row.verdict == IDENTICAL for row in rows)
    num_runs = 1 + max(sample.repeat for sample in samples)
    machine = describe_machine()
    blas = f"{machine['blas']}, " if mx.default_device() == mx.cpu else ""
    lines = [
        f"{_speeds(rows)}{num_same} of {len(rows)} texts are plain mlx-lm's, token by token.",
        "speed: tokens a second from the first token to the last, over those of plain mlx-lm "
        f"({1 / step:.1f} a second, {first.task.id}), which took turns with it; "
        f"{'one run' if num_runs == 1 else f'median of {num_runs} runs'}.",
        "K: draft length, most tokens drafted for a pass; auto, the default, drafts where it pays.",
        f"Machine: {machine['processor']}, {machine['cores']} cores, {machine['device']}, "
        f"{describe_dtype(model)}, {blas}mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}.",
    ]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:  # one is this program
        lines.append(f"Others use this machine too (load {load:.0f}): speeds vary between runs.")
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _speeds(rows: Sequence[Row]) -> str:
    shown = {r.first.id: r for r in reversed(rows) if r.first.draft_length == "auto" and r.speed}
    if not shown:
        return ""
    parts = [f"{text} {row.speed:.2f} ({row.first.drafter})" for text, row in shown.items()]
    return f"With auto, in times plain: {', '.join(reversed(parts))}. "
