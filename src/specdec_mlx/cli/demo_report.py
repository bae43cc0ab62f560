"""What the demo says after: a line for each text and contender, and what the table comes to."""

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
from specdec_mlx.cli.demo_texts import Show
from specdec_mlx.cli.plan import Scene

IDENTICAL, TIE, DIFFERENT = VERDICTS = ("identical", "parts at a tie", "DIFFERENT")
"""Plain decoding's tokens; other ones from a place on where the target's two greatest logits are
equal up to rounding, which on a GPU may fall either way; other ones."""

WIDTH = 100
"""Columns of the lines beneath the table."""


@dataclass(frozen=True)
class Row:
    """A line of the table: one text by one contender.

    Attributes:
        text: id of the text.
        drafter: as on the command line.
        draft_length: the same.
        num_tokens: of the first run of it.
        speed: in times plain decoding's, median over the repeats; None where it was too short.
        tokens_per_pass: of the first run.
        accepted: draft tokens kept in it.
        drafted: draft tokens proposed in it.
        verdict: on its tokens, one of `VERDICTS`.
    """

    text: str
    drafter: str
    draft_length: str
    num_tokens: int
    speed: float | None
    tokens_per_pass: float
    accepted: int
    drafted: int
    verdict: str


def compare(model: nn.Module, scene: Scene, samples: Sequence[Sample]) -> list[Row]:
    """A row for each contender but plain decoding, with which it is compared repeat by repeat.

    Args:
        model: the target, asked how near a tie each difference is.
        scene: a text.
        samples: all that was written, this text among it.
    """
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
    """One contender's samples of a text in a line.

    Args:
        own: one for each repeat.
        bases: plain decoding's of the same text, by repeat.
        verdict: on their tokens, the worst of the repeats.
    """
    ratios = [
        base / pace
        for sample in own
        if (base := bases[sample.repeat].seconds_per_token) and (pace := sample.seconds_per_token)
    ]
    first = own[0]
    return Row(
        text=first.id,
        drafter=first.drafter,
        draft_length=first.draft_length,
        num_tokens=len(first.tokens),
        speed=statistics.median(ratios) if ratios else None,
        tokens_per_pass=len(first.tokens) / first.passes,
        accepted=first.accepted,
        drafted=first.drafted,
        verdict=verdict,
    )


def format_table(rows: Sequence[Row]) -> str:
    """The comparison as text, one line a row."""
    head = (
        f"{'text':<10}{'drafter':<15}{'K':<6}{'tokens':>6}  {'speed':<18}{'tokens a pass':>13}"
        f"{'accepted':>13}  text"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        speed = "too short to time" if row.speed is None else f"{row.speed:.2f} times plain"
        lines.append(
            f"{row.text:<10}{row.drafter:<15}{row.draft_length:<6}{row.num_tokens:>6}  "
            f"{speed:<18}{row.tokens_per_pass:>13.2f}"
            f"{f'{row.accepted} of {row.drafted}':>13}  {row.verdict}"
        )
    return "\n".join(lines)


def legend(rows: Sequence[Row], show: Show, samples: Sequence[Sample]) -> str:
    """What the table comes to, how to read it, and what it was measured on.

    Args:
        rows: of the table.
        show: what stands first in it.
        samples: of that show.
    """
    first = show.scenes[0]
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
        f"{describe_dtype(show.model)}, {blas}mlx {machine['mlx']}, mlx-lm {machine['mlx-lm']}.",
    ]
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores + 1:  # one is this program
        lines.append(f"Others use this machine too (load {load:.0f}): speeds vary between runs.")
    return "\n".join(textwrap.fill(line, WIDTH) for line in lines)


def _speeds(rows: Sequence[Row]) -> str:
    """The speeds of what a user gets who chooses nothing but a drafter."""
    shown = {row.text: row for row in reversed(rows) if row.draft_length == "auto" and row.speed}
    if not shown:
        return ""
    parts = [f"{text} {row.speed:.2f} ({row.drafter})" for text, row in reversed(shown.items())]
    return f"With auto, in times plain: {', '.join(parts)}. "
