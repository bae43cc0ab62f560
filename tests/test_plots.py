"""What is drawn: the data of the artists, their labels and units; not pixels."""

from __future__ import annotations

import sys
from dataclasses import fields
from io import BytesIO

import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.text import Text
from PIL import Image

import specdec_mlx as sd
from specdec_mlx.bench.cost import linear_cost
from specdec_mlx.bench.replay import Score, Scores
from specdec_mlx.bench.summary import Result
from specdec_mlx.checks.report import CheckReport, Part
from specdec_mlx.contracts import RoundRecord
from specdec_mlx.notebook import plots
from specdec_mlx.notebook.views import GREY, VERMILLION
from specdec_mlx.stats import theory

ROUNDS = [(0, 0)] * 3 + [(4, 2), (4, 4), (4, 4), (2, 0)]
TREE = [-1, -1, 0, 0, 2]


def stats_of(rounds: list[tuple[int, int]]) -> sd.stats.SpeculationStats:
    stats = sd.stats.SpeculationStats()
    for drafted, accepted in rounds:
        stats.record(RoundRecord(drafted, accepted, accepted + 1, drafted + 1))
    return stats


def result(drafter: str, length: str, category: str, ratio: float) -> Result:
    """A benchmark's result of which only the speed matters."""
    speeds = {"ratio": ratio, "ratio_low": ratio - 0.1, "ratio_high": ratio + 0.2}
    others = dict.fromkeys((f.name for f in fields(Result)), 10) | {"drafted": 20}
    way = {"drafter": drafter, "draft_length": length, "rule": "", "category": category}
    return Result(**others | speeds | way)


def score(drafter: str, category: str, speedup: float) -> Score:
    """A replay's score of which only the speed matters."""
    return Score("linear:0.24", drafter, "4", category, 1, 10, 5, 5, 5, 2.0, speedup)


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
        "stats": stats.plot(),
        "cost": plots.cost_curve(linear_cost(0.24), 0.8),
        "lengths": plots.draft_lengths({2: stats}),
        "speeds": plots.draft_lengths({2: stats}, linear_cost(0.1)),
        "by text": plots.speed_by_text(results),
        "modelled": Scores([score("ngram", "a", 1.5), score("ngram", "all", 1.2)]).plot(),
        "power": CheckReport([Part("joint", "passed", "", {"power": {"bonus": 1.0}})]).plot(),
        "tree": plots.token_tree(TREE, list("abcd$"), [0, 2]),
        "gain": plots.tree_gain([[0.6, 0.2]] * 4),
        "figure 2": plots.paper_figure_2(),
        "figure 3": plots.paper_figure_3(),
        "figure 4": plots.paper_figure_4(),
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


def test_draft_lengths_hold_equation_1_against_the_counts():
    runs = {2: stats_of([(2, 2), (2, 0)]), 4: stats_of([(4, 4), (4, 2)])}
    plot = plots.draft_lengths(runs)
    expected = [theory.expected_tokens(8 / 10, K) for K in (2, 4)]
    assert line(plot, "expected, α = 0.80") == ([2, 4], pytest.approx(expected))
    assert line(plot, "observed") == ([2, 4], [2, 4])
    speeds = line(plots.draft_lengths(runs, linear_cost(0.5)), "observed")[1]
    assert speeds == pytest.approx([2 / 2, 4 / 3])


def test_figures_of_the_paper():
    """Figure 2 is equation 1, figure 3 section 3.5, figure 4 theorems 3.8 and 3.11."""
    for plot, label, number in (
        (plots.paper_figure_2(), "K = 5", (1 - 0.8**6) / 0.2),
        (plots.paper_figure_3(), "c = 0.05", theory.best_draft_length(0.8, 0.05)),
        (plots.paper_figure_4(), "speed, K = 5", 3.69),  # table 1
        (plots.paper_figure_4(), "operations, K = 5", 1.63),
    ):
        x, y = line(plot, label)
        assert y[x.index(0.8)] == pytest.approx(number, abs=0.005)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "specdec_mlx.notebook.plots")
    with pytest.raises(sd.errors.MissingPackageError, match=r"pip install \"specdec-mlx\[plot\]\""):
        stats_of(ROUNDS).plot()


def test_a_tree_is_drawn_with_what_was_kept_and_is_worth_no_less_than_a_chain():
    """An edge for each node, those of the kept path in another colour; leaves at other heights.

    At every cost; by 1 + the sum of all chances where positions cost nothing.
    """
    ax = axes(plots.token_tree(TREE, list("abcde"), [0, 2]))
    *edges, nodes = ax.get_lines()
    assert [edge.get_color() == VERMILLION for edge in edges] == [True, False, True, False, False]
    assert [text.get_text() for text in ax.texts] == list("abcde")
    assert len(set(zip(*nodes.get_data(), strict=True))) == 6
    gain = plots.tree_gain([[0.6, 0.2]] * 3)
    tree, chain = line(gain, "best tree")[1], line(gain, "best chain")[1]
    assert all(a >= b for a, b in zip(tree, chain, strict=True))
    assert tree[0] == pytest.approx(1 + 0.8 + 0.8**2 + 0.8**3)
    assert chain[0] == pytest.approx(1 + 0.6 + 0.6**2 + 0.6**3)
