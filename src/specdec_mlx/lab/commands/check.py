"""`specdec-mlx check`: is it lossless on this model, machine and setting?"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import mlx.core as mx

from specdec_mlx.arguments import argument, new_file, parse_draft_length
from specdec_mlx.drafters.choosing.choice import choice_of
from specdec_mlx.lab.commands.shared_flags import FILE, SMALL_MODEL, add_drafting
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.lab.prompts import read_prompts
from specdec_mlx.lab.proof.run import BUDGET, check
from specdec_mlx.models.loading import load_target
from specdec_mlx.sampling import Sampling


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help=SMALL_MODEL)
    add_drafting(parser, "a model to draft with, a trained head, or auto")
    add("--temp", type=float, default=0.0, help="temperature (%(default)s)")
    add("--top-p", type=float, default=0.0, help="(off)")
    add("--min-p", type=float, default=0.0, help="(off)")
    add("--top-k", type=int, default=0, help="(off)")
    add("--rule", default="auto", metavar="NAME[:KEY=VALUE,...]", help="(%(default)s)")
    add("--ties", choices=("plain",), help="let plain passes decide near ties of greedy texts")
    length = argument(parse_draft_length)
    add("--num-draft-tokens", type=length, default="auto", metavar="N|POLICY", help="(%(default)s)")
    add("--prompts", **FILE, help="JSON lines with prompt or turns (default: ours)")
    how = "parts take as many samples as fit (%(default)g)"
    add("--budget", type=float, default=BUDGET, metavar="SECONDS", help=how)
    add("--texts", type=int, metavar="N", help="most texts drawn; more find a smaller bias (6000)")
    add("--seed", type=int, help="of all draws (0); rule auto is then the one for seeds")
    add("--json", type=argument(new_file), metavar="FILE", help="write the report there too")


def main(args: argparse.Namespace) -> int:
    """Return 0 if all parts passed, and 1 otherwise."""
    sampling = Sampling(args.temp, args.top_p, args.min_p, top_k=args.top_k)
    model_name = args.model = str(args.model or demo_model_path())
    choice = choice_of(args)
    prompts = [prompt.text for prompt in read_prompts(args.prompts)] if args.prompts else None
    model, tokenizer = load_target(model_name)
    is_first = mx.distributed.init().rank() == 0  # it speaks for all ranks
    report = check(
        model,
        tokenizer,
        drafter=choice.resolve(model),
        sampler=sampling,
        rule=args.rule,
        ties=args.ties,
        num_draft_tokens=args.num_draft_tokens,
        prompts=prompts,
        budget=args.budget,
        texts=args.texts,
        seed=args.seed,
        progress=is_first,
    )
    names: dict[str, Any] = {
        "model": model_name,
        "drafter": " and ".join(map(str, choice.drafters)),
    }
    if choice.model.name is not None:
        names |= {"draft_model": choice.model.name, **choice.model.flags}
    report = replace(report, settings=report.settings | names)
    if is_first:
        print(report)
        if args.json:
            args.json.write_text(report.to_json(), encoding="utf-8")
    return 0 if report.passed else 1
