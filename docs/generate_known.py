"""Write the table of repositories that draft for a model into drafters.md, from the package's list.

python docs/generate_known.py
"""

from __future__ import annotations

import re
from pathlib import Path

from specdec_mlx.drafters.choosing.candidates import KNOWN, SMALL

PAGE = Path(__file__).parent / "drafters.md"
BEGIN, END = "<!-- known: docs/generate_known.py -->", "<!-- end of known -->"
PLACE = re.compile(rf"(?<={BEGIN}\n).*?(?={END})", re.S)


def table() -> str:
    """A row for each beginning of a model's name: a small model for it, and heads."""
    rows: dict[str, tuple[list[str], list[str]]] = {}
    for beginning, *repositories in map(str.split, KNOWN.read_text("utf-8").splitlines()):
        small, heads = rows.setdefault(beginning, ([], []))
        for one in repositories:
            (small if one.startswith(SMALL) else heads).append(f"`{one.removeprefix(SMALL)}`")
    lines = ["| name begins with | a small model | heads, and PARD |", "|---|---|---|"]
    lines += [
        f"| {beginning} | {', '.join(small)} | {', '.join(heads)} |"
        for beginning, (small, heads) in rows.items()
    ]
    return "\n".join(["", *lines, "", ""])


def written(page: str) -> str:
    """The page with the table as it is now."""
    return PLACE.sub(lambda _: table(), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), encoding="utf-8")
