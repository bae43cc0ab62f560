"""Write commands.md: the help of every command, as the commands print it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parent / "commands.md"
WIDTH = "100"
HEAD = """\
# All flags

Written by `docs/generate_help.py` from the commands themselves; do not edit.

`specdec-mlx generate`, `chat` and `benchmark` are mlx-lm's commands: they take all of its flags,
and the same ones of ours. The other commands are ours; `server` takes the flags of mlx-lm's too.
"""


def page() -> str:
    """The whole page."""
    from specdec_mlx.cli.commands import MLX_LM_COMMANDS, commands, make_parser, overview
    from specdec_mlx.mlx_lm_plugin import flags
    from specdec_mlx.server.flags import make_parser as make_server_parser

    os.environ["COLUMNS"] = WIDTH
    os.environ["NO_COLOR"] = "1"
    parts = [
        HEAD,
        section("specdec-mlx", overview()),
        section("Ours for generate, chat and benchmark", added_by(flags.add_arguments)),
        section("Ours for generate and chat", added_by(flags.add_grammar_arguments)),
        section("specdec-mlx server", make_server_parser().format_help()),
    ]
    for name in sorted(commands()):
        if name not in (*MLX_LM_COMMANDS, "server"):
            command = make_parser(name)
            parts.append(section(f"specdec-mlx {name}", command.format_help()))
            for action, parser in subparsers(command).items():
                parts.append(section(f"specdec-mlx {name} {action}", parser.format_help(), "###"))
    return "\n".join(parts)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Parsers of a command's actions, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def added_by(add_arguments: Callable[[argparse.ArgumentParser], object]) -> str:
    """Help on the flags that we add to commands of mlx-lm's, which document their own."""
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    return parser.format_help().partition("\n\n")[2]


def section(title: str, text: str, level: str = "##") -> str:
    """One command."""
    return f"{level} {title}\n\n```\n{text.strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
