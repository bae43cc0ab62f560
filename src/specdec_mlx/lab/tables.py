"""Tables of numbers, in HTML and in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from specdec_mlx.views.html import CELL, table


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int) -> str:
    """A table whose first `num_text_columns` stand to the left; numbers stand to the right."""
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
    """Table with aligned columns: the first so many are text, the others numbers."""
    columns = []
    for i, cells in enumerate(zip(header, *rows, strict=True)):
        width = max(3, *map(len, cells))
        if i < num_text_columns:
            columns.append([cell.ljust(width) for cell in (cells[0], "-" * width, *cells[1:])])
        else:
            rule = "-" * (width - 1) + ":"
            columns.append([cell.rjust(width) for cell in (cells[0], rule, *cells[1:])])
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
