"""What rounds without a draft cost: ours beside mlx-lm's `generate_step`, where ours cannot win.

`python -m specdec_mlx.bench.plain_rounds`. The target of the lab pair takes about 2 ms a token, so
that every operation and every line of Python shows. Three cases: no drafter, a draft model that is
never asked, and a useless one that the automatic draft length has paused.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from specdec_mlx import lab
from specdec_mlx.bench.contenders import PLAIN, Contender, Emitted, ours, plain
from specdec_mlx.bench.prompts import Task
from specdec_mlx.bench.record import or_dash
from specdec_mlx.bench.report import markdown_table
from specdec_mlx.bench.summary import ALL, Result, summarise
from specdec_mlx.bench.timing import Settings, run_interleaved, time_generation
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.lab import corpus

TEMPERATURES = (0.0, 0.7, 1.0)

NO_DRAFTER, NEVER_ASKED, PAUSED = "no drafter", "draft model, never asked", "draft model, paused"
CASES = (NO_DRAFTER, NEVER_ASKED, PAUSED)


def measure(
    target: nn.Module, useless: nn.Module, tasks: Sequence[Task], temp: float, settings: Settings
) -> list[Result]:
    """All cases side by side.

    Args:
        target: a small model, so that host time shows.
        useless: a draft model that knows nothing; see `shuffled`.
        tasks: the prompts.
        temp: temperature.
        settings: how every loop generates.

    Returns:
        A result for each of `CASES`, with speeds relative to plain decoding's.
    """
    drafter, tuning = ModelDrafter(useless), Tuning.for_model(target)
    contenders = [
        ours(target, None, NO_DRAFTER, "", temp),
        ours(target, drafter, NEVER_ASKED, "0", temp),
        ours(target, drafter, PAUSED, "auto", temp, tuning=tuning),
    ]
    time_generation(contenders[-1], tasks[0], settings, settings.repeats)  # until it is paused
    everybody = [unended(contender) for contender in (plain(target, temp), *contenders)]
    samples = run_interleaved(tasks, everybody, settings)
    results = summarise(samples, [], greedy=False)
    return [r for r in results if r.category == ALL and r.drafter != PLAIN]


def shuffled(model: nn.Module) -> nn.Module:
    """The same model with the numbers of each weight in another order: it knows nothing more."""
    key = mx.random.key(0)
    weights = tree_map(
        lambda w: mx.random.permutation(w.flatten(), key=key).reshape(w.shape), model.parameters()
    )
    model.update(weights)
    return model


def unended(contender: Contender) -> Contender:
    """The same, timed in the middle of a text.

    At the last token that is wanted some loops have a pass under way that nobody needs, and others
    do not; with one token more to come all have.
    """

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        return contender.start(prompt, max_tokens + 1, seed)

    return replace(contender, start=start)


def lab_tasks(tokenizer: Any, num_prompts: int) -> Iterator[Task]:
    """Openings of texts that the pair was not trained on."""
    for topic, i, text in islice(corpus.held_out_openings(), num_prompts):
        yield Task(f"{topic}/{i}", topic, list(tokenizer.encode(text)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-prompts", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=192, help="of each (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="(%(default)s)")
    args = parser.parse_args(arguments)
    pair = lab.load_pair()
    useless = shuffled(pair.draft)
    tasks = list(lab_tasks(pair.tokenizer, args.num_prompts))
    settings = Settings(args.max_tokens, args.repeats)
    rows = [
        [
            f"{temp:g}",
            r.drafter,
            or_dash(r.ratio, 3),
            f"{or_dash(r.ratio_low, 3)} to {or_dash(r.ratio_high, 3)}",
            f"{r.drafting_share:.1%}",
            or_dash(r.host_ms_per_round, 3),
        ]
        for temp in TEMPERATURES
        for r in measure(pair.target, useless, tasks, temp, settings)
    ]
    header = ["temperature", "case", "of plain's speed", "95%", "drafting", "host ms"]
    print(markdown_table(header, rows, num_text_columns=2))


if __name__ == "__main__":
    main()
