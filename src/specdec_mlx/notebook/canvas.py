"""What plots are drawn on, with matplotlib (`pip install "specdec-mlx[plot]"`).

No pyplot, no global state. A plot of ours has no background and grey lettering, so that it reads on
light and on dark pages; on axes that the caller gives, the caller's style stays.
"""

from __future__ import annotations

from io import BytesIO
from typing import Any

from specdec_mlx.errors import MissingPackageError
from specdec_mlx.notebook.palette import GREY

try:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.ticker import MaxNLocator as MaxNLocator
except ImportError as error:
    raise MissingPackageError(
        'Plots need matplotlib, which is not installed. pip install "specdec-mlx[plot]"'
    ) from error

PANEL = (4.6, 3.2)  # inches
PIXELS_PER_INCH = 90
SHARPNESS = 2
"""Pixels drawn for each pixel of width shown."""


class Plot(Figure):
    """A figure that a notebook shows as the value of a cell, on the page's own background."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what a matplotlib figure takes."""
        super().__init__(*args, **{"facecolor": "none", "layout": "constrained"} | options)

    def add_subplot(self, *args: Any, **options: Any) -> Axes:
        """Axes without a background, lettered in grey."""
        ax: Axes = super().add_subplot(*args, **options)
        ax.set_facecolor("none")
        ax.tick_params(colors=GREY)
        ax.spines[:].set_color(GREY)
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            text.set_color(GREY)
        return ax

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=SHARPNESS * PIXELS_PER_INCH)
        width, height = self.get_size_inches() * PIXELS_PER_INCH
        return buffer.getvalue(), {"width": int(width), "height": int(height)}


def axes_or_new(ax: Axes | None, size: tuple[float, float] = PANEL) -> Axes:
    """The axes given, or those of a new plot of so many inches."""
    return Plot(figsize=size).add_subplot() if ax is None else ax


def panels(count: int) -> tuple[Plot, Any]:
    """A new plot, and its axes [count] side by side."""
    plot = Plot(figsize=(count * PANEL[0], PANEL[1]))
    return plot, plot.subplots(1, count)


def figure_of(ax: Axes) -> Figure:
    """The figure of axes: a `Plot`, unless the axes were the caller's."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def ink(ax: Axes) -> Any:
    """Colour of the axes' lettering."""
    return ax.xaxis.label.get_color()


def label_axes(ax: Axes, title: str, x: str, y: str) -> None:
    """Name the axes, and drop the frame where nothing is read off.

    Args:
        ax: the axes.
        title: stands above them.
        x: what is read off below, with its unit.
        y: what is read off on the left, with its unit.
    """
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def legend(ax: Axes, **options: Any) -> None:
    """What lines and marks mean; options as matplotlib's."""
    ax.legend(**{"fontsize": 8, "frameon": False, "labelcolor": ink(ax)} | options)


def legend_above(ax: Axes, title: str, num_columns: int = 4) -> None:
    """The legend between a title and the axes, from the left edge on, in rows.

    Args:
        ax: the axes.
        title: stands above the legend.
        num_columns: most entries in a row.
    """
    drawn = ax.legend(
        title=title,
        title_fontsize=10,
        alignment="left",
        ncols=num_columns,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderaxespad=0.2,
        fontsize=8,
        frameon=False,
        labelcolor=ink(ax),
    )
    drawn.get_title().set_color(ink(ax))
