"""`specdec-mlx replay`: recorded texts scored offline, for any drafter, draft length and cost.

The loop itself runs; the target is replaced by one that knows its text, and its passes cost c(m).
At temperature 0 the counts are those of a live run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_lm.utils import load_tokenizer
from tqdm import tqdm

from specdec_mlx.bench.cost import MEASURED, CostCurve, parse_cost
from specdec_mlx.bench.record import Record, load_record, or_dash, read_sessions
from specdec_mlx.bench.recorded import Modelled, replay_text
from specdec_mlx.bench.summary import ALL
from specdec_mlx.contracts import Drafter
from specdec_mlx.draft_length.costs import CURVES, MILDEST
from specdec_mlx.draft_length.policy import make_draft_length, parse_draft_length
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.choosing.choice import add_lighter_arguments, choice_of
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.models import explained
from specdec_mlx.notebook.views import markdown_table, table_html
from specdec_mlx.stats.account import Row, Rows

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_LENGTHS = ("auto",)
DEFAULT_SLOPE = "linear:0.24"


@dataclass(frozen=True)
class Score:
    """One way of drafting on one category of texts ("all" for every one), under one cost curve.

    drafter, draft_length: as on the command line. speedup: plain seconds over modelled ones.
    live_ratio: as measured live on the same curve, or None. session: of the texts, or "".
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
    """Scores: a table in text and in a notebook; a row for each in CSV and pandas.

    Speedups per category; tokens per pass, acceptance and the measured ratio over all.
    """

    def rows(self) -> list[Row]:
        """A row for each score, a column for each field."""
        return [asdict(score) for score in self]

    def plot(self, cost: str = "") -> Figure:
        """Draw the speeds by kind of text at one cost, the first if none is named; matplotlib."""
        plots: Any = import_module("specdec_mlx.notebook.plots")
        figure: Figure = plots.modelled_speed([s for s in self if s.cost == (cost or self[0].cost)])
        return figure

    def __str__(self) -> str:
        """Markdown."""
        return markdown_table(*_table(self), 3)

    def _repr_html_(self) -> str:
        note = "<p>modelled speed relative to plain decoding</p>"
        return table_html(*_table(self), 3) + note


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


def score_record(
    record: Record,
    drafters: Mapping[str, Drafter | Callable[[], Drafter | None] | None],
    draft_lengths: Sequence[str],
    cost: CostCurve,
    *,
    draft_cost: float = 0.0,
) -> Scores:
    """Every drafter with every draft length on all texts.

    Args:
        record: of a benchmark; its texts are scored.
        drafters: name -> drafter, None for plain decoding, or a function that makes it, so that one
            that remembers has a memory for each way of drafting.
        draft_lengths: numbers and policies, as on the command line. What one learns it keeps from
            text to text; it begins with the prior of the chip whose curve is named.
        cost: c(m), in seconds.
        draft_cost: of a draft token, in c(1).

    Returns:
        A score for each way of drafting and each category, session, and all texts.

    Raises:
        ValueError: a drafter draws at random; only drafts that are certain can be replayed.
    """
    scores = Scores()
    options: Any = {name: int(record.settings[name]) for name in ("max_tokens", "vocab_size")}
    options["draft_seconds"] = draft_cost * cost(1)
    for name, made in drafters.items():
        for length in draft_lengths if made else [""]:
            drafter = made if made is None or isinstance(made, Drafter) else made()
            modelled, tuning = [], Tuning(CURVES.get(cost.name, MILDEST))
            bar = tqdm(record.texts, f"{name} {length}", unit="text", delay=1, leave=False)
            for text in bar:
                policy = make_draft_length(parse_draft_length(length or "0"), tuning)
                modelled.append(replay_text(text, drafter, policy, cost, **options))
            scores += scores_of(record, cost.name, name, length, modelled)
    return scores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `specdec-mlx replay`."""
    add, several = parser.add_argument, partial(parser.add_argument, action="append")
    add("record", nargs="?", metavar="FILE", help="what specdec-mlx bench --json wrote")
    sessions = "conversations instead, as JSON lines with messages, or turns and reference; of the "
    add("--sessions", metavar="FILE", help=f"{sessions}other file only the costs are taken")
    add("--model", help="for --sessions: whose tokenizer (default: a small one)")
    several("--drafter", metavar="NAME[:KEY=VALUE,...]", help=f"repeatable ({DEFAULT_DRAFTER})")
    add("--draft-model", metavar="MODEL", help="a model to draft with; it really runs")
    add_lighter_arguments(parser)
    several("--draft-length", metavar="N|POLICY", help=f"repeatable ({', '.join(DEFAULT_LENGTHS)})")
    costs = "repeatable: measured, linear:SLOPE, costs of 1, 2 ... positions as 1,1.1, or a chip as"
    costs += f" others measured it: m3-max, m4-pro, m5-max-27b, ... (measured, {DEFAULT_SLOPE})"
    several("--cost", metavar="CURVE", help=costs)
    each = "of a token drafted by a model, in passes over one position (%(default)s)"
    add("--draft-cost", type=float, default=0.0, metavar="C", help=each)
    add("--json", metavar="FILE", help="write the scores")
    add("--plot", metavar="FILE", help="draw the speeds at the first cost, as PNG, SVG or PDF")


def main(args: argparse.Namespace) -> int:
    """Score, and print a table per cost curve."""
    record, drafters = read_record(args), drafters_of(args)
    lengths, everything = args.draft_length or DEFAULT_LENGTHS, Scores()
    for cost in costs_of(args, record):
        scores = score_record(record, drafters, lengths, cost, draft_cost=args.draft_cost)
        everything += scores
        print(f"Modelled speedup, {len(record.texts)} texts, cost {cost.name}:\n\n{scores}\n")
    if args.json:
        Path(args.json).write_text(json.dumps(everything.rows(), indent=1))
    if args.plot:
        draw(args.plot, everything)
    return 0


def draw(path: str, scores: Scores) -> None:
    """Write the picture of scores; its kind is the file's suffix."""
    scores.plot().savefig(path, dpi=150, facecolor="white")


