"""`specdec-mlx drafters`: the drafters there are, or what to draft with for a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from specdec_mlx.drafters.choosing.registry import describe_drafters
from specdec_mlx.drafters.choosing.report import report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="also which models here can draft for this one")
    parser.add_argument(
        "--in",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="look for them here instead of in the Hugging Face cache",
    )


def main(args: argparse.Namespace) -> int:
    if args.model is not None:
        print(report(args.model, args.folder))
    elif args.folder is not None:
        raise ValueError("--in needs --model, the model to draft for.")
    else:
        texts = describe_drafters()
        width = max(map(len, texts)) + 2
        for name, text in texts.items():
            print(f"{name:<{width}}{text}")
    return 0
