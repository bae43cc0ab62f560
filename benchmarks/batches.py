"""Several texts at once, against mlx-lm's batches: `python -m benchmarks.batches`.

The prompts are taken in groups, in the order of their file, and each group is written by mlx-lm's
`BatchGenerator` and by `batch_stream_generate` with each drafter, in turns of a few tokens, so that
they share what else the machine does. At the end of a turn all that was launched in it is waited
for. A group's speed is the median over the repeats; the speed over all is that of all groups'
median seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, generation_stream

from benchmarks.recorded_rows import groups_of
from specdec_mlx.arguments import argument, number, parse_draft_length
from specdec_mlx.batch_generation import batch_stream_generate
from specdec_mlx.lab.bench.record import describe_machine
from specdec_mlx.lab.prompts import RecordedText, encode_chat, read_prompts
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.models.loading import load_model

ROWS = (1, 2, 4, 8)
TURN = 8  # tokens of each text before another contender has its turn

PLAIN = "mlx-lm"

NOTE = (
    "speed: mlx-lm's seconds over ours, behind the prompts; processor: the same of the seconds in "
    "which the process computed, which other programs hardly change; with prompts: from the first "
    "prompt to the last token; least, most: of a group, with prompts; tok/pass: tokens of all "
    "rows; same: texts that are mlx-lm's, token by token."
)

Start = Callable[[Sequence[RecordedText], int], Iterator[tuple[int, int, int]]]
"""Tasks and most tokens of each -> (which task, token, passes so far) for each token."""


@dataclass
class Run:
    """A group being written by one contender.

    seconds: of all turns. prompt_seconds: until the first token. processor_seconds: of the process,
    behind it. tokens: of each text.
    """

    stream: Iterator[tuple[int, int, int]]
    tokens: list[list[int]]
    seconds: float = 0.0
    prompt_seconds: float = 0.0
    processor_seconds: float = 0.0
    passes: int = 0

    def go_on(self, num_tokens: int) -> bool:
        """Write so many tokens more, all rows together; whether there were as many."""
        started, began, count = time.perf_counter(), time.process_time(), 0
        for index, token, passes in islice(self.stream, num_tokens):
            self.tokens[index].append(token)
            self.passes = passes
            count += 1
        mx.synchronize(generation_stream)
        self.seconds += time.perf_counter() - started
        self.processor_seconds += time.process_time() - began
        return count == num_tokens


@dataclass(frozen=True)
class Group:
    """What became of one group with one contender.

    seconds, prompt_seconds, processor_seconds: one for each repeat; same: texts that are mlx-lm's.
    """

    contender: str
    ids: list[str]
    categories: list[str]
    num_tokens: int
    passes: int
    same: int
    seconds: list[float] = field(default_factory=list)
    prompt_seconds: list[float] = field(default_factory=list)
    processor_seconds: list[float] = field(default_factory=list)

    @property
    def decode_seconds(self) -> list[float]:
        """Behind the prompts."""
        return [a - b for a, b in zip(self.seconds, self.prompt_seconds, strict=True)]


@dataclass(frozen=True)
class Row:
    """One contender at one number of rows; speeds are relative to mlx-lm's batch of as many."""

    rows: int
    contender: str
    groups: int
    speed: float
    processor: float
    with_prompts: float
    least: float
    most: float
    tokens_per_pass: float
    same: int
    texts: int


def mlx_lm_batch(model: nn.Module, tokenizer: Any) -> Start:
    """Mlx-lm's batch, token by token."""

    def start(tasks: Sequence[RecordedText], max_tokens: int) -> Iterator[tuple[int, int, int]]:
        generator = BatchGenerator(model, stop_tokens=[[t] for t in tokenizer.eos_token_ids])
        uids = generator.insert([task.prompt for task in tasks], [max_tokens] * len(tasks))
        passes = 0
        while responses := generator.next_generated():
            passes += 1
            for response in responses:
                yield uids.index(response.uid), response.token, passes
        generator.close()

    return start


def our_batch(
    model: nn.Module, tokenizer: Any, drafter: str | None, draft_length: int | str
) -> Start:
    """Ours with a drafter, None for the plain batch."""

    def start(tasks: Sequence[RecordedText], max_tokens: int) -> Iterator[tuple[int, int, int]]:
        prompts = [task.prompt for task in tasks]
        for response in batch_stream_generate(
            model, tokenizer, prompts, max_tokens, drafter=drafter, num_draft_tokens=draft_length
        ):
            yield response.index, response.token, response.num_rounds

    return start


def race(
    contenders: dict[str, Start], group: Sequence[RecordedText], *, max_tokens: int, repeats: int
) -> list[Group]:
    """Write a group with every contender, in turns, several times."""
    runs = [_race_once(contenders, group, max_tokens, seed=repeat) for repeat in range(repeats)]
    plain = runs[0][PLAIN].tokens
    return [
        Group(
            name,
            [task.id for task in group],
            [task.category for task in group],
            sum(map(len, runs[0][name].tokens)),
            runs[0][name].passes,
            sum(a == b for a, b in zip(plain, runs[0][name].tokens, strict=True)),
            [run[name].seconds for run in runs],
            [run[name].prompt_seconds for run in runs],
            [run[name].processor_seconds for run in runs],
        )
        for name in contenders
    ]


