"""Draw the figures of the documentation from the committed benchmarks: `make figures`.

    python docs/figures.py                       # docs/data/*.json -> docs/figures/*.png
    python docs/figures.py benchmark RECORD.json # first takes over what `bench --json` wrote
    python docs/figures.py greedy RECORD.json    # the same, of the trained pair that ships
    python docs/figures.py sampled RECORD.json   # and of the pair at temperature 1
                                                 # long-*.json are of `benchmarks.online --long`
    python docs/figures.py expected auto=SCORES.json head=SCORES.json ...  # of `replay --json`

Of a record only what is drawn is kept: results, machine, settings and costs, no texts.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from math import log2
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from specdec_mlx.draft_length.costs import CURVES
from specdec_mlx.lab import plots
from specdec_mlx.lab.bench.cost import CostCurve
from specdec_mlx.lab.bench.summary import ALL, Result
from specdec_mlx.lab.plots import Plot, finish, label_axes, styled
from specdec_mlx.views.html import BLUE, GREEN, GREY, ORANGE, VERMILLION

DOCS = Path(__file__).parent
DATA = {name: DOCS / "data" / f"{name}.json" for name in ("benchmark", "greedy", "sampled")}
EXPECTED = DOCS / "data" / "expected.json"
LONG = sorted((DOCS / "data").glob("long-*.json"))
FIGURES = DOCS / "figures"
KEPT = ("machine", "settings", "cost", "results")
TITLES = (
    "SmolLM2-135M-Instruct, no second model, greedy",
    "The trained pair that ships, 3.5 million parameters and a draft model of 0.37 million",
)
COLORS = (BLUE, VERMILLION, GREEN, ORANGE, GREY)
PAIR = {"greedy": "greedy", "sampled": "temperature 1"}
CAPTION = (
    "Measured on a CPU ({processor}, {cores} cores, {blas}), {dtype}, with mlx {mlx} and mlx-lm "
    "{mlx-lm}"
)


def take_over(name: str, record: Path) -> None:
    """Keep of a record what may be committed and is drawn."""
    data = json.loads(record.read_text(encoding="utf-8"))
    kept = {key: data[key] for key in KEPT}
    DATA[name].parent.mkdir(exist_ok=True)
    DATA[name].write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def take_over_scores(given: Iterable[str]) -> None:
    """Keep speedups by drafter, cost curve and kind of text of scores given as DRAFTER=FILE."""
    speeds: dict[str, dict[str, dict[str, float]]] = {}
    for drafter, _, path in (one.partition("=") for one in given):
        for score in json.loads(Path(path).read_text(encoding="utf-8")):
            if not score["session"]:
                of_curve = speeds.setdefault(drafter, {}).setdefault(score["cost"], {})
                of_curve[score["category"]] = round(score["ratio"], 3)
    EXPECTED.write_text(json.dumps(speeds, indent=1) + "\n", encoding="utf-8")


def read() -> dict[str, dict[str, Any]]:
    """The committed benchmarks."""
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in DATA.items()}


def figures(data: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """File name -> figure."""
    curve = CostCurve(**data["benchmark"]["cost"])
    return {
        "speed_by_text": speed_by_text(data),
        "cost": plots.cost_curve(curve),
        "staircases": staircases(),
        "expected": expected(),
        "long_texts": long_texts(),
    }


def speed_by_text(data: dict[str, dict[str, Any]]) -> Plot:
    """By kind of text without a second model; below, the pair, over all of its texts."""
    by_text = results(data, "benchmark")
    pair = [
        replace(result, category=label)
        for name, label in PAIR.items()
        for result in results(data, name)
        if result.category == ALL
    ]
    figure = Plot(figsize=(7.6, 6))
    heights = [len({result.category for result in by_text}), 3.5]
    above, below = figure.subplots(2, 1, height_ratios=heights, sharex=True)
    plots.speed_by_text(by_text, above, TITLES[0])
    plots.speed_by_text(pair, below, TITLES[1])
    above.set_xlabel("")
    figure.supxlabel(caption(data.values()), fontsize=7.5, color=GREY)
    return figure


SHOWN = ("m1-m2", "m1-8bit", "m3-max", "m4-pro", "m5-max-70b", "mildest")
"""Chips in the figure of staircases."""


def staircases() -> Plot:
    """Costs of passes over 1 to 64 rows on Apple chips, as others measured them."""
    figure = Plot(figsize=(7.6, 3.6))
    ax = figure.add_subplot()
    rows = range(1, 65)
    for name, style, color in zip(
        SHOWN, ("-", ":", "--", "-.", ":", "-"), (BLUE, *COLORS), strict=True
    ):
        costs = [CURVES[name](m) for m in rows]
        ax.plot(rows, costs, style, drawstyle="steps-pre", color=color, label=name)
    ax.set_xticks([1, 5, 9, 13, 20, 32, 48, 64])
    ax.set_ylim(0, 10.5)
    finish(ax, "Cost of a pass on Apple chips", "rows in the pass", "passes over one row")
    figure.supxlabel("Measured by others; sources in chips.tsv", fontsize=7.5, color=GREY)
    return figure


KINDS = (
    ("chat", "auto", "mt_bench"),
    ("mathematics", "auto", "math_reasoning"),
    ("summaries", "auto", "summarization"),
    ("retrieval", "auto", "rag"),
    ("code", "auto", "code"),
    ("short edits", "auto", "code_edit"),
    ("agents", "auto", "agent"),
    ("edits of files", "auto", "edit_session"),
    ("chat: draft model", "draft model", "mt_bench"),
    ("code: draft model", "draft model", "code"),
    ("chat: head", "head", "mt_bench"),
    ("code: head", "head", "code"),
)
MACHINES = {
    "m1-m2": "M1, M2, 4-bit",
    "m1-8bit": "M1, M2, 8-bit",
    "fp-modes": "M1, M2, mxfp4",
    "m3-max": "M3 Max, 4-bit",
    "m4-pro": "M4 Pro, 4-bit",
    "m4-max-27b": "M4 Max, 4-bit",
    "m5-max-27b": "M5 Max, 4-bit",
    "m5-max-27b-8bit": "M5 Max, 8-bit",
    "bf16-m3-ultra": "M3 Ultra, bf16",
    "m5-max-30b-a3b": "M5 Max, experts, 4-bit",
}


def expected() -> Plot:
    """Modelled speeds over plain decoding by machine and kind of text."""
    speeds = json.loads(EXPECTED.read_text(encoding="utf-8"))
    table = [[speeds[drafter][m][kind] for _, drafter, kind in KINDS] for m in MACHINES]
    figure = Plot(figsize=(9.2, 5.2))
    ax = figure.add_subplot()
    ax.imshow(
        [[log2(x) for x in row] for row in table], cmap="Blues", vmin=0, vmax=3, aspect="auto"
    )
    for i, row in enumerate(table):
        for j, speed in enumerate(row):
            color = "white" if speed > 4 else "black"
            ax.text(j, i, f"{speed:.2f}", ha="center", va="center", color=color, fontsize=9)
    ax.axvline(7.5, color="white", linewidth=4)
    ax.set_xticks(range(len(KINDS)), [name for name, *_ in KINDS], rotation=35, ha="right")
    ax.set_yticks(range(len(MACHINES)), MACHINES.values())
    ax.set_title("Expected speed, plain decoding = 1: look-up, and beyond the gap a second model")
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
    said = "Modelled from costs that others measured; sources in chips.tsv"
    figure.supxlabel(said, fontsize=7.5, color=GREY)
    return figure


def long_texts() -> Plot:
    """Accepted tokens a pass along long texts, by whether the drafter learns; a panel a file."""
    figure = Plot(figsize=(4.8, 0.5 + 2.3 * len(LONG)))
    panels = figure.subplots(len(LONG), 1, squeeze=False)[:, 0]
    for ax, path in zip(panels, LONG, strict=True):
        record = json.loads(path.read_text(encoding="utf-8"))
        for way, style, color in (("not learning", "--", GREY), ("learning", "-", BLUE)):
            counts = record[way]
            shares = [accepted / max(1, passes) for passes, _, accepted in counts]
            places = [record["every"] * (i + 0.5) for i in range(len(counts))]
            ax.plot(places, shares, style, color=color, label=way)
        ax.set_ylim(0)
        label_axes(ax, record["title"], "", "accepted tokens a pass")
    panels[-1].set_xlabel("tokens of the text", fontsize=9)
    styled(panels[0].legend)(ncols=2, loc="lower left")
    return figure


def caption(records: Iterable[dict[str, Any]]) -> str:
    """Machine and dtype, which all records must share; models stand in the titles."""
    said = {CAPTION.format(**r["machine"], dtype=r["settings"]["dtype"]) for r in records}
    (only,) = said
    return only


def results(data: dict[str, dict[str, Any]], name: str) -> list[Result]:
    """Results of a committed benchmark; fields of older versions are left out."""
    known = Result.__struct_fields__
    return [
        Result(**{field: value for field, value in result.items() if field in known})
        for result in data[name]["results"]
    ]


def digest() -> str:
    """Fingerprint of the data; a figure carries that of what it was drawn from."""
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in (*DATA.values(), EXPECTED, *LONG))
    ).hexdigest()


def main() -> None:
    """Take a record over if one is given, and draw."""
    if sys.argv[1:2] == ["expected"]:
        take_over_scores(sys.argv[2:])
    elif len(sys.argv) > 1:
        take_over(sys.argv[1], Path(sys.argv[2]))
    FIGURES.mkdir(exist_ok=True)
    for name, plot in figures(read()).items():
        metadata = {"Source": digest()}
        plot.savefig(FIGURES / f"{name}.png", dpi=160, metadata=metadata)


if __name__ == "__main__":
    main()
