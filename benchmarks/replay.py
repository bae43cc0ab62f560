"""`specdec-mlx replay` with more to compare: bounds, recorded drafts of a draft model, and batches.

    python -m benchmarks.replay texts.json --drafter ngram            # and the oracles' rows
    python -m benchmarks.replay texts.json --drafts drafts.json --draft-cost 0.1
    python -m benchmarks.replay texts.json --rows 2 --rows 4
    python -m benchmarks.replay --sessions sessions.jsonl --described --num-draft-tokens 64

`benchmarks.recorded_drafts` records drafts; see `oracles` for the bounds, `recorded_rows` for
batches, `described_lookups` for look-ups of other projects.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from msgspec.structs import replace

from benchmarks.described_lookups import METHODS
from benchmarks.oracles import (
    LENGTH_ORACLE,
    LONGEST_DRAFT,
    TEXT_ORACLE,
    length_oracle,
    text_oracle,
)
from benchmarks.recorded_drafts import load_drafts
from benchmarks.recorded_rows import RowsScore, format_rows, score_rows
from specdec_mlx.arguments import number
from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.first_of import BestOf
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.lab.bench.cost import CostCurve
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.replay import modelled_results, score_record
from specdec_mlx.lab.bench.summary import Result
from specdec_mlx.lab.commands import replay
from specdec_mlx.memory.store import Memory

Drafters = Mapping[str, Callable[[], Drafter | None]]


def score_oracles(
    record: Record, drafters: Drafters, cost: CostCurve, *, draft_cost: float, longest: int
) -> list[Result]:
    """Of each drafter the length oracle, and the text oracle.

    Args:
        record: of a benchmark; its texts are scored.
        drafters: name -> what makes the drafter.
        cost: c(m), in seconds.
        draft_cost: of a draft token, in c(1).
        longest: most tokens of a draft.
    """
    vocab_size, results = record.settings.vocab_size, list[Result]()
    for name, make in drafters.items():
        if (drafter := make()) is None:
            continue
        bounds = [
            length_oracle(
                text,
                drafter,
                cost,
                vocab_size=vocab_size,
                draft_seconds=draft_cost * cost(1),
                longest=longest,
            )
            for text in record.texts
        ]
        results += modelled_results(record, cost, name, LENGTH_ORACLE, bounds)
    best = [text_oracle(text, cost, longest) for text in record.texts]
    return results + modelled_results(record, cost, TEXT_ORACLE, "", best)


def main(arguments: Sequence[str] | None = None) -> int:
    """Score, and print a table per cost curve."""
    args = _parser().parse_args(arguments)
    record = replay.read_record(args)
    drafts = {Path(path).stem: load_drafts(path, record.texts) for path in args.drafts or ()}
    drafters: dict[str, Callable[[], Drafter | None]] = {
        name: lambda drafter=drafter: drafter  # type: ignore[misc]
        for name, drafter in drafts.items()
    }
    if args.drafter or not drafters:
        drafters = replay.drafters_of(args) | drafters
    if args.described:
        drafters |= METHODS
        drafters["auto, a memory"] = lambda: SuffixDrafter(Memory())
        n_grams = NGramDrafter(max_order=5, num_draft=16)
        drafters["auto and n-grams"] = lambda: BestOf(SuffixDrafter(), n_grams)
    lengths = args.num_draft_tokens or replay.DEFAULT_LENGTHS
    results, of_batches = list[Result](), list[RowsScore]()
    for cost in replay.costs_of(args, record):
        print(f"Modelled speed, {len(record.texts)} texts, cost {cost.name}:\n")
        if args.rows:
            of_rows = score_rows(record, drafters, lengths, args.rows, cost)
            of_batches += of_rows
            print(f"{format_rows(of_rows)}\n")
            continue
        scored = score_record(record, drafters, lengths, cost, draft_cost=args.draft_cost)
        if args.longest > 0:
            scored.results.extend(
                score_oracles(
                    record, drafters, cost, draft_cost=args.draft_cost, longest=args.longest
                )
            )
        results += scored.results
        print(f"{scored}\n")
    if args.rows and args.json:
        rows = [asdict(score) for score in of_batches]
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif not args.rows:
        replay.write(args, replace(record, results=results))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    replay.add_arguments(parser)
    add = parser.add_argument
    add(
        "--drafts",
        action="append",
        metavar="FILE",
        help="repeatable: of benchmarks.recorded_drafts",
    )
    add(
        "--described",
        action="store_true",
        help="also the look-ups of llama.cpp and MTPLX, and ours with a memory and with n-grams",
    )
    add(
        "--longest",
        type=int,
        default=LONGEST_DRAFT,
        metavar="N",
        help="most tokens that the oracles draft; 0 leaves them out (%(default)s)",
    )
    add(
        "--rows",
        action="append",
        type=number(int, 1),
        metavar="N",
        help="repeatable: N texts at a time in one batch, without oracles; a pass of width m costs "
        "c(N m)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
