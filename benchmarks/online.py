"""What learning on brings a draft model: `python -m benchmarks.online`.

A draft model drafts for a series of texts of one kind and learns after each. Before the series, and
after it, it drafts for other texts of the kind, from which it does not learn. Texts come under the
rule `coupled`, which has one text for a seed whatever drafts, so that the same tokens are counted.
Without flags on the lab's pair, which knows a reference manual, with texts that begin as records.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import mlx.nn as nn

from specdec_mlx.bench.machine import describe_machine
from specdec_mlx.bench.prompts import read_prompts
from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab import draft_path, target_path
from specdec_mlx.loop import speculate
from specdec_mlx.models import load_model
from specdec_mlx.notebook.views import markdown_table
from specdec_mlx.options import argument, positive_int
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.training.online import OnlineDraftModel, OnlineTrainer
from specdec_mlx.training.trainees import Recipe, draft_model

NAMES = ("Ada", "Bob", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana", "Ivo", "June")


@dataclass(frozen=True)
class Counts:
    """What became of the drafts for some texts.

    texts: which. seconds: of all, learning included.
    """

    texts: str
    accepted: int
    drafted: int
    passes: int
    tokens: int
    seconds: float


def records(num: int, seed: int) -> list[str]:
    """Texts that begin as records, and break off in the middle of one."""
    rng = random.Random(seed)
    texts = []
    for _ in range(num):
        first, age = rng.randrange(1000), rng.randrange(100)
        one, other = rng.choice(NAMES), rng.choice(NAMES)
        texts.append(
            f'{{"id": {first}, "name": "{one}", "age": {age}}}\n'
            f'{{"id": {first + 1}, "name": "{other}", "age": '
        )
    return texts


def learner_of(draft: str | Path, target: nn.Module, folder: Path) -> OnlineDraftModel:
    """A draft model that learns on, of any folder; it is not saved."""
    model, tokenizer = load_model(draft)
    trainer = OnlineTrainer(draft_model(Recipe(target, init=str(draft))), target)
    drafter = ModelDrafter(model, tokenizer, tokenizers="same")
    return OnlineDraftModel(drafter, trainer, folder, "float32")


def count(
    name: str,
    target: nn.Module,
    drafter: Drafter,
    prompts: Iterable[tuple[int, Sequence[int]]],
    args: argparse.Namespace,
) -> Counts:
    """Generate a text after each prompt.

    Args:
        name: of these texts.
        target: the model.
        drafter: for all of them.
        prompts: (seed, token ids [n]) of each.
        args: the command's.
    """
    accepted = drafted = passes = tokens = 0
    started = time.perf_counter()
    for seed, prompt in prompts:
        text = list(
            speculate(
                target,
                prompt,
                drafter,
                sampler=Sampling(temp=args.temp),
                seed=seed,
                rule="coupled",
                draft_length=args.draft_length,
                max_tokens=args.max_tokens,
            )
        )
        stats = text[-1].stats
        accepted += stats.accepted
        drafted += stats.drafted
        passes += stats.target_passes
        tokens += len(text)
    return Counts(name, accepted, drafted, passes, tokens, time.perf_counter() - started)


def main() -> None:
    """Print the counts, and write them where that was asked for."""
    args = _parser().parse_args()
    target, tokenizer = load_model(args.model or target_path())
    draft = args.draft_model or draft_path()
    num = args.texts + args.held_out
    texts = [p.text for p in read_prompts(args.prompts)] if args.prompts else records(num, seed=0)
    seeded = list(enumerate(list(tokenizer.encode(text)) for text in texts))
    held_out, series = seeded[: args.held_out], seeded[args.held_out :]
    learning, half = learner_of(draft, target, Path(draft)), len(series) // 2
    rows = [
        count("others, before", target, learning.drafter, held_out, args),
        count("series, first half", target, learning, series[:half], args),
        count("series, second half", target, learning, series[half:], args),
        count("others, after", target, learning.drafter, held_out, args),
        count("series, first half, not learning", target, _as_loaded(draft), series[:half], args),
        count("series, second half, not learning", target, _as_loaded(draft), series[half:], args),
    ]
    if args.json:
        record = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(format_rows(rows))


def format_rows(rows: Sequence[Counts]) -> str:
    """A table of the counts."""
    header = ["texts", "accepted of drafted", "share", "tokens a pass", "seconds"]
    return markdown_table(
        header,
        [
            [
                row.texts,
                f"{row.accepted} of {row.drafted}",
                f"{row.accepted / max(1, row.drafted):.3f}",
                f"{row.tokens / row.passes:.2f}",
                f"{row.seconds:.0f}",
            ]
            for row in rows
        ],
        num_text_columns=1,
    )


def _as_loaded(draft: str | Path) -> ModelDrafter:
    """The draft model as it is in its folder."""
    return ModelDrafter(load_model(draft)[0])


def _parser() -> argparse.ArgumentParser:
    number = argument(positive_int)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online", description=__doc__)
    add = parser.add_argument
    add("--model", help="target: folder or Hugging Face name (default: the lab's)")
    add("--draft-model", help="draft model, not quantized (default: the lab's)")
    add("--prompts", metavar="FILE", help="JSON lines with id, category, turns (default: ours)")
    add("--texts", type=number, default=32, help="texts of the series, of ours (%(default)s)")
    add("--held-out", type=number, default=8, help="texts not learnt from (%(default)s)")
    add("--max-tokens", type=number, default=100, help="tokens of a text (%(default)s)")
    add("--draft-length", type=number, default=4, help="tokens of a draft (%(default)s)")
    add("--temp", type=float, default=0.7, help="temperature (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the counts")
    return parser


if __name__ == "__main__":
    main()
