"""How a command ends: what is kept is saved after SIGTERM as it is after Ctrl-C.

A service manager stops a server with SIGTERM, which ends a Python process on the spot: no `finally`
is run, and what a memory, the automatic draft length or `--online` learned last is lost.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt in here, and end the process quietly if nobody caught it.

    Not on several ranks: one that waits for the others in the middle of a pass would never come to
    raise it. Not outside of the main thread, and not where somebody has a handler of his own.
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


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def _interrupt(number: int, frame: Any) -> None:
    raise _Terminated
