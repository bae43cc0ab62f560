"""How much of the demo fits into its time: what a pass costs here, and what there is room for."""

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

PLAIN_PASSES = 5
"""Plain passes that a median is taken over."""

PROMPT_POSITIONS = 32
"""Positions of the pass that a prompt's cost is estimated from."""

LEAST_TOKENS = 3 * TURN_TOKENS
"""Length of a text below which no speed can be told: a heuristic."""

MARGIN = 1.25
"""Time that turns are given, relative to what the last ones took: a heuristic."""


@dataclass
class Budget:
    """Seconds that may be spent, from now on.

    Attributes:
        seconds: how many.
        clock: in seconds, from any start.
    """

    seconds: float
    clock: Callable[[], float] = time.perf_counter
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        """Start."""
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


@dataclass
class EnoughTime:
    """Whether there is time for everybody's next turn; asked before each.

    The first turns read the prompts and are always taken. The second take what was expected, and
    each later one as long as the one before it; a machine's pace changes, hence the margin.

    Attributes:
        budget: what there is.
        expected: seconds of everybody's second turn.
    """

    budget: Budget
    expected: float
    _num_asked: int = 0
    _asked_at: float = 0.0

    def __call__(self) -> bool:
        """Ask."""
        now = self.budget.spent
        if self._num_asked >= 2:
            self.expected = now - self._asked_at
        self._asked_at = now
        self._num_asked += 1
        needed = MARGIN * self.expected if self._num_asked > 1 else 0.0
        return self.budget.left > 0 and needed <= self.budget.left


@dataclass(frozen=True)
class Pace:
    """What a model's passes cost on this machine.

    Attributes:
        step: seconds of a pass over one position.
        position: seconds of each position of a prompt.
    """

    step: float
    position: float


@dataclass(frozen=True)
class Scene:
    """A text that is written in several ways side by side.

    Attributes:
        task: its prompt.
        contenders: plain decoding, then what is compared with it, the most important first.
        pace: what the model's passes cost here.
        max_tokens: most tokens of the text.
        end_tokens: ids that end it.
    """

    task: Task
    contenders: Sequence[Contender]
    pace: Pace
    max_tokens: int
    end_tokens: Collection[int] = ()

    def seconds(self, num_tokens: int) -> float:
        """What so many tokens take, were all contenders as slow as plain decoding."""
        prompt = len(self.task.prompt) * self.pace.position
        return len(self.contenders) * (prompt + min(num_tokens, self.max_tokens) * self.pace.step)

    @property
    def least_seconds(self) -> float:
        """What a text takes that is just long enough."""
        return self.seconds(LEAST_TOKENS)

    @property
    def most_seconds(self) -> float:
        """What the whole text takes."""
        return self.seconds(self.max_tokens)

    def runs(self, repeat: int) -> list[Run]:
        """All contenders, before their first token."""
        settings = Settings(self.max_tokens, end_tokens=self.end_tokens)
        return [Run(contender, self.task, settings, repeat) for contender in self.contenders]


def fit(scenes: Sequence[Scene], seconds: float) -> list[Scene]:
    """As much of the scenes as there is time for, if every text may be cut short.

    Where that is not enough, each keeps one contender beside plain decoding; then scenes are left
    out, the last one first. The first one always stays, and may take longer after all.
    """
    shown = list(scenes)
    if sum(scene.least_seconds for scene in shown) > seconds:
        shown = [replace(scene, contenders=scene.contenders[:2]) for scene in shown]
    while len(shown) > 1 and sum(scene.least_seconds for scene in shown) > seconds:
        shown.pop()
    return shown


def measure_pace(model: nn.Module) -> Pace:
    """Seconds of a plain pass, median of a few, and of a position of a prompt."""
    cache = make_prompt_cache(model)

    def seconds(num_positions: int) -> float:
        began = time.perf_counter()
        mx.eval(model(mx.zeros((1, num_positions), mx.int32), cache=cache))
        return time.perf_counter() - began

    seconds(1)  # the first pass reads the weights
    prompt = seconds(PROMPT_POSITIONS)
    step = statistics.median(seconds(1) for _ in range(PLAIN_PASSES))
    return Pace(step, prompt / PROMPT_POSITIONS)
