"""HTML of texts, stats and tables for notebooks, from the `_repr_html_` of results.

Colours are translucent, for light and dark themes, and each origin has its own HTML element.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

from specdec_mlx.contracts import Origin
from specdec_mlx.stats.account import SpeculationStats

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9")
"""Okabe and Ito (2008)."""

BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = COLOURS
GREY = "#7F7F7F"  # contrast of 4 to white and to the near-black of dark pages
MARKERS = "osD^vP"  # lines differ in these too

MONOSPACE = "font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
PRE = f"white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.5;margin:0 0 .5em;{MONOSPACE}"
CELL = "padding:.15em .8em .15em 0;border:0;background:none;color:inherit"
TABLE = "border-collapse:collapse;color:inherit"


def translucent(colour: str, opacity: float) -> str:
    """CSS of a colour such as `#0072B2` that lets the page shine through."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity:g})"


class Piece(NamedTuple):
    """One token of a text, with the characters that it added."""

    text: str
    token: int
    origin: Origin


class Look(NamedTuple):
    """How tokens of one origin look.

    Attributes:
        tag: HTML element.
        colour: of the background, or "".
        label, meaning: words of the legend.
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
    """A text with each token coloured by its origin, and a legend."""
    tokens = "".join(_token(piece, drafter) for piece in pieces)
    counts = Counter(piece.origin for piece in pieces)
    legend = ""
    for origin, look in LOOKS.items():
        if count := counts[origin]:
            description = f"{count} token{'' if count == 1 else 's'}: {look.meaning}"
            legend += f"<div>{_coloured(look, look.label)}, {description}</div>"
    return (
        f'<pre style="{PRE}">{tokens}</pre>'
        f"<p>{stats.emitted} tokens in {stats.target_passes} passes, "
        f"{stats.tokens_per_pass:.2f} a pass</p>"
        f'<div style="font-size:smaller">{legend}</div>'
    )


def stats_html(stats: SpeculationStats) -> str:
    share = f"{stats.accepted} of {stats.drafted} drafted ({stats.accepted_share:.0%})"
    rows = [
        ("tokens", f"{stats.emitted} in {stats.target_passes} target passes"),
        ("tokens per pass", f"<b>{stats.tokens_per_pass:.2f}</b>"),
        ("accepted", share if stats.drafted else "nothing drafted"),
    ]
    if stats.drafted:
        rows.append(("by position", _bars(stats)))
        rows.append(("rounds by tokens accepted", _histogram(stats.rounds)))
    names = {"drafting": "draft", "verifying": "verify", "prefill": "prefill", "elsewhere": "other"}
    seconds = (f"{name} {getattr(stats, f'{x}_seconds'):.2f}" for name, x in names.items())
    rows.append(("seconds", ", ".join(seconds)))
    name_style = f"{CELL};text-align:left;font-weight:normal;vertical-align:top"
    return table(
        f'<tr><th style="{name_style}">{name}</th>'
        f'<td style="{CELL};text-align:left">{value}</td></tr>'
        for name, value in rows
    )


def table(rows: Iterable[str]) -> str:
    return f'<table style="{TABLE}">{"".join(rows)}</table>'


def _token(piece: Piece, drafter: str) -> str:
    look = LOOKS[piece.origin]
    by = f" by {drafter}" if piece.origin == "draft" and drafter else ""
    return _coloured(look, piece.text, f"{look.label}{by}, token {piece.token}")


def _coloured(look: Look, text: str, title: str = "") -> str:
    style = ""
    if look.colour:
        shine = f"background:{translucent(look.colour, 0.38)};color:inherit;border-radius:.3em"
        clone = "box-decoration-break:clone;-webkit-box-decoration-break:clone"
        style = f' style="{shine};{clone}"'
    hover = f' title="{escape(title)}"' if title else ""
    return f"<{look.tag}{style}{hover}>{escape(text)}</{look.tag}>"


def position_ranges(longest: int) -> list[range]:
    """Positions 1 to 4 of a draft one by one, and later positions in doubling ranges."""
    last_positions = [min(n, longest) for n in (0, 1, 2, 3, 4, 8, 16, 32, longest)]
    return [range(first + 1, end + 1) for first, end in pairwise(last_positions) if first < end]


def range_label(numbers: range) -> str:
    """Words for consecutive numbers: "3", "5 to 8"."""
    first, last = numbers[0], numbers[-1]
    return f"{first}" if first == last else f"{first} to {last}"


def acceptance_in_ranges(stats: SpeculationStats) -> dict[range, tuple[int, int]]:
    counts = list(zip(stats.accepted_at, stats.drafted_at, strict=True))
    totals = {}
    for positions in position_ranges(len(counts)):
        accepted, drafted = zip(*counts[positions.start - 1 : positions.stop - 1], strict=True)
        totals[positions] = sum(accepted), sum(drafted)
    return totals


def _bars(stats: SpeculationStats) -> str:
    return "".join(
        f"<div>{range_label(places)}: {a / d:.0%} &nbsp; ({a} of {d})</div>"
        for places, (a, d) in acceptance_in_ranges(stats).items()
    )


def _histogram(rounds: Sequence[tuple[int, int]]) -> str:
    counts = Counter(accepted for drafted, accepted in rounds if drafted)
    parts = [f"{n}: {counts[n]}" for n in sorted(counts)]
    return f"{', '.join(parts)}; plain: {len(rounds) - counts.total()}"
