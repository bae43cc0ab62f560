"""A report of a machine as rows of `chips.tsv`, the costs of passes by chip.

    python -m benchmarks.import_report report.json            # prints the row of the least depth
    python -m benchmarks.import_report report.json --write    # adds it to the package's chips.tsv

The report comes from `specdec-mlx bench --report`. The row has the date, the version of MLX and the
word "measured". `--depth` chooses costs after more tokens, and `--fits` makes the row the prior of
the chips and weights that a pattern matches.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from specdec_mlx.draft_length import costs
from specdec_mlx.draft_length.costs import isotonic
from specdec_mlx.lab.bench.report import MachineReport, load_report

CHIPS = Path(costs.__file__).with_name("chips.tsv")
NO_TILE = "0"


def row_of(report: MachineReport, depth: int | None = None, fits: str = "") -> str:
    """A line of chips.tsv.

    Args:
        report: a report with costs.
        depth: tokens before a pass. None stands for the least depth of the report.
        fits: pattern of the chips and weights whose prior the row is. "" for none.

    Raises:
        ValueError: the report has no costs at this depth, or the pattern is wrong.
    """
    least = min(report.costs, default=0)
    depth = least if depth is None else depth
    if depth not in report.costs:
        measured = ", ".join(map(str, report.costs)) or "none"
        raise ValueError(f"The report has no costs after {depth} tokens. It has: {measured}.")
    try:
        re.compile(fits)
    except re.error as error:
        raise ValueError(f"--fits {fits!r}: expected a regular expression ({error}).") from error
    curve, model = report.costs[depth], report.model
    # A pass over more rows never costs less, and the rest is noise.
    relative = isotonic([(cost, 1.0) for cost in curve.relative()])
    pairs = (f"{m}:{cost:.3g}" for m, cost in zip(curve.positions, relative, strict=True))
    what = f"{report.chip}, {report.backend}, {model}"
    name = "-".join(re.findall(r"[a-z0-9.]+", f"{report.chip} {model.weights}".lower()))
    name = f"{name.removeprefix('apple-')}-{model.gigabytes:.1f}gb"
    if depth > least:
        name, what = f"{name}-{depth}", f"{what}, after {depth} tokens"
    mlx = report.versions.get("mlx", "unknown")
    source = f"measured {report.date}, MLX {mlx}, specdec-mlx bench --report"
    fields = name, " ".join(pairs), NO_TILE, fits, what, source
    # A report may come from anybody, and a tab or a new line would be a further column or row.
    return "\t".join(" ".join(field.split()) for field in fields)


def with_row(table: str, row: str) -> str:
    """chips.tsv with one row more, before its last row, or in place of a row of this name."""
    name = row.partition("\t")[0]
    *lines, last = [line for line in table.splitlines() if line.partition("\t")[0] != name]
    return "\n".join([*lines, row, last, ""])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row, or write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_report")
    parser.add_argument("report", help="report.json of specdec-mlx bench --report")
    parser.add_argument("--depth", type=int, metavar="N", help="tokens before a pass (the least)")
    parser.add_argument("--fits", default="", metavar="PATTERN", help="chips and weights")
    parser.add_argument("--write", action="store_true", help=f"add the row to {CHIPS.name}")
    args = parser.parse_args(arguments)
    row = row_of(load_report(args.report), args.depth, args.fits)
    print(row)
    if args.write:
        CHIPS.write_text(with_row(CHIPS.read_text(encoding="utf-8"), row), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
