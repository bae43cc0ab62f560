"""The command line: `specdec-mlx demo | generate | drafters | ...`.

A command's module is imported when the command is run: the list, `--version` and what is wrong with
a command's name come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import specdec_mlx
from specdec_mlx.arguments import Parser, did_you_mean
from specdec_mlx.errors import LogitsError

COMMANDS = {
    "demo": "plain against speculative, on real text",
    "generate": "mlx-lm's generate command, with drafters",
    "chat": "mlx-lm's chat command, with drafters",
    "server": "a server for agents and chats",
    "drafters": "the drafters there are, or what to take for a model",
    "doctor": "what is installed here, and is it right?",
    "check": "is it lossless on this model, machine and setting?",
    "probe": "is a pass over several positions exact here?",
    "bench": "speed and identity on many prompts, interleaved",
    "benchmark": "mlx-lm's benchmark command, with drafters",
    "replay": "score drafters on recorded texts, offline",
    "memory": "what was written before, to draft from",
    "train": "train a head or a draft model for a target",
    "new-drafter": "a package for a drafter of your own",
}
MLX_LM_COMMANDS = "generate", "chat", "benchmark"
"""Commands that take all of mlx-lm's flags, and ours beside them."""

LAB_COMMANDS = "demo", "check", "probe", "bench", "replay", "train", "new-drafter"

PROGRAM = "specdec-mlx"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, 2 with one line on stderr where it cannot be done."""
    name, *flags = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        return _run(name, flags)
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError, OSError, LogitsError) as error:
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
        from specdec_mlx.mlx_lm_plugin import run_command

        run_command(name, flags)
    elif name == "server":
        from specdec_mlx.server.command import run_server

        run_server(flags)
    elif name in COMMANDS:
        args = make_parser(name).parse_args(flags)
        return int(_module(name).main(args))
    else:
        wrong = f"there is no command {name!r}.{did_you_mean(name, COMMANDS)}"
        print(f"{PROGRAM}: {wrong}\nAll commands: {PROGRAM} --help", file=sys.stderr)
        return 2
    return 0


def overview() -> str:
    """The commands, a line each."""
    lines = [
        f"{PROGRAM} COMMAND: speculative decoding for mlx-lm, the same text, sooner.",
        "",
    ]
    lines += [f"  {name:<13}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [*lines, "", f"{PROGRAM} COMMAND --help lists the command's flags."]
    )


def make_parser(name: str) -> Parser:
    """The parser of a command that is neither mlx-lm's nor the server."""
    parser = Parser(
        prog=f"{PROGRAM} {name}", description=f"{COMMANDS[name]}.".capitalize()
    )
    _module(name).add_arguments(parser)
    return parser


def _module(name: str) -> ModuleType:
    place = "lab.commands" if name in LAB_COMMANDS else "cli"
    return import_module(f"specdec_mlx.{place}.{name.replace('-', '_')}")
