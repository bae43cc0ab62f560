"""Figures of token trees: one that was drafted, and their speed by the cost of a position."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specdec_mlx.notebook.canvas import (
    Axes,
    Figure,
    axes_or_new,
    figure_of,
    ink,
    label_axes,
    legend,
)
from specdec_mlx.notebook.palette import BLUE, GREY, VERMILLION
from specdec_mlx.stats.trees import Ranks, best_first, expected_tree_tokens
from specdec_mlx.types.trees import ROOT, children_of, depths_of

SIZE = (9.2, 4.4)  # inches
SLOPES = tuple(n / 100 for n in range(26))  # costs of a further position, in passes over one
MOST_NODES = 60


def token_tree(
    parents: Sequence[int],
    labels: Sequence[str],
    kept: Collection[int] = (),
    ax: Axes | None = None,
) -> Figure:
    """A drafted tree, from the left to the right, with the path that was kept.

    Args:
        parents: [K], see `Draft.parents`.
        labels: [K] the text of each node.
        kept: the nodes that were kept.
        ax: where to draw; a new plot if None.
    """
    ax = axes_or_new(ax, SIZE)
    heights = _heights(parents)
    depths = [0, *(depth + 1 for depth in depths_of(parents))]
    for node, parent in enumerate(parents):
        is_kept = node in kept
        colour = VERMILLION if is_kept else GREY
        ends = (parent + 1, node + 1)
        x, y = [depths[end] for end in ends], [heights[end] for end in ends]
        ax.plot(x, y, color=colour, linewidth=2.4 if is_kept else 0.8, zorder=1)
        ax.annotate(
            repr(labels[node])[1:-1].replace(" ", "␣"),
            (depths[node + 1], heights[node + 1]),
            color=colour if is_kept else ink(ax),
            fontsize=8,
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
        )
    ax.plot(depths, heights, "o", color=BLUE, markersize=4, zorder=2)
    title = f"A tree of {len(parents)} tokens, {len(kept)} of them kept"
    label_axes(ax, title, "tokens after the text", "")
    ax.set_yticks([])
    ax.spines[["left"]].set_visible(False)
    return figure_of(ax)


def _heights(parents: Sequence[int]) -> list[float]:
    """Height of each row: leaves one below the other, the others between their children."""
    children = children_of(parents)
    heights = [0.0] * len(children)
    num_leaves = 0

    def place(node: int) -> float:
        nonlocal num_leaves
        below = [place(child) for child in children[node + 1]]
        if not below:
            num_leaves += 1
        heights[node + 1] = (below[0] + below[-1]) / 2 if below else -float(num_leaves)
        return heights[node + 1]

    place(ROOT)
    return heights


def tree_gain(acceptance: Ranks, ax: Axes | None = None) -> Figure:
    """Speed of the best tree and of the best chain against the cost of a further position.

    Args:
        acceptance: by depth and rank, see `stats.trees`; drafts cost nothing.
        ax: where to draw; a new plot if None.
    """
    ax = axes_or_new(ax)
    likeliest = [row[:1] for row in acceptance]
    for label, ranks, colour in (("tree", acceptance, VERMILLION), ("chain", likeliest, BLUE)):
        speeds = [best_speed(ranks, slope) for slope in SLOPES]
        ax.plot(SLOPES, speeds, color=colour, label=f"best {label}")
    label_axes(ax, "What trees gain", "cost of a further position, in passes", "speed, plain = 1")
    return legend(ax)


def best_speed(acceptance: Ranks, slope: float) -> float:
    """Speed of the best tree where m positions cost 1 + slope (m - 1)."""

    def cost(positions: int) -> float:
        return 1 + slope * (positions - 1)

    parents, _ = best_first(acceptance, MOST_NODES, cost)
    return expected_tree_tokens(parents, acceptance) / cost(len(parents) + 1)
