"""Figures, with matplotlib (`pip install "specdec-mlx[plot]"`): of a run, of costs, of the theory.

Each function returns a `Plot`, a matplotlib figure that notebooks show by itself, or draws into the
axes that it is given and returns their figure. Those of benchmarks are in `bench.plots`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from specdec_mlx.notebook.canvas import (
    Axes,
    Figure,
    MaxNLocator,
    Plot,
    axes_or_new,
    figure_of,
    ink,
    label_axes,
    legend,
    legend_above,
    panels,
)
from specdec_mlx.notebook.palette import BLUE, COLOURS, GREEN, GREY, ORANGE, VERMILLION
from specdec_mlx.notebook.views import binned
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stats.estimates import wilson
from specdec_mlx.stats.theory import (
    acceptance_from_counts,
    best_draft_length,
    best_draft_length_on_curve,
    expected_operations,
    expected_speedup,
    expected_speedup_on_curve,
    expected_tokens,
)

MOST_POSITIONS = 17
"""Widest pass of a drawn cost curve."""


class Curve(Protocol):
    """c(m), known at some positions; `bench.cost.CostCurve` is one."""

    @property
    def name(self) -> str:
        """What titles call it."""
        ...

    @property
    def positions(self) -> Sequence[int]:
        """Where it was measured."""
        ...

    @property
    def low(self) -> Sequence[float]:
        """Lower ends of its intervals at these positions; () for none."""
        ...

    @property
    def high(self) -> Sequence[float]:
        """Upper ends; () for none."""
        ...

    def __call__(self, num_positions: int) -> float:
        """Cost of a pass, in any unit."""
        ...


def plot_stats(stats: SpeculationStats) -> Plot:
    """A generation: its accept histogram, acceptance by position, and tokens per pass over time."""
    plot, axes = panels(3)
    accept_histogram(stats, axes[0])
    acceptance_by_position(stats, axes[1])
    tokens_over_time(stats, axes[2])
    return plot


def accept_histogram(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Rounds that drafted, by the number of draft tokens that were accepted."""
    ax = axes_or_new(ax)
    counts = Counter(accepted for drafted, accepted in stats.rounds if drafted)
    numbers = range(max(counts, default=0) + 1)
    bars = ax.bar(numbers, [counts[n] for n in numbers], color=BLUE)
    ax.bar_label(bars, fontsize=8, color=ink(ax))
    num_plain = stats.target_passes - counts.total()
    title = f"Rounds that drafted ({num_plain} plain ones beside them)"
    label_axes(ax, title, "draft tokens accepted", "rounds")
    ax.set_xticks(numbers)
    ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    return figure_of(ax)


