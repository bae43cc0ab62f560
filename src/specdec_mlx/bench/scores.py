"""What a replay says: the modelled speedup of each way of drafting, by kind of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from specdec_mlx.bench.report import markdown_table
from specdec_mlx.bench.summary import ALL
from specdec_mlx.notebook.views import table_html
from specdec_mlx.stats.rows import Row, Rows


@dataclass(frozen=True)
class Score:
    """One way of drafting on one category of texts, under one cost curve.

    Attributes:
        cost: name of the cost curve.
        drafter: as given on the command line.
        draft_length: N or a policy; "" where it means nothing.
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
        session: which conversation's texts they are; "" for all of the category.
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
        return scores_html(self)


def format_scores(scores: Sequence[Score]) -> str:
    """Table of one cost curve: speedups per category; tokens per pass and live ratio over all.

    Where there are sessions, "least" is the session in which a drafter does worst relative to the
    first drafter of the table with the same draft length.
    """
    categories = list(dict.fromkeys(score.category for score in scores))
    rows: dict[tuple[str, str], dict[str, Score]] = {}
    for score in scores:
        if not score.session:
            rows.setdefault((score.drafter, score.draft_length), {})[score.category] = score
    least = least_of_sessions(scores)
    header = ["drafter", "K", *categories, "tok/pass", "accepted", "live"]
    header += ["least"] * bool(least)
    lines = []
    for (drafter, length), by_category in rows.items():
        total = by_category[ALL]
        lines.append(
            [
                *(drafter, length or "-"),
                *(f"{by_category[name].speedup:.2f}" for name in categories),
                f"{total.tokens_per_pass:.2f}",
                f"{total.accepted / total.drafted:.2f}" if total.drafted else "-",
                "-" if total.live_ratio is None else f"{total.live_ratio:.2f}",
                *([f"{least[drafter, length]:.3f}"] if least else []),
            ]
        )
    return markdown_table(header, lines, num_text_columns=2)


def least_of_sessions(scores: Sequence[Score]) -> dict[tuple[str, str], float]:
    """(drafter, draft length) -> its speed over the first drafter's, in the worst session for it.

    The first drafter's with the same draft length, or its first one. {} without sessions.
    """
    ways: dict[tuple[str, str], dict[str, float]] = {}
    for score in scores:
        if score.session:
            way = ways.setdefault((score.drafter, score.draft_length), {})
            way[score.session] = score.speedup
    if not ways:
        return {}
    first_way = next(iter(ways))
    least = {}
    for drafter, length in ways:
        base = ways.get((first_way[0], length), ways[first_way])
        least[drafter, length] = min(
            speed / base[session] for session, speed in ways[drafter, length].items()
        )
    return least


def scores_html(scores: Sequence[Score]) -> str:
    """The modelled speedup of each drafter and draft length, by kind of text, for a notebook."""
    by_row: dict[tuple[str, str, str], dict[str, Score]] = {}
    for score in [score for score in scores if not score.session]:
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
