"""Commands as a user runs them: in this process, which is quick, or in one of their own.

A test marked `@both_ways` runs once more as a process in the full run, which also sees what is
imported when, and what earlier commands leave behind: one or two for each part of a command.
"""

from __future__ import annotations

import io
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

from selection import FULL

WAYS = ["here", pytest.param("as a process", marks=FULL)]
both_ways = pytest.mark.usefixtures("way")

_way = "here"


class Done(NamedTuple):
    """A command that has ended."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: str | Path, stdin: str = "", program: str = "specdec_mlx", **env: str) -> Done:
    """`python -m PROGRAM ARGUMENTS...`, with all of its input and further environment variables."""
    command = [str(argument) for argument in arguments]
    if _way == "here":
        return _here(program, command, stdin, env)
    command, env = [sys.executable, "-m", program, *command], os.environ | env
    options = {"capture_output": True, "text": True, "timeout": 240}
    done = subprocess.run(command, input=stdin, env=env, check=False, **options)  # type: ignore[call-overload]
    return Done(done.returncode, done.stdout, done.stderr)


@contextmanager
def in_this_way(way: str) -> Iterator[None]:
    """Run commands as one of `WAYS` says."""
    global _way
    before, _way = _way, way
    try:
        yield
    finally:
        _way = before


def _here(program: str, arguments: list[str], stdin: str, env: dict[str, str]) -> Done:
    stdout, stderr = io.StringIO(), io.StringIO()

    def show(message: Warning | str, *about: object, **more: object) -> None:
        print(f"warning: {message}", file=stderr)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "argv", [program, *arguments])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in env.items():
            patch.setenv(name, value)
        warnings.simplefilter("default")
        patch.setattr(warnings, "showwarning", show)
        with redirect_stdout(stdout), redirect_stderr(stderr):
            status = _status(program)
    return Done(status, stdout.getvalue(), stderr.getvalue())


def _status(program: str) -> int:
    """Exit status of a module that is run as a program; signals are handled as before after it."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        runpy.run_module(program, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)
    return 0
