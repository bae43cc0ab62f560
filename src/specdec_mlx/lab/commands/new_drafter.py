"""`specdec-mlx new-drafter`: a package for a drafter of your own."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from specdec_mlx.arguments import argument
from specdec_mlx.drafters.choosing.registry import drafter_names

TEMPLATE = Path(__file__).parent / "template"
PLACES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "drafter.py.txt": "src/specdec_mlx_MODULE/__init__.py",
    "test_drafter.py.txt": "tests/test_MODULE.py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", type=argument(new_name), help="as --drafter will take it")


def new_name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", text):
        raise ValueError(f"{text!r}: expected small letters, digits and single hyphens.")
    if text in drafter_names():
        raise ValueError(f"{text!r} is the name of a drafter already. Choose another.")
    return text


def main(args: argparse.Namespace) -> int:
    """Write the package into the working directory. FileExistsError if it exists."""
    folder = Path(f"specdec-mlx-{args.name}")
    if folder.exists():
        raise FileExistsError(f"{folder} exists already. Give another name, or remove it.")
    words = {
        "NAME": args.name,
        "MODULE": args.name.replace("-", "_"),
        "CLASS": args.name.title().replace("-", ""),
    }
    for source, place in PLACES.items():
        text = (TEMPLATE / source).read_text(encoding="utf-8")
        for word, value in words.items():
            text, place = text.replace(word, value), place.replace(word, value)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")
    print(f"{folder}: next, cd {folder} && pip install -e . pytest && pytest")
    return 0
