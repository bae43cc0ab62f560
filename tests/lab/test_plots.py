"""What is drawn: the data of the artists, their labels and units; not pixels."""

from __future__ import annotations

import importlib
import sys
from io import BytesIO

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.text import Text
from msgspec.structs import replace
from PIL import Image

import specdec_mlx as sd
from specdec_mlx.contracts import RoundRecord
from specdec_mlx.lab import plots
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.summary import Result
from specdec_mlx.lab.proof.report import CheckReport, Part
from specdec_mlx.views.html import GREY, VERMILLION

ROUNDS = [(0, 0)] * 3 + [(4, 2), (4, 4), (4, 4), (2, 0)]


def stats_of(rounds: list[tuple[int, int]]) -> sd.stats.SpeculationStats:
    stats = sd.stats.SpeculationStats()
    for drafted, accepted in rounds:
        stats.record(RoundRecord(drafted, accepted, accepted + 1, drafted + 1))
    return stats


def result(drafter: str, length: str, category: str, ratio: float) -> Result:
    """A benchmark's result of which only the speed matters."""
    speeds = {"ratio": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.2}
    others = dict.fromkeys(Result.__struct_fields__, 10) | {"drafted": 20}
    way = {"drafter": drafter, "draft_length": length, "rule": "", "category": category}
    way |= {"session": "", "cost": "", "kernels": ""}
    return Result(**others | speeds | way)


def score(drafter: str, category: str, speed: float) -> Result:
    """A replay's result of which only the speed matters."""
    return replace(result(drafter, "4", category, speed), cost="linear:0.24")


def axes(plot: plots.Plot) -> Axes:
    return plot.axes[0]


def line(plot: plots.Plot, label: str) -> tuple[list[float], list[float]]:
    """Data of the line of a label."""
    (found,) = [x for x in axes(plot).get_lines() if x.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def every_plot() -> dict[str, plots.Plot]:
    stats = stats_of(ROUNDS)
    results = [result("mlx-lm", "", "a", 1), result("ngram", "4", "a", 2)]
    return {
        "stats": plots.plot_stats(stats),
        "cost": plots.cost_curve(linear_cost(0.24)),
        "by text": plots.speed_by_text(results),
        "modelled": plots.speed_by_text([score("ngram", "a", 1.5), score("ngram", "all", 1.2)]),
        "power": CheckReport([Part("joint", "passed", "", {"power": {"bonus": 1.0}})]).plot(),
    }


def test_every_plot_is_named_and_reads_on_light_and_on_dark_pages():
    """A PNG without a background; letters and axes are of a grey, or a colour, for both."""
    for name, plot in every_plot().items():
        png, size = plot._repr_png_()
        with Image.open(BytesIO(png)) as image:
            assert image.getpixel((0, 0))[3] == 0, name
        assert size["width"] > 300
        shown = [text for text in plot.findobj(Text) if text.get_text()]
        colours = {to_hex(text.get_color()) for text in shown}
        assert len(shown) > 5, name
        for ax in plot.axes:
            assert ax.get_xlabel() or not (ax.get_ylabel() or ax.get_title()), name
            assert ax.get_facecolor()[3] == 0, name
            colours |= {to_hex(spine.get_edgecolor()) for spine in ax.spines.values()}
            lines = [x for x in ax.get_lines() if not str(x.get_label()).startswith("_")]
            looks = {(x.get_color(), x.get_linestyle(), x.get_marker()) for x in lines}
            assert len(lines) == len(looks), name
        assert colours <= {to_hex(GREY), to_hex(VERMILLION)}, name


LONG = [(63, n) for n in range(64)]


def test_long_drafts_are_shown_in_ranges_of_positions():
    """As the table has them: 63 bars would be a blot; no round and no position is left out."""
    histogram, by_position, _ = plots.plot_stats(stats_of(LONG + ROUNDS)).axes[:3]
    bars = [patch.get_height() for patch in histogram.patches]
    assert [label.get_text() for label in histogram.get_xticklabels()] == [
        *"01234",
        *("5\n–8", "9\n–16", "17\n–32", "33\n–63"),
    ]
    assert sum(bars) == len(LONG) + sum(drafted > 0 for drafted, _ in ROUNDS)
    assert bars[-1] == 63 - 32
    (shares,) = by_position.containers
    assert list(shares[0].get_ydata())[-1] == pytest.approx(sum(range(32)) / (31 * 64))
    assert len(shares[0].get_ydata()) == len(by_position.get_xticks()) == 8


def test_titles_stand_in_their_panels_and_the_legend_in_its_figure():
    """With long names, nothing is cut at an edge."""
    name = "prompt-lookup:max_ngram=4,min_ngram=2,window=1024,case=false"
    scores = [score(f"{name}{i}", "a", 1.5) for i in range(7)]
    for plot in (plots.plot_stats(stats_of(LONG)), plots.speed_by_text(scores)):
        plot.canvas.draw()
        for ax in plot.axes:
            boxes = [ax.title.get_window_extent()]
            boxes += [ax.get_legend().get_window_extent()] if ax.get_legend() else []
            assert all(box.x0 >= 0 and box.x1 <= plot.bbox.x1 for box in boxes if box.width)
            assert ax.title.get_window_extent().width <= ax.get_window_extent().width


def test_a_drafter_is_a_colour_and_a_length_is_a_mark():
    """So that no two ways look the same, up to six of each."""
    ways = [(f"drafter {d}", length) for d in range(6) for length in ("4", "8", "auto")]
    scores = [replace(score(name, "a", 1.5), draft_length=length) for name, length in ways]
    looks = {}
    for bars in axes(plots.speed_by_text(scores)).containers:
        drawn = bars[0]
        looks[bars.get_label()] = drawn.get_color(), drawn.get_marker()
    assert len(looks) == len(set(looks.values())) == len(ways)
    for name, length in ways:
        colour, mark = looks[f"{name}, K = {length}"]
        assert colour == looks[f"{name}, K = 4"][0]
        assert mark == looks[f"drafter 0, K = {length}"][1]


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "specdec_mlx.lab.plots")
    with pytest.raises(sd.errors.MissingPackageError, match=r"pip install \"specdec-mlx\[plot\]\""):
        importlib.import_module("specdec_mlx.lab.plots")
