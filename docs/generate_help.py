"""Write commands.md: the help of every command, as the commands print it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

PAGE = Path(__file__).parent / "commands.md"
WIDTH = "100"
TAKE_GRAMMAR = ("generate", "chat")
HEAD = """\
# All flags

Written by `docs/generate_help.py` from the commands themselves; do not edit.

`specdec-mlx generate`, `chat`, `server` and `benchmark` are mlx-lm's commands: they take all of its
flags, and ours beside them. The other commands are ours.
"""


def page() -> str:
    """The whole page."""
    from specdec_mlx.cli.commands import MLX_LM_COMMANDS, make_parser

    os.environ["COLUMNS"] = WIDTH
    os.environ["NO_COLOR"] = "1"
    parser = make_parser()
    parts = [HEAD, section("specdec-mlx", parser.format_help())]
    for name, text in MLX_LM_COMMANDS.items():
        parts.append(section(f"specdec-mlx {name}", f"{text}\n\n{our_flags(name)}"))
    for name, command in subparsers(parser).items():
        if name not in MLX_LM_COMMANDS:
            parts.append(section(f"specdec-mlx {name}", command.format_help()))
            for action, parser in subparsers(command).items():
                parts.append(section(f"specdec-mlx {name} {action}", parser.format_help(), "###"))
    return "\n".join(parts)


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Parsers of the commands, or of a command's actions, by name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def our_flags(name: str) -> str:
    """What we add to a command of mlx-lm's; its own flags are its own to document."""
    from specdec_mlx.mlx_lm_plugin import flags, requests

    parser = argparse.ArgumentParser(add_help=False)
    flags.add_arguments(parser)
    if name in TAKE_GRAMMAR:
        flags.add_grammar_arguments(parser)
    if name == "server":
        requests.add_server_arguments(parser)
    return parser.format_help().partition("\n\n")[2]


def section(title: str, text: str, level: str = "##") -> str:
    """One command."""
    return f"{level} {title}\n\n```\n{text.strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
