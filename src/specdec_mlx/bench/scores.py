"""What a replay says: the modelled speedup of each way of drafting, by kind of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specdec_mlx.bench.report import markdown_table
from specdec_mlx.bench.summary import ALL
from specdec_mlx.notebook.views import table_html
from specdec_mlx.stats.rows import Row, Rows

LENGTH_ORACLE = "length oracle"
TEXT_ORACLE = "text oracle"


@dataclass(frozen=True)
class Score:
    """One way of drafting on one category of texts, under one cost curve.

    Attributes:
        cost: name of the cost curve.
        drafter: a drafter, "text oracle", or "none".
        draft_length: N, a policy, or "length oracle".
        category: of the texts; "all" is every text.
        texts: how many.
        tokens: how many they have together.
        target_passes: of the target.
        drafted: draft tokens proposed.
        accepted: draft tokens handed out.
        tokens_per_pass: tokens over passes.
        speedup: plain seconds over modelled seconds, sums over the texts.
        live_ratio: what the recorded benchmark measured; None if it did not run this, or the curve
            is not the measured one.
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


class Scores(list[Score], Rows):
    """Scores, which a notebook shows as a table; a row for each in CSV and pandas."""

    def rows(self) -> list[Row]:
        """A row for each score, a column for each field."""
        return [asdict(score) for score in self]

    def _repr_html_(self) -> str:
        return scores_html(self)


def format_scores(scores: Sequence[Score]) -> str:
    """Table of one cost curve: speedups per category; tokens per pass and live ratio over all.

    "of oracle" is the speedup over all texts relative to the length oracle's.
    """
    categories = list(dict.fromkeys(score.category for score in scores))
    rows: dict[tuple[str, str], dict[str, Score]] = {}
    for score in scores:
        rows.setdefault((score.drafter, score.draft_length), {})[score.category] = score
    header = ["drafter", "K", *categories, "of oracle", "tok/pass", "accepted", "live"]
    lines = []
    for (drafter, length), by_category in rows.items():
        total = by_category[ALL]
        oracle = rows.get((drafter, LENGTH_ORACLE))
        lines.append(
            [
                *(drafter, length or "-"),
                *(f"{by_category[name].speedup:.2f}" for name in categories),
                f"{total.speedup / oracle[ALL].speedup:.2f}" if oracle else "-",
                f"{total.tokens_per_pass:.2f}",
                f"{total.accepted / total.drafted:.2f}" if total.drafted else "-",
                "-" if total.live_ratio is None else f"{total.live_ratio:.2f}",
            ]
        )
    return markdown_table(header, lines, num_text_columns=2)


def scores_html(scores: Sequence[Score]) -> str:
    """The modelled speedup of each drafter and draft length, by kind of text, for a notebook."""
    by_row: dict[tuple[str, str, str], dict[str, Score]] = {}
    for score in scores:
        row = by_row.setdefault((score.cost, score.drafter, score.draft_length), {})
        row[score.category] = score
    categories = list(dict.fromkeys(score.category for score in scores))
    rows = [
        [*(part or "-" for part in key), *(f"{row[name].speedup:.2f}" for name in categories)]
        for key, row in by_row.items()
    ]
    return table_html(["cost", "drafter", "K", *categories], rows, 3) + (
        "<p>modelled speed relative to plain decoding</p>"
    )
