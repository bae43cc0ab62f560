"""Trees of heads beside chains of the same heads: `python -m benchmarks.head_trees`.

Without flags on the lab's target and its heads. Each text is generated plainly, and with chains and
trees of every size, in turns, so that they share the machine's pace; speeds are medians over the
texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import mlx.nn as nn

from benchmarks.heads import (
    Begin,
    add_arguments,
    race,
    report,
    target_and_prompts,
    tokens_a_pass,
)
from specdec_mlx.arguments import argument, number, parse_draft_length
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab import draft_path, head_path
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import speculate
from specdec_mlx.models.loading import load_model
from specdec_mlx.rules import AutoRule
from specdec_mlx.sampling import Sampling
from specdec_mlx.stats.account import SpeculationStats

SIZES = (4, 8, 16, "auto")
TEMPS = (0.0, 0.7, 1.0)
BRANCHES = 4

NOTE = (
    "tokens a pass of the target, and speed (plain decoding = 1, median over the texts), with "
    "chains and with trees of n draft tokens, or as many as the automatic draft length takes."
)

Forking = HeadDrafter | ModelDrafter

Case = tuple[str, int | str, int]  # name of the drafter, size, and tokens at a place


@dataclass(frozen=True)
class TreeRow:
    """Chains and trees of one size, a number or "auto", of a drafter at a temperature.

    chain, tree: tokens a pass. chain_speed, tree_speed: of plain decoding.
    """

    drafter: str
    temp: float
    size: int | str
    chain: float
    tree: float
    chain_speed: float
    tree_speed: float


def compare_trees(
    target: nn.Module,
    drafters: Mapping[str, Forking],
    prompts: Sequence[Sequence[int]],
    *,
    sizes: Sequence[int | str] = SIZES,
    temps: Sequence[float] = TEMPS,
    branches: int = BRANCHES,
    max_tokens: int = 128,
) -> Iterator[TreeRow]:
    """Rows of the table, temperature by temperature.

    Args:
        target: the model.
        drafters: by name, of chains.
        prompts: token ids of each text.
        sizes: draft tokens, or "auto".
        temps: temperatures of the text.
        branches: most tokens at a place of a tree.
        max_tokens: of each text.
    """
    cases = list(product(drafters, sizes, (1, branches)))
    for temp in temps:
        accounts: dict[Case, list[SpeculationStats]] = {case: [] for case in cases}
        speeds: dict[Case, list[float]] = {case: [] for case in cases}
        tunings = {case: Tuning() for case in cases}
        for seed, prompt in enumerate(prompts):
            options: dict[str, Any] = {
                "sampler": Sampling(temp=temp),
                "max_tokens": max_tokens,
                "seed": seed,
                "rule": AutoRule(),  # that of callers without a seed
            }
            begin: Begin = partial(speculate, target, prompt, **options)
            drafting = [
                begin(
                    replace(drafters[case[0]], branches=case[2]),
                    num_draft_tokens=case[1],
                    tuning=tunings[case],
                )
                for case in cases
            ]
            plain, *runs = race([begin(None), *drafting])
            for case, run in zip(cases, runs, strict=True):
                accounts[case].append(run.stats)
                speeds[case].append(plain.seconds / run.seconds)
        for name, size in product(drafters, sizes):
            both = [(name, size, width) for width in (1, branches)]
            yield TreeRow(
                name,
                temp,
                size,
                *(tokens_a_pass(accounts[case]) for case in both),
                *(median(speeds[case]) for case in both),
            )


def format_tree_rows(rows: Sequence[TreeRow]) -> str:
    """A table in Markdown."""
    header = ["drafter", "temp", "n", "chain", "tree", "chain, speed", "tree, speed"]
    cells = [
        [
            row.drafter,
            *(f"{row.temp:g}", str(row.size)),
            *(f"{x:.2f}" for x in (row.chain, row.tree, row.chain_speed, row.tree_speed)),
        ]
        for row in rows
    ]
    return markdown_table(header, cells, num_text_columns=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    args = _parser().parse_args(arguments)
    target, prompts = target_and_prompts(args)
    rows = list(
        compare_trees(
            target,
            dict(_drafters(args, target)),
            prompts,
            sizes=args.sizes,
            branches=args.branches,
            max_tokens=args.max_tokens,
        )
    )
    report(args, prompts, rows, f"{format_tree_rows(rows)}\n\n{NOTE}")


def _drafters(args: argparse.Namespace, target: nn.Module) -> Iterator[tuple[str, Forking]]:
    """By name: those given, or the lab's."""
    if args.model is None:
        yield from ((kind, load_head(head_path(kind), target)) for kind in ("medusa", "eagle3"))
        yield "draft model", ModelDrafter(load_model(draft_path())[0])
    for folder in args.head:
        yield Path(folder).name, load_head(folder, target)


def _parser() -> argparse.ArgumentParser:
    name = "python -m benchmarks.head_trees"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=argument(parse_draft_length),
        default=SIZES,
        metavar="N",
        help="draft tokens (4 8 16 auto)",
    )
    parser.add_argument(
        "--branches",
        type=number(int, 1),
        default=BRANCHES,
        help="tokens at a place (%(default)s)",
    )
    return parser


if __name__ == "__main__":
    main()
