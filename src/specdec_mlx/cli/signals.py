"""Signals to the command: its server ends with exit code 0, whatever is imported at the moment.

Imported before all else, so it imports nothing that takes a while.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys


def command_line() -> list[str] | None:
    """Arguments of this process if it is `specdec-mlx` or `python -m specdec_mlx`, else None."""
    program, *arguments = sys.argv or [""]
    if (
        program == "-m"
    ):  # until Python has found the module, which only the original ones name
        module = sys.orig_argv[-len(sys.argv)].removeprefix("-m")
        is_server = module == "specdec_mlx.server"
        if is_server or module == "specdec_mlx":
            return ["server", *arguments] if is_server else arguments
        return None
    stem = os.path.splitext(os.path.basename(program))[0]
    return arguments if stem == "specdec-mlx" else None


def end_server_in_peace() -> None:
    """Let signals end the process with code 0 if it is `specdec-mlx server`.

    From now on, until the server has its own handlers, and while Python ends.
    """
    if (command_line() or [])[:1] == ["server"]:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os._exit(0))
            atexit.register(signal.signal, number, signal.SIG_IGN)
