"""Figures of a training: its curve, and what of its drafts would be accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_mlx.notebook.canvas import (
    Axes,
    Figure,
    MaxNLocator,
    axes_or_new,
    figure_of,
    label_axes,
    legend,
)
from specdec_mlx.notebook.palette import COLOURS, MARKERS


def learning_curve(report: Mapping[str, Any], ax: Axes | None = None) -> Figure:
    """Acceptance on held-out text over the updates, a line for each position of the draft.

    Args:
        report: contents of the `training.json` that a training writes.
        ax: axes to draw into, a new plot if None.
    """
    ax = axes_or_new(ax)
    curve = report["curve"]
    steps = [point["step"] for point in curve]
    for i in range(len(curve[0]["greedy"])):
        shares = [point["greedy"][i] for point in curve]
        style: Any = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        ax.plot(steps, shares, label=f"position {i + 1}", markersize=4, **style)
    label_axes(ax, "Learning curve, held-out text", "updates", "kept, and all before it")
    legend(ax)
    return figure_of(ax)


def acceptance_of_reports(reports: Mapping[str, Any], ax: Axes | None = None) -> Figure:
    """Share of the drafts that is kept, by position, for several trainings.

    Args:
        reports: what each is called -> contents of its `training.json`.
        ax: axes to draw into, a new plot if None.
    """
    ax = axes_or_new(ax)
    for i, (name, report) in enumerate(reports.items()):
        chances = report["acceptance"]["greedy"]
        style: Any = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        ax.plot(range(1, len(chances) + 1), chances, label=name, **style)
    label_axes(ax, "Acceptance, held-out text", "position in the draft", "kept, and all before it")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(ax)
    return figure_of(ax)