def _race_once(
    contenders: dict[str, Start], group: Sequence[RecordedText], max_tokens: int, seed: int
) -> dict[str, Run]:
    """One repeat; whose turn is next is drawn anew each time around, as in `timing.take_turns`."""
    draws = random.Random(seed)
    names = draws.sample(list(contenders), len(contenders))
    runs = {name: Run(contenders[name](group, max_tokens), [[] for _ in group]) for name in names}
    left = dict(runs)
    for run in runs.values():
        run.go_on(1)
        run.prompt_seconds, run.processor_seconds = run.seconds, 0.0
    while left:
        for name, run in draws.sample(list(left.items()), len(left)):
            if not run.go_on(TURN * len(group)):
                del left[name]
    return runs


def summarize(num_rows: int, groups: Sequence[Group]) -> list[Row]:
    """A row for each contender but mlx-lm."""
    by_name: dict[str, list[Group]] = {}
    for group in groups:
        by_name.setdefault(group.contender, []).append(group)
    plain = by_name.pop(PLAIN)
    rows = []
    for name, own in by_name.items():
        of_groups = [
            median(a / b for a, b in zip(base.seconds, group.seconds, strict=True))
            for base, group in zip(plain, own, strict=True)
        ]
        rows.append(
            Row(
                num_rows,
                name,
                len(own),
                _total(plain, "decode_seconds") / _total(own, "decode_seconds"),
                _total(plain, "processor_seconds") / _total(own, "processor_seconds"),
                _total(plain, "seconds") / _total(own, "seconds"),
                min(of_groups),
                max(of_groups),
                sum(group.num_tokens for group in own) / sum(group.passes for group in own),
                sum(group.same for group in own),
                num_rows * len(own),
            )
        )
    return rows


def _total(groups: Sequence[Group], name: str) -> float:
    """Sum over the groups of the medians over the repeats."""
    return float(sum(median(getattr(group, name)) for group in groups))


def format_rows(rows: Sequence[Row]) -> str:
    """A table in Markdown."""
    header = ["rows", "drafter", "groups", "speed", "processor", "with prompts", "least", "most"]
    cells = [
        [
            *(str(row.rows), row.contender, str(row.groups)),
            *(
                f"{x:.2f}"
                for x in (row.speed, row.processor, row.with_prompts, row.least, row.most)
            ),
            *(f"{row.tokens_per_pass:.2f}", f"{row.same} of {row.texts}"),
        ]
        for row in rows
    ]
    return markdown_table([*header, "tok/pass", "same"], cells, num_text_columns=2)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    args = _parser().parse_args(arguments)
    model, tokenizer = load_model(args.model)
    prompts = read_prompts(args.prompts)
    tasks = [RecordedText(p.id, p.category, encode_chat(tokenizer, p.text)) for p in prompts]
    contenders = {PLAIN: mlx_lm_batch(model, tokenizer)} | {
        name: our_batch(model, tokenizer, None if name == "none" else name, args.num_draft_tokens)
        for name in args.drafter or ["auto"]
    }
    rows: list[Row] = []
    everything: list[Group] = []
    for num_rows in args.rows:
        groups = groups_of(tasks, num_rows, args.groups)
        race(contenders, groups[0], max_tokens=TURN, repeats=1)  # the first passes are slow
        done: list[Group] = []
        for group in groups:
            done += race(contenders, group, max_tokens=args.max_tokens, repeats=args.repeats)
            if args.verbose:
                print(f"{num_rows}: {_line(done[-len(contenders) :])}", flush=True)
        everything += done
        rows += summarize(num_rows, done)
    if args.json:
        record = {
            "machine": describe_machine(),
            "rows": [asdict(row) for row in rows],
            "groups": [asdict(group) for group in everything],
        }
        args.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"{format_rows(rows)}\n\n{NOTE}")


def _line(groups: Sequence[Group]) -> str:
    """One group's speeds, as it is done."""
    rows = summarize(len(groups[0].ids), groups)
    speeds = ", ".join(
        f"{r.contender} {r.with_prompts:.2f} ({r.speed:.2f}, {r.processor:.2f})" for r in rows
    )
    return f"{speeds}; {'+'.join(groups[0].categories)}; same {[g.same for g in groups]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    count = number(int, 1)
    add = parser.add_argument
    add("--model", required=True, help="target: folder or Hugging Face name")
    add("--drafter", action="append", metavar="NAME", help="repeatable; none for ours without")
    add("--prompts", metavar="FILE", help="JSON lines with id, category, turns (default: ours)")
    add("--rows", nargs="+", type=count, default=ROWS, metavar="N", help="texts at once (1 2 4 8)")
    add("--groups", type=count, metavar="N", help="most groups of each size (all)")
    add("--max-tokens", type=count, default=64, help="tokens of a text (%(default)s)")
    add("--repeats", type=count, default=3, metavar="N", help="times each is written (%(default)s)")
    add(
        "--num-draft-tokens",
        type=argument(parse_draft_length),
        default="auto",
        metavar="N|POLICY",
        help="%(default)s",
    )
    add("--verbose", action="store_true", help="print each group as it is done")
    add("--json", type=Path, metavar="FILE", help="write the rows and groups")
    return parser


if __name__ == "__main__":
    main()
