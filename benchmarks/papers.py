"""PaSS beside PARD, and typical acceptance on trees: `python -m benchmarks.papers PASS PARD`.

PASS is a folder that `specdec-mlx train --kind pass` made for the lab's target; PARD one that
`--train-pard FOLDER` makes of the lab's draft model, for so many seconds of processor time. Counts
are of the lab's held-out openings. Speeds are modelled: a pass of the target costs what `replay`
says of a chip, a drafter's step its share of the target's weights on the same curve.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from benchmarks.heads import openings
from specdec_mlx.contracts import Decision, Draft, Drafter, Features, Randomness, TargetRows
from specdec_mlx.draft_length.costs import CURVES
from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.lab import draft_path, head_path, target_path
from specdec_mlx.lab.pair import split_topics
from specdec_mlx.lab.papers.lossy import Typical
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.lab.training.features import Batch, live_batch
from specdec_mlx.lab.training.fitting import LOSSES, update
from specdec_mlx.lab.training.trainees import Prediction, Trainee, branches_behind
from specdec_mlx.loop import speculate
from specdec_mlx.models.loading import load_model
from specdec_mlx.rules import AutoRule
from specdec_mlx.sampling import Sampling
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.trees.tree_pass import tree_pass

MASK = 255  # a byte that no text of UTF-8 has
LENGTHS = (1, 2, 4)
CHIPS = ("m3-max", "m5-max-70b")
WINDOW, BATCH, RATE = 64, 2, 2e-3


def main() -> None:
    """Train, or measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    add = parser.add_argument
    add("folders", nargs="*", type=Path, metavar="FOLDER", help="heads to measure")
    add("--train-pard", type=Path, metavar="FOLDER", help="train one, and write it there")
    add("--seconds", type=float, default=600, help="of processor time (%(default)s)")
    add("--typical", action="store_true", help="measure typical acceptance on trees")
    add("--every", type=int, default=1, help="take every n-th opening (%(default)s)")
    add("--max-tokens", type=int, default=96, help="tokens of a text (%(default)s)")
    args = parser.parse_args()
    target, tokenizer = load_model(target_path())
    if args.train_pard:
        train_pard(target, tokenizer, args.train_pard, args.seconds)
    prompts = [list(tokenizer.encode(p.text)) for p in openings()[:: args.every]]
    measured = Texts(target, prompts, args.max_tokens)
    rows = [row for folder in args.folders for row in measured.parallel(folder)]
    rows += measured.typical() if args.typical else []
    print(markdown_table(HEADER, rows, num_text_columns=2) if rows else "")


HEADER = ["drafter", "rule, temperature", "drafted", "accepted by position", "tokens a pass"]
HEADER += [f"speed, {chip}" for chip in CHIPS]


@dataclass(frozen=True)
class Texts:
    """Texts of the target, drafted."""

    target: nn.Module
    prompts: Sequence[Sequence[int]]
    max_tokens: int

    def run(self, drafter: Drafter, **options: Any) -> SpeculationStats:
        """All texts as one account."""
        total = SpeculationStats()
        for seed, prompt in enumerate(self.prompts):
            given = {"max_tokens": self.max_tokens, "seed": seed, **options}
            *_, last = speculate(self.target, prompt, drafter, **given)
            total.rounds += last.stats.rounds
            total.cut += last.stats.cut
            total.target_passes += last.stats.target_passes
            total.accepted += last.stats.accepted
        return total

    def parallel(self, folder: Path) -> Iterator[list[str]]:
        """A head that drafts in one pass, at each length and temperature."""
        head: Any = load_head(folder, self.target)
        is_pass = head.model is self.target
        share = 1.0 if is_pass else size_of(head.model) / size_of(self.target)
        for temp, length in ((t, k) for t in (0.0, 1.0) for k in LENGTHS):
            drafted = length + is_pass
            stats = self.run(
                head, num_draft_tokens=drafted, rule=AutoRule(), sampler=Sampling(temp=temp)
            )
            passes = stats.target_passes
            if is_pass:
                passes += sum(k > 1 for k, _ in stats.rounds)
            costs = {
                chip: sum(c(k + 1) + share * c(k) * (k > 0) for k, _ in stats.rounds)
                for chip, c in ((chip, CURVES[chip]) for chip in CHIPS)
            }
            yield row_of(head.describe().split(";")[0].split(": ")[-1], f"exact, {temp:g}", stats,
                         passes, costs)  # fmt: skip

    def typical(self) -> Iterator[list[str]]:
        """Medusa's and EAGLE-3's trees of 4 and 8 tokens at temperature 1, under each rule."""
        for kind in ("medusa", "eagle3"):
            head: Any = replace(load_head(head_path(kind), self.target), branches=4)
            share = size_of(head.head) / size_of(self.target)
            for size in (4, 8):
                ways: dict[str, Any] = {"exact": AutoRule()}
                ways |= {"typical, first children": FirstChildren(), "typical": Typical()}
                for name, rule in ways.items():
                    how: Any = {
                        "rule": rule,
                        "sampler": Sampling(temp=1.0),
                        "num_draft_tokens": size,
                    }
                    with steps_of(head.head.source) as steps:
                        stats = self.run(head, **how)
                    num_steps = len(stats.rounds) if kind == "medusa" else len(steps)
                    costs = {
                        chip: sum(CURVES[chip](k + 1) for k, _ in stats.rounds) + share * num_steps
                        for chip in CHIPS
                    }
                    yield row_of(f"{kind}, {size}", name, stats, stats.target_passes, costs)


