"""Write the table of repositories that draft for a model into drafters.md, from the package's list.

python docs/generate_known.py
"""

from __future__ import annotations

import re
from pathlib import Path

from specdec_mlx.drafters.choosing.candidates import KNOWN, SMALL

PAGE = Path(__file__).parent / "drafters.md"
BEGIN, END = "<!-- known: docs/generate_known.py -->", "<!-- end of known -->"
SERIES = re.compile(
    r"gpt-oss|vicuna|zephyr|muse-glimmer|ternary-bonsai|nvidia-nemotron|[a-z]+(?:-?[\d.]+)?"
)
PLACE = re.compile(rf"(?<={BEGIN}\n).*?(?={END})", re.S)


def table() -> str:
    """A row for each series of models: small models and heads.

    Models that have prediction layers of their own share a sentence.
    """
    rows: dict[str, tuple[list[str], list[str]]] = {}
    with_layers = []
    for beginning, *repositories in map(str.split, KNOWN.read_text("utf-8").splitlines()):
        for repository in repositories:
            if repository.lower().endswith(f"/{beginning}"):
                with_layers.append(f"`{repository}`")
                continue
            small, heads = rows.setdefault(SERIES.findall(beginning)[0], ([], []))
            column = small if repository.startswith(SMALL) else heads
            column.append(f"`{repository.removeprefix(SMALL)}`")
    lines = ["| series | a small model | heads, and PARD |", "|---|---|---|"]
    lines += [
        f"| {series} | {', '.join(small)} | {', '.join(heads)} |"
        for series, (small, heads) in rows.items()
    ]
    sentence = f"These repositories have prediction layers: {', '.join(with_layers)}."
    return "\n".join(["", *lines, "", sentence, "", ""])


def written(page: str) -> str:
    """The page with the table as it is now."""
    return PLACE.sub(lambda _: table(), page)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), encoding="utf-8")
