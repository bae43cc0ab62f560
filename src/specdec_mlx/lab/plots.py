"""Figures of runs, benchmarks and checks (`pip install "specdec-mlx[plot]"`).

Each function returns a `Plot`, which notebooks show, or draws into the axes `ax`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import cycle
from typing import Any

import numpy as np

from specdec_mlx.errors import MissingPackageError
from specdec_mlx.lab.estimates import wilson
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
    """These axes, or the axes of a new plot with a size in inches."""
    return Plot(figsize=size).add_subplot() if ax is None else ax


@styled
def label_axes(ax: Axes, title: str, x: str, y: str) -> Figure:
    """Set the title and the names of the axes with their units.

    Returns the figure, which is a `Plot` unless the caller gave the axes.
    """
    ax.set(title=title, xlabel=x, ylabel=y)
    assert isinstance(ax.figure, Figure)
    return ax.figure


@styled
def finish(ax: Axes, title: str, x: str, y: str, /, **options: Any) -> Figure:
    """Add a legend with matplotlib's options, and call `label_axes`."""
    ax.legend(**options)
    return label_axes(ax, title, x, y)


def plot_stats(stats: SpeculationStats) -> Plot:
    """Draw the accept histogram, the acceptance by position, and tokens per pass over time."""
    drawings = (accept_histogram, acceptance_by_position, tokens_over_time)
    plot = Plot(figsize=(2 * PANEL[0], PANEL[1]))  # not wider than a notebook
    for draw, ax in zip(drawings, plot.subplots(1, len(drawings)), strict=True):
        draw(stats, ax)
    return plot


