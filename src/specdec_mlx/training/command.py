"""`specdec-mlx train`: flags, and what is printed."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdec_mlx.models import load_model
from specdec_mlx.options import argument, positive_int
from specdec_mlx.training.fitting import Schedule
from specdec_mlx.training.losses import LOSSES
from specdec_mlx.training.run import KINDS, Data, Plan, train
from specdec_mlx.training.trainees import TYPES, Size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("--model", required=True, help="target: folder or Hugging Face name")
    parser.add_argument("--kind", required=True, choices=KINDS, help="what is trained")
    parser.add_argument("--out", required=True, type=Path, help="folder for the result")
    _add_data(parser.add_argument_group("what it learns from"))
    _add_schedule(parser.add_argument_group("how it learns"))
    _add_size(parser.add_argument_group("how large it becomes"))


def _add_data(group: argparse._ArgumentGroup) -> None:
    count = argument(positive_int)
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompts",
        nargs="+",
        default=[],
        metavar="FILE",
        help="what the target answers: a question a line, or .jsonl with turns, messages or prompt",
    )
    source.add_argument(
        "--texts",
        nargs="+",
        default=[],
        metavar="FILE",
        help="a document each, or .jsonl in mlx-lm's formats for fine-tuning",
    )
    group.add_argument(
        "--held-out",
        nargs="+",
        default=[],
        metavar="FILE",
        help="others of the kind to measure on (default: a twentieth of them)",
    )
    group.add_argument(
        "--temps",
        type=argument(_temps),
        default=Data().temps,
        metavar="T,T",
        help="temperatures at which it answers each prompt, 0 for greedy (0,1)",
    )
    group.add_argument("--window", type=count, default=512, help="tokens of a window (%(default)s)")
    group.add_argument(
        "--work", type=Path, help="folder for tokens and features (default: OUT/work)"
    )
    group.add_argument(
        "--keep-work", action="store_true", help="keep it, for another training on the same data"
    )


def _add_schedule(group: argparse._ArgumentGroup) -> None:
    count, defaults = argument(positive_int), Schedule()
    group.add_argument(
        "--minutes",
        type=count,
        metavar="N",
        help="how long it may take in all: for as many answers and updates as there is time for",
    )
    group.add_argument("--steps", type=count, default=defaults.steps, help="updates (%(default)s)")
    group.add_argument(
        "--batch", type=count, default=defaults.batch, help="windows an update (%(default)s)"
    )
    group.add_argument(
        "--learning-rate",
        type=float,
        default=defaults.learning_rate,
        metavar="RATE",
        help="its peak (%(default)s)",
    )
    group.add_argument(
        "--loss", choices=LOSSES, default=defaults.loss, help="what it minimises (%(default)s)"
    )
    group.add_argument(
        "--draft-steps",
        type=count,
        default=3,
        metavar="K",
        help="tokens of the drafts that mtp and eagle3 are trained on (%(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def _add_size(group: argparse._ArgumentGroup) -> None:
    count = argument(positive_int)
    group.add_argument("--width", type=count, help="of the states of eagle3 and draft")
    group.add_argument(
        "--mlp", type=count, help="width of the MLP (3 times the states'; exit: theirs)"
    )
    group.add_argument("--heads", type=count, help="of attention (one for each 64 of the width)")
    group.add_argument("--kv-heads", type=count, help="as many as --heads")
    group.add_argument("--head-dim", type=count, help="width of each (that of the states / heads)")
    group.add_argument(
        "--layers",
        type=argument(_layers),
        metavar="I,I,I",
        help="eagle3: layers it reads, from 0; exit: layers that draft; draft: its depth",
    )
    group.add_argument(
        "--draft-vocab",
        type=count,
        help="tokens that it can propose (eagle3: at most 32000; mtp: all)",
    )
    group.add_argument("--guesses", type=count, default=3, help="medusa: heads (%(default)s)")
    group.add_argument(
        "--init",
        metavar="MODEL",
        help="what to begin with: a draft model, or a head of this kind and size",
    )
    group.add_argument(
        "--dtype", choices=TYPES, default="float16", help="of the file (%(default)s)"
    )


def main(args: argparse.Namespace) -> int:
    """Train, and print the acceptance."""
    plan = plan_of(args)
    target, tokenizer = load_model(args.model)
    try:
        acceptance = train(
            plan, target, tokenizer, args.out, work=args.work, keep_work=args.keep_work
        )
    except KeyboardInterrupt:
        print(
            f"\nStopped. What is done is kept in {args.out}: type the same command again, and it "
            "goes on from the last checkpoint.",
            file=sys.stderr,
        )
        return 130
    print(f"{args.out}: on held-out text {acceptance}, in {acceptance.num_drafts} drafts.")
    return 0


def plan_of(args: argparse.Namespace) -> Plan:
    """What the flags say."""
    named = {name: getattr(args, name) for name in ("model", "kind", "init", "dtype")}
    parts = {"data": _of(Data, args), "size": _of(Size, args), "schedule": _of(Schedule, args)}
    return Plan(**named, **parts, num_steps=args.draft_steps)


def _of(kind: type, args: argparse.Namespace) -> Any:
    """A dataclass each of whose fields has a flag of its name."""
    return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})


def _temps(text: str) -> tuple[float, ...]:
    """Temperatures with commas between them; raises ValueError."""
    temps = tuple(float(part) for part in text.split(","))
    if min(temps) < 0:
        raise ValueError(f"{text!r}: expected temperatures of at least 0, such as 1,0.5.")
    return temps


def _layers(text: str) -> tuple[int, ...]:
    """Ints with commas between them; raises ValueError."""
    return tuple(int(part) for part in text.split(","))
