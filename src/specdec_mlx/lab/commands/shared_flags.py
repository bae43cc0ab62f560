"""Flags that several commands of the lab share."""

import argparse
from typing import Any

from specdec_mlx.arguments import argument, existing_file
from specdec_mlx.drafters.choosing.choice import add_lighter_arguments
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER

FILE: Any = {"type": argument(existing_file), "metavar": "FILE"}
SMALL_MODEL = "model folder or Hugging Face name (default: a small one)"


def add_drafting(parser: argparse.ArgumentParser, draft_model: str) -> None:
    spec, drafters = "NAME[:KEY=VALUE,...]", f"repeatable; none: without ({DEFAULT_DRAFTER})"
    parser.add_argument("--drafter", action="append", metavar=spec, help=drafters)
    parser.add_argument("--draft-model", metavar="MODEL", help=draft_model)
    add_lighter_arguments(parser)
