"""Vertical cascades and trees of several drafters: `python -m benchmarks.systems`, on the lab.

Counts of a live run: passes of the target, and of the draft models with their positions. Seconds
are modelled: a pass costs what the curve of a chip says, one of a draft model a share of that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.contracts import Drafter, RoundRecord
from specdec_mlx.draft_length.value import Fixed
from specdec_mlx.drafters.first_of import BestOf
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.reduced_models import first_layers
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.lab import head, load_pair
from specdec_mlx.lab.bench.cost import CostCurve, parse_cost
from specdec_mlx.lab.pair import held_out_openings
from specdec_mlx.lab.papers.trees_of_several import TreeOf
from specdec_mlx.lab.papers.vertical_cascade import GuessedDrafter
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import speculate
from specdec_mlx.rules import AutoRule
from specdec_mlx.sampling import Sampling

CHIPS = ("m3-max", "m5-max-70b")


class Measured(nn.Module):  # type: ignore[misc]
    """A draft model that notes how many positions each of its passes has."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.widths: list[int] = []

    @property
    def layers(self) -> Any:
        """The model's."""
        return self.model.layers

    def make_cache(self) -> list[Any]:
        """The model's."""
        caches: list[Any] = make_prompt_cache(self.model)
        return caches

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        """Logits of the model."""
        self.widths.append(inputs.shape[1])
        logits: mx.array = self.model(inputs, cache=cache)
        return logits


class NotingLength(Fixed):
    """A fixed length that keeps the records of the rounds."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.rounds: list[RoundRecord] = []

    def record(self, round_: RoundRecord) -> None:
        """Keep it."""
        self.rounds.append(round_)


@dataclass
class Count:
    """A way of drafting on all texts; widths: positions of each pass, of the target and drafts."""

    name: str
    drafter: Callable[[], Drafter]
    tokens: int = 0
    drafted: int = 0
    widths: list[int] = field(default_factory=list)
    draft_widths: list[list[int]] = field(default_factory=list)

    def speed(self, cost: CostCurve, shares: Sequence[float]) -> float:
        """Of plain decoding; shares: cost of a draft model's pass, in the target's."""
        drafting = sum(
            share * sum(map(cost, widths))
            for share, widths in zip(shares, self.draft_widths, strict=True)
        )
        return self.tokens * cost(1) / (sum(map(cost, self.widths)) + drafting)


def ways(
    draft: Measured, small: Measured, prediction: Drafter, parts: Sequence[str]
) -> list[Count]:
    """What is compared; the parts named."""
    alone, branching = ModelDrafter(draft), ModelDrafter(draft, branches=4)
    smaller = ModelDrafter(small)
    cascades: dict[str, Callable[[], Drafter]] = {
        "model": lambda: alone,
        "guessed-model:drafter=suffix": lambda: GuessedDrafter(draft, drafter="suffix"),
        "model, its first layer guesses": lambda: GuessedDrafter(draft, drafter=smaller),
        "BestOf(suffix, model)": lambda: BestOf(SuffixDrafter(), alone),
    }
    trees: dict[str, Callable[[], Drafter]] = {
        "model": lambda: alone,
        "model:branches=4": lambda: branching,
        "mtp": lambda: prediction,
        "TreeOf(model, mtp)": lambda: TreeOf(alone, prediction),
        "TreeOf(model, its first layer)": lambda: TreeOf(alone, smaller),
        "TreeOf(model, mtp, suffix)": lambda: TreeOf(alone, prediction, SuffixDrafter()),
        "TreeOf(model, suffix)": lambda: TreeOf(alone, SuffixDrafter()),
    }
    chosen = {"cascades": cascades, "trees": trees}
    return [Count(f"{part}: {name}", way) for part in parts for name, way in chosen[part].items()]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=2, help="Every nth of the lab's openings.")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--draft-cost", type=float, default=0.1)
    parser.add_argument("--part", choices=["cascades", "trees"], action="append")
    args = parser.parse_args()
    pair = load_pair()
    draft, small = Measured(pair.draft), Measured(first_layers(pair.draft, 1))
    shares = [args.draft_cost, args.draft_cost / len(pair.draft.layers)]
    prediction = head("mtp", pair.target)
    counts = ways(draft, small, prediction, args.part or ["cascades", "trees"])
    openings = [text for _, _, text in held_out_openings()][:: args.every]
    for count in counts:
        count.draft_widths = [[], []]
        drafter = count.drafter()
        for seed, text in enumerate(openings):
            length = NotingLength(args.num_draft_tokens)
            prompt, widths = pair.tokenizer.encode(text), (draft.widths, small.widths)
            how: dict[str, Any] = {"seed": seed, "rule": AutoRule(), "num_draft_tokens": length}
            how |= {"sampler": Sampling(temp=args.temp), "max_tokens": args.max_tokens}
            draft.widths, small.widths = [], []
            tokens = list(speculate(pair.target, prompt, drafter, **how))
            widths = (draft.widths, small.widths)
            count.tokens += len(tokens)
            count.drafted += tokens[-1].stats.drafted
            count.widths += [round_.fed for round_ in length.rounds]
            for known, new in zip(count.draft_widths, widths, strict=True):
                # without the prompt
                known += [width for width in new if width <= 2 * args.num_draft_tokens + 8]
    header = ["way", "tokens a pass", "drafted a pass", "draft passes a drafted token"]
    rows = [
        [
            count.name,
            f"{count.tokens / len(count.widths):.2f}",
            f"{count.drafted / len(count.widths):.2f}",
            f"{sum(map(len, count.draft_widths[:1])) / max(1, count.drafted):.2f}",
            *(f"{count.speed(parse_cost(chip, None), shares):.2f}" for chip in CHIPS),
        ]
        for count in counts
    ]
    print(markdown_table([*header, *CHIPS], rows, 1))


if __name__ == "__main__":
    main()
