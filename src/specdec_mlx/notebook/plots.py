"""Figures, with matplotlib (`pip install "specdec-mlx[plot]"`): of a run, of costs, of the theory.

Each function returns a `Plot`, a matplotlib figure that notebooks show by itself, or draws into the
axes that it is given. No pyplot, no global state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from specdec_mlx.bench.contenders import MLX_LM_SPECULATION
from specdec_mlx.bench.cost import CostCurve
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.notebook.views import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, binned
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stats.theory import (
    acceptance_from_counts,
    best_draft_length,
    best_draft_length_on_curve,
    expected_operations,
    expected_speedup,
    expected_speedup_on_curve,
    expected_tokens,
)

try:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
except ImportError as error:
    raise MissingPackageError(
        'Plots need matplotlib, which is not installed. pip install "specdec-mlx[plot]"'
    ) from error

if TYPE_CHECKING:
    from specdec_mlx.bench.replay import Score
    from specdec_mlx.bench.summary import Result

COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY)
MARKERS = "osD^vP"
"""Colour never is the only difference."""

PANEL = (4.6, 3.2)  # inches
PIXELS_PER_INCH = 90
SHARPNESS = 2
"""Pixels drawn for each pixel of width shown."""

MOST_POSITIONS = 17
"""Widest pass of a drawn cost curve."""

Z95 = 1.959964


class Plot(Figure):
    """A figure that a notebook shows as the value of a cell."""

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        buffer = BytesIO()
        self.savefig(buffer, format="png", dpi=SHARPNESS * PIXELS_PER_INCH, facecolor="white")
        width, height = self.get_size_inches() * PIXELS_PER_INCH
        return buffer.getvalue(), {"width": int(width), "height": int(height)}


def plot_stats(stats: SpeculationStats) -> Plot:
    """A generation: its accept histogram, acceptance by position, and tokens per pass over time."""
    plot, axes = _panels(3)
    accept_histogram(stats, axes[0])
    acceptance_by_position(stats, axes[1])
    tokens_over_time(stats, axes[2])
    return plot


def accept_histogram(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Rounds that drafted, by the number of draft tokens that were accepted."""
    ax = _axes(ax)
    counts = Counter(accepted for drafted, accepted in stats.rounds if drafted)
    numbers = range(max(counts, default=0) + 1)
    bars = ax.bar(numbers, [counts[n] for n in numbers], color=BLUE)
    ax.bar_label(bars, fontsize=8)
    num_plain = stats.target_passes - counts.total()
    title = f"Rounds that drafted ({num_plain} plain ones beside them)"
    _name(ax, title, "draft tokens accepted", "rounds")
    ax.set_xticks(numbers)
    return _figure(ax)


