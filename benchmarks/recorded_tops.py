"""What the target thought likeliest at each place of a recorded text.

Drafters that read the target's guesses, such as Token Recycling, can then be replayed:

    python -m benchmarks.recorded_tops texts.json --model M --json with-tops.json
    specdec-mlx replay with-tops.json --drafter recycling

Only places of the text itself are recorded. What a live target computes after rejected draft tokens
is not known to a replay, so that what it says of such a drafter is a lower bound.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from msgspec.structs import replace
from tqdm import tqdm

from specdec_mlx.lab.bench.record import load_record, save_record
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.models.loading import load_model

TOP = 8  # tokens that are recorded of each place


def with_tops(model: nn.Module, text: RecordedText, top: int = TOP) -> RecordedText:
    """The same text with its `top_tokens`, by one pass over it.

    Args:
        model: what wrote it.
        text: the recorded text.
        top: how many tokens are kept of each place.
    """
    tokens = mx.array([[*text.prompt, *text.generated[:-1]]], mx.uint32)
    rows = model(tokens)[0, len(text.prompt) - 1 :].astype(mx.float32)
    likeliest: Any = mx.argsort(-rows, axis=-1)[:, :top].tolist()
    return replace(text, top_tokens=likeliest)


def main() -> None:
    """Read a record, and write it with what the model thought."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("record", help="what specdec-mlx bench --json wrote")
    parser.add_argument("--model", required=True, help="folder or Hugging Face name of the target")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where it goes")
    args = parser.parse_args()
    record = load_record(args.record)
    model, _ = load_model(args.model)
    texts = [with_tops(model, text) for text in tqdm(record.texts)]
    save_record(replace(record, texts=texts), args.json)


if __name__ == "__main__":
    main()
