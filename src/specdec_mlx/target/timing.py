"""What a pass takes by itself, on nothing that is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import mlx.core as mx


def time_of(run: Callable[[], mx.array | Sequence[mx.array]], times: int = 2) -> float:
    """Seconds that a pass takes: the quickest of so many after one to warm up."""
    seconds = []
    for _ in range(1 + times):
        mx.synchronize()
        began = perf_counter()
        mx.eval(run())
        seconds.append(perf_counter() - began)
    return min(seconds[1:])
