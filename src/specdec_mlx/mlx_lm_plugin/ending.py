"""SIGTERM ends a command as Ctrl-C does: memories, tunings and learned weights are saved."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in this block, and end the process if nobody caught it.

    Only in the main thread, without another handler, and on one rank: one of several would not come
    to it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    is_alone = mx.distributed.init().size() == 1
    if not (is_main and is_alone and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL):
        yield
        return
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    except _Terminated:
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: Any) -> None:
    raise _Terminated
