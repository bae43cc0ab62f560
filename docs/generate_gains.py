"""Write what to expect by chip and kind of text into the pages that show it: the only place of it.

    python docs/generate_gains.py

From data/expected.json, and from data/report-*.json, which `specdec-mlx bench --report` wrote;
between the marks below, on every page that has them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from figures import EXPECTED, MACHINES

from specdec_mlx.lab.bench.report import MachineReport, load_report
from specdec_mlx.lab.bench.summary import ALL, Result
from specdec_mlx.lab.bench.timing import PLAIN

DOCS = Path(__file__).parent
IN_PACKAGE = DOCS.parent / "src/specdec_mlx/drafters/choosing/gains.tsv"
BEGIN, END = "<!-- gains: docs/generate_gains.py -->", "<!-- end of gains -->"
PLACE = re.compile(rf"(?<={BEGIN}\n).*?(?={END})", re.S)
MEASURED, END_MEASURED = "<!-- measured: docs/generate_gains.py -->", "<!-- end of measured -->"
PLACE_MEASURED = re.compile(rf"(?<={MEASURED}\n).*?(?={END_MEASURED})", re.S)
REPORTS = sorted((DOCS / "data").glob("report-*.json"))

KINDS = {
    "edits of files": ("auto", ["edit_session"]),
    "agents": ("auto", ["agent"]),
    "short edits": ("auto", ["code_edit"]),
    "summaries, retrieval": ("auto", ["rag", "summarization"]),
    "code": ("auto", ["code"]),
    "chat": ("auto", ["mt_bench"]),
    "chat, code: a draft model": ("draft model", ["mt_bench", "code"]),
    "chat, code: a head": ("head", ["mt_bench", "code"]),
}
"""Heading of a column -> drafter, and the kinds of text that it stands for."""

WITH_KERNELS = {"m4-pro": "m4-pro-kernels"}
"""Chips -> their curves with mlx-dspark's kernels, as far as somebody has published figures."""

NO_SOURCE = "M3, M4, M5 without Pro or Max"


def table() -> str:
    """Rows of chips; a range where several kinds of text stand in a column."""
    speeds = json.loads(EXPECTED.read_text(encoding="utf-8"))
    rows = [
        ["modelled speed, mlx-lm = 1", *KINDS, "modelled: a head, with kernels"],
        ["---"] * (2 + len(KINDS)),
        *(
            [
                name,
                *(span([speeds[by][chip][kind] for kind in kinds]) for by, kinds in KINDS.values()),
                with_kernels(speeds["head"], chip),
            ]
            for chip, name in MACHINES.items()
        ),
        [NO_SOURCE, "no source", *[""] * len(KINDS)],
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def with_kernels(speeds: dict[str, dict[str, float]], chip: str) -> str:
    """Chat and code with a head; "off" for chips on which the kernels' author leaves them off."""
    if chip in WITH_KERNELS:
        _, kinds = KINDS["chat, code: a head"]
        return span([speeds[WITH_KERNELS[chip]][kind] for kind in kinds])
    return "off" if chip.startswith("m5") else "no source"


def span(speeds: list[float]) -> str:
    """The least and the greatest, with one decimal; above 3 none."""
    told = dict.fromkeys(
        f"{speed:.0f}" if speed > 3 else f"{speed:.1f}" for speed in sorted(speeds)
    )
    return " to ".join([*told][:1] + [*told][1:][-1:])


def lines() -> str:
    """The same for `specdec-mlx drafters`: a chip, and its speeds in words."""
    speeds = json.loads(EXPECTED.read_text(encoding="utf-8"))
    told = {
        chip: "; ".join(
            f"{name} {span([speeds[by][chip][kind] for kind in kinds])}"
            for name, (by, kinds) in KINDS.items()
        )
        for chip in MACHINES
    }
    return "".join(
        f"{chip}\ttimes plain decoding, modelled: {text}\n" for chip, text in told.items()
    )


CATEGORIES = {
    "code_edit": "short edits",
    "code": "code",
    "summarization": "summaries",
    "grounded_qa": "questions about a text",
    "rewriting": "rewriting",
    "chat": "chat",
    ALL: "all",
}
DRAFTERS = {
    "auto": "look-up",
    "model": "draft model",
    "mlx-lm-speculation": "mlx-lm's own, draft model",
}


def measured(report: MachineReport) -> str:
    """A report's speeds by kind of text, measured and modelled, and how it was measured."""
    rows = [
        (f"{name}, {how}", results)
        for how, some in (("measured", report.results), ("modelled", report.modelled))
        for name, results in by_drafter(some).items()
    ]
    rows.sort(key=lambda row: not row[0].startswith("look-up"))  # modelled too, so side by side
    header = ["mlx-lm = 1", *CATEGORIES.values(), "95%, all", "tokens a pass"]
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    for name, results in rows:
        of = {r.category: r for r in results}
        speeds = [f"{of[kind].ratio:.2f}" for kind in CATEGORIES]
        total = of[ALL]
        bounds = f"{total.ratio_low:.2f} to {total.ratio_high:.2f}"
        lines.append([name, *speeds, bounds, f"{total.tokens_per_pass:.2f}"])
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    drafted = f" Draft model: {report.draft_model}." if report.draft_model else ""
    return f"{report.machine}. Model: {report.model}.{drafted}\n\n{text}"


def by_drafter(results: list[Result]) -> dict[str, list[Result]]:
    """Name of a drafter as the table has it -> its results; plain decoding is left out."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        if result.drafter != PLAIN:
            name = DRAFTERS.get(result.drafter, result.drafter) + ", kernels" * bool(result.kernels)
            groups.setdefault(name, []).append(result)
    return groups


def written(page: str) -> str:
    """The page with the tables as they are now, wherever it has their marks."""
    page = PLACE.sub(lambda _: "\n" + table() + "\n", page)
    tables = "\n".join(measured(load_report(path)) for path in REPORTS)
    return PLACE_MEASURED.sub(lambda _: "\n" + tables + "\n", page)


def main() -> None:
    """Write it into every page that has the marks, and into the package."""
    IN_PACKAGE.write_text(lines(), encoding="utf-8")
    for path in DOCS.glob("*.md"):
        page = path.read_text(encoding="utf-8")
        if BEGIN in page or MEASURED in page:
            path.write_text(written(page), encoding="utf-8")


if __name__ == "__main__":
    main()
