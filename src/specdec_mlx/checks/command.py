"""`specdec-mlx check`."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from specdec_mlx.bench.prompts import read_prompts
from specdec_mlx.checks.run import BUDGET, check
from specdec_mlx.drafters.draft_models import NamedModel, add_lighter_arguments, lighter_of
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.models import load_target
from specdec_mlx.sampling.distribution import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `specdec-mlx check`."""
    add = parser.add_argument
    add("--model", help="model folder or Hugging Face name (default: a small one)")
    add("--drafter", metavar="NAME[:KEY=VALUE,...]", help="(model if there is one, else ngram)")
    add("--draft-model", metavar="MODEL", help="draft model, for --drafter model")
    add_lighter_arguments(parser)
    add("--temp", type=float, default=0.0, help="temperature (%(default)s)")
    add("--top-p", type=float, default=0.0, help="(off)")
    add("--min-p", type=float, default=0.0, help="(off)")
    add("--top-k", type=int, default=0, help="(off)")
    add("--rule", default="auto", metavar="NAME[:KEY=VALUE,...]", help="(%(default)s)")
    add("--draft-length", type=int, default=4, metavar="N", help="tokens a draft (%(default)s)")
    add("--prompts", metavar="FILE", help="JSON lines with prompt or turns (default: ours)")
    how = "parts take as many samples as fit (%(default)g)"
    add("--budget", type=float, default=BUDGET, metavar="SECONDS", help=how)
    add("--seed", type=int, default=0, help="of all draws (%(default)s)")
    add("--json", metavar="FILE", help="write the report there too")


def main(args: argparse.Namespace) -> int:
    """Run and print the report; 0 if all of it passed, else 1."""
    if args.json:
        Path(args.json).touch()  # a path that cannot be written is found out now, not at the end
    sampling = Sampling(args.temp, args.top_p, args.min_p, top_k=args.top_k)
    prompts = [prompt.text for prompt in read_prompts(args.prompts)] if args.prompts else None
    model_name = str(args.model or demo_model_path())
    model, tokenizer = load_target(model_name)
    is_first = mx.distributed.init().rank() == 0  # it speaks for all ranks
    name = args.drafter or ("model" if args.draft_model else "ngram")
    report = check(
        model,
        tokenizer,
        drafter=NamedModel(args.draft_model, lighter_of(args)).make(name, model),
        sampler=sampling,
        rule=args.rule,
        draft_length=args.draft_length,
        prompts=prompts,
        budget=args.budget,
        seed=args.seed,
        progress=is_first,
    )
    names: dict[str, Any] = {"model": model_name, "drafter": name}
    if args.draft_model:
        names |= {"draft_model": args.draft_model, **lighter_of(args).flags}
    report = replace(report, settings=report.settings | names)
    if is_first:
        print(report)
        if args.json:
            Path(args.json).write_text(report.to_json(), encoding="utf-8")
    return 0 if report.passed else 1
