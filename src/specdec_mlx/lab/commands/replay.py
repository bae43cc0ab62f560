"""`specdec-mlx replay`: score drafters on recorded texts, offline."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from specdec_mlx.arguments import argument, new_file, number
from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.choosing.choice import choice_of
from specdec_mlx.lab.bench.cost import MEASURED, CostCurve, parse_cost
from specdec_mlx.lab.bench.record import Record, load_record
from specdec_mlx.lab.bench.replay import record_of_sessions, score_record
from specdec_mlx.lab.bench.summary import Result
from specdec_mlx.lab.commands.shared_flags import FILE, add_drafting

DEFAULT_LENGTHS = ("auto",)
DEFAULT_SLOPE = "linear:0.24"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, add_repeatable = parser.add_argument, partial(parser.add_argument, action="append")
    add("record", nargs="?", **FILE, help="what specdec-mlx bench --json wrote")
    sessions = "conversations instead, as JSON lines with messages, or turns and reference; of the "
    add("--sessions", **FILE, help=f"{sessions}other file only the costs are taken")
    add("--model", help="for --sessions: whose tokenizer (default: a small one)")
    add_drafting(parser, "a model to draft with; it really runs")
    add_repeatable(
        "--num-draft-tokens", metavar="N|POLICY", help=f"repeatable ({', '.join(DEFAULT_LENGTHS)})"
    )
    costs = "repeatable: measured, linear:SLOPE, costs of 1, 2 ... positions as 1,1.1, or a chip as"
    costs += f" others measured it: m3-max, m4-pro, m5-max-27b, ... (measured, {DEFAULT_SLOPE})"
    add_repeatable("--cost", metavar="CURVE", help=costs)
    each = "of a token drafted by a model, in passes over one position (%(default)s)"
    add("--draft-cost", type=number(float, 0), default=0.0, metavar="C", help=each)
    new = argument(new_file)
    add("--json", type=new, metavar="FILE", help="write the scores")
    picture = "draw the speeds at the first cost, as PNG, SVG or PDF"
    add("--plot", type=new, metavar="FILE", help=picture)


def main(args: argparse.Namespace) -> int:
    record, drafters = read_record(args), drafters_of(args)
    lengths, results = args.num_draft_tokens or DEFAULT_LENGTHS, list[Result]()
    for cost in costs_of(args, record):
        scored = score_record(record, drafters, lengths, cost, draft_cost=args.draft_cost)
        print(f"Modelled speed, {len(record.texts)} texts, cost {cost.name}:\n\n{scored}\n")
        results += scored.results
    write(args, replace(record, results=results))
    return 0


def write(args: argparse.Namespace, scored: Record) -> None:
    if args.json:
        args.json.write_text(json.dumps(scored.rows(), indent=1), encoding="utf-8")
    if args.plot:
        first = [r for r in scored.results if r.cost == scored.results[0].cost]
        figure = replace(scored, results=first).plot()
        figure.savefig(args.plot, dpi=150, facecolor="white")


def read_record(args: argparse.Namespace) -> Record:
    """The texts to score, with measured costs. ValueError if there are none."""
    record = load_record(args.record) if args.record else None
    if args.sessions:
        return record_of_sessions(args.sessions, args.model, record.cost if record else None)
    if record is None:
        raise ValueError("Nothing to replay. Give what bench --json wrote, or --sessions.")
    return record


def costs_of(args: argparse.Namespace, record: Record) -> list[CostCurve]:
    """The named curves. By default the measured curve, and a typical curve of Apple GPUs."""
    usual = [MEASURED] * bool(record.cost) + [DEFAULT_SLOPE]
    return [parse_cost(text, record.cost) for text in args.cost or usual]


def drafters_of(args: argparse.Namespace) -> dict[str, Callable[[], Drafter | None]]:
    ways = {spec: one.resolve for spec, one in choice_of(args).each().items()}
    # Errors come before the first score.
    for make in ways.values():
        make()
    return dict(ways)
