"""What notebooks show: HTML of texts, stats and tables.

Pure functions from results to HTML, called by the results' `_repr_html_`. Colours are translucent
inline styles over the page's own, so that light and dark themes both read. Each origin of a token
also has an HTML element of its own, for viewers that drop styles; none of them underlines, since
in code an underlined space looks like an underscore. All text is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Any, NamedTuple

from specdec_mlx.notebook.palette import BLUE, GREEN, GREY, SKY, VERMILLION, translucent
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.types import Origin

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BINS = 48
"""Most characters of a row of blocks."""

MONOSPACE = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
PRE = f"white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5;margin:0 0 .5em;{MONOSPACE}"
CELL = "padding:.15em .8em .15em 0;border:0;background:none;color:inherit"
TABLE = "border-collapse:collapse;color:inherit"


class Piece(NamedTuple):
    """One token of a text: what it added to the text, its id, and where it came from."""

    text: str
    token: int
    origin: Origin


class Look(NamedTuple):
    """How tokens of one origin look, and what that means.

    tag: element whose own look says it without a style. colour: of the background; "" for none.
    meaning: of the origin, in the legend.
    """

    tag: str
    colour: str
    label: str
    meaning: str


LOOKS: dict[Origin, Look] = {
    "draft": Look("mark", SKY, "accepted draft", "proposed, and kept by the target"),
    "correction": Look("b", VERMILLION, "correction", "the target's own, after a rejected draft"),
    "bonus": Look("i", GREEN, "bonus", "the target's own, after a draft kept whole"),
    "plain": Look("span", "", "plain", "no draft was there"),
}


def text_html(pieces: Sequence[Piece], stats: SpeculationStats, drafter: str = "") -> str:
    """A text with each token coloured by its origin, what it took, and a legend.

    Args:
        pieces: the tokens, in order.
        stats: the account of the generation.
        drafter: what the drafter is called; shown on hover.
    """
    tokens = "".join(_token(piece, drafter) for piece in pieces)
    counts = Counter(piece.origin for piece in pieces)
    legend = "".join(
        f"<div>{_coloured(look, look.label)}, {_tokens(counts[origin])}: {look.meaning}</div>"
        for origin, look in LOOKS.items()
        if counts[origin]
    )
    return (
        f'<pre style="{PRE}">{tokens}</pre>'
        f"<p>{stats.emitted} tokens in {stats.target_passes} passes, "
        f"{stats.tokens_per_pass:.2f} a pass</p>"
        f'<div style="font-size:smaller">{legend}</div>'
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


def table_html(header: Sequence[str], rows: Iterable[Sequence[str]], num_text_columns: int) -> str:
    """A table.

    Args:
        header: of each column.
        rows: the cells of each row.
        num_text_columns: how many columns, from the first on, are text and stand to the left;
            numbers stand to the right.
    """
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
    """Text in the element of its origin; `title` shows on hover.

    Rounded ends tell one token from the next of the same colour, on each line that it is on.
    """
    style = (
        f' style="background:{translucent(look.colour, 0.38)};color:inherit;border-radius:.3em;'
        'box-decoration-break:clone;-webkit-box-decoration-break:clone"'
        if look.colour
        else ""
    )
    hover = f' title="{escape(title)}"' if title else ""
    return f"<{look.tag}{style}{hover}>{escape(text)}</{look.tag}>"


def _tokens(count: int) -> str:
    return f"{count} token{'' if count == 1 else 's'}"


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} drafted ({part / whole:.0%})"


def _bars(stats: SpeculationStats) -> str:
    """Acceptance by position, a bar each; the width is the share."""
    accepted = [*stats.accepted_at, *[0] * (len(stats.drafted_at) - len(stats.accepted_at))]
    full, empty = translucent(BLUE, 0.35), translucent(GREY, 0.12)
    rows = [
        f'<div style="background:linear-gradient(to right,{full} {100 * a / d:.0f}%,{empty} 0);'
        f'width:16em;padding:0 .4em">{i}: {a / d:.0%} &nbsp; ({a} of {d})</div>'
        for i, (a, d) in enumerate(zip(accepted, stats.drafted_at, strict=True), start=1)
    ]
    return "".join(rows)


def _histogram(rounds: Sequence[tuple[int, int]]) -> str:
    """How many rounds accepted 0, 1, 2 ... draft tokens; those that drafted nothing apart."""
    counts = Counter(accepted for drafted, accepted in rounds if drafted)
    parts = [f"{n}: {counts[n]}" for n in range(max(counts, default=0) + 1)]
    return f"{', '.join(parts)}; plain: {len(rounds) - counts.total()}"


def _timeline(rounds: Sequence[tuple[int, int]]) -> str:
    """Tokens per pass in equal runs of rounds, and beneath how many of them drafted."""
    tokens = binned([accepted + 1.0 for _, accepted in rounds])
    drafting = binned([float(drafted > 0) for drafted, _ in rounds])
    line = "".join("━" if share > 0.5 else "╌" if share else "·" for share in drafting)
    return (
        f'<pre style="margin:0;line-height:1.3;color:inherit;opacity:.8;white-space:pre;'
        f'{MONOSPACE}">{blocks(tokens, max(tokens))} {min(tokens):.1f} to {max(tokens):.1f}\n'
        f"{line} ━ drafting ╌ now and then · plain</pre>"
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
