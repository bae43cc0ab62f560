"""Tables of numbers, in HTML and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from specdec_mlx.views.html import CELL, table

Columns = dict[str, Callable[[Any], str]]
"""Heading -> the text beneath it for an item."""

Table = tuple[list[str], list[tuple[str, ...]], int]
"""Header, rows, and the number of leading columns that are text."""


def or_dash(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table_of(items: Sequence[Any], text: Columns, numbers: Columns) -> Table:
    cells = {name: [cell(item) for item in items] for name, cell in (text | numbers).items()}
    # A benchmark without a rule or an interval has no such column.
    filled = {name: column for name, column in cells.items() if {*column} - {"-"}}
    rows = list(zip(*filled.values(), strict=True))
    return [*filled], rows, len(filled.keys() & text.keys())


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int) -> str:
    """A table whose first `num_text_columns` are aligned left, and whose others are right."""
    lines = []
    for tag, cells in (("th", header), *(("td", row) for row in rows)):
        line = ""
        for i, cell in enumerate(cells):
            side = "left" if i < num_text_columns else "right"
            line += f'<{tag} style="{CELL};text-align:{side}">{escape(str(cell))}</{tag}>'
        lines.append(f"<tr>{line}</tr>")
    return table(lines)


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int
) -> str:
    """A table with aligned columns, of which the first `num_text_columns` are text."""
    columns = []
    for i, cells in enumerate(zip(header, *rows, strict=True)):
        width = max(3, *map(len, cells))
        side, rule = ("<", "-" * width) if i < num_text_columns else (">", "-" * (width - 1) + ":")
        columns.append([f"{cell:{side}{width}}" for cell in (cells[0], rule, *cells[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