def read_record(args: argparse.Namespace) -> Record:
    """The texts to score, and the costs that were measured. Raises ValueError where none is."""
    record = load_record(args.record) if args.record else None
    if args.sessions:
        return record_of_sessions(args.sessions, args.model, record.cost if record else None)
    if record is None:
        raise ValueError("Nothing to replay. Give what bench --json wrote, or --sessions.")
    return record


def costs_of(args: argparse.Namespace, record: Record) -> list[CostCurve]:
    """The curves that were named, else the measured one and what Apple GPUs are said to cost."""
    usual = [MEASURED] * bool(record.cost) + [DEFAULT_SLOPE]
    return [parse_cost(text, record.cost) for text in args.cost or usual]


def record_of_sessions(
    path: Path | str, model: Path | str | None = None, cost: CostCurve | None = None
) -> Record:
    """A session file as a record, by a model's tokenizer (a small one if None)."""
    name = model or demo_model_path()
    with explained(name):
        tokenizer = load_tokenizer(name)
    texts = read_sessions(path, tokenizer)
    longest = max(len(text.generated) for text in texts)
    settings = {"vocab_size": len(tokenizer), "max_tokens": longest, "temp": 0.0}
    return Record(f"sessions of {path}", {}, settings, texts, cost)


def drafters_of(args: argparse.Namespace) -> dict[str, Callable[[], Drafter | None]]:
    """Ways to make the drafters that were named; each is tried once."""
    ways = {spec: one.resolve for spec, one in choice_of(args).each().items()}
    for make in ways.values():
        make()
    return dict(ways)


def scores_of(
    record: Record, cost: str, drafter: str, length: str, modelled: Sequence[Modelled]
) -> list[Score]:
    """One score per category, "all", and one for each session, of what became of each text."""
    groups: dict[tuple[str, str], list[Modelled]] = {(c, ""): [] for c in record.categories}
    groups[ALL, ""] = list(modelled)
    for text, found in zip(record.texts, modelled, strict=True):
        groups[text.category, ""].append(found)
        if text.session:
            groups.setdefault((text.category, text.session), []).append(found)
    scores = []
    for (category, session), group in groups.items():
        tokens, passes, drafted, accepted, seconds, plain_seconds = (
            sum(numbers) for numbers in zip(*(m[1:] for m in group), strict=True)
        )
        counts = len(group), tokens, passes, drafted, accepted
        numbers = tokens / passes, plain_seconds / seconds
        is_live = cost == MEASURED and not session
        live = record.live_ratio(drafter, length, category) if is_live else None
        scores.append(Score(cost, drafter, length, category, *counts, *numbers, live, session))
    return scores
