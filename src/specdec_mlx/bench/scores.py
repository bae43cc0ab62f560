"""The scores of a replay: the modelled speedup of each way of drafting, by kind of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specdec_mlx.bench.report import markdown_table, or_dash
from specdec_mlx.bench.summary import ALL
from specdec_mlx.notebook.views import table_html
from specdec_mlx.stats.rows import Row, Rows


@dataclass(frozen=True)
class Score:
    """One way of drafting on one category of texts, under one cost curve.

    Attributes:
        cost: name of the cost curve.
        drafter, draft_length: as given on the command line; "" where it means nothing.
        category: of the texts; "all" is every text.
        texts, tokens, target_passes: how many.
        drafted, accepted: draft tokens proposed, and emitted.
        tokens_per_pass: tokens over passes.
        speedup: plain seconds over modelled seconds, sums over the texts.
        live_ratio: ratio that the recorded benchmark measured; None if it did not run this, or the
            curve is not the measured one.
        session: the conversation of the texts; "" for all of the category.
    """

    cost: str
    drafter: str
    draft_length: str
    category: str
    texts: int
    tokens: int
    target_passes: int
    drafted: int
    accepted: int
    tokens_per_pass: float
    speedup: float
    live_ratio: float | None = None
    session: str = ""


class Scores(list[Score], Rows):
    """Scores, which a notebook shows as a table; a row for each in CSV and pandas."""

    def rows(self) -> list[Row]:
        """A row for each score, a column for each field."""
        return [asdict(score) for score in self]

    def _repr_html_(self) -> str:
        note = "<p>modelled speed relative to plain decoding</p>"
        return table_html(*_table(self), 3) + note


def format_scores(scores: Sequence[Score]) -> str:
    """Speedups per category; tokens per pass, acceptance and the measured ratio over all."""
    return markdown_table(*_table(scores), 3)


def _table(scores: Sequence[Score]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one for each cost curve, drafter and draft length, all sessions together."""
    ways: dict[tuple[str, str, str], dict[str, Score]] = {}
    for score in scores:
        if not score.session:
            way = ways.setdefault((score.cost, score.drafter, score.draft_length), {})
            way[score.category] = score
    categories = list(dict.fromkeys(score.category for score in scores))
    rows = [
        [
            *(part or "-" for part in key),
            *(f"{way[name].speedup:.2f}" for name in categories),
            f"{way[ALL].tokens_per_pass:.2f}",
            f"{way[ALL].accepted / way[ALL].drafted:.2f}" if way[ALL].drafted else "-",
            or_dash(way[ALL].live_ratio),
        ]
        for key, way in ways.items()
    ]
    return ["cost", "drafter", "K", *categories, "tok/pass", "accepted", "live"], rows
