"""Canvas of all plots: no background, grey lettering, no pyplot; a caller's style stays."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from specdec_mlx.errors import MissingPackageError
from specdec_mlx.notebook.palette import COLOURS, GREY, MARKERS

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
SHARPNESS = 2  # pixels drawn for each pixel shown


class Plot(Figure):
    """A figure that a notebook shows as the value of a cell."""

    def __init__(self, *args: Any, **options: Any) -> None:
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
    """The axes given, or those of a new plot of this size in inches."""
    return Plot(figsize=size).add_subplot() if ax is None else ax


def figure_of(ax: Axes) -> Figure:
    """The figure of axes: a `Plot`, unless the axes were the caller's."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def ink(ax: Axes) -> Any:
    """Colour of the axes' lettering."""
    return ax.xaxis.label.get_color()


def line_style(number: int) -> dict[str, Any]:
    """Colour and marker of the n-th line of a plot."""
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def label_axes(ax: Axes, title: str, x: str, y: str) -> None:
    """Write the title and the axes' names with their units, and drop the frame without scales."""
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def legend(ax: Axes, **options: Any) -> Figure:
    """Add the legend, with matplotlib's options; returns the figure, which is complete."""
    drawn = ax.legend(**{"fontsize": 8, "frameon": False, "labelcolor": ink(ax)} | options)
    drawn.get_title().set_color(ink(ax))
    return figure_of(ax)


def finish(ax: Axes, title: str, x: str, y: str, **options: Any) -> Figure:
    """`label_axes`, then `legend`."""
    label_axes(ax, title, x, y)
    return legend(ax, **options)


def legend_above(ax: Axes, title: str, num_columns: int = 4) -> Figure:
    """Add the legend in rows between a title and the axes; returns the figure."""
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    titled = {"title": title, "title_fontsize": 10, "alignment": "left"}
    return legend(ax, ncols=num_columns, **place, **titled)
