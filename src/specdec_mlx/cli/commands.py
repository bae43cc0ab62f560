"""The command line: `specdec-mlx demo | generate | drafters | ...`.

A command's module is imported when the command runs, so that the list, `--version` and errors in a
command's name come at once.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import specdec_mlx
from specdec_mlx.arguments import Parser, did_you_mean, installed, load
from specdec_mlx.cli import backends
from specdec_mlx.cli.signals import end_in_peace
from specdec_mlx.errors import LogitsError, MissingBackendError

OWN_COMMANDS = {
    "generate": "mlx-lm's generate command, with drafters",
    "chat": "mlx-lm's chat command, with drafters",
    "benchmark": "mlx-lm's benchmark command, with drafters",
    "drafters": "the drafters there are, or what to take for a model",
    "doctor": "what is installed here, and is it right?",
    "memory": "what was written before, to draft from",
}
"""The library's commands, and what each is for."""

MLX_LM_COMMANDS = "generate", "chat", "benchmark"
"""Commands that take all of mlx-lm's flags, and ours beside them."""

GROUP = "specdec_mlx.commands"
"""Entry points, each a module with `add_arguments` and `main`, or with `run` for all arguments. Its
docstring begins with the command and what it is for."""

PROGRAM = "specdec-mlx"


def run_process() -> int:
    """Run the process `specdec-mlx`. A server handles signals from its first import on."""
    if sys.argv[1:2] == ["server"]:
        end_in_peace()
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2, with a line on stderr, for an error."""
    name, *flags = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        status = _run(name, flags)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (*(ValueError, RuntimeError, OSError), *(LogitsError, MissingBackendError)) as error:
        if sys.stdout.isatty() and name in ("generate", "chat"):
            print()  # ends the line of a text that was streamed
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2


def _run(name: str, flags: Sequence[str]) -> int:
    if name in ("-h", "--help"):
        print(overview())
    elif name == "--version":
        print(specdec_mlx.__version__)
    elif name in MLX_LM_COMMANDS:
        backends.require_mlx()
        from specdec_mlx.mlx_lm_plugin import run_command

        run_command(name, flags)
    elif name in commands():
        if name != "server":  # which imports MLX once its flags are right
            backends.require_mlx()
        module = module_of(name)
        if hasattr(module, "run"):
            module.run(flags)
            return 0
        return int(module.main(make_parser(name).parse_args(flags)))
    else:
        problem = f"there is no command {name!r}.{did_you_mean(name, commands())}"
        if commands().keys() == OWN_COMMANDS.keys():
            problem += " Others are not registered here: install specdec-mlx again."
        print(f"{PROGRAM}: {problem}\nAll commands: {PROGRAM} --help", file=sys.stderr)
        return 2
    return 0


def overview() -> str:
    lines = [f"{PROGRAM} COMMAND: speculative decoding for mlx-lm, the same text, sooner.", ""]
    lines += [f"  {name:<13}{text}" for name, text in sorted(commands().items())]
    return "\n".join([*lines, "", f"{PROGRAM} COMMAND --help lists the command's flags."])


def commands() -> dict[str, str]:
    entries = installed(GROUP, "command", OWN_COMMANDS)
    return OWN_COMMANDS | {name: purpose_of(one) for name, one in entries.items()}


def purpose_of(entry: EntryPoint) -> str:
    """Purpose of a command, from its module's docstring. The module is not imported."""
    try:
        spec = find_spec(entry.module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text(encoding="utf-8")
        first = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    except Exception as error:  # another package's fault must not break the list
        return f"cannot be loaded: {error}"
    return first.partition("`: ")[2].rstrip(".")


def make_parser(name: str) -> Parser:
    description = f"{commands()[name]}.".replace("?.", "?").capitalize()
    parser = Parser(prog=f"{PROGRAM} {name}", description=description)
    module_of(name).add_arguments(parser)
    return parser


def module_of(name: str) -> Any:
    if name in OWN_COMMANDS:
        return import_module(f"specdec_mlx.cli.{name}")
    return load(installed(GROUP, "command", OWN_COMMANDS)[name], "command")
