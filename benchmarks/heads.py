"""Tokens a pass by head, draft length and temperature: `python -m benchmarks.heads`.

Without flags on the lab's pair: its draft model and its trained heads, on openings that neither
was trained on. Each text is generated plainly and with every drafter in turn, so that they share
what else the machine does; speeds are medians over the texts.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice, product
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from specdec_mlx.arguments import argument, number, parse_draft_length
from specdec_mlx.contracts import Drafter
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab import HEADS, draft_path, head_path, target_path
from specdec_mlx.lab import pair as pair_module
from specdec_mlx.lab.bench.record import describe_machine
from specdec_mlx.lab.prompts import Prompt, read_prompts
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import Token, speculate
from specdec_mlx.models.loading import load_model
from specdec_mlx.rules import make_rule
from specdec_mlx.sampling import Sampling
from specdec_mlx.stats.account import SpeculationStats

Begin = Callable[..., Iterable[Token]]

LENGTHS = (1, 2, 3, 4, "auto")
TEMPS = (0.0, 0.7, 1.0)
TURN = 8  # tokens of a generation before the next one has its turn

NOTE = (
    "tokens a pass of the target by draft length; drafted: draft tokens a pass where the length is "
    "automatic; speed: of that, plain decoding = 1, median over the texts."
)


@dataclass(frozen=True)
class Row:
    """A drafter at a temperature.

    tokens_per_pass: by draft length. speed: with the automatic one, of plain decoding. drafted:
    draft tokens a pass that it chose.
    """

    drafter: str
    temp: float
    tokens_per_pass: Mapping[str, float]
    speed: float | None
    drafted: float | None


def compare(
    target: nn.Module,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    lengths: Sequence[int | str] = LENGTHS,
    temps: Sequence[float] = TEMPS,
    max_tokens: int = 128,
    is_seeded: bool = False,
) -> Iterator[Row]:
    """Rows of the table, temperature by temperature.

    Args:
        target: the model.
        drafters: by name.
        prompts: token ids of each text.
        lengths: draft lengths; speeds are of "auto".
        temps: temperatures of the text.
        max_tokens: of each text.
        is_seeded: with the rule of callers who give a seed.
    """
    rule = make_rule("auto", is_seeded=is_seeded)
    for temp in temps:
        tunings = {name: Tuning() for name in drafters}
        accounts: dict[tuple[str, str], list[SpeculationStats]] = {}
        ratios: dict[str, list[float]] = {name: [] for name in drafters}
        for seed, prompt in enumerate(prompts):
            options: dict[str, Any] = {
                "sampler": Sampling(temp=temp),
                "max_tokens": max_tokens,
                "seed": seed,
                "rule": rule,
            }
            begin: Begin = partial(speculate, target, prompt, **options)
            for (name, drafter), length in product(drafters.items(), lengths):
                if length != "auto":
                    (run,) = race([begin(drafter, num_draft_tokens=length)])
                    accounts.setdefault((name, str(length)), []).append(run.stats)
            if "auto" in lengths:
                automatic = [begin(d, tuning=tunings[name]) for name, d in drafters.items()]
                plain, *runs = race([begin(None), *automatic])
                for name, run in zip(drafters, runs, strict=True):
                    accounts.setdefault((name, "auto"), []).append(run.stats)
                    ratios[name].append(plain.seconds / run.seconds)
        for name in drafters:
            per_pass = {str(k): tokens_a_pass(accounts[name, str(k)]) for k in lengths}
            own = accounts.get((name, "auto"), [])
            drafted = sum(s.drafted for s in own) / max(1, sum(s.target_passes for s in own))
            speed = median(ratios[name]) if own else None
            yield Row(name, temp, per_pass, speed, drafted if own else None)


@dataclass
class Run:
    """A generation under way. seconds: behind its first token. stats: its account."""

    stats: SpeculationStats
    seconds: float = 0.0


def race(generations: Sequence[Iterable[Token]]) -> list[Run]:
    """Run generations to their ends in turns of TURN tokens, so that they share the machine's pace.

    The prompt is read before any turn, and its time is not counted, nor that of a pass which was
    launched then. A turn ends when the device is done with it, the pass that was launched ahead
    included: the next turn would wait for that. Whose turn is next is drawn anew each time around,
    since what ran before is felt in the processor's caches.
    """
    draws = random.Random(0)
    iterators = [iter(tokens) for tokens in generations]
    runs = [Run(next(iterator).stats) for iterator in iterators]
    mx.synchronize(generation_stream)
    left = list(zip(iterators, runs, strict=True))
    while left:
        for iterator, run in draws.sample(left, len(left)):
            started = time.perf_counter()
            turn = list(islice(iterator, TURN))
            mx.synchronize(generation_stream)
            run.seconds += time.perf_counter() - started
            if len(turn) < TURN:
                left.remove((iterator, run))
    return runs


def tokens_a_pass(accounts: Sequence[SpeculationStats]) -> float:
    """Tokens a pass over all texts."""
    return float(sum(s.emitted for s in accounts) / sum(s.target_passes for s in accounts))


def format_rows(rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    lengths = list(rows[0].tokens_per_pass)
    header = ["drafter", "temp", *(f"K = {k}" if k != "auto" else k for k in lengths)]
    cells = [
        [
            row.drafter,
            f"{row.temp:g}",
            *(f"{row.tokens_per_pass[k]:.2f}" for k in lengths),
            "-" if row.drafted is None else f"{row.drafted:.1f}",
            "-" if row.speed is None else f"{row.speed:.2f}",
        ]
        for row in rows
    ]
    return markdown_table([*header, "drafted", "speed"], cells, num_text_columns=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    args = _parser().parse_args(arguments)
    target, prompts = target_and_prompts(args)
    drafters = dict(_drafters(args, target))
    lengths, max_tokens = args.lengths, args.max_tokens
    how = {"lengths": lengths, "max_tokens": max_tokens, "is_seeded": args.seeded}
    rows = list(compare(target, drafters, prompts, **how))
    report(args, prompts, rows, f"{format_rows(rows)}\n\n{NOTE}")


def target_and_prompts(args: argparse.Namespace) -> tuple[nn.Module, list[list[int]]]:
    """What the flags of `add_arguments` name, the prompts as token ids."""
    target, tokenizer = load_model(args.model or target_path())
    texts = read_prompts(args.prompts) if args.prompts else openings()
    return target, [list(tokenizer.encode(p.text)) for p in texts[:: args.every]]


def report(
    args: argparse.Namespace, prompts: Sequence[Sequence[int]], rows: Sequence[Any], table: str
) -> None:
    """Print a table of these prompts, and write its rows, dataclasses, where that was asked for."""
    if args.json:
        record = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"{len(prompts)} texts of {args.max_tokens} tokens\n\n{table}")


def _drafters(args: argparse.Namespace, target: nn.Module) -> Iterator[tuple[str, Drafter]]:
    """By name: those given, or the lab's."""
    if args.model is None:
        yield "draft model", ModelDrafter(load_model(draft_path())[0])
        yield from ((kind, load_head(head_path(kind), target)) for kind in HEADS)
    for folder in args.head:
        yield Path(folder).name, load_head(folder, target)


def openings() -> list[Prompt]:
    """The lab's held-out openings."""
    return [Prompt(f"{name}/{i}", name, text) for name, i, text in pair_module.held_out_openings()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that say what is raced: target, heads and prompts."""
    count = number(int, 1)
    add = parser.add_argument
    add("--model", help="target: folder or Hugging Face name (default: the lab's)")
    add("--head", action="append", default=[], metavar="HEAD", help="trained head (again for more)")
    add("--prompts", metavar="FILE", help="JSON lines with id, category, turns (default: ours)")
    add("--every", type=count, default=1, metavar="N", help="take every n-th prompt (%(default)s)")
    add("--max-tokens", type=count, default=128, help="tokens of a text (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the rows")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heads", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=argument(parse_draft_length),
        default=LENGTHS,
        metavar="K",
        help="draft lengths (1 2 3 4 auto)",
    )
    help_seeded = "under the rule of callers who give a seed, coupled"
    parser.add_argument("--seeded", action="store_true", help=help_seeded)
    return parser


if __name__ == "__main__":
    main()