@contextmanager
def steps_of(source: Any) -> Iterator[list[None]]:
    """A list that grows with each step of a head's drafts in here."""
    steps: list[None] = []
    method = source.next_logits

    def counted(self: Any, *args: Any, **more: Any) -> Any:
        steps.append(None)
        return method(self, *args, **more)

    with patch.object(source, "next_logits", counted):
        yield steps


@dataclass(frozen=True)
class FirstChildren:
    """Typical acceptance as of a rule for chains: of a tree it gets the chain of first children."""

    name = "typical, first children"

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        """See `Typical`."""
        return Typical().decide(target, draft, randomness)


def row_of(
    name: str, rule: str, stats: SpeculationStats, passes: int, costs: dict[str, float]
) -> list[str]:
    """Cells; a position's number is the chance to accept there, all before it accepted."""
    at, accepted = stats.drafted_at, [len(stats.rounds), *stats.accepted_at]
    reached = [min(n, a) for n, a in zip(at, accepted, strict=False)]
    shares = [a / max(1, n) for n, a in zip(reached, accepted[1:], strict=True)]
    speeds = [f"{stats.emitted / cost:.2f}" for cost in costs.values()]
    return [
        *(name, rule, str(len(at)), " ".join(f"{share:.2f}" for share in shares)),
        f"{stats.emitted / passes:.2f}",
        *speeds,
    ]


def size_of(model: nn.Module) -> int:
    """Weights."""
    leaves: Any = tree_flatten(model.parameters())
    return sum(x.size for _, x in leaves)


def train_pard(target: nn.Module, tokenizer: Any, folder: Path, seconds: float) -> None:
    """The lab's draft model, trained to draft what stands after its masks, and written."""
    model, _ = load_model(draft_path())
    count = max(LENGTHS) - 1

    def predictions(batch: Batch) -> Iterator[Prediction]:
        size = batch.tokens.shape[1]
        layout, masks = branches_behind(size, count), mx.full((size * count,), MASK)
        logits = mx.stack(
            [
                tree_pass(model, mx.concatenate([x, masks]), make_prompt_cache(model), layout)
                for x in batch.tokens
            ]
        )
        behind = logits[:, size:].reshape(logits.shape[0], size, count, -1)
        yield logits[:, :size], 0
        for i in range(count):
            yield behind[:, : -1 - i, i], 1 + i

    own: Any = {"draft_logits": lambda logits: logits}
    trainee = Trainee(
        model, anatomy_for_head(target), Features(), {}, predictions, 1 + count, **own
    )
    text = np.concatenate([tokenizer.encode(text) for text in split_topics()[0]])
    draws, optimizer = np.random.default_rng(0), optim.AdamW(0.0, betas=[0.9, 0.95])
    optimizer.init(model.trainable_parameters())
    began, losses = time.process_time(), list[float]()
    while (done := (time.process_time() - began) / seconds) < 1:
        optimizer.learning_rate = RATE * min(1, 20 * done) * 0.5 * (1 + np.cos(np.pi * done))
        starts = draws.integers(0, len(text) - WINDOW, BATCH)
        windows = mx.array(np.stack([text[start : start + WINDOW] for start in starts]))
        batch = live_batch(target, (), windows)
        losses.append(update(trainee, optimizer, batch, LOSSES["forward-kl+tv"]))
        if len(losses) % 50 == 0:
            print(f"{done:.2f} {len(losses)} updates, loss {np.mean(losses[-50:]):.3f}", flush=True)
    shutil.copytree(draft_path(), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"pard_token": MASK}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    trainee.save_weights(folder, "float32")


if __name__ == "__main__":
    main()
