"""Commands run in this process, as they would be typed; no interpreter has to start."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

from specdec_mlx.cli import commands as cli


class Done(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


def run(*arguments: object, stdin: str = "", **env: str) -> Done:
    """`specdec-mlx` with these arguments, input and changes of the environment."""
    return _done(lambda: cli.main([str(argument) for argument in arguments]), [], stdin, env)


def run_stock(name: str, *arguments: object, stdin: str = "") -> Done:
    """mlx-lm's own command of that name."""
    module: Any = importlib.import_module(f"mlx_lm.{name}")
    return _done(module.main, [f"mlx_lm.{name}", *map(str, arguments)], stdin, {})


def _done(main: Callable[[], object], argv: list[str], stdin: str, env: dict[str, str]) -> Done:
    """Run with standard input, output and errors replaced; a SystemExit is the command's end."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        patch.object(sys, "stdin", io.StringIO(stdin)),
        patch.object(sys, "argv", argv or sys.argv),
        patch.dict(os.environ, env),
    ):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
    return Done(code if isinstance(code, int) else 0, out.getvalue(), err.getvalue())
