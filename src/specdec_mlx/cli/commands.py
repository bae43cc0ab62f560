"""The command line: `specdec-mlx demo | generate | drafters | ...`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import specdec_mlx
from specdec_mlx.drafters.choosing.registry import describe_drafters
from specdec_mlx.errors import LogitsError
from specdec_mlx.options import refusal

MLX_LM_COMMANDS = {
    "generate": "mlx-lm's generate command, with drafters",
    "chat": "mlx-lm's chat command, with drafters",
    "benchmark": "mlx-lm's benchmark command, with drafters",
}
"""Commands that take all of mlx-lm's flags, and ours beside them."""

Commands = argparse._SubParsersAction


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status, 2 with one line on stderr where it cannot be done."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(given)
    except (ValueError, RuntimeError, OSError, LogitsError) as error:
        if sys.stdout.isatty() and given[:1] in (["generate"], ["chat"]):
            print()  # ends the line of a text that was streamed
        print(f"specdec-mlx: {error}", file=sys.stderr)
        return 2


def _run(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in MLX_LM_COMMANDS:
        from specdec_mlx.mlx_lm_plugin import run_command

        run_command(arguments[0], arguments[1:])
        return 0
    if arguments[:1] == ["server"]:
        from specdec_mlx.server.command import run_server

        run_server(arguments[1:])
        return 0
    parser = make_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(refusal(unknown))
    return int(args.run(args))


def make_parser() -> argparse.ArgumentParser:
    """The parser for all commands but those that are mlx-lm's own."""
    from specdec_mlx.cli import (
        bench,
        check,
        demo,
        doctor,
        memory,
        new_drafter,
        replay,
        train,
    )

    parser = argparse.ArgumentParser(
        prog="specdec-mlx",
        description="Speculative decoding for mlx-lm: the same text, sooner.",
    )
    parser.add_argument("--version", action="version", version=specdec_mlx.__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, module: ModuleType, text: str) -> None:
        command = commands.add_parser(name, help=text)
        module.add_arguments(command)
        command.set_defaults(run=module.main)

    for name, text in MLX_LM_COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    commands.add_parser("server", help="a server for agents and chats", add_help=False)
    add("demo", demo, "plain against speculative, on real text")
    add("bench", bench, "speed and identity on many prompts, interleaved")
    add("replay", replay, "score drafters on recorded texts, offline")
    _add_probe(commands)
    add("check", check, "is it lossless on this model, machine and setting?")
    _add_drafters(commands)
    add("memory", memory, "what was written before, to draft from")
    add("train", train, "train a head or a draft model for a target")
    add("doctor", doctor, "what is installed here, and is it right?")
    add("new-drafter", new_drafter, "a package for a drafter of your own")
    return parser


def _add_probe(commands: Commands[argparse.ArgumentParser]) -> None:
    probe = commands.add_parser(
        "probe", help="is a pass over several positions exact here?"
    )
    probe.add_argument(
        "--model", help="model folder or Hugging Face name (default: a small one)"
    )
    probe.set_defaults(run=_probe)


def _probe(args: argparse.Namespace) -> int:
    from specdec_mlx.lab.demo_model import demo_model_path
    from specdec_mlx.models import load_model
    from specdec_mlx.verify.exactness import probe

    report = probe(load_model(args.model or demo_model_path())[0])
    print(report)
    return 0 if report.exact else 1


def _add_drafters(commands: Commands[argparse.ArgumentParser]) -> None:
    drafters = commands.add_parser(
        "drafters", help="the drafters there are, or those for a model"
    )
    drafters.add_argument(
        "--model", help="also which models here can draft for this one"
    )
    drafters.add_argument(
        "--in",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="look for them here instead of in the Hugging Face cache",
    )
    drafters.set_defaults(run=_drafters)


def _drafters(args: argparse.Namespace) -> int:
    if args.model is not None:
        from specdec_mlx.drafters.choosing.candidates import report

        print(report(args.model, args.folder))
    elif args.folder is not None:
        raise ValueError("--in needs --model, the model to draft for.")
    else:
        print(
            "\n".join(f"{name:<15}{text}" for name, text in describe_drafters().items())
        )
    return 0
