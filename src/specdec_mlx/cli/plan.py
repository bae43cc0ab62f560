"""The part of the demo that fits into its time, by the costs of passes on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.bench.contenders import Contender
from specdec_mlx.bench.prompts import Task
from specdec_mlx.bench.timing import TURN_TOKENS, Run, Settings

PLAIN_PASSES = 5  # plain passes that a median is taken over
PROMPT_POSITIONS = 32  # positions of the pass that a prompt's cost is estimated from
LEAST_TOKENS = 3 * TURN_TOKENS  # shortest text whose speed can be told: a heuristic
MARGIN = 1.25  # time that turns are given, relative to the last ones: a heuristic


@dataclass
class Budget:
    """Seconds that may be spent from now on, by a clock in seconds."""

    seconds: float
    clock: Callable[[], float] = time.perf_counter
    _began: float = field(init=False)

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
            nonlocal expected
            asked_at.append(self.spent)
            if len(asked_at) > 2:
                expected = asked_at[-1] - asked_at[-2]
            needed = MARGIN * expected if len(asked_at) > 1 else 0.0
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

    @property
    def least_seconds(self) -> float:
        """Time for a text that is just long enough."""
        return self.seconds(LEAST_TOKENS)

    def runs(self, repeat: int) -> list[Run]:
        """All contenders, before their first token."""
        settings = Settings(self.max_tokens, end_tokens=self.end_tokens)
        return [Run(contender, self.task, settings, repeat) for contender in self.contenders]


def fit(scenes: Sequence[Scene], seconds: float) -> list[Scene]:
    """As many scenes as there is time for: fewer contenders first, then scenes, never none."""
    shown = list(scenes)
    if sum(scene.least_seconds for scene in shown) > seconds:
        shown = [replace(scene, contenders=scene.contenders[:2]) for scene in shown]
    while len(shown) > 1 and sum(scene.least_seconds for scene in shown) > seconds:
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
