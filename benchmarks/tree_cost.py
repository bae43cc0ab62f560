"""What a tree of n draft tokens costs beside a chain of n, and to keep one path of it.

    python -m benchmarks.tree_cost --model M

Passes over one position, a chain and a tree of each size follow each other, so that the machine's
pace is the same for all of them; what is printed are medians, over passes and over ratios of
neighbours.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx import loop
from specdec_mlx.arguments import number
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import Draft
from specdec_mlx.lab import target_path
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.models.loading import load_model
from specdec_mlx.target import Verifier
from specdec_mlx.trees.shape import path_to

SIZES = (4, 8, 16)
CONTEXTS = (128, 1024)


@dataclass(frozen=True)
class TreeCost:
    """What one size costs at one length of context.

    plain, chain, tree: seconds of a pass. of_chain: of the tree's over the chain's. compaction:
    keeping a path that is no head of the tree, less going back to a head of a chain, in plain
    passes.
    """

    context: int
    size: int
    plain: float
    chain: float
    tree: float
    of_chain: float
    compaction: float


def measure(
    model: nn.Module,
    tokens: Sequence[int],
    *,
    contexts: Sequence[int] = CONTEXTS,
    sizes: Sequence[int] = SIZES,
    repeats: int = 15,
) -> Iterator[TreeCost]:
    """A row for each context and size.

    Args:
        model: the target; its caches have to take trees.
        tokens: some real text, repeated as often as needed.
        contexts: positions on the caches.
        sizes: draft tokens.
        repeats: passes of each kind.

    Raises:
        ValueError: the model takes no trees.
    """
    for context in contexts:
        meter = TreeMeter(model, tokens, context)
        samples = {size: [meter.turn(size) for _ in range(repeats + 1)][1:] for size in sizes}
        for size, turns in samples.items():
            plain = median(turn.plain for turn in turns)
            yield TreeCost(
                context,
                size,
                plain,
                median(turn.chain for turn in turns),
                median(turn.tree for turn in turns),
                median(turn.tree / turn.chain for turn in turns),
                median(turn.compacted - turn.rewound for turn in turns) / plain,
            )


@dataclass(frozen=True)
class Turn:
    """Seconds of passes that followed each other, and of the way back after each."""

    plain: float
    chain: float
    rewound: float
    tree: float
    compacted: float


class TreeMeter:
    """Times passes after a text of some length."""

    def __init__(self, model: nn.Module, tokens: Sequence[int], context: int) -> None:
        """Read the text; ValueError for a model that takes no trees."""
        self.rollback = Rollback(make_prompt_cache(model))
        self.verifier = Verifier(model, self.rollback)
        self.tokens = (list(tokens) * (context // len(tokens) + 2))[: context + max(SIZES) + 1]
        self.context = context
        if not self.verifier.takes_trees():
            raise ValueError("This model takes no trees, see docs/architectures.md. Give another.")
        with mx.stream(generation_stream):
            self.verifier.feed(mx.array(self.tokens[:context]))
            self._settle()

    def turn(self, size: int) -> Turn:
        """One pass of each kind."""
        parents = [node // 2 - 1 for node in range(size)]  # two children each
        path = path_to(size - 1, parents)
        plain, _ = self._time(None, 0, ())
        chain, rewound = self._time(None, size, range(len(path)))
        tree, compacted = self._time(parents, size, path)
        return Turn(plain, chain, rewound, tree, compacted)

    def _time(
        self, parents: Sequence[int] | None, size: int, kept: Sequence[int]
    ) -> tuple[float, float]:
        """Seconds of a pass, and of keeping these nodes of it; the caches are as before then."""
        begin = self.rollback.position
        drafted = self.tokens[self.context + 1 :][:size]
        draft = Draft(drafted, parents=parents)
        pending = self.tokens[self.context : self.context + 1]
        passed = self._seconds(lambda: self.verifier.launch(pending, draft, 0).read())
        back = self._seconds(lambda: self.rollback.keep(begin + 1, kept))
        self.rollback.rewind_to(begin)
        self.rollback.drop_checkpoints()
        return passed, back

    def _seconds(self, run: Callable[[], object]) -> float:
        mx.synchronize(generation_stream)
        began = time.perf_counter()
        with mx.stream(generation_stream):
            run()
            self._settle()
        return time.perf_counter() - began

    def _settle(self) -> None:
        mx.eval([cache.state for cache in self.rollback.caches])


def format_costs(costs: Sequence[TreeCost]) -> str:
    """A table: passes in plain ones, the tree's over the chain's, and the compaction."""
    rows = [
        [
            *(str(cost.context), str(cost.size)),
            *(f"{cost.chain / cost.plain:.2f}", f"{cost.tree / cost.plain:.2f}"),
            *(f"{cost.of_chain:.3f}", f"{cost.compaction:.3f}"),
        ]
        for cost in costs
    ]
    header = ["context", "n", "chain", "tree", "tree/chain", "compaction"]
    return markdown_table(header, rows, num_text_columns=0)


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="folder or Hugging Face name (default: the lab's target)")
    parser.add_argument("--repeats", type=number(int, 1), default=15, help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    args = parser.parse_args()
    model, tokenizer = load_model(args.model or target_path())
    tokens = tokenizer.encode(f"{loop.__doc__}")
    costs = list(measure(model, tokens, repeats=args.repeats))
    print(format_costs(costs))
    if args.json:
        args.json.write_text(
            json.dumps([asdict(cost) for cost in costs], indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