@styled
def accept_histogram(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Draw the rounds with a draft, by the number of accepted tokens."""
    ax = axes_or_new(ax)
    counts = Counter(accepted for drafted, accepted in stats.rounds if drafted)
    ranges = [range(1), *position_ranges(max(counts, default=0))]
    heights = [sum(counts[n] for n in numbers) for numbers in ranges]
    ax.bar_label(ax.bar(names_of(ranges), heights, color=BLUE), fontsize=8)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    num_plain = stats.target_passes - counts.total()
    words = f"tokens accepted ({num_plain} plain rounds)"
    return label_axes(ax, "Rounds that drafted", words, "rounds")


def acceptance_by_position(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Draw the acceptance at each position of a draft, with 95% intervals."""
    ax = axes_or_new(ax)
    counts = acceptance_in_ranges(stats)
    shares = [wilson(*of_range) for of_range in counts.values()]
    draw_intervals(ax, names_of(counts), shares, fmt="o", color=BLUE, capsize=3)
    ax.set_ylim(0, 1.03)
    y = "share accepted, 95% interval"
    return label_axes(ax, "Acceptance by position", "position in the draft", y)


def names_of(ranges: Iterable[range]) -> list[str]:
    """Labels of ranges, on two lines if they are long."""
    return [range_label(numbers).replace(" to ", "\n–") for numbers in ranges]


def draw_intervals(
    ax: Axes,
    at: Sequence[Any],
    estimates: Sequence[Sequence[float]],
    sideways: bool = False,
    **look: Any,
) -> None:
    """Draw estimates with their intervals.

    Args:
        ax: where to draw.
        at: place of each estimate on the other axis.
        estimates: (value, low, high) each.
        sideways: True for values along the x axis.
        **look: of matplotlib's `errorbar`.
    """
    middle, low, high = np.array(estimates).reshape(-1, 3).T
    # Rounding may leave an estimate outside of its interval.
    errors = np.maximum(0, [middle - low, high - middle])
    if sideways:
        ax.errorbar(middle, at, xerr=errors, **look)
    else:
        ax.errorbar(at, middle, yerr=errors, **look)


def tokens_over_time(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Draw tokens per pass along the generation, and the share of rounds with a draft."""
    ax = axes_or_new(ax)
    rows = [(i, 1 + accepted, drafted > 0) for i, (drafted, accepted) in enumerate(stats.rounds)]
    runs = np.array_split(rows, min(MOST_RUNS, len(rows))) if rows else []
    at, tokens, drafting = np.array([run.mean(axis=0) for run in runs]).reshape(-1, 3).T
    ax.step(at, tokens, where="mid", color=BLUE, label="tokens per pass")
    ax.axhline(1, color=GREY, linewidth=1, linestyle=":", label="plain decoding")
    look: Any = {"color": ORANGE, "alpha": 0.3, "linewidth": 0}
    ax.fill_between(at, drafting, step="mid", label="share of rounds that drafted", **look)
    # Leave room for the legend.
    ax.set_ylim(0, max([2.0, *tokens]) * 1.35)
    return finish(ax, "Along the generation", "round", "tokens per pass", loc="upper right")


def cost_curve(cost: Any) -> Figure:
    """Draw a `CostCurve`: c(m) of a pass over m positions, relative to a plain step."""
    ax = axes_or_new(None)
    known = cost.positions if len(cost.positions) > 2 else range(1, MOST_POSITIONS + 1)
    positions = [m for m in known if m <= MOST_POSITIONS]
    ax.plot(positions, [cost(m) / cost(1) for m in positions], "o-", color=BLUE, label="c(m)")
    if cost.low:
        low, high = np.array([cost.low, cost.high])[:, : len(positions)] / cost(1)
        ax.fill_between(positions, low, high, color=BLUE, alpha=0.25, linewidth=0, label="95%")
    ax.set_ylim(0)
    return finish(ax, f"Cost of a pass, {cost.name}", "positions in the pass, m", "plain steps")


def speed_by_text(results: Sequence[Any], ax: Axes | None = None, title: str = "") -> Figure:
    """Draw the speed of each contender on each kind of text, relative to plain mlx-lm.

    A colour is a drafter, and a mark is a draft length and a rule.

    Args:
        results: of a benchmark, or of a replay at a single cost.
        ax: where to draw. None for a new plot.
        title: of the legend.
    """
    others = [r for r in results if r.drafter != PLAIN and not r.session]
    others.sort(key=lambda r: r.drafter == MLX_LM_SPECULATION)
    categories = list(dict.fromkeys(r.category for r in others))
    ways = list(dict.fromkeys(r.key for r in others))
    colours = cycled(COLOURS, (drafter for drafter, *_ in ways))
    marks = cycled(MARKERS, (way[1:] for way in ways))
    has_rules = len({rule for _, _, rule, _ in ways if rule}) > 1
    step = 1 / (len(ways) + 1)
    height = 1.2 + 0.13 * len(categories) / step + LEGEND_LINE * len(ways)
    ax = axes_or_new(ax, (7.2, height))
    ax.axvline(1, color=GREY, linewidth=1.5, label="plain decoding")
    for i, way in enumerate(ways, start=1):
        drafter, length, rule, kernels = way
        measured = [r for r in others if r.key == way and r.ratio]
        name = [LEGENDS.get(drafter, drafter), length and f"K = {length}"]
        name += [rule if has_rules else "", kernels and f"kernels {kernels}"]
        draw_intervals(
            ax,
            [categories.index(r.category) + i * step for r in measured],
            [(r.ratio, r.ratio_low, r.ratio_high) for r in measured],
            sideways=True,
            fmt=marks[way[1:]],
            color=colours[drafter],
            capsize=2,
            label=", ".join(filter(None, name)),
        )
    for edge in range(1, len(categories)):
        ax.axhline(edge, color=GREY, alpha=0.3, linewidth=0.8)
    names = [category.replace("_", " ") for category in categories]
    ax.set_yticks([i + 0.5 for i in range(len(names))], names)
    ax.set_ylim(len(categories), 0)
    cost = others[0].cost if others else ""
    x = "modelled speed" if cost else "tokens per second"
    x += " relative to plain mlx-lm, 95% interval over texts"
    look = {"title": title or cost, "title_fontsize": 10, "alignment": "left"}
    return finish(ax, "", x, "", loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, **look)


def cycled(looks: Sequence[str], keys: Iterable[Any]) -> dict[Any, str]:
    """A look for each different key. The looks repeat if there are not enough."""
    return dict(zip(dict.fromkeys(keys), cycle(looks), strict=False))


def power_of_check(parts: Sequence[Any]) -> Figure:
    """Draw the probability that a check finds each named fault. `parts` are of its report."""
    powers = {
        f"{part.name}: {fault}": power
        for part in parts
        for fault, power in part.numbers.get("power", {}).items()
    }
    ax = axes_or_new(None, (7.2, 1.2 + 0.25 * len(powers)))
    ax.barh([*powers], [*powers.values()], color=BLUE)
    ax.axvline(0.9, color=ORANGE, linestyle="--", label="counts as found")
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    words = "chance that the fault would have been found"
    return finish(
        ax,
        "Power of the check",
        words,
        "",
        loc="lower right",
        bbox_to_anchor=(1, 1),
        borderaxespad=0.2,
    )
