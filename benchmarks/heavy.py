"""A pair whose target is as heavy as you say, raced against mlx-lm.

    python -m benchmarks.heavy --gigabytes 16 --bits 4 --num-draft-tokens 4 --num-draft-tokens auto

After the small pair's own target each pass multiplies by matrices of zeros, one after another, and
adds what comes out: nothing. So the texts, and what of a draft is accepted, are those of a real
pair, while a pass reads as many bytes as a model with billions of parameters. On a GPU this shows
what drafts save there, without a download. Attention, caches and the head stay small.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx import lab
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.lab.bench.record import format_record, save_record
from specdec_mlx.lab.bench.run import make_tasks, run_bench
from specdec_mlx.lab.bench.timing import Settings, make_contenders
from specdec_mlx.lab.pair import held_out_openings
from specdec_mlx.lab.prompts import Prompt

WIDTH, GROUP = 4096, 64
BITS = {16: 16.0, 8: 8.5, 4: 4.5}  # of a weight; the quantized ones with their scales and biases


def heavy(model: nn.Module, gigabytes: float, bits: int) -> nn.Module:
    """The model, which reads as much more in every pass, and writes what it wrote before."""
    kind = type(model)
    ballast = []
    for _ in range(round(gigabytes * 8e9 / (BITS[bits] * WIDTH**2))):
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        layer.weight = mx.zeros((WIDTH, WIDTH), mx.bfloat16)
        ballast.append(layer.to_quantized(GROUP, bits) if bits < 16 else layer)
        mx.eval(ballast[-1].parameters())

    def call(self: Any, inputs: mx.array, *args: Any, **options: Any) -> mx.array:
        logits = kind.__call__(self, inputs, *args, **options)
        nothing = mx.broadcast_to(0 * logits[..., :1], (*logits.shape[:-1], WIDTH))
        for layer in ballast:
            nothing = layer(nothing.astype(mx.bfloat16))
        same: mx.array = logits + nothing[..., :1].astype(logits.dtype)
        return same

    model.__class__ = type(
        kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__}
    )
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Race, and print the report; 1 if a greedy text differs for no reason."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heavy", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--gigabytes", type=float, default=8.0, help="read in a pass (%(default)s)")
    add("--bits", type=int, choices=BITS, default=16, help="of those weights (%(default)s)")
    add("--drafter", action="append", help="repeatable (model)")
    add("--num-draft-tokens", action="append", help="repeatable (4, auto)")
    add("--temp", type=float, default=0.0, help="temperature (%(default)s)")
    add("--max-tokens", type=int, default=192, help="a text (%(default)s)")
    add("--texts", type=int, default=8, help="openings that are continued (%(default)s)")
    add("--repeats", type=int, default=2, help="of each text (%(default)s)")
    add("--json", help="write results there")
    args = parser.parse_args(arguments)
    pair = lab.load_pair()
    model = heavy(pair.target, args.gigabytes, args.bits)
    openings = [Prompt(f"{topic}/{i}", topic, text) for topic, i, text in held_out_openings()]
    tasks = make_tasks(pair.tokenizer, openings[:: max(1, len(openings) // args.texts)])
    choice = DrafterChoice(args.drafter or ["model"], DraftModel(pair.draft))
    ends = pair.tokenizer.eos_token_ids
    how = Settings(args.max_tokens, args.repeats, None, ends, args.temp)
    lengths = args.num_draft_tokens or ["4", "auto"]
    contenders = make_contenders(model, choice, lengths, how, pair.tokenizer)
    record = run_bench(model, tasks, contenders, how)
    print(format_record(record))
    if args.json:
        save_record(record, args.json)
    return 0 if all(difference.excused for difference in record.differences) else 1


if __name__ == "__main__":
    sys.exit(main())
