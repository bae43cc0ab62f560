"""`specdec-mlx bench`: live, interleaved, against plain mlx-lm."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream, wired_limit

from specdec_mlx.bench.contenders import PLAIN, Contender, make_contenders
from specdec_mlx.bench.cost import CostMeter
from specdec_mlx.bench.identity import find_differences, reference_texts
from specdec_mlx.bench.machine import describe_dtype, describe_machine
from specdec_mlx.bench.prompts import (
    Prompt,
    Task,
    builtin_prompts,
    choose,
    encode_chat,
    read_prompts,
)
from specdec_mlx.bench.record import Record, RecordedText, read_sessions, save_record
from specdec_mlx.bench.report import format_record
from specdec_mlx.bench.summary import summarise
from specdec_mlx.bench.timing import Settings, run_interleaved
from specdec_mlx.draft_length.policy import parse_draft_length
from specdec_mlx.drafters.draft_models import NamedModel, add_lighter_arguments, lighter_of
from specdec_mlx.drafters.registry import DEFAULT_DRAFTER, WITH_MODEL
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.models import load_target
from specdec_mlx.options import argument, checked, positive_int
from specdec_mlx.rules.registry import make_rule

DEFAULT_DRAFT_LENGTHS = ("auto",)
DEFAULT_RULES = ("auto",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `specdec-mlx bench`."""
    add, count = parser.add_argument, argument(positive_int)
    add("--model", help="model folder or Hugging Face name (default: a small one)")
    add("--prompts", metavar="FILE", help="JSON lines with id, category, turns (default: ours)")
    add(
        "--sessions",
        metavar="FILE",
        help="prompts of conversations instead, as JSON lines with messages, or with turns and "
        "reference; in their order, so that a drafter that remembers is of use",
    )
    add("--categories", nargs="+", metavar="NAME", help="only these")
    add("--per-category", type=count, metavar="N", help="prompts of each, evenly spread (all)")
    add(
        "--drafter",
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help=f"repeatable; none: our loop without a drafter ({DEFAULT_DRAFTER})",
    )
    add(
        "--draft-model",
        metavar="MODEL",
        help="a draft model or a trained head; with a model mlx-lm's own speculation runs as well",
    )
    add_lighter_arguments(parser)
    add(
        "--draft-length",
        action="append",
        type=checked(parse_draft_length),
        metavar="N|POLICY",
        help="repeatable: every drafter with every length (auto)",
    )
    add(
        "--rule",
        action="append",
        type=checked(make_rule),
        metavar="NAME",
        help="acceptance rule, repeatable: every drafter and length with every rule (auto)",
    )
    add("--temp", type=float, default=0.0, help="temperature (%(default)s)")
    add("--max-tokens", type=count, default=128, help="tokens a prompt (%(default)s)")
    add("--repeats", type=count, default=1, help="timed runs of each (%(default)s)")
    add("--seed", type=int, default=0, help="of draws at a temperature above 0 (%(default)s)")
    add("--no-cost", action="store_true", help="do not measure what a pass over m positions costs")
    add("--json", metavar="FILE", help="write results, and the texts for specdec-mlx replay")


def main(
    args: argparse.Namespace, others: Callable[[nn.Module, Any], Sequence[Contender]] | None = None
) -> int:
    """Run, print the report; 1 where a greedy text differs from plain decoding's for no reason."""
    if args.json:
        Path(args.json).touch()  # a path that cannot be written is found out now, not at the end
    model, tokenizer = load_target(args.model or demo_model_path())
    is_first = mx.distributed.init().rank() == 0  # it speaks for all ranks
    named = NamedModel(args.draft_model, lighter_of(args))
    draft_model, draft_tokenizer = named.pair
    contenders = make_contenders(
        model,
        _drafters(args),
        args.draft_length or DEFAULT_DRAFT_LENGTHS,
        args.temp,
        tokenizer,
        draft_model,
        draft_tokenizer,
        args.rule or DEFAULT_RULES,
        partial(named.make, target=model),
    )
    contenders += others(model, tokenizer) if others else ()
    tasks = _tasks(args, tokenizer)
    settings = Settings(args.max_tokens, args.repeats, args.seed, tokenizer.eos_token_ids)
    models = [m for m in (model, draft_model) if m is not None]
    with wired_limit(models, [generation_stream]):
        record = run_bench(
            model,
            tasks,
            contenders,
            settings,
            temp=args.temp,
            measure_cost=not args.no_cost,
            make_bar=_progress_bar if is_first else None,
            about={"model": str(args.model or "demo model")},
            command=shlex.join(["specdec-mlx", *sys.argv[1:]]),
        )
    if is_first:
        if args.json:
            save_record(record, args.json)
        print(format_record(record))
    return 0 if all(difference.excused for difference in record.differences) else 1


