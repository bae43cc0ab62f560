"""The race that the speeds of heads come from: each generation is charged with its own passes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from benchmarks import heads
from specdec_mlx.loop import Token


class Device:
    """A clock that moves when something waits for the device, which works on what was launched."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queued = 0.0

    def clock(self) -> float:
        return self.now

    def wait(self, stream: object = None) -> None:
        self.now += self.queued
        self.queued = 0.0

    def generation(self, seconds: float, num_tokens: int) -> Iterator[Token]:
        """A token a pass; the next pass is under way when a token is handed out."""
        self.queued += seconds
        for left in reversed(range(num_tokens)):
            self.wait()
            self.queued += seconds if left else 0.0
            yield Token(0, "plain", None, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_generation_pays_for_the_passes_that_it_launched(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that is left at the end of a turn as well, whoever comes next."""
    device, costs, num_tokens = Device(), (1.0, 5.0), 2 + 3 * heads.TURN
    monkeypatch.setattr(heads.time, "perf_counter", device.clock)
    monkeypatch.setattr(heads.mx, "synchronize", device.wait)
    runs = heads.race([device.generation(costs[i], num_tokens) for i in order])
    assert [run.seconds / (num_tokens - 2) for run in runs] == [costs[i] for i in order]


def test_each_generation_comes_after_each_other_one() -> None:
    """What ran before is felt in the processor's caches, and so it is no one's own burden."""
    turns: list[int] = []

    def generation(index: int) -> Iterator[Token]:
        for number in range(1 + 20 * heads.TURN):
            if number % heads.TURN == 1:
                turns.append(index)
            yield Token(0, "plain", None, None, 0)  # type: ignore[arg-type]

    heads.race([generation(i) for i in range(3)])
    follows = set(pairwise(turns))
    assert {(a, b) for a in range(3) for b in range(3) if a != b} <= follows
    assert [turns.count(i) for i in range(3)] == [20, 20, 20]
