"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.bench.identity import EXCUSED_GAP, Difference
from specdec_mlx.bench.record import Record, or_dash
from specdec_mlx.bench.summary import Result

SPEED_NOTE = (
    "ratio: tokens per second over all texts, relative to plain mlx-lm, prefill and first round "
    "left out, with a 95% bootstrap interval over texts; mean: of the texts' own ratios; end to "
    "end: prefill included; tok/s: median over texts, and all tokens over all seconds."
)
ROUNDS_NOTE = (
    "share: of the drafted tokens, those accepted; drafting: share of target passes that verified "
    "a draft (the others are plain steps); host: time per pass in the loop outside the target's "
    "passes; first: time to the first token, in seconds and over plain mlx-lm's (1.020: 2% later)."
)


def format_record(record: Record) -> str:
    """The whole report."""
    parts = [
        _header(record),
        format_speed(record.results),
        SPEED_NOTE,
        format_rounds(record.results),
        ROUNDS_NOTE,
        format_differences(record.differences),
    ]
    if record.cost is not None:
        parts.append(format_cost(record.cost))
    return "\n\n".join(part for part in parts if part)


def format_speed(results: Sequence[Result]) -> str:
    """How fast: a row per category and contender."""
    names = _Names(results)
    header = ["category", *names.header, "ratio", "95%", "mean", "end to end", "tok/s", "total"]
    rows = [
        [
            *(r.category, *names(r), or_dash(r.ratio)),
            f"{or_dash(r.ratio_low)} to {or_dash(r.ratio_high)}",
            *(or_dash(r.mean_ratio), or_dash(r.end_to_end_ratio)),
            *(or_dash(r.tokens_per_second, 1), or_dash(r.total_tokens_per_second, 1)),
        ]
        for r in results
    ]
    return markdown_table(header, rows, 1 + len(names.header))


def format_rounds(results: Sequence[Result]) -> str:
    """What happened in the rounds: a row per category and contender."""
    names = _Names(results)
    header = ["category", *names.header, "tok/pass", "accepted", "share", "drafting", "host ms"]
    header += ["peak GB", "first s", "of plain's", "identical"]
    rows = [
        [
            *(r.category, *names(r), f"{r.tokens_per_pass:.2f}"),
            f"{r.accepted} of {r.drafted}" if r.drafted else "-",
            f"{r.accepted_share:.2f}" if r.drafted else "-",
            f"{r.drafting_share:.2f}",
            or_dash(r.host_ms_per_round),
            *(f"{r.peak_memory_gb:.2f}", f"{r.first_token_seconds:.3f}"),
            *(or_dash(r.first_token_ratio, 3), _identical(r)),
        ]
        for r in results
    ]
    return markdown_table(header, rows, 1 + len(names.header))


def format_differences(differences: Sequence[Difference]) -> str:
    """Where texts part from plain decoding's; empty if nowhere."""
    if not differences:
        return ""
    names = _Names(differences)
    rows = [
        [
            *(d.id, *names(d), str(d.repeat), str(d.position)),
            *(f"{d.top_two_gap:.2e}", "yes" if d.excused else "NO"),
        ]
        for d in differences
    ]
    header = ["text", *names.header, "repeat", "position", "top-two gap", "excused"]
    note = f"Texts that differ; excused: the target's own top two are within {EXCUSED_GAP:g} there."
    return f"{note}\n\n{markdown_table(header, rows, 1 + len(names.header))}"


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
    """Table with aligned columns.

    Args:
        header: of each column.
        rows: the cells of each row.
        num_text_columns: how many columns, from the first on, are text and stand to the left;
            numbers stand to the right.
    """
    widths = [max(3, *(len(row[i]) for row in [header, *rows])) for i in range(len(header))]
    rule = [
        "-" * width if i < num_text_columns else "-" * (width - 1) + ":"
        for i, width in enumerate(widths)
    ]
    return "\n".join(_line(cells, widths, num_text_columns) for cells in [header, rule, *rows])


class _Names:
    """The columns that tell contenders apart: the rule only where there is more than one."""

    def __init__(self, rows: Sequence[Result | Difference]) -> None:
        self.with_rule = len({row.rule for row in rows if row.rule}) > 1
        self.header = ["drafter", "K", *(["rule"] if self.with_rule else [])]

    def __call__(self, row: Result | Difference) -> list[str]:
        rule = [row.rule or "-"] if self.with_rule else []
        return [row.drafter, row.draft_length or "-", *rule]


def _line(cells: Sequence[str], widths: Sequence[int], num_text_columns: int) -> str:
    padded = [
        cell.ljust(width) if i < num_text_columns else cell.rjust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return f"| {' | '.join(padded)} |"


def _identical(result: Result) -> str:
    if result.identical is None:
        return "-"
    excused = f" (+{result.excused})" if result.excused else ""
    return f"{result.identical}{excused} of {result.texts}"


def _header(record: Record) -> str:
    settings = ", ".join(f"{name} {value}" for name, value in record.settings.items())
    machine = ", ".join(f"{name} {value}" for name, value in record.machine.items())
    return f"    {record.command}\n\n{machine}\n\n{settings}"
