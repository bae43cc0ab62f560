"""Signals to the server's command: the process ends with exit code 0, whatever it is importing.

This is called before everything else, so that it imports nothing slow.
"""

from __future__ import annotations

import atexit
import os
import signal


def end_in_peace() -> None:
    """Let signals end this process with code 0."""
    # This counts until the server has its own handlers, and again while Python ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(0))
        atexit.register(signal.signal, number, signal.SIG_IGN)
