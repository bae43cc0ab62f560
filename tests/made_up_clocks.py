"""A machine that is made up: passes and draft steps take what a table says, at an unsteady pace."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat
from math import inf
from typing import Any

from mlx_lm.generate import generation_stream

import specdec_mlx as sd
from benchmarks.recorded_drafts import RecordedDrafter
from specdec_mlx.contracts import Draft, Evidence, GoesOn, RoundRecord, Step
from specdec_mlx.draft_length.costs import MILDEST, Curve
from specdec_mlx.draft_length.drafting import Drafting
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import Auto, make_draft_length
from specdec_mlx.lab.bench.replay import RecordedTarget, greedy_context
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.loop import Generation, RoundClock
from specdec_mlx.sequence import SequenceState
from specdec_mlx.stats.account import SpeculationStats

Pace = Callable[[float], tuple[float, float]]
"""How many times longer everything takes at a time, and until when, in seconds."""

PLAIN, STEP, HOST = 0.003, 0.1, 0.0001
"""Seconds of a plain pass; a draft step's, in plain passes; seconds to build either on the host."""


def in_turn(spans: Iterable[tuple[float, float]]) -> Pace:
    """A pace for so many seconds, then the next one; the last one for ever."""
    paces, seconds = zip(*spans, strict=True)
    ends = [*accumulate(seconds)]
    ends[-1] = inf

    def pace(time: float) -> tuple[float, float]:
        i = bisect_right(ends, time)
        return paces[i], ends[i]

    return pace


def changing(seed: int) -> Pace:
    """1 or 5 times as long, for 100 ms or so each."""
    coins = random.Random(seed)
    return in_turn((5.0 if i % 2 else 1.0, coins.uniform(0.05, 0.15)) for i in range(1000))


def stalling(seed: int) -> Pace:
    """Nothing at all for 5 to 40 ms, every 20 ms or so."""
    coins, spans = random.Random(seed), list[tuple[float, float]]()
    for _ in range(2000):
        spans += [(1.0, coins.expovariate(1 / 0.02)), (1e9, coins.uniform(0.005, 0.04))]
    return in_turn(spans)


def memory_taken(seed: int) -> Iterator[float]:
    """How many times longer each pass takes in turn: 1 in seven of ten, else 10 to 50, in bursts.

    So it was on a machine whose host took memory away and gave it back.
    """
    coins = random.Random(seed)
    while True:
        for longest, least, most in ((14, 1.0, 1.0), (6, 10.0, 50.0)):
            for _ in range(coins.randint(1, longest)):
                yield coins.uniform(least, most)


PACES: dict[str, Callable[[int], Pace]] = {
    "steady": lambda seed: in_turn([(1.0, inf)]),
    "slower once": lambda seed: in_turn([(1.0, 0.06), (4.0, inf)]),
    "changing": changing,
    "stalls": stalling,
}


@dataclass
class Machine:
    """A device that works through what was launched, in order. seconds: the host's time.

    times: how many times longer each pass takes than at its pace. free_at: when the device will
    have done all of it. copied: costs of passes over drafts of a look-up, None for those of others.
    """

    pace: Pace
    passes: Curve = MILDEST
    step: float = STEP
    times: Iterator[float] = field(default_factory=lambda: repeat(1.0))
    seconds: float = 0.0
    free_at: float = 0.0
    ends: deque[float] = field(default_factory=deque)
    copied: Curve | None = None

    def now(self) -> float:
        """The time."""
        return self.seconds

    def after(self, start: float, work: float) -> float:
        """The time at which work is done that takes so many seconds at pace 1."""
        while True:
            times, until = self.pace(start)
            if start + work * times <= until:
                return start + work * times
            work -= (until - start) / times
            start = until

    def launch(self, work: float) -> float:
        """Build and launch; the time at which the device will have done it."""
        self.seconds = self.after(self.seconds, HOST)
        self.free_at = self.after(max(self.seconds, self.free_at), work)
        return self.free_at

    def wait_until(self, time: float) -> None:
        self.seconds = max(self.seconds, time)


@dataclass
class MadeUpClock(RoundClock):
    """A clock of rounds on such a machine."""

    machine: Any = None

    def record(self, *round_: Any) -> RoundRecord:
        self.machine.wait_until(self.machine.ends.popleft())
        return super().record(*round_)


class TimedTarget(RecordedTarget):
    """A recorded target whose passes take time on a machine."""

    machine: Machine

    def launch(self, pending: Any, draft: Draft, *more: Any) -> Any:
        machine, is_drafted = self.machine, any(one.confidence for one in draft.evidence or ())
        passes = machine.passes if is_drafted else machine.copied or machine.passes
        work = PLAIN * passes(len(pending) + len(draft)) * next(machine.times)
        self.machine.ends.append(self.machine.launch(work))
        return super().launch(pending, draft, *more)


class TimedDrafter(sd.Drafter):
    """A recorded draft model whose steps take time on a machine; or it is never right."""

    def __init__(self, drafter: RecordedDrafter, machine: Machine, is_right: bool = True) -> None:
        self.drafter, self.machine, self.is_right = drafter, machine, is_right

    @property
    def key(self) -> str:
        return self.drafter.key

    def begin(self, prompt: Any, context: Any) -> TimedSession:
        return TimedSession(self.drafter.begin(prompt, context), self.machine, self.is_right)


class TimedSession(sd.Session):
    def __init__(self, session: Any, machine: Machine, is_right: bool) -> None:
        self.session, self.machine, self.is_right = session, machine, is_right

    def observe(self, tokens: Any) -> None:
        self.session.observe(tokens)

    def propose(self, limit: int) -> Draft:
        return self.propose_while(limit, lambda evidence: Step.GO_ON)

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        def timed(evidence: list[Evidence]) -> Step:
            self.machine.wait_until(self.machine.launch(PLAIN * self.machine.step))
            return goes_on(evidence)

        draft = self.session.propose_while(limit, timed)
        return draft if self.is_right else Draft([-1] * len(draft), evidence=draft.evidence)


def written(
    text: RecordedText,
    drafter: sd.Drafter,
    length: int | str,
    machine: Machine,
    tuning: Tuning | None = None,
    is_right: bool = True,
) -> SpeculationStats:
    """The account of a recorded text as it is written on a machine; it is the target's own.

    The steps of recorded drafts take time on the machine, and those of other drafters take none.
    """
    policy = make_draft_length(length, tuning)
    if isinstance(policy, Auto):
        policy.prices.clock = machine.now
    target = TimedTarget(text, 10_000)
    target.machine = machine
    sequence = SequenceState(list(text.prompt), len(text.prompt), len(text.generated))
    options: dict[str, Any] = {"keeps_cache": False, "stream": generation_stream}
    if isinstance(drafter, RecordedDrafter):
        drafter = TimedDrafter(drafter, machine, is_right)
    drafting = Drafting(drafter, policy, target, sequence, **options)
    stats = SpeculationStats()
    clock = MadeUpClock(now=machine.now, machine=machine)
    context = greedy_context(10_000)
    generation = Generation(target, sequence, drafting, context, stats=stats, clock=clock)
    with closing(generation.run()) as tokens:
        emitted = [token.token for token in islice(tokens, len(text.generated))]
    assert emitted == text.generated
    return stats