def acceptance_by_position(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Share of the rounds that drafted a position in which it was accepted, 95% Wilson intervals.

    A position counts as drafted also where one before it was rejected.
    """
    ax = _axes(ax)
    drafted = stats.drafted_at
    accepted = [*stats.accepted_at, *[0] * (len(drafted) - len(stats.accepted_at))]
    positions = range(1, len(drafted) + 1)
    shares = [a / d for a, d in zip(accepted, drafted, strict=True)]
    intervals = [wilson_interval(a, d) for a, d in zip(accepted, drafted, strict=True)]
    below = [max(0, share - low) for share, (low, _) in zip(shares, intervals, strict=True)]
    above = [max(0, high - share) for share, (_, high) in zip(shares, intervals, strict=True)]
    ax.errorbar(positions, shares, yerr=[below, above], fmt="o", color=BLUE, capsize=3)
    _name(ax, "Acceptance by position", "position in the draft", "share accepted, 95% interval")
    ax.set_ylim(0, 1.03)
    ax.set_xticks(positions)
    return _figure(ax)


def tokens_over_time(stats: SpeculationStats, ax: Axes | None = None) -> Figure:
    """Tokens per pass along the generation, in runs of rounds, and how many of them drafted."""
    ax = _axes(ax)
    size = max(1, len(stats.rounds) // 40)
    num_bins = len(stats.rounds) // size
    tokens = binned([1 + accepted for _, accepted in stats.rounds], num_bins)
    drafting = binned([float(drafted > 0) for drafted, _ in stats.rounds], num_bins)
    at = [(i + 0.5) * len(stats.rounds) / max(1, num_bins) for i in range(num_bins)]
    ax.step(at, tokens, where="mid", color=BLUE, label="tokens per pass")
    ax.axhline(1, color=GREY, linewidth=1, linestyle=":", label="plain decoding")
    top = max([2.0, *tokens]) * 1.25
    gear = ax.twinx()
    gear.fill_between(at, drafting, step="mid", color=ORANGE, alpha=0.3, linewidth=0)
    gear.set_ylim(0, 4)  # the gear stays in the lowest quarter
    gear.set_yticks([0, 1], ["plain", "drafting"], fontsize=8, color="#8a5a00")
    _name(ax, "Along the generation", "round", "tokens per pass")
    ax.set_ylim(0, top)
    ax.legend(fontsize=8, loc="upper right", frameon=False)
    return _figure(ax)


def cost_curve(
    cost: CostCurve,
    acceptance: float | None = None,
    draft_cost: float = 0.0,
    ax: Axes | None = None,
) -> Figure:
    """c(m), a pass over m positions in plain steps, and the draft length that pays best on it.

    acceptance: chance that a draft token is accepted; None draws the curve alone. draft_cost: of
    one draft token, in plain steps.
    """
    ax = _axes(ax)
    known = cost.positions if len(cost.positions) > 2 else range(1, MOST_POSITIONS + 1)
    positions = [m for m in known if m <= MOST_POSITIONS]
    relative = [cost(m) / cost(1) for m in positions]
    ax.plot(positions, relative, "o-", color=BLUE, markersize=4, label="c(m)")
    _name(ax, f"Cost of a pass, {cost.name}", "positions in the pass, m", "plain steps; tokens")
    highest = max(relative)
    if acceptance is not None:
        K = best_draft_length_on_curve(acceptance, cost, draft_cost * cost(1), positions[-1] - 1)
        label = f"pays best: K = {K}"
        ax.plot([K + 1], [cost(K + 1) / cost(1)], "D", color=VERMILLION, markersize=9, label=label)
        tokens = [expected_tokens(acceptance, m - 1) for m in positions]
        label = f"tokens a round, α = {acceptance:.2f}"
        ax.plot(positions, tokens, "--", color=GREEN, label=label)
        highest = max(highest, *tokens)
    ax.set_ylim(0, 1.15 * highest)
    ax.legend(fontsize=8, frameon=False)
    return _figure(ax)


def draft_lengths(
    runs: Mapping[int, SpeculationStats], cost: CostCurve | None = None, ax: Axes | None = None
) -> Figure:
    """Expected against observed by draft length: tokens per pass, or speed where `cost` is given.

    runs: draft length K -> account of a generation that drafted K tokens a round. Expected is
    equation 1, or theorem 3.8 on the cost curve, with one chance of acceptance for all positions
    that fits the counts best.
    """
    ax = _axes(ax)
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
    _name(ax, "Expected and observed", "draft tokens a round, K", what)
    ax.set_xticks(lengths)
    ax.legend(fontsize=8, frameon=False)
    return _figure(ax)


def expected_and_observed(scores: Iterable[Score], ax: Axes | None = None) -> Figure:
    """Modelled speedup of replayed texts against what the live benchmark measured.

    scores: of `score_record`, under the measured cost; those without a live ratio are left out.
    """
    ax = _axes(ax)
    drafters: dict[str, list[Score]] = {}
    for score in scores:
        if score.live_ratio is not None and score.drafted:
            drafters.setdefault(f"{score.drafter}, K = {score.draft_length}", []).append(score)
    values = [1.0]
    for i, (name, chosen) in enumerate(drafters.items()):
        x = [score.speedup for score in chosen]
        y = [score.live_ratio or 0.0 for score in chosen]
        ax.plot(x, y, MARKERS[i % 6], color=COLOURS[i % 6], label=name)
        values += x + y
    ends = [0.95 * min(values), 1.05 * max(values)]
    ax.plot(ends, ends, ":", color=GREY)
    _name(ax, "Expected and observed", "modelled speed, plain = 1", "measured speed, plain = 1")
    ax.legend(fontsize=8, frameon=False)
    return _figure(ax)


def speed_by_text(results: Sequence[Result], ax: Axes | None = None) -> Figure:
    """Speed of each contender by kind of text, relative to plain mlx-lm, with 95% intervals.

    results: of a benchmark, the first those of plain mlx-lm. mlx-lm's own speculation comes last.
    """
    contenders = list(dict.fromkeys(r.key for r in results))[1:]
    contenders.sort(key=lambda key: key[0] == MLX_LM_SPECULATION)
    with_rule = len({r.rule for r in results if r.rule}) > 1
    categories = list(dict.fromkeys(r.category for r in results))
    height = 0.8 + 0.13 * len(categories) * (len(contenders) + 1)
    ax = _axes(ax, (7.2, height))
    for i, key in enumerate(contenders):
        chosen = [r for r in results if r.key == key and r.ratio]
        rows = [categories.index(r.category) + (i + 1) / (len(contenders) + 1) for r in chosen]
        ratios = [r.ratio or 0.0 for r in chosen]
        below = [max(0.0, x - (r.ratio_low or x)) for x, r in zip(ratios, chosen, strict=True)]
        above = [max(0.0, (r.ratio_high or x) - x) for x, r in zip(ratios, chosen, strict=True)]
        ax.errorbar(
            ratios,
            rows,
            xerr=[below, above],
            fmt=MARKERS[i % 6],
            color=COLOURS[i % 6],
            capsize=2,
            label=contender_name(*(key if with_rule else key[:2])),
        )
    ax.axvline(1, color=GREY, linewidth=1.5, label="plain mlx-lm")
    for edge in range(1, len(categories)):
        ax.axhline(edge, color="#dddddd", linewidth=0.8)
    names = [category.replace("_", " ") for category in categories]
    ax.set_yticks([i + 0.5 for i in range(len(names))], names)
    ax.set_ylim(len(categories), 0)
    _name(ax, "", "tokens per second relative to plain mlx-lm, 95% interval over texts", "")
    ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return _figure(ax)


def rule_picture(target_probs: Any, draft_probs: Any) -> Figure:
    """How rejection comes to the target's law, token by token.

    target_probs, draft_probs: [V]. Blue: drawn from q and kept, min(p, q). Orange: drawn after a
    rejection, max(0, p - q). Together they are p; the outline is q, what the drafter proposes.
    """
    ax = _axes(None)
    tokens = range(len(target_probs))
    kept = [min(p, q) for p, q in zip(target_probs, draft_probs, strict=True)]
    replaced = [p - k for p, k in zip(target_probs, kept, strict=True)]
    ax.bar(tokens, kept, color=BLUE, label=f"kept: {sum(kept):.0%} of the drafts")
    ax.bar(tokens, replaced, bottom=kept, color=ORANGE, hatch="//", label="after a rejection")
    ax.bar(tokens, draft_probs, fill=False, edgecolor="black", linestyle="--", label="proposed, q")
    _name(ax, "Kept and replaced add up to p", "token", "chance")
    ax.set_xticks(tokens)
    ax.legend(fontsize=8, frameon=False)
    return _figure(ax)


def paper_figure_2(draft_lengths: Sequence[int] = (1, 3, 5, 7, 10)) -> Figure:
    """Expected tokens a round by acceptance (Leviathan et al. 2023, figure 2)."""
    ax = _axes(None)
    for i, K in enumerate(draft_lengths):
        values = [expected_tokens(alpha, K) for alpha in _chances()]
        ax.plot(_chances(), values, color=COLOURS[i % 6], label=f"K = {K}")
    unlimited = [1 / (1 - alpha) for alpha in _chances()[:-10]]
    ax.plot(_chances()[:-10], unlimited, ":", color=GREY, label="K unlimited")
    ax.set_ylim(0, max(draft_lengths) + 2)
    _name(ax, "Figure 2: tokens a round", "acceptance rate, α", "expected tokens a round")
    ax.legend(fontsize=8, frameon=False)
    return _figure(ax)


def paper_figure_3(draft_costs: Sequence[float] = (0.01, 0.02, 0.05, 0.1)) -> Figure:
    """Best draft length by acceptance, for several costs of a draft token (figure 3)."""
    ax = _axes(None)
    for i, c in enumerate(draft_costs):
        values = [best_draft_length(alpha, c) for alpha in _chances()[:-10]]
        ax.step(_chances()[:-10], values, where="mid", color=COLOURS[i % 6], label=f"c = {c:g}")
    _name(ax, "Figure 3: best draft length", "acceptance rate, α", "best K, tokens")
    ax.legend(fontsize=8, frameon=False)
    return _figure(ax)


def paper_figure_4(draft_lengths: Sequence[int] = (3, 5, 7, 10)) -> Figure:
    """Speedup and growth of operations by acceptance, at draft costs of 0 (figure 4)."""
    ax = _axes(None)
    for i, K in enumerate(draft_lengths):
        speed = [expected_speedup(alpha, K) for alpha in _chances()]
        operations = [expected_operations(alpha, K) for alpha in _chances()]
        ax.plot(_chances(), speed, color=COLOURS[i % 6], label=f"speed, K = {K}")
        ax.plot(_chances(), operations, "--", color=COLOURS[i % 6], label=f"operations, K = {K}")
    _name(ax, "Figure 4: speed and operations", "acceptance rate, α", "factor over plain decoding")
    ax.legend(fontsize=7, frameon=False)
    return _figure(ax)


def wilson_interval(successes: int, trials: int, z: float = Z95) -> tuple[float, float]:
    """Interval for a share, from Wilson's score test (1927): sound also near 0 and 1.

    z: standard deviations, 1.96 for 95%. (0, 1) without any trial.
    """
    if not trials:
        return 0.0, 1.0
    share, weight = successes / trials, z * z / trials
    centre = share + weight / 2
    half = z * ((share * (1 - share) + weight / 4) / trials) ** 0.5
    return max(0.0, (centre - half) / (1 + weight)), min(1.0, (centre + half) / (1 + weight))


def pooled_acceptance(runs: Iterable[SpeculationStats]) -> float:
    r"""Likeliest $\alpha$ for all rounds together; drafts behind a rejected token do not count."""
    rounds = [pair for stats in runs for pair in stats.rounds]
    accepted = sum(a for _, a in rounds)
    return acceptance_from_counts(accepted, sum(a < d for d, a in rounds))


def contender_name(drafter: str, draft_length: str, rule: str = "") -> str:
    """What a legend calls a contender of a benchmark."""
    known = {MLX_LM_SPECULATION: "mlx-lm's own, draft model", "none": "no drafter, our loop"}
    name = known.get(drafter, drafter)
    name = f"{name}, K = {draft_length}" if draft_length else name
    return f"{name}, {rule}" if rule else name


def _chances() -> list[float]:
    return [i / 200 for i in range(201)]


def _axes(ax: Axes | None, size: tuple[float, float] = PANEL) -> Axes:
    """The axes given, or those of a new plot."""
    if ax is not None:
        return ax
    return Plot(figsize=size, layout="constrained").add_subplot()


def _figure(ax: Axes) -> Figure:
    """The figure of axes: a `Plot`, unless the axes were the caller's."""
    figure = ax.figure
    assert isinstance(figure, Figure)
    return figure


def _panels(count: int) -> tuple[Plot, Any]:
    plot = Plot(figsize=(count * PANEL[0], PANEL[1]), layout="constrained")
    return plot, plot.subplots(1, count)


def _name(ax: Axes, title: str, x: str, y: str) -> None:
    """Title and axis labels, with units, and no frame where nothing is read off."""
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(x, fontsize=9)
    ax.set_ylabel(y, fontsize=9)
    ax.tick_params(labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
