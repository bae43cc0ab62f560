"""The demo's table: a line for each text and contender, and a summary below it."""

from __future__ import annotations

import os
import statistics
import textwrap
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.bench.contenders import PLAIN, Contender
from specdec_mlx.bench.identity import find_differences
from specdec_mlx.bench.machine import describe_dtype, describe_machine
from specdec_mlx.bench.prompts import Task
from specdec_mlx.bench.timing import TURN_TOKENS, Run, Sample, Settings

PLAIN_PASSES = 5  # plain passes that a median is taken over
PROMPT_POSITIONS = 32  # positions of the pass that a prompt's cost is estimated from
LEAST_TOKENS = 3 * TURN_TOKENS  # shortest text whose speed can be told: a heuristic
MARGIN = 1.25  # time that turns are given, relative to the last ones: a heuristic


@dataclass
class Budget:
    """Seconds that may be spent from now on, by a clock in seconds."""

    seconds: float
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._began = self.clock()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._began

    @property
    def left(self) -> float:
        """Seconds that remain; below 0 where too much was spent."""
        return self.seconds - self.spent

    def part(self, seconds: float) -> Budget:
        """A budget of its own, of no more than what is left."""
        return Budget(min(seconds, self.left), self.clock)

    def enough_for_turns(self, expected: float) -> Callable[[], bool]:
        """True, when called before each turn of all, if there is time for it.

        The first turns are always taken; the second take `expected` seconds, later ones as the one
        before.
        """
        asked_at: list[float] = []

        def ask() -> bool:
            asked_at.append(self.spent)
            last = asked_at[-1] - asked_at[-2] if len(asked_at) > 2 else expected
            needed = MARGIN * last if len(asked_at) > 1 else 0.0
            return self.left > 0 and needed <= self.left

        return ask


@dataclass(frozen=True)
class Pace:
    """Seconds of a model's plain pass, and of each position of a prompt, on this machine."""

    step: float
    position: float


@dataclass(frozen=True)
class Scene:
    """A text that is written in several ways side by side, plain decoding the first."""

    task: Task
    contenders: Sequence[Contender]
    pace: Pace
    max_tokens: int
    end_tokens: Collection[int] = ()

    def seconds(self, num_tokens: int) -> float:
        """Time for so many tokens, were all contenders as slow as plain decoding."""
        prompt = len(self.task.prompt) * self.pace.position
        return len(self.contenders) * (prompt + min(num_tokens, self.max_tokens) * self.pace.step)

    def runs(self, repeat: int) -> list[Run]:
        """All contenders, before their first token."""
        settings = Settings(self.max_tokens, end_tokens=self.end_tokens)
        return [Run(contender, self.task, settings, repeat) for contender in self.contenders]


def fit(scenes: Sequence[Scene], seconds: float) -> list[Scene]:
    """As many scenes as there is time for: fewer contenders first, then scenes, never none."""
    shown = list(scenes)
    if sum(scene.seconds(LEAST_TOKENS) for scene in shown) > seconds:
        shown = [replace(scene, contenders=scene.contenders[:2]) for scene in shown]
    while len(shown) > 1 and sum(scene.seconds(LEAST_TOKENS) for scene in shown) > seconds:
        shown.pop()
    return shown


def measure_pace(model: nn.Module) -> Pace:
    """The pace of a model: the median of a few plain passes, and one of a prompt."""
    cache = make_prompt_cache(model)

    def seconds(num_positions: int) -> float:
        began = time.perf_counter()
        mx.eval(model(mx.zeros((1, num_positions), mx.int32), cache=cache))
        return time.perf_counter() - began

    seconds(1)  # the first pass reads the weights
    prompt = seconds(PROMPT_POSITIONS)
    step = statistics.median(seconds(1) for _ in range(PLAIN_PASSES))
    return Pace(step, prompt / PROMPT_POSITIONS)


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
    bases = {s.repeat: s.seconds_per_token for s in own if s.drafter == PLAIN}
    rows = []
    for contender in scene.contenders[1:]:
        theirs = [sample for sample in own if sample.key == contender.key]
        paces = [(bases[sample.repeat], sample.seconds_per_token) for sample in theirs]
        ratios = [base / pace for base, pace in paces if base and pace]
        speed = statistics.median(ratios) if ratios else None
        rows.append(Row(theirs[0], speed, verdicts[contender.key]))
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """The comparison as text, one line a row."""
    line = "{:<10}{:<15}{:<6}{:>6}  {:<18}{:>13}{:>13}  {}".format
    head = line("text", "drafter", "K", "tokens", "speed", "tokens a pass", "accepted", "text")
    lines = [head, "-" * len(head)]
    for row in rows:
        run, num_tokens = row.first, len(row.first.tokens)
        speed = "too short to time" if row.speed is None else f"{row.speed:.2f} times plain"
        counts = f"{num_tokens / run.passes:.2f}", f"{run.accepted} of {run.drafted}"
        whose = run.id, run.drafter, run.draft_length, num_tokens
        lines.append(line(*whose, speed, *counts, row.verdict))
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
