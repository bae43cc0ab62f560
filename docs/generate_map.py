"""Rewrite the map in CONTRIBUTING.md: rooms in the order of their layers, with their docstrings.

The layers and the other contracts are import-linter's, in pyproject.toml, which `make lint` holds.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "CONTRIBUTING.md"
PACKAGE = ROOT / "src" / "specdec_mlx"
BETWEEN = re.compile(r"(?<=<!-- map -->\n).*?(?=<!-- end of the map -->)", re.S)


def section() -> str:
    """The table, and below it what else holds between rooms."""
    lines = ["", "| where | what it is for |", "|---|---|"]
    lines += [row(name) for layer in layers() for name in layer if path_of(name).exists()]
    others = [c["name"] for c in contracts() if c["type"] != "layers"]
    return "\n".join([*lines, "", *(f"- {name}." for name in others), "", ""])


def contracts() -> list[dict[str, Any]]:
    """The contracts of import-linter, in their order."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = settings["tool"]["importlinter"]["contracts"]
    return found


def layers() -> Iterator[list[str]]:
    """Names of the rooms of each layer, from the top down."""
    for contract in contracts():
        if contract["type"] == "layers":
            for layer in contract["layers"]:
                yield [name.strip(" ()") for name in re.split("[:|]", layer)]


def path_of(name: str) -> Path:
    """Where a room's docstring stands: in a package's `__init__`, or in the module."""
    package = PACKAGE / name / "__init__.py"
    return package if package.exists() else PACKAGE / f"{name}.py"


def row(name: str) -> str:
    """A line of the table."""
    path = path_of(name)
    where = path.name if path.name != "__init__.py" else f"{name}/"
    return f"| `{where}` | {first_line(path)} |"


def first_line(path: Path) -> str:
    """What a module says that it is."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, f"{path} has no docstring"
    return docstring.partition("\n")[0]


def current() -> str:
    """What stands in the guide."""
    found = BETWEEN.search(GUIDE.read_text(encoding="utf-8"))
    assert found, "CONTRIBUTING.md has lost the comments between which the map stands"
    return found[0]


if __name__ == "__main__":
    text = GUIDE.read_text(encoding="utf-8")
    GUIDE.write_text(BETWEEN.sub(lambda _: section(), text), encoding="utf-8")
