"""`specdec-mlx train`: train a head or a draft model for a target."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from specdec_mlx import sampling
from specdec_mlx.arguments import argument, checked, existing_file, number
from specdec_mlx.lab.training.fitting import LOSSES, Updates
from specdec_mlx.lab.training.run import Data, Plan, train
from specdec_mlx.lab.training.trainees import KINDS, TYPES, Size
from specdec_mlx.models.loading import load_model

PROMPTS = "what the target answers: a question a line, or .jsonl with turns, messages or prompt"
TEXTS = "a document each, or .jsonl in mlx-lm's formats for fine-tuning"
HELD_OUT = "others of the kind to measure on (default: a twentieth of them)"
TEMPS = "temperatures at which it answers each prompt, 0 for greedy (0,1)"
MINUTES = "how long it may take in all: for as many answers and updates as there is time for"
PEAK = "its peak (%(default)s)"
DRAFT_STEPS = "tokens of the drafts that mtp and eagle3 are trained on (%(default)s)"
LAYERS = "eagle3: layers it reads, from 0; exit: layers that draft; draft: its depth"
DRAFT_VOCAB = "tokens that it can propose (eagle3: at most 32000; mtp: all)"
INIT = "what to begin with: a draft model, or a head of this kind and size"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    count, rate = number(int, 1), Updates.learning_rate
    add = parser.add_argument
    add("--model", required=True, help="target: folder or Hugging Face name")
    add("--kind", required=True, choices=KINDS, help="what is trained")
    add("--out", required=True, type=Path, help="folder for the result")

    group = parser.add_argument_group("what it learns from")
    there = checked(existing_file)
    files: Any = {"nargs": "+", "type": there, "default": [], "metavar": "FILE"}
    source = group.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", **files, help=PROMPTS)
    source.add_argument("--texts", **files, help=TEXTS)
    add = group.add_argument
    add("--held-out", **files, help=HELD_OUT)
    add("--temps", type=argument(_temps), default=Data.temps, metavar="T,T", help=TEMPS)
    add("--window", type=count, default=Data.window, help="tokens of a window (%(default)s)")
    add("--work", type=Path, help="folder for tokens and features (default: OUT/work)")
    add("--keep-work", action="store_true", help="keep it, for another training on the same data")

    add = parser.add_argument_group("how it learns").add_argument
    add("--minutes", type=count, metavar="N", help=MINUTES)
    add("--steps", type=count, default=Updates.steps, help="updates (%(default)s)")
    add("--batch", type=count, default=Updates.batch, help="windows an update (%(default)s)")
    add("--learning-rate", type=number(float, 0), default=rate, metavar="RATE", help=PEAK)
    add("--loss", choices=LOSSES, default=Updates.loss, help="what it minimises (%(default)s)")
    add("--draft-steps", type=count, default=Plan.num_steps, metavar="K", help=DRAFT_STEPS)
    add("--seed", type=int, default=Updates.seed, help="(%(default)s)")

    add = parser.add_argument_group("how large it becomes").add_argument
    add("--width", type=count, help="of the states of eagle3 and draft")
    add("--mlp", type=count, help="width of the MLP (3 times the states'; exit: theirs)")
    add("--heads", type=count, help="of attention (one for each 64 of the width)")
    add("--kv-heads", type=count, help="as many as --heads")
    add("--head-dim", type=count, help="width of each (that of the states / heads)")
    add("--layers", type=argument(_layers), metavar="I,I,I", help=LAYERS)
    add("--draft-vocab", type=count, help=DRAFT_VOCAB)
    add(
        "--guesses",
        type=count,
        default=Size.guesses,
        help="medusa: heads; pass: embeddings (%(default)s)",
    )
    add("--init", metavar="MODEL", help=INIT)
    add("--dtype", choices=TYPES, default=Plan.dtype, help="of the file (%(default)s)")


def main(args: argparse.Namespace) -> int:
    target, tokenizer = load_model(args.model)
    keep: Any = {"work": args.work, "keep_work": args.keep_work}
    try:
        acceptance = train(plan_of(args), target, tokenizer, args.out, **keep)
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
    def part(kind: type) -> Any:
        return kind(**{field.name: getattr(args, field.name) for field in fields(kind)})

    names = {name: getattr(args, name) for name in ("model", "kind", "init", "dtype")}
    parts = {"data": part(Data), "size": part(Size), "schedule": part(Updates)}
    return Plan(**names, **parts, num_steps=args.draft_steps)


def _temps(text: str) -> tuple[float, ...]:
    temps = tuple(map(number(float, 0), text.split(",")))
    if not all(map(sampling.is_temp, temps)):
        raise ValueError(f"{text!r}: expected {sampling.TEMPS}; several as in 1,0.5.")
    return temps


def _layers(text: str) -> tuple[int, ...]:
    return tuple(map(number(int, 0), text.split(",")))
