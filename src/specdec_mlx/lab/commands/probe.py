"""`specdec-mlx probe`: is a pass over several positions exact here?"""

from __future__ import annotations

import argparse

from specdec_mlx.lab import probing
from specdec_mlx.lab.commands.shared_flags import SMALL_MODEL
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.models.loading import load_model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help=SMALL_MODEL)


def main(args: argparse.Namespace) -> int:
    """Return 0 if passes are exact, and 1 otherwise, for use in scripts."""
    report = probing.probe(load_model(args.model or demo_model_path())[0])
    print(report)
    return 0 if report.exact else 1