def run_bench(
    model: nn.Module,
    tasks: Sequence[Task],
    contenders: Sequence[Contender],
    settings: Settings,
    *,
    temp: float = 0.0,
    measure_cost: bool = True,
    make_bar: Callable[[int], Any] | None = None,
    about: dict[str, Any] | None = None,
    command: str = "",
) -> Record:
    """Run all contenders, plain mlx-lm the first, on all tasks, and compare.

    temp: that the contenders were made with; at 0 texts are compared. measure_cost: measure c(m), a
    sweep before each task. make_bar: total -> a progress bar. about, command: for the record.
    """
    assert contenders[0].drafter == PLAIN
    meter = CostMeter(model, tasks[0].prompt) if measure_cost else None
    bar = make_bar(len(tasks) * len(contenders) * settings.repeats) if make_bar else None
    machine = describe_machine()
    try:
        samples = run_interleaved(
            tasks,
            contenders,
            settings,
            on_sample=lambda sample: bar.update() if bar else None,
            between_tasks=meter.sweep if meter else lambda: None,
        )
    finally:
        if bar:
            bar.close()
    differences = find_differences(model, tasks, samples) if temp == 0 else []
    references = reference_texts(samples)
    return Record(
        command=command,
        machine=machine,
        settings={
            **(about or {}),
            "temp": temp,
            "max_tokens": settings.max_tokens,
            "repeats": settings.repeats,
            "seed": settings.seed,
            "dtype": describe_dtype(model),
            "vocab_size": model(mx.array([[0]])).shape[-1],
        },
        texts=[RecordedText(t.id, t.category, t.prompt, references[t.id]) for t in tasks],
        cost=meter.curve() if meter else None,
        results=summarise(samples, differences, greedy=temp == 0),
        differences=differences,
        samples=samples,
    )


def bench_texts(
    model: nn.Module,
    tokenizer: Any,
    texts: Mapping[str, Sequence[str]],
    drafters: Sequence[str],
    draft_lengths: Sequence[str] = ("4",),
    *,
    draft_model: nn.Module | None = None,
    rules: Sequence[str] = DEFAULT_RULES,
    temp: float = 0.0,
    settings: Settings | None = None,
    progress: bool = True,
) -> Record:
    """A benchmark of your own texts from Python.

    Args:
        model: the target.
        tokenizer: the target's, with a chat template.
        texts: user messages by kind of text.
        drafters: as on the command line, as are lengths and rules.
        draft_model: of the drafter "model"; it has the target's tokenizer.
        temp: temperature; at 0 the texts are compared with plain decoding's.
        settings: 128 tokens and one repeat if None.
        progress: show a bar.

    Returns:
        What `specdec-mlx bench` prints and writes.

    Raises:
        UnknownNameError: no drafter, length or rule has this name.
        ValueError: options that a drafter does not take, or no texts.
    """
    prompts = [
        Prompt(f"{kind}/{i}", kind, text)
        for kind, messages in texts.items()
        for i, text in enumerate(messages)
    ]
    contenders = make_contenders(
        model,
        drafters,
        draft_lengths,
        temp,
        tokenizer,
        draft_model,
        None if draft_model is None else tokenizer,
        rules,
    )
    return run_bench(
        model,
        make_tasks(tokenizer, prompts),
        contenders,
        settings or Settings(end_tokens=tokenizer.eos_token_ids),
        temp=temp,
        make_bar=_progress_bar if progress else None,
    )


def make_tasks(tokenizer: Any, prompts: Sequence[Prompt]) -> list[Task]:
    """Prompts through the tokenizer's chat template. Raises ValueError if there are none."""
    if not prompts:
        raise ValueError("No prompts. Give another file, or drop --categories.")
    return [Task(p.id, p.category, encode_chat(tokenizer, p.text)) for p in prompts]


def _drafters(args: argparse.Namespace) -> list[str]:
    """Those asked for; a draft model takes part in any case."""
    if args.drafter is None:
        return ["model"] if args.draft_model else [DEFAULT_DRAFTER]
    names = {spec.partition(":")[0] for spec in args.drafter}
    is_named = not names.isdisjoint(WITH_MODEL)
    return [*args.drafter, *(["model"] if args.draft_model and not is_named else [])]


def _tasks(args: argparse.Namespace, tokenizer: Any) -> list[Task]:
    if args.sessions:
        texts = read_sessions(args.sessions, tokenizer)
        tasks = [Task(text.id, text.category, text.prompt) for text in texts]
        return choose(tasks, args.categories, args.per_category)
    prompts = read_prompts(args.prompts) if args.prompts else builtin_prompts()
    return make_tasks(tokenizer, choose(prompts, args.categories, args.per_category))


def _progress_bar(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="bench", unit="text")
