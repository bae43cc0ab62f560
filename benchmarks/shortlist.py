"""Tokens that a shortlist of output rows loses, counted on recorded texts.

    python -m benchmarks.shortlist texts.json --model M

The draft model is a copy of M with weights rounded to 4 bits, or --draft-model. A pass over each
text gives its logits at every place, so that lists of any size are scored from one run. The list
follows the text as it does in a generation, and stays for a draft. Drafts are greedy chains of K
tokens, and a token counts as accepted as far as the recorded text agrees. The last column is for
drawn drafts at temperature 1: the chance that a first token is accepted, the sum of min(p, q).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map
from tqdm import tqdm

from specdec_mlx.arguments import number
from specdec_mlx.contracts import DraftContext
from specdec_mlx.drafters.shortlist import OutputLayer, PairCounts, Shortlist, output_layer_of
from specdec_mlx.lab.bench.record import load_record
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.models.loading import load_model

SIZES = (1024, 2048, 4096, 8192, 16384)
GROUP = 64  # weights that share a scale in the rounded copy


@dataclass
class Score:
    """Counts over all texts, of lists of one size.

    Attributes:
        size: tokens of a list.
        tokens: tokens of the texts.
        covered: tokens that were in the list when a draft could have had them.
        passes: passes of the target, each after a draft.
        accepted: accepted draft tokens.
        lists: lists that were made.
        drawn: sum over the places of the chance that a drawn token is accepted.
    """

    size: int
    tokens: int = 0
    covered: int = 0
    passes: int = 0
    accepted: int = 0
    lists: int = 0
    drawn: float = 0.0


def rounded(model: nn.Module, bits: int) -> nn.Module:
    """The model with its matrices rounded to some bits, in their own type."""

    def round_to_bits(weights: Any) -> Any:
        if weights.ndim != 2 or weights.shape[1] % GROUP:
            return weights
        how: Any = {"group_size": GROUP, "bits": bits}
        return mx.dequantize(*mx.quantize(weights, **how), **how).astype(weights.dtype)

    model.update(tree_map(round_to_bits, model.parameters()))
    mx.eval(model.parameters())
    return model


def logits_along(model: nn.Module, text: RecordedText) -> np.ndarray:
    """Logits [n, V] before each generated token."""
    tokens = mx.array([[*text.prompt, *text.generated[:-1]]], mx.uint32)
    return np.array(model(tokens)[0, len(text.prompt) - 1 :].astype(mx.float32))


def score_text(
    score: Score,
    shortlist: Shortlist | None,
    text: RecordedText,
    logits: np.ndarray,
    target_probs: np.ndarray,
    length: int,
) -> None:
    """Draft along a text with lists, and add the counts.

    Args:
        score: the counts to add to.
        shortlist: makes the lists, None for all tokens.
        text: the text.
        logits: of the draft model [n, V].
        target_probs: of the target [n, V].
        length: draft tokens of a round.
    """
    generated, place, latest = text.generated, 0, None
    ids = np.arange(logits.shape[1])
    text_shortlist = None if shortlist is None else shortlist.begin(DraftContext())
    if text_shortlist is not None:
        text_shortlist.read(text.prompt)
    while place < len(generated):
        if text_shortlist is not None and (rows := text_shortlist.refresh()) is not latest:
            latest, ids = rows, np.array(rows.ids)
            score.lists += 1
        accepted, end = 0, min(place + length, len(generated))
        for here in range(place, end):
            if ids[logits[here, ids].argmax()] != generated[here]:
                break
            accepted += 1
        step = min(accepted + 1, len(generated) - place)
        for here in range(place, place + step):
            draft_probs = softmax(logits[here, ids])
            score.drawn += float(np.minimum(target_probs[here, ids], draft_probs).sum())
        score.covered += int(np.isin(generated[place : place + step], ids).sum())
        score.tokens += step
        score.accepted += accepted
        score.passes += 1
        if text_shortlist is not None:
            text_shortlist.read(generated[place : place + step])
        place += step


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probs: np.ndarray = weights / weights.sum(axis=-1, keepdims=True)
    return probs


def format_scores(scores: Sequence[Score], length: int) -> str:
    """A table. The last score is of all tokens."""
    every = scores[-1]
    lines = [
        f"| tokens in the list | share of the text in the list | accepted, K = {length} "
        "| relative to all tokens | tokens a pass | lists in 100 tokens | drawn tokens accepted |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for score in scores:
        name = f"all {score.size:,}" if score is every else f"{score.size:,}"
        cells = [
            name,
            f"{score.covered / score.tokens:.3f}",
            f"{score.accepted:,}",
            f"{score.accepted / max(1, every.accepted):.3f}",
            f"{score.tokens / score.passes:.2f}",
            f"{100 * score.lists / score.tokens:.1f}",
            f"{score.drawn / score.tokens:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Score lists of several sizes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    add = parser.add_argument
    add("record", metavar="FILE", help="what specdec-mlx bench --json wrote")
    add("--model", required=True, help="folder or Hugging Face name of the target")
    add("--draft-model", metavar="M", help="folder or Hugging Face name (default: rounded weights)")
    add("--bits", type=number(int, 2, 8), default=4, help="of the rounded copy (%(default)s)")
    add("--size", type=number(int, 1), action="append", metavar="N", help=f"(default: {SIZES})")
    add("--num-draft-tokens", type=number(int, 1), default=4, metavar="K", help="(%(default)s)")
    add("--counts", metavar="FILE", help="a memory or a table of n-grams, to choose tokens by")
    add("--json", type=Path, metavar="FILE", help="write the counts")
    args = parser.parse_args(argv)
    texts = load_record(args.record).texts
    target, _ = load_model(args.model)
    draft = load_model(args.draft_model or args.model)[0]
    if args.draft_model is None:
        rounded(draft, args.bits)
    layer: OutputLayer = output_layer_of(draft)
    counts = PairCounts.load(Path(args.counts)) if args.counts else PairCounts()
    sizes = [size for size in args.size or SIZES if size < layer.num_rows]
    scores = [Score(size) for size in [*sizes, layer.num_rows]]
    length = args.num_draft_tokens
    for text in tqdm(texts, disable=not sys.stderr.isatty()):
        logits, probs = logits_along(draft, text), softmax(logits_along(target, text))
        for score in scores:
            is_all = score.size == layer.num_rows
            shortlist = None if is_all else Shortlist(layer, score.size, counts)
            score_text(score, shortlist, text, logits, probs[:, : logits.shape[1]], length)
    print(format_scores(scores, length))
    if args.json:
        args.json.write_text(json.dumps([*map(asdict, scores)], indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
