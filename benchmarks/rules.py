"""Acceptance by rule in one table: `python -m benchmarks.rules`.

One run under token-level rejection says what every rule would have accepted, since both models'
distributions are known at each position (see `counterfactual`). Sums are over the rounds of all
texts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.choosing.choice import add_lighter_arguments, named_model
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab.bench.record import describe_machine
from specdec_mlx.lab.counterfactual import BY_ROUND, Counterfactual
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.lab.prompts import RecordedText, choose, encode_chat, read_prompts
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import speculate
from specdec_mlx.models.loading import load_model
from specdec_mlx.sampling import Sampling

REFERENCES = ("rejection", "match")
NOTE = (
    "1, 2, ...: chance to accept at that position of the draft, where all before was accepted; "
    "acceptance: their mean over all positions reached; kept: draft tokens kept in a round; "
    "tok/pass: one more; ratios to rejection and to match. Block verification decides on drafts, "
    "not on positions. greedy draft: the draft model's likeliest token instead of a drawn one."
)


@dataclass(frozen=True)
class RuleResult:
    """What a rule accepts.

    Attributes:
        rule: its name.
        by_position: [K] chance at each position reached; None for block verification.
        acceptance: its mean over all drafted positions reached; None for block verification.
        accepted_per_round: draft tokens kept.
        tokens_per_pass: one more.
        acceptance_ratios: of acceptance, to the rules of `REFERENCES`.
        pass_ratios: of tokens_per_pass, to the rules of `REFERENCES`.
    """

    rule: str
    by_position: list[float] | None
    acceptance: float | None
    accepted_per_round: float
    tokens_per_pass: float
    acceptance_ratios: dict[str, float] | None
    pass_ratios: dict[str, float]


def account_of(
    model: nn.Module,
    drafter: Drafter,
    tasks: Sequence[RecordedText],
    *,
    max_tokens: int,
    temp: float,
    num_draft_tokens: int,
    seed: int = 0,
    end_tokens: Collection[int] = (),
    on_text: Callable[[], Any] = lambda: None,
) -> Counterfactual:
    """One account of all texts, each written with token-level rejection.

    Args:
        model: the target.
        drafter: one that draws at random, or the rules have nothing to differ in.
        tasks: the prompts.
        max_tokens: of each text.
        temp: temperature, above 0.
        num_draft_tokens: tokens a round.
        seed: of the draws.
        end_tokens: ids that end a text.
        on_text: called after each text.
    """
    account = Counterfactual()
    for task in tasks:
        stream = speculate(
            model,
            task.prompt,
            drafter,
            max_tokens=max_tokens,
            sampler=Sampling(temp),
            seed=seed,
            rule=account.counting("rejection", is_seeded=True),
            num_draft_tokens=num_draft_tokens,
        )
        with closing(stream):
            for token in stream:
                if token.token in end_tokens:
                    break
        on_text()
    return account


def by_rule(account: Counterfactual) -> list[RuleResult]:
    """A result per rule; raises ValueError for an account without rounds."""
    if not account.rounds:
        raise ValueError("No round had a draft. Take more tokens, or another draft model.")
    positions = account.positions
    reached = sum(position.reached for position in positions)
    kept = {rule: estimate.mean for rule, estimate in account.accepted_per_round.items()}
    chances = {
        rule: [position.expected[rule].mean for position in positions]
        for rule in positions[0].expected
    }
    acceptance = {
        rule: sum(p.reached * chance for p, chance in zip(positions, row, strict=True)) / reached
        for rule, row in chances.items()
    }
    return [
        RuleResult(
            rule,
            chances.get(rule),
            acceptance.get(rule),
            kept[rule],
            1 + kept[rule],
            _ratios(rule, acceptance) if rule in acceptance else None,
            _ratios(rule, {name: 1 + mean for name, mean in kept.items()}),
        )
        for rule in BY_ROUND
    ]


def format_results(results: Sequence[RuleResult]) -> str:
    """The table in Markdown."""
    num_positions = max(len(result.by_position or ()) for result in results)
    ratios = [f"/ {name}" for name in REFERENCES]
    header = ["rule", *(str(i + 1) for i in range(num_positions)), "acceptance", *ratios]
    header += ["kept", "tok/pass", *ratios]
    rows = [
        [
            result.rule,
            *_numbers(result.by_position or [None] * num_positions),
            *_numbers([result.acceptance]),
            *_numbers([(result.acceptance_ratios or {}).get(name) for name in REFERENCES]),
            *_numbers([result.accepted_per_round, result.tokens_per_pass]),
            *_numbers([result.pass_ratios.get(name) for name in REFERENCES]),
        ]
        for result in results
    ]
    return markdown_table(header, rows, num_text_columns=1)


def four_bit_copy(model_path: Path | str) -> nn.Module:
    """The model with 4-bit weights: a draft model that is at hand for any target."""
    model = load_model(model_path)[0]
    if not any(isinstance(layer, nn.QuantizedLinear) for layer in model.modules()):
        nn.quantize(model, group_size=32, bits=4)
        mx.eval(model.parameters())
    return model


def main(arguments: Sequence[str] | None = None) -> None:
    """Run and print."""
    from tqdm import tqdm

    args = _parser().parse_args(arguments)
    path = args.model or demo_model_path()
    model, tokenizer = load_model(path)
    given = named_model(args).pair[0]
    draft_model = four_bit_copy(path) if given is None else given
    prompts = read_prompts(args.prompts)
    prompts = choose(prompts, per_category=args.per_category)
    tasks = [RecordedText(p.id, p.category, encode_chat(tokenizer, p.text)) for p in prompts]
    with tqdm(total=len(tasks), desc="rules", unit="text", file=sys.stderr) as bar:
        account = account_of(
            model,
            ModelDrafter(draft_model),
            tasks,
            max_tokens=args.max_tokens,
            temp=args.temp,
            num_draft_tokens=args.num_draft_tokens,
            seed=args.seed,
            end_tokens=tokenizer.eos_token_ids,
            on_text=bar.update,
        )
    results = by_rule(account)
    if args.json:
        record = {
            "command": shlex.join(sys.argv),
            "machine": describe_machine(),
            "settings": {name: value for name, value in vars(args).items() if name != "json"},
            "texts": len(tasks),
            "results": [asdict(result) for result in results],
            "account": account.as_dict(),
        }
        Path(args.json).write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(f"{len(tasks)} texts, {account.rounds} rounds\n\n{format_results(results)}\n\n{NOTE}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", help="model folder or Hugging Face name (default: a small one)")
    add("--draft-model", metavar="MODEL", help="default: the target's own copy with 4-bit weights")
    add_lighter_arguments(parser)
    add("--prompts", metavar="FILE", help="JSON lines with id, category, turns (default: ours)")
    add("--per-category", type=int, metavar="N", help="prompts of each, evenly spread (all)")
    add("--max-tokens", type=int, default=128, help="tokens a prompt (%(default)s)")
    add("--temp", type=float, default=1.0, help="temperature (%(default)s)")
    add("--num-draft-tokens", type=int, default=4, metavar="K", help="tokens a round (%(default)s)")
    add("--seed", type=int, default=0, help="of the draws (%(default)s)")
    add("--json", metavar="FILE", help="write the table and the whole account")
    return parser


def _ratios(rule: str, values: dict[str, float]) -> dict[str, float]:
    """To each reference that is not 0."""
    return {name: values[rule] / values[name] for name in REFERENCES if values[name]}


def _numbers(values: Sequence[float | None]) -> list[str]:
    return ["-" if value is None else f"{value:.3f}" for value in values]


if __name__ == "__main__":
    main()
