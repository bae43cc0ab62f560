"""Figures of benchmarks, with matplotlib (`pip install "specdec-mlx[plot]"`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec_mlx.bench.contenders import MLX_LM_SPECULATION
from specdec_mlx.bench.summary import Result
from specdec_mlx.drafters.registry import NO_DRAFTER
from specdec_mlx.notebook.plots import Axes, Figure, axes_or_new, label_axes, legend_above
from specdec_mlx.notebook.views import COLOURS, GREY, MARKERS

LEGENDS = {MLX_LM_SPECULATION: "mlx-lm's own, draft model", NO_DRAFTER: "no drafter, our loop"}
"""Names in a legend that differ from the command line's."""


def speed_by_text(results: Sequence[Result], ax: Axes | None = None, title: str = "") -> Figure:
    """Speed of each contender by kind of text, relative to plain mlx-lm, with 95% intervals.

    results: of a benchmark, those of plain mlx-lm first. ax: where to draw, a new plot if None.
    """
    contenders = list(dict.fromkeys(r.key for r in results))[1:]
    contenders.sort(key=lambda key: key[0] == MLX_LM_SPECULATION)
    with_rule = len({r.rule for r in results if r.rule}) > 1
    categories = list(dict.fromkeys(r.category for r in results))
    height = 1.2 + 0.13 * len(categories) * (len(contenders) + 1)
    ax = axes_or_new(ax, (7.2, height))
    ax.axvline(1, color=GREY, linewidth=1.5, label="plain mlx-lm")
    for i, key in enumerate(contenders):
        chosen = [r for r in results if r.key == key and r.ratio]
        rows = [categories.index(r.category) + (i + 1) / (len(contenders) + 1) for r in chosen]
        ratios = [r.ratio or 0.0 for r in chosen]
        below = [max(0.0, x - (r.ratio_low or x)) for x, r in zip(ratios, chosen, strict=True)]
        above = [max(0.0, (r.ratio_high or x) - x) for x, r in zip(ratios, chosen, strict=True)]
        look: dict[str, Any] = {"fmt": MARKERS[i % 6], "color": COLOURS[i % 6], "capsize": 2}
        label = contender_name(*(key if with_rule else key[:2]))
        ax.errorbar(ratios, rows, xerr=[below, above], label=label, **look)
    for edge in range(1, len(categories)):
        ax.axhline(edge, color=GREY, alpha=0.3, linewidth=0.8)
    names = [category.replace("_", " ") for category in categories]
    ax.set_yticks([i + 0.5 for i in range(len(names))], names)
    ax.set_ylim(len(categories), 0)
    label_axes(ax, "", "tokens per second relative to plain mlx-lm, 95% interval over texts", "")
    return legend_above(ax, title)


def contender_name(drafter: str, draft_length: str, rule: str = "") -> str:
    """Name of a contender in a legend; an empty part is left out."""
    name = LEGENDS.get(drafter, drafter)
    name = f"{name}, K = {draft_length}" if draft_length else name
    return f"{name}, {rule}" if rule else name
