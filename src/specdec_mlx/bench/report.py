"""The report of a benchmark, as tables: in Markdown, and in HTML for a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.bench.identity import EXCUSED_GAP, Difference
from specdec_mlx.bench.summary import Result
from specdec_mlx.notebook.views import table_html

if TYPE_CHECKING:
    from specdec_mlx.bench.record import Record

SPEED_NOTE = (
    "ratio: tokens per second over all texts, relative to plain mlx-lm, prefill and first round "
    "left out, with a 95% bootstrap interval over texts; end to end: prefill included; tok/s: all "
    "tokens over all seconds; accepted: of the drafted tokens."
)
DIFFERENCES_NOTE = (
    f"Texts that differ; excused: the target's own top two are within {EXCUSED_GAP:g} there."
)
ROUNDS_NOTE = (
    "drafting: share of target passes that verified a draft (the others are plain steps); host: "
    "time per pass in the loop outside the target's passes; first: time to the first token, in "
    "seconds and over plain mlx-lm's (1.020: 2% later)."
)


def _listed(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def or_dash(value: float | None, digits: int = 2) -> str:
    """A number with so many decimals; a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def _identical(result: Result) -> str:
    excused = f" (+{result.excused})" if result.excused else ""
    return "-" if result.identical is None else f"{result.identical}{excused} of {result.texts}"


Columns = dict[str, Callable[[Any], str]]

SPEEDS: Columns = {
    "ratio": lambda r: or_dash(r.ratio),
    "95%": lambda r: f"{or_dash(r.ratio_low)} to {or_dash(r.ratio_high)}",
    "end to end": lambda r: or_dash(r.end_to_end_ratio),
    "tok/s": lambda r: or_dash(r.total_tokens_per_second, 1),
    "tok/pass": lambda r: f"{r.tokens_per_pass:.2f}",
    "accepted": lambda r: f"{r.accepted} of {r.drafted}" if r.drafted else "-",
    "identical": _identical,
}
ROUNDS: Columns = {
    "drafting": lambda r: f"{r.drafting_share:.2f}",
    "host ms": lambda r: or_dash(r.host_ms_per_round),
    "peak GB": lambda r: f"{r.peak_memory_gb:.2f}",
    "first s": lambda r: f"{r.first_token_seconds:.3f}",
    "of plain's": lambda r: or_dash(r.first_token_ratio, 3),
}
DIFFERENCES: Columns = {
    "repeat": lambda d: str(d.repeat),
    "position": lambda d: str(d.position),
    "top-two gap": lambda d: f"{d.top_two_gap:.2e}",
    "excused": lambda d: "yes" if d.excused else "NO",
}


def format_record(record: Record) -> str:
    """The whole report."""
    parts = [
        f"    {record.command}\n\n{_listed(record.machine)}\n\n{_listed(record.settings)}",
        markdown_table(*_table(record.results, SPEEDS)),
        SPEED_NOTE,
        markdown_table(*_table(record.results, ROUNDS)),
        ROUNDS_NOTE,
    ]
    if record.differences:
        parts += [DIFFERENCES_NOTE, markdown_table(*_table(record.differences, DIFFERENCES))]
    return "\n\n".join([*parts, *([format_cost(record.cost)] if record.cost else [])])


def record_html(record: Record) -> str:
    """Speeds and the machine, for a notebook."""
    notes = f"{escape(SPEED_NOTE)}<br><small>{escape(_listed(record.machine))}</small>"
    return f"{table_html(*_table(record.results, SPEEDS))}<p>{notes}</p>"


def _table(
    rows: Sequence[Result] | Sequence[Difference], columns: Columns
) -> tuple[list[str], list[list[str]], int]:
    """Header, rows, and the number of leading columns that are text."""
    whose: Columns = {"category": lambda r: r.category}
    if columns is DIFFERENCES:
        whose = {"text": lambda r: r.id}
    whose |= {"drafter": lambda r: r.drafter, "K": lambda r: r.draft_length or "-"}
    if len({row.rule for row in rows if row.rule}) > 1:
        whose["rule"] = lambda r: r.rule or "-"
    shown = whose | columns
    return [*shown], [[column(row) for column in shown.values()] for row in rows], len(whose)


def format_cost(curve: CostCurve) -> str:
    """c(m) in milliseconds and relative to one position."""
    header = ["positions", *(str(m) for m in curve.positions)]
    rows = [
        ["ms", *(f"{1e3 * s:.1f}" for s in curve.seconds)],
        ["relative", *(f"{x:.2f}" for x in curve.relative())],
    ]
    if curve.low:
        one = curve.seconds[0]
        ends = zip(curve.low, curve.high, strict=True)
        rows.append(["95%", *(f"{low / one:.2f} to {high / one:.2f}" for low, high in ends)])
    return f"A pass of the target, {curve.name}:\n\n{markdown_table(header, rows, 1)}"


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
