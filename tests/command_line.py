"""Commands as a user runs them: in this process, which is quick, or in one of their own.

A test of a command is marked `@both_ways`. It then runs in this process always, and once more as a
process in the full run, which also sees what only a process shows: what is imported and when, and
what earlier commands leave behind.
"""

from __future__ import annotations

import io
import os
import runpy
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple, TextIO

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
    """What `python -m PROGRAM ARGUMENTS...` does.

    Args:
        arguments: of the command.
        stdin: all of its input.
        program: a module to run.
        env: variables of its environment, beside those of the tests.
    """
    command = [str(argument) for argument in arguments]
    return (_here if _way == "here" else _as_a_process)(program, command, stdin, env)


@contextmanager
def in_this_way(way: str) -> Iterator[None]:
    """Run commands as one of `WAYS` says."""
    global _way
    before, _way = _way, way
    try:
        yield
    finally:
        _way = before


def _as_a_process(program: str, arguments: list[str], stdin: str, env: dict[str, str]) -> Done:
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments],
        input=stdin,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def _here(program: str, arguments: list[str], stdin: str, env: dict[str, str]) -> Done:
    stdout, stderr = io.StringIO(), io.StringIO()
    as_it_is = _as_it_is_for_a_process(program, arguments, stdin, env, stderr)
    with as_it_is, redirect_stdout(stdout), redirect_stderr(stderr):
        status = _status(program)
    return Done(status, stdout.getvalue(), stderr.getvalue())


def _status(program: str) -> int:
    """Exit status of a module that is run as a program."""
    try:
        runpy.run_module(program, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


@contextmanager
def _as_it_is_for_a_process(
    program: str, arguments: list[str], stdin: str, env: dict[str, str], stderr: TextIO
) -> Iterator[None]:
    """Its arguments, input and environment; warnings go to stderr."""

    def show(message: Warning | str, *about: object, **more: object) -> None:
        print(f"warning: {message}", file=stderr)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr(sys, "argv", [program, *arguments])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        for name, value in env.items():
            patch.setenv(name, value)
        warnings.simplefilter("default")
        patch.setattr(warnings, "showwarning", show)
        yield
