"""What learning on brings a draft model: `python -m benchmarks.online`.

A draft model drafts for a series of texts of one kind and learns after each. Before the series, and
after it, it drafts for other texts of the kind, from which it does not learn. Texts come under the
rule `coupled`, which has one text for a seed whatever drafts, so that the same tokens are counted.
Without flags on the lab's pair, which knows a reference manual, with texts that begin as records.

`--long 4000` writes each text in pieces that continue it, with a head that learns after each, and
without; counted by hundreds. The lab's head, or `--model NAME --head FOLDER --prompt TEXT`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import make_logits_processors

from specdec_mlx.arguments import number
from specdec_mlx.contracts import Drafter, LogitsProcessor
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab import draft_path, head_path, target_path
from specdec_mlx.lab.bench.record import describe_machine
from specdec_mlx.lab.pair import held_out_openings
from specdec_mlx.lab.prompts import read_prompts
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.lab.training.online import OnlineDrafter, OnlineTrainer, learning_on
from specdec_mlx.lab.training.run import PLAN
from specdec_mlx.lab.training.trainees import Recipe, draft_model
from specdec_mlx.loop import speculate
from specdec_mlx.models.loading import load_model
from specdec_mlx.sampling import Sampling
from specdec_mlx.stats.account import SpeculationStats

WAYS = ("not learning", "learning")
EVERY = 100  # tokens of a long text that are counted together
LAB_PLAN = {"size": {"mlp": 384, "kv_heads": 2}, "num_steps": 2, "dtype": "float16", "kind": "mtp"}
"""Settings of the lab's head, as far as learning on asks for them; see the model card."""
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


def learner_of(draft: str | Path, target: nn.Module, folder: Path) -> OnlineDrafter:
    """A draft model that learns on, of any folder; it is not saved."""
    model, tokenizer = load_model(draft)
    trainer = OnlineTrainer(draft_model(Recipe(target, init=str(draft))), target)
    drafter = ModelDrafter(model, tokenizer, tokenizers="same")
    return OnlineDrafter(drafter, trainer, folder, "float32")


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
        text, stats = write(target, prompt, drafter, seed, args)
        accepted += stats.accepted
        drafted += stats.drafted
        passes += stats.target_passes
        tokens += len(text)
    return Counts(name, accepted, drafted, passes, tokens, time.perf_counter() - started)


def write(
    target: nn.Module,
    prompt: Sequence[int],
    drafter: Drafter,
    seed: int,
    args: argparse.Namespace,
    processors: Sequence[LogitsProcessor] = (),
) -> tuple[list[int], SpeculationStats]:
    """Generate a text: its tokens after the prompt, and the account of its drafts."""
    how: Any = {"sampler": Sampling(temp=args.temp), "logits_processors": processors}
    how |= {"num_draft_tokens": args.num_draft_tokens, "max_tokens": args.max_tokens}
    how |= {"prefill_step_size": 512}  # attention of a CPU over long texts
    text = list(speculate(target, prompt, drafter, seed=seed, rule="coupled", **how))
    return [token.token for token in text], text[-1].stats


def by_hundreds(target: nn.Module, tokenizer: Any, args: argparse.Namespace) -> np.ndarray:
    """Passes, drafted and accepted tokens [way, hundred, 3]; texts do not end by themselves."""
    processors = make_logits_processors(dict.fromkeys(tokenizer.eos_token_ids, -np.inf))
    starts = range(0, args.long, args.max_tokens)
    total = np.zeros((len(WAYS), -(-len(starts) * args.max_tokens // EVERY), 3), int)
    for place, opening in enumerate(_openings(args)):
        prompt, texts = list(tokenizer.encode(opening)), []
        learning, counts = _learner_of_head(args.head, target), np.zeros_like(total)
        for of_way, drafter in zip(counts, (learning.drafter, learning), strict=True):
            text = list(prompt)
            for at in starts:
                seed = place * args.long + at
                tokens, stats = write(target, text, drafter, seed, args, processors)
                text += tokens
                for drafted, accepted in stats.rounds:
                    of_way[at // EVERY] += 1, drafted, accepted
                    at += accepted + 1
            texts.append(text)
        assert texts[0] == texts[1], "learning changed a text"
        total += counts
        end = tokenizer.decode(text[-EVERY:])
        print(f"{end!r}\n{format_hundreds(counts)}", file=sys.stderr, flush=True)
    return total


def format_hundreds(counts: np.ndarray) -> str:
    """A table of the counts, and of the halves of the texts."""
    middle = counts.shape[1] // 2
    parts = {str(EVERY * i): counts[:, i] for i in range(counts.shape[1])}
    parts |= {"first half": counts[:, :middle].sum(1), "second half": counts[:, middle:].sum(1)}
    header = [f"{what}, {way}" for what in ("accepted a pass", "of drafted") for way in WAYS]
    rows = []
    for name, part in parts.items():
        passes, drafted, accepted = np.maximum(1, part).T
        shares = [*(accepted / passes), *(accepted / drafted)]
        rows.append([name, *(f"{share:.3f}" for share in shares)])
    return markdown_table(["from token", *header], rows, num_text_columns=1)


def _openings(args: argparse.Namespace) -> list[str]:
    """Beginnings of long texts: the one given, those of a file, or of the lab's manual."""
    given = [args.prompt] * args.texts if args.prompt else []
    given += [p.text for p in read_prompts(args.prompts)] if args.prompts else []
    return (given or [text for _, _, text in held_out_openings()])[: args.texts]


def _learner_of_head(folder: str | None, target: nn.Module) -> Any:
    """A head that `train` made, else the lab's, as it is in its folder; it is not saved."""
    if folder is not None:
        return learning_on(folder, target)
    with tempfile.TemporaryDirectory() as own:
        shutil.copytree(head_path("mtp"), own, dirs_exist_ok=True)
        (Path(own) / PLAN).write_text(json.dumps(LAB_PLAN), encoding="utf-8")
        return learning_on(own, target)


def main() -> None:
    """Print the counts, and write them where that was asked for."""
    args = _parser().parse_args()
    target, tokenizer = load_model(args.model or target_path())
    if args.long:
        counts = by_hundreds(target, tokenizer, args)
        if args.json:
            name = Path(args.model).name if args.model else "The lab’s target"
            title = f"{name}, temperature {args.temp:g}"
            ways = dict(zip(WAYS, counts.tolist(), strict=True))
            args.json.write_text(
                json.dumps({"title": title, "every": EVERY, **ways}) + "\n", encoding="utf-8"
            )
        print(format_hundreds(counts))
        return
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
    count = number(int, 1)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.online", description=__doc__)
    add = parser.add_argument
    add("--model", help="target: folder or Hugging Face name (default: the lab's)")
    add("--draft-model", help="draft model, not quantized (default: the lab's)")
    add("--prompts", metavar="FILE", help="JSON lines with id, category, turns (default: ours)")
    add("--long", type=count, metavar="N", help="tokens of each text, in pieces (see above)")
    add("--head", metavar="FOLDER", help="head that `train` made, for long texts")
    add("--prompt", metavar="TEXT", help="begin all long texts with this")
    add("--texts", type=count, default=32, help="texts of the series, of ours (%(default)s)")
    add("--held-out", type=count, default=8, help="texts not learnt from (%(default)s)")
    add("--max-tokens", type=count, default=100, help="tokens of a text or piece (%(default)s)")
    add("--num-draft-tokens", type=count, default=4, help="tokens of a draft (%(default)s)")
    add("--temp", type=float, default=0.7, help="temperature (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write the counts")
    return parser


if __name__ == "__main__":
    main()
