"""`specdec-mlx bench`: speed and identity on many prompts, interleaved."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit
from msgspec.structs import replace

from specdec_mlx.arguments import argument, checked, new_file, number, parse_draft_length
from specdec_mlx.drafters.choosing.choice import choice_of
from specdec_mlx.drafters.choosing.registry import DEFAULT_DRAFTER, MODEL_DRAFTER
from specdec_mlx.kernels import make_kernels
from specdec_mlx.lab import prompts
from specdec_mlx.lab.bench.record import format_record, read_sessions, save_record
from specdec_mlx.lab.bench.report import (
    FOLDER,
    JSON_FILE,
    MINUTES,
    Budget,
    choose_draft,
    choose_model,
    format_report,
    measure_report,
    save_report,
)
from specdec_mlx.lab.bench.run import make_tasks, run_bench
from specdec_mlx.lab.bench.timing import Contender, Settings, make_contenders
from specdec_mlx.lab.commands.shared_flags import FILE, SMALL_MODEL, add_drafting
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.models.loading import load_target
from specdec_mlx.rules import make_rule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, count = parser.add_argument, number(int, 1)
    add_repeatable = partial(add, action="append")
    add("--model", help=SMALL_MODEL)
    add("--prompts", **FILE, help="JSON lines with id, category, turns (default: ours)")
    sessions = "conversations in order instead: JSON lines with messages, or turns and reference"
    add("--sessions", **FILE, help=sessions)
    add("--categories", nargs="+", metavar="NAME", help="only these")
    add("--per-category", type=count, metavar="N", help="prompts of each, evenly spread (all)")
    add_drafting(parser, "a head, or a model: mlx-lm's own takes part too")
    length, lengths = (checked(parse_draft_length), "repeatable: every drafter with every length")
    add_repeatable("--num-draft-tokens", type=length, metavar="N|POLICY", help=f"{lengths} (auto)")
    rules = "acceptance rule, repeatable: every drafter and length with every rule (auto)"
    add_repeatable("--rule", type=checked(make_rule), metavar="NAME", help=rules)
    others = "kernels for passes over several rows, repeatable: every drafter with and without them"
    add_repeatable("--kernels", type=checked(make_kernels), metavar="NAME", help=others)
    add("--temp", type=float, default=0.0, help="temperature (%(default)s)")
    add("--max-tokens", type=count, default=128, help="tokens a prompt (%(default)s)")
    add("--repeats", type=count, default=1, help="timed runs of each (%(default)s)")
    add("--seed", type=int, help="of draws (0); rule auto is then the one for seeds")
    add("--ties", choices=("plain",), help="let plain passes decide near ties, and count them")
    add("--no-cost", action="store_true", help="do not measure what a pass over m positions costs")
    add(
        "--json",
        type=argument(new_file),
        metavar="FILE",
        help="write results, and the texts for specdec-mlx replay",
    )
    report = f"measure this machine, and write numbers without texts to send in ({FOLDER})"
    add("--report", nargs="?", type=Path, const=FOLDER, metavar="FOLDER", help=report)
    minutes = "of --report, after which no row is begun (%(default)g)"
    add("--minutes", type=number(float, 0), default=MINUTES, metavar="N", help=minutes)


def main(
    args: argparse.Namespace, others: Callable[[nn.Module, Any], Sequence[Contender]] | None = None
) -> int:
    """Return 1 if a greedy text differs from plain decoding beyond rounding, and 0 otherwise."""
    if args.report:
        return write_report(args)
    model_name = str(args.model or "demo model")
    args.model = args.model or str(demo_model_path())
    model, tokenizer = load_target(args.model)
    is_first = mx.distributed.init().rank() == 0  # it speaks for all ranks
    choice = choice_of(args)
    lengths, rules = args.num_draft_tokens or ("auto",), args.rule or ("auto",)
    end_tokens = tokenizer.eos_token_ids
    how = Settings(args.max_tokens, args.repeats, args.seed, end_tokens, args.temp, ties=args.ties)
    kernels = args.kernels or ()
    contenders = make_contenders(model, choice, lengths, how, tokenizer, rules, kernels)
    contenders += others(model, tokenizer) if others else ()
    tasks = _tasks(args, tokenizer)
    models = [m for m in (model, choice.model.pair[0]) if m is not None]
    with wired_limit(models, [generation_stream]):
        record = run_bench(
            model, tasks, contenders, how, measure_cost=not args.no_cost, progress=is_first
        )
    if is_first:
        command = shlex.join(["specdec-mlx", *sys.argv[1:]])
        settings = replace(record.settings, model=model_name)
        record = replace(record, command=command, settings=settings)
        if args.json:
            save_record(record, args.json)
        print(format_record(record))
    return 0 if all(difference.excused for difference in record.differences) else 1


def _tasks(args: argparse.Namespace, tokenizer: Any) -> list[RecordedText]:
    tasks: Sequence[RecordedText]
    if args.sessions:
        tasks = read_sessions(args.sessions, tokenizer)
    else:
        tasks = make_tasks(tokenizer, prompts.read_prompts(args.prompts))
    return prompts.choose(tasks, args.categories, args.per_category)


OF_NO_REPORT = (
    *("prompts", "sessions", "drafter", "draft_layers", "draft_vocab", "num_draft_tokens"),
    *("rule", "temp", "ties", "kernels", "no_cost", "json"),
)
"""Flags that would put something private into a report, or would make reports differ."""


def write_report(args: argparse.Namespace) -> int:
    if others := [name for name in OF_NO_REPORT if getattr(args, name)]:
        raise ValueError(
            f"--{others[0].replace('_', '-')} and --report exclude each other, because all reports "
            "measure the same rows on the built-in prompts. Leave one of them out."
        )
    budget = Budget(60 * args.minutes)
    args.model = args.model or choose_model()
    model, tokenizer = load_target(args.model)
    # A folder that cannot be written is an error now, before minutes of measurements.
    args.report.mkdir(parents=True, exist_ok=True)
    new_file(args.report / JSON_FILE)
    args.draft_model = args.draft_model or choose_draft(args.model)
    choice = choice_of(args)
    names = (DEFAULT_DRAFTER, MODEL_DRAFTER) if choice.model.name else (DEFAULT_DRAFTER,)
    choice = replaced(choice, drafters=names)
    settings = Settings(args.max_tokens, args.repeats, args.seed, tokenizer.eos_token_ids)
    args.per_category = args.per_category or 1
    models = [m for m in (model, choice.model.pair[0]) if m is not None]
    with wired_limit(models, [generation_stream]):
        tasks = _tasks(args, tokenizer)
        for report in measure_report(model, tokenizer, choice, tasks, settings, args.model, budget):
            # A report that is stopped early has what was measured until then.
            paths = save_report(report, args.report)
    print(format_report(report))
    print(*(f"Written: {path}" for path in paths), sep="\n")
    return int(any((r.identical or 0) + (r.excused or 0) < r.texts for r in report.results))
