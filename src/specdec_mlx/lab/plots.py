"""Figures of runs, benchmarks and checks (`pip install "specdec-mlx[plot]"`).

Each function returns a `Plot`, which notebooks show, or draws into the axes `ax`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np

from specdec_mlx.errors import MissingPackageError
from specdec_mlx.lab.counterfactual import wilson
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.views.html import (
    BLUE,
    COLOURS,
    GREY,
    MARKERS,
    ORANGE,
    acceptance_in_ranges,
    position_ranges,
    range_label,
)

try:
    from matplotlib import rc_context
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.ticker import MaxNLocator as MaxNLocator
except ImportError as error:
    raise MissingPackageError(
        'Plots need matplotlib, which is not installed. pip install "specdec-mlx[plot]"'
    ) from error

PANEL = (4.6, 3.2)  # inches
PIXELS_PER_INCH, SHARPNESS = 90, 2  # as shown, and pixels drawn for each of them
# of a cost curve, and of a text along its generation
MOST_POSITIONS, MOST_RUNS = 17, 40
LEGEND_LINE = 0.17  # inches
PLAIN, MLX_LM_SPECULATION = "mlx-lm", "mlx-lm-speculation"
LEGENDS = {MLX_LM_SPECULATION: "mlx-lm's own, draft model", "none": "no drafter, our loop"}
"""Names in a legend that differ from those of a benchmark's results."""


styled = rc_context(
    {
        **dict.fromkeys(["figure.facecolor", "axes.facecolor"], "none"),
        **dict.fromkeys(["text.color", "axes.labelcolor", "axes.edgecolor"], GREY),
        **dict.fromkeys(["xtick.color", "ytick.color"], GREY),
        **dict.fromkeys(["xtick.labelsize", "ytick.labelsize", "legend.fontsize"], 8),
        **dict.fromkeys(["axes.spines.top", "axes.spines.right"], False),
        "figure.constrained_layout.use": True,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "legend.frameon": False,
    }
)
"""Decorator: draw without a background, lettered in a grey for light and dark pages."""


class Plot(Figure):
    """A figure that a notebook shows as the value of a cell."""

    @styled
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)

    add_subplot = styled(Figure.add_subplot)

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=SHARPNESS * PIXELS_PER_INCH)
        width, height = self.get_size_inches() * PIXELS_PER_INCH
        return buffer.getvalue(), {"width": int(width), "height": int(height)}


def axes_or_new(ax: Axes | None, size: tuple[float, float] = PANEL) -> Axes:
    """The axes given, or those of a new plot of this size in inches."""
    return Plot(figsize=size).add_subplot() if ax is None else ax


@styled
def label_axes(ax: Axes, title: str, x: str, y: str) -> Figure:
    """Write the title and the axes' names with their units; returns the figure.

    The figure is a `Plot`, unless the axes were the caller's.
    """
    ax.set_title(title)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    assert isinstance(ax.figure, Figure)
    return ax.figure


@styled
def legend(ax: Axes, **options: Any) -> Figure:
    """Add the legend, with matplotlib's options; returns the figure, which is complete."""
    ax.legend(**options)
    assert isinstance(ax.figure, Figure)
    return ax.figure


def finish(ax: Axes, title: str, x: str, y: str, **options: Any) -> Figure:
    """`label_axes`, then `legend`."""
    label_axes(ax, title, x, y)
    return legend(ax, **options)


def plot_stats(stats: SpeculationStats) -> Plot:
    """Accept histogram, acceptance by position, and tokens per pass over time."""
    drawings = (accept_histogram, acceptance_by_position, tokens_over_time)
    plot = Plot(figsize=(2 * PANEL[0], PANEL[1]))  # not wider than a notebook
    for draw, ax in zip(drawings, plot.subplots(1, len(drawings)), strict=True):
        draw(stats, ax)
    return plot