def acceptance_by_position(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Share of the rounds that drafted a position in which it was accepted, 95% Wilson intervals.

    A position counts as drafted also where one before it was rejected.
    """
    ax = axes_or_new(ax)
    drafted = stats.drafted_at
    accepted = [*stats.accepted_at, *[0] * (len(drafted) - len(stats.accepted_at))]
    positions = range(1, len(drafted) + 1)
    estimates = [wilson(a, d) for a, d in zip(accepted, drafted, strict=True)]
    shares = [estimate.mean for estimate in estimates]
    below = [share - low for share, low, _ in estimates]
    above = [high - share for share, _, high in estimates]
    ax.errorbar(positions, shares, yerr=[below, above], fmt="o", color=BLUE, capsize=3)
    label_axes(
        ax, "Acceptance by position", "position in the draft", "share accepted, 95% interval"
    )
    ax.set_ylim(0, 1.03)
    ax.set_xticks(positions)
    return figure_of(ax)


def tokens_over_time(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Tokens per pass along the generation, in runs of rounds, and how many of them drafted."""
    ax = axes_or_new(ax)
    size = max(1, len(stats.rounds) // 40)
    num_bins = len(stats.rounds) // size
    tokens = binned([1 + accepted for _, accepted in stats.rounds], num_bins)
    drafting = binned([float(drafted > 0) for drafted, _ in stats.rounds], num_bins)
    at = [(i + 0.5) * len(stats.rounds) / max(1, num_bins) for i in range(num_bins)]
    ax.step(at, tokens, where="mid", color=BLUE, label="tokens per pass")
    ax.axhline(1, color=GREY, linewidth=1, linestyle=":", label="plain decoding")
    top = max([2.0, *tokens]) * 1.25
    mode = ax.twinx()
    mode.fill_between(at, drafting, step="mid", color=ORANGE, alpha=0.3, linewidth=0)
    mode.set_ylim(0, 4)  # the lowest quarter of the panel
    mode.set_yticks([0, 1], ["plain", "drafting"], fontsize=8)
    mode.spines[["top", "right"]].set_visible(False)
    label_axes(ax, "Along the generation", "round", "tokens per pass")
    ax.set_ylim(0, top)
    legend(ax, loc="upper right")
    return figure_of(ax)


def cost_curve(
    cost: Curve,
    acceptance: float | None = None,
    draft_cost: float = 0.0,
    ax: Axes | None = None,
) -> Figure:
    """c(m), a pass over m positions in plain steps, and the draft length that pays best on it.

    Args:
        cost: the curve, in any unit.
        acceptance: chance that a draft token is accepted; None draws the curve alone.
        draft_cost: of one draft token, in plain steps.
        ax: where to draw; a new plot if None.
    """
    ax = axes_or_new(ax)
    known = cost.positions if len(cost.positions) > 2 else range(1, MOST_POSITIONS + 1)
    positions = [m for m in known if m <= MOST_POSITIONS]
    relative = [cost(m) / cost(1) for m in positions]
    ax.plot(positions, relative, "o-", color=BLUE, markersize=4, label="c(m)")
    highest = max(relative)
    if cost.low:
        shown = slice(len(positions))
        low, high = ([x / cost(1) for x in side[shown]] for side in (cost.low, cost.high))
        ax.fill_between(positions, low, high, color=BLUE, alpha=0.25, linewidth=0, label="95%")
        highest = max(highest, *high)
    unit = "plain steps" if acceptance is None else "plain steps; tokens"
    label_axes(ax, f"Cost of a pass, {cost.name}", "positions in the pass, m", unit)
    if acceptance is not None:
        K = best_draft_length_on_curve(acceptance, cost, draft_cost * cost(1), positions[-1] - 1)
        label = f"pays best: K = {K}"
        ax.plot([K + 1], [cost(K + 1) / cost(1)], "D", color=VERMILLION, markersize=9, label=label)
        tokens = [expected_tokens(acceptance, m - 1) for m in positions]
        label = f"tokens a round, α = {acceptance:.2f}"
        ax.plot(positions, tokens, "--", color=GREEN, label=label)
        highest = max(highest, *tokens)
    ax.set_ylim(0, 1.15 * highest)
    legend(ax)
    return figure_of(ax)


def draft_lengths(
    runs: Mapping[int, SpeculationStats], cost: Curve | None = None, ax: Axes | None = None
) -> Figure:
    """Expected against observed by draft length: tokens per pass, or speed where `cost` is given.

    Expected is equation 1, or theorem 3.8 on the cost curve, with one chance of acceptance for all
    positions that fits the counts best.

    Args:
        runs: draft length K -> account of a generation that drafted K tokens a round.
        cost: c(m) in any unit, for speeds; None for tokens per pass.
        ax: where to draw; a new plot if None.
    """
    ax = axes_or_new(ax)
    lengths = sorted(runs)
    alpha = pooled_acceptance(runs.values())
    if cost is None:
        observed = [runs[K].tokens_per_pass for K in lengths]
        expected = [expected_tokens(alpha, K) for K in lengths]
        what = "tokens per pass"
    else:
        observed = [runs[K].tokens_per_pass * cost(1) / cost(K + 1) for K in lengths]
        expected = [expected_speedup_on_curve(alpha, K, cost) for K in lengths]
        what = "speed, plain decoding = 1"
        ax.axhline(1, color=GREY, linewidth=1, linestyle=":")
    ax.plot(lengths, expected, "--", color=GREEN, label=f"expected, α = {alpha:.2f}")
    ax.plot(lengths, observed, "o", color=BLUE, label="observed")
    label_axes(ax, "Expected and observed", "draft tokens a round, K", what)
    ax.set_xticks(lengths)
    legend(ax)
    return figure_of(ax)


def rule_picture(target_probs: Any, draft_probs: Any) -> Figure:
    """How rejection comes to the target's distribution, token by token.

    Blue: drawn from q and kept, min(p, q). Orange: drawn after a rejection, max(0, p - q). Together
    they are p; the outline is q, what the drafter proposes.

    Args:
        target_probs: [V] p.
        draft_probs: [V] q.
    """
    ax = axes_or_new(None)
    tokens = range(len(target_probs))
    kept = [min(p, q) for p, q in zip(target_probs, draft_probs, strict=True)]
    replaced = [p - k for p, k in zip(target_probs, kept, strict=True)]
    ax.bar(tokens, kept, color=BLUE, label=f"kept: {sum(kept):.0%} of the drafts")
    ax.bar(tokens, replaced, bottom=kept, color=ORANGE, hatch="//", label="after a rejection")
    ax.bar(tokens, draft_probs, fill=False, edgecolor=GREY, linestyle="--", label="proposed, q")
    label_axes(ax, "Kept and replaced add up to p", "token", "chance")
    ax.set_xticks(tokens)
    legend(ax)
    return figure_of(ax)


def paper_figure_2(draft_lengths: Sequence[int] = (1, 3, 5, 7, 10)) -> Figure:
    """Expected tokens a round by acceptance (Leviathan et al. 2023, figure 2)."""
    ax = axes_or_new(None)
    for i, K in enumerate(draft_lengths):
        values = [expected_tokens(alpha, K) for alpha in _chances()]
        ax.plot(_chances(), values, color=COLOURS[i % 6], label=f"K = {K}")
    unlimited = [1 / (1 - alpha) for alpha in _chances()[:-10]]
    ax.plot(_chances()[:-10], unlimited, ":", color=GREY, label="K unlimited")
    ax.set_ylim(0, max(draft_lengths) + 2)
    label_axes(ax, "Figure 2: tokens a round", "acceptance rate, α", "expected tokens a round")
    legend(ax)
    return figure_of(ax)


def paper_figure_3(draft_costs: Sequence[float] = (0.01, 0.02, 0.05, 0.1)) -> Figure:
    """Best draft length by acceptance, for several costs of a draft token (figure 3)."""
    ax = axes_or_new(None)
    for i, c in enumerate(draft_costs):
        values = [best_draft_length(alpha, c) for alpha in _chances()[:-10]]
        ax.step(_chances()[:-10], values, where="mid", color=COLOURS[i % 6], label=f"c = {c:g}")
    label_axes(ax, "Figure 3: best draft length", "acceptance rate, α", "best K, tokens")
    legend(ax)
    return figure_of(ax)


def paper_figure_4(draft_lengths: Sequence[int] = (3, 5, 7, 10)) -> Figure:
    """Speedup and growth of operations by acceptance, at draft costs of 0 (figure 4)."""
    ax = axes_or_new(None)
    for i, K in enumerate(draft_lengths):
        speed = [expected_speedup(alpha, K) for alpha in _chances()]
        operations = [expected_operations(alpha, K) for alpha in _chances()]
        ax.plot(_chances(), speed, color=COLOURS[i % 6], label=f"speed, K = {K}")
        ax.plot(_chances(), operations, "--", color=COLOURS[i % 6], label=f"operations, K = {K}")
    label_axes(ax, "", "acceptance rate, α", "factor over plain decoding")
    legend_above(ax, "Figure 4: speed and operations", num_columns=2)
    return figure_of(ax)


def pooled_acceptance(runs: Iterable[SpeculationStats]) -> float:
    """Likeliest α for all rounds together; drafts behind a rejected token do not count."""
    rounds = [pair for stats in runs for pair in stats.rounds]
    accepted = sum(a for _, a in rounds)
    return acceptance_from_counts(accepted, sum(a < d for d, a in rounds))


def _chances() -> list[float]:
    return [i / 200 for i in range(201)]
