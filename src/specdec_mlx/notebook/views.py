"""What notebooks show: HTML of texts, stats and tables.

Pure functions from results to HTML, called by the results' `_repr_html_`. Colours are translucent
inline styles over the page's own, so that light and dark themes both read; each origin of a token
also has an HTML element of its own, for viewers that drop styles. All text is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec_mlx.types import Origin

if TYPE_CHECKING:
    from specdec_mlx.bench.record import Record
    from specdec_mlx.bench.replay import Score
    from specdec_mlx.stats.account import SpeculationStats

BLUE, VERMILLION, GREEN, ORANGE, SKY, PURPLE, YELLOW, GREY = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#56B4E9",
    "#CC79A7",
    "#F0E442",
    "#7F7F7F",
)
"""Colours that colour-blind people can tell apart (Okabe and Ito 2008), and a grey."""

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BINS = 48
"""Most characters of a row of blocks."""

PRE = "white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5;margin:0 0 .5em"
CELL = "padding:.15em .8em .15em 0;border:0;background:none;color:inherit"
TABLE = "border-collapse:collapse;color:inherit"


class Piece(NamedTuple):
    """One token of a text: what it added to the text, its id, and where it came from."""

    text: str
    token: int
    origin: Origin


class Look(NamedTuple):
    """How tokens of one origin look. tag: element whose own look says it too; colour: r, g, b."""

    tag: str
    colour: str
    label: str


LOOKS: dict[Origin, Look] = {
    "draft": Look("u", "0,114,178", "accepted draft"),
    "correction": Look("b", "213,94,0", "correction"),
    "bonus": Look("i", "0,158,115", "bonus"),
    "plain": Look("span", "", "plain"),
}


def text_html(pieces: Sequence[Piece], stats: SpeculationStats, drafter: str = "") -> str:
    """A text with each token coloured by its origin, a legend, and what it took."""
    tokens = "".join(_token(piece, drafter) for piece in pieces)
    counts = {origin: sum(p.origin == origin for p in pieces) for origin in LOOKS}
    legend = " &nbsp; ".join(
        f"{_coloured(LOOKS[origin], LOOKS[origin].label)} {count}"
        for origin, count in counts.items()
        if count
    )
    return (
        f'<pre style="{PRE}">{tokens}</pre>'
        f"<p>{legend} &nbsp; | &nbsp; {stats.emitted} tokens in {stats.target_passes} passes, "
        f"{stats.tokens_per_pass:.2f} a pass</p>"
    )


def stats_html(stats: SpeculationStats) -> str:
    """The account of a generation as a compact table."""
    rows = [
        ("tokens", f"{stats.emitted} in {stats.target_passes} target passes"),
        ("tokens per pass", f"<b>{stats.tokens_per_pass:.2f}</b>"),
        ("accepted", _share(stats.accepted, stats.drafted) if stats.drafted else "nothing drafted"),
    ]
    if stats.drafted:
        rows.append(("by position", _bars(stats)))
        rows.append(("rounds by tokens accepted", _histogram(stats.rounds)))
    if stats.rounds:
        rows.append(("tokens per pass over time", _timeline(stats.rounds)))
    if stats.counterfactual is not None:
        kept = stats.counterfactual.accepted_per_round
        rules = ", ".join(f"{rule} {estimate.mean:.2f}" for rule, estimate in kept.items())
        rows.append(("kept in a round, by rule", escape(rules)))
    rows.append(("seconds", _seconds(stats)))
    body = "".join(
        f'<tr><th style="{CELL};text-align:left;font-weight:normal;vertical-align:top">'
        f'{name}</th><td style="{CELL};text-align:left">{value}</td></tr>'
        for name, value in rows
    )
    return f'<table style="{TABLE}">{body}</table>'


def record_html(record: Record) -> str:
    """A benchmark: where it ran, and a row for each kind of text and contender."""
    header = ["texts", "drafter", "K", "speed", "95%", "tok/s", "tok/pass", "accepted", "identical"]
    rows = [
        [
            *(r.category, r.drafter, r.draft_length or "-", _number(r.ratio)),
            "-" if r.ratio_low is None else f"{r.ratio_low:.2f} to {r.ratio_high:.2f}",
            *(_number(r.total_tokens_per_second, 1), f"{r.tokens_per_pass:.2f}"),
            f"{r.acceptance_rate:.0%}" if r.drafted else "-",
            "-" if r.identical is None else f"{r.identical + (r.excused or 0)} of {r.texts}",
        ]
        for r in record.results
    ]
    machine = ", ".join(f"{key} {value}" for key, value in record.machine.items())
    note = "speed: tokens per second relative to plain mlx-lm, with a 95% interval over texts"
    return f"{table_html(header, rows, 3)}<p>{escape(note)}<br><small>{escape(machine)}</small></p>"


def scores_html(scores: Iterable[Score]) -> str:
    """Replayed texts: the modelled speedup of each drafter and draft length, by kind of text."""
    by_row: dict[tuple[str, str, str], dict[str, Score]] = {}
    for score in scores:
        by_row.setdefault((score.cost, score.drafter, score.draft_length), {})[score.category] = (
            score
        )
    categories = list(dict.fromkeys(category for row in by_row.values() for category in row))
    rows = [
        [*(part or "-" for part in key), *(_number(row[c].speedup) for c in categories)]
        for key, row in by_row.items()
    ]
    return table_html(["cost", "drafter", "K", *categories], rows, 3) + (
        "<p>modelled speed relative to plain decoding</p>"
    )


def table_html(header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int) -> str:
    """A table: the first columns to the left, numbers to the right."""
    lines = [_row(header, "th", num_text_columns)]
    lines += [_row(row, "td", num_text_columns) for row in rows]
    return f'<table style="{TABLE}">{"".join(lines)}</table>'


def blocks(values: Sequence[float], highest: float) -> str:
    """A row of block characters, one a value, from 0 to `highest`."""
    steps = len(BLOCKS) - 1
    return "".join(BLOCKS[round(steps * min(1.0, v / highest))] for v in values) if highest else ""


def binned(values: Sequence[float], most: int = MOST_BINS) -> list[float]:
    """Means of at most `most` runs of neighbouring values, as equal in length as can be."""
    count = min(most, len(values))
    edges = [i * len(values) // count for i in range(count + 1)] if count else []
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def _token(piece: Piece, drafter: str) -> str:
    look = LOOKS[piece.origin]
    by = f" by {drafter}" if piece.origin == "draft" and drafter else ""
    return _coloured(look, piece.text, f"{look.label}{by}, token {piece.token}")


def _coloured(look: Look, text: str, title: str = "") -> str:
    """Text in the element of its origin; `title` shows on hover."""
    style = f' style="background:rgba({look.colour},.28);color:inherit"' if look.colour else ""
    hover = f' title="{escape(title)}"' if title else ""
    return f"<{look.tag}{style}{hover}>{escape(text)}</{look.tag}>"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} drafted ({part / whole:.0%})"


def _bars(stats: SpeculationStats) -> str:
    """Acceptance by position, a bar each; the width is the share."""
    accepted = [*stats.accepted_at, *[0] * (len(stats.drafted_at) - len(stats.accepted_at))]
    rows = [
        f'<div style="background:linear-gradient(to right,rgba(0,114,178,.35) {100 * a / d:.0f}%,'
        f'rgba(127,127,127,.12) 0);width:16em;padding:0 .4em">'
        f"{i}: {a / d:.0%} &nbsp; ({a} of {d})</div>"
        for i, (a, d) in enumerate(zip(accepted, stats.drafted_at, strict=True), start=1)
    ]
    return "".join(rows)


def _histogram(rounds: Sequence[tuple[int, int]]) -> str:
    """How many rounds accepted 0, 1, 2 ... draft tokens; those that drafted nothing apart."""
    counts = Counter(accepted for drafted, accepted in rounds if drafted)
    parts = [f"{n}: {counts[n]}" for n in range(max(counts, default=0) + 1)]
    return f"{', '.join(parts)}; plain: {len(rounds) - counts.total()}"


def _timeline(rounds: Sequence[tuple[int, int]]) -> str:
    """Tokens per pass in equal runs of rounds, and the gear beneath: how many of them drafted."""
    tokens = binned([accepted + 1.0 for _, accepted in rounds])
    drafting = binned([float(drafted > 0) for drafted, _ in rounds])
    gear = "".join("━" if share > 0.5 else "╌" if share else "·" for share in drafting)
    return (
        f'<pre style="margin:0;line-height:1.3;color:inherit;opacity:.8;white-space:pre">'
        f"{blocks(tokens, max(tokens))} {min(tokens):.1f} to {max(tokens):.1f}\n"
        f"{gear} ━ drafting ╌ now and then · plain</pre>"
    )


def _seconds(stats: SpeculationStats) -> str:
    return (
        f"drafting {stats.draft_seconds:.2f}, verifying {stats.verify_seconds:.2f}, "
        f"prefill {stats.prefill_seconds:.2f}, elsewhere {stats.other_seconds:.2f}"
    )


def _row(cells: Sequence[Any], tag: str, num_text_columns: int) -> str:
    parts = []
    for i, cell in enumerate(cells):
        side = "left" if i < num_text_columns else "right"
        parts.append(f'<{tag} style="{CELL};text-align:{side}">{escape(str(cell))}</{tag}>')
    return f"<tr>{''.join(parts)}</tr>"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