@styled
def accept_histogram(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Rounds that drafted, by the number of draft tokens that were accepted."""
    ax = axes_or_new(ax)
    counts = Counter(accepted for drafted, accepted in stats.rounds if drafted)
    numbers = [range(1), *position_ranges(max(counts, default=0))]
    heights = [sum(counts[n] for n in one) for one in numbers]
    bars = ax.bar(range(len(numbers)), heights, color=BLUE)
    ax.bar_label(bars, fontsize=8)
    _label_ranges(ax, numbers)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    num_plain = stats.target_passes - counts.total()
    words = f"tokens accepted ({num_plain} plain rounds)"
    return label_axes(ax, "Rounds that drafted", words, "rounds")


def acceptance_by_position(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Share of the rounds that drafted a position in which it was accepted, 95% intervals."""
    ax = axes_or_new(ax)
    found = acceptance_in_ranges(stats)
    shares = np.array([wilson(*counts) for counts in found.values()]).reshape(-1, 3)
    middle, low, high = shares.T
    places, ends = range(len(found)), [middle - low, high - middle]
    ax.errorbar(places, middle, yerr=ends, fmt="o", color=BLUE, capsize=3)
    ax.set_ylim(0, 1.03)
    _label_ranges(ax, list(found))
    return label_axes(
        ax, "Acceptance by position", "position in the draft", "share accepted, 95% interval"
    )


def _label_ranges(ax: Axes, ranges: Sequence[range]) -> None:
    """Name the places of the x axis, 0, 1, ..., after ranges of numbers."""
    names = [range_label(numbers).replace(" to ", "\n–") for numbers in ranges]
    ax.set_xticks(range(len(ranges)), names)


def tokens_over_time(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Tokens per pass along the generation, in runs of rounds, and how many of them drafted."""
    ax = axes_or_new(ax)
    rows = [(i, 1 + accepted, drafted > 0) for i, (drafted, accepted) in enumerate(stats.rounds)]
    num_runs = min(MOST_RUNS, len(rows))
    runs = np.array_split(rows, num_runs) if rows else []
    means = np.array([run.mean(axis=0) for run in runs]).reshape(-1, 3)
    at, tokens, drafting = means.T
    ax.step(at, tokens, where="mid", color=BLUE, label="tokens per pass")
    ax.axhline(1, color=GREY, linewidth=1, linestyle=":", label="plain decoding")
    mode = ax.twinx()
    mode.fill_between(at, drafting, step="mid", color=ORANGE, alpha=0.3, linewidth=0)
    mode.set_ylim(0, 4)  # the lowest quarter of the panel
    mode.set_yticks([0, 1], ["plain", "drafting"])
    ax.set_ylim(0, max([2.0, *tokens]) * 1.25)
    return finish(ax, "Along the generation", "round", "tokens per pass", loc="upper right")


def cost_curve(cost: Any) -> Figure:
    """c(m), a pass over m positions in plain steps. cost: a `bench.cost.CostCurve`."""
    ax = axes_or_new(None)
    known = cost.positions if len(cost.positions) > 2 else range(1, MOST_POSITIONS + 1)
    positions = [m for m in known if m <= MOST_POSITIONS]
    ax.plot(positions, [cost(m) / cost(1) for m in positions], "o-", color=BLUE, label="c(m)")
    if cost.low:
        intervals = (cost.low, cost.high)
        low, high = ([x / cost(1) for x in ends[: len(positions)]] for ends in intervals)
        ax.fill_between(positions, low, high, color=BLUE, alpha=0.25, linewidth=0, label="95%")
    ax.set_ylim(0)
    return finish(ax, f"Cost of a pass, {cost.name}", "positions in the pass, m", "plain steps")


def speed_by_text(results: Sequence[Any], ax: Axes | None = None, title: str = "") -> Figure:
    """Speed of each contender by kind of text, relative to plain mlx-lm, with 95% intervals.

    results: of a benchmark or a replay at one cost. ax: where to draw, a new plot if None. A
    drafter is a colour, a draft length and rule a mark.
    """
    others = [r for r in results if r.drafter != PLAIN and not r.session]
    others.sort(key=lambda r: r.drafter == MLX_LM_SPECULATION)
    categories = list(dict.fromkeys(r.category for r in others))
    ways = list(dict.fromkeys(r.key for r in others))
    drafters = list(dict.fromkeys(drafter for drafter, *_ in ways))
    settings = list(dict.fromkeys(way[1:] for way in ways))
    rules = {rule for _, _, rule in ways if rule}
    step = 1 / (len(ways) + 1)
    height = 1.2 + 0.13 * len(categories) / step + LEGEND_LINE * len(ways)
    ax = axes_or_new(ax, (7.2, height))
    ax.axvline(1, color=GREY, linewidth=1.5, label="plain decoding")
    for i, (drafter, length, rule) in enumerate(ways, start=1):
        own = [r for r in others if r.key == (drafter, length, rule) and r.ratio]
        spread = np.array([(r.ratio - r.ratio_low, r.ratio_high - r.ratio) for r in own])
        name = (
            LEGENDS.get(drafter, drafter),
            length and f"K = {length}",
            rule if len(rules) > 1 else "",
        )
        ax.errorbar(
            [r.ratio for r in own],
            [categories.index(r.category) + i * step for r in own],
            xerr=np.maximum(0, spread.reshape(-1, 2).T),
            fmt=MARKERS[settings.index((length, rule)) % len(MARKERS)],
            color=COLOURS[drafters.index(drafter) % len(COLOURS)],
            capsize=2,
            label=", ".join(filter(None, (*name, rule if len(rules) > 1 else ""))),
        )
    for edge in range(1, len(categories)):
        ax.axhline(edge, color=GREY, alpha=0.3, linewidth=0.8)
    names = [category.replace("_", " ") for category in categories]
    ax.set_yticks([i + 0.5 for i in range(len(names))], names)
    ax.set_ylim(len(categories), 0)
    cost = others[0].cost if others else ""
    speed = "modelled speed" if cost else "tokens per second"
    label_axes(ax, "", f"{speed} relative to plain mlx-lm, 95% interval over texts", "")
    where = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    return legend(ax, title=title or cost, title_fontsize=10, alignment="left", **where)


def power_of_check(parts: Sequence[Any]) -> Figure:
    """Chance that a check would have found each of the named faults. parts: of its report."""
    found = [
        (f"{part.name}: {fault}", power)
        for part in parts
        for fault, power in part.numbers.get("power", {}).items()
    ]
    ax = axes_or_new(None, (7.2, 1.2 + 0.25 * len(found)))
    ax.barh([name for name, _ in found], [power for _, power in found], color=BLUE)
    ax.axvline(0.9, color=ORANGE, linestyle="--", label="counts as found")
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    words = "chance that the fault would have been found"
    where = {"loc": "lower right", "bbox_to_anchor": (1, 1), "borderaxespad": 0.2}
    return finish(ax, "Power of the check", words, "", **where)
