"""Host time of a round at long context: `python -m benchmarks.host_time --context 32000`.

The target is a table of logits by token behind a real key-value cache, so that its passes cost next
to nothing and what is left of a round is the loop's own: drafting, launching, reading, handing out.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.sample_utils import make_logits_processors

from specdec_mlx.contracts import Drafter, LogitsProcessor
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import Token, speculate

VOCAB_SIZE = 512
BEST, OTHERS = 20.0, -20.0
"""Logits of the next token and of all others: so far apart that no penalty swaps them."""

WARM_UP_ROUNDS = 32
PENALTY = 1.1


class Table(nn.Module):  # type: ignore[misc]
    """A target whose next token follows from the last one: t, t + 1, ..., around the vocabulary."""

    def __init__(self, vocab_size: int = VOCAB_SIZE) -> None:
        """One cached key and value of size 1 a token."""
        super().__init__()
        self.layers = [nn.Identity()]
        following = (mx.arange(vocab_size) + 1) % vocab_size
        self.table = mx.where(following[:, None] == mx.arange(vocab_size), BEST, OTHERS)

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        """Logits [B, S, V] for ids [B, S]."""
        if cache is not None:
            entry = ids.astype(mx.float32)[:, None, :, None]
            cache[0].update_and_fetch(entry, entry)
        return self.table[ids]


@dataclass(frozen=True)
class Kind:
    """A way of generating whose rounds are timed."""

    name: str
    drafter: Drafter | None
    processors: Sequence[LogitsProcessor] = ()


def kinds(draft_length: int) -> list[Kind]:
    """Plain and speculative rounds, without and with a repetition penalty of mlx-lm's."""
    penalty = make_logits_processors(repetition_penalty=PENALTY)
    lookup = PromptLookupDrafter(min_ngram=1, num_draft=draft_length)
    return [
        Kind("plain", None),
        Kind("drafting", lookup),
        Kind("plain, penalty", None, penalty),
        Kind("drafting, penalty", lookup, penalty),
    ]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens, then a turn around the vocabulary that the text goes on repeating."""
    random_tokens = random.Random(seed).choices(range(VOCAB_SIZE), k=length)
    turn = list(range(VOCAB_SIZE))[-length:]
    return random_tokens[: length - len(turn)] + turn


def generate(
    kind: Kind, context: int, num_tokens: int, draft_length: int
) -> Iterator[tuple[int, Token]]:
    """Tokens of a generation, each with the number of its round.

    Args:
        kind: the way of generating.
        context: tokens of the prompt.
        num_tokens: to generate.
        draft_length: tokens a round.
    """
    stream = speculate(
        Table(),
        prompt_of(context),
        kind.drafter,
        max_tokens=num_tokens,
        num_draft_tokens=draft_length,
        logits_processors=kind.processors,
        probe=False,
    )
    with closing(stream):
        for token in stream:
            yield token.stats.target_passes, token


def round_seconds(kind: Kind, context: int, num_rounds: int, draft_length: int) -> list[float]:
    """Seconds of each round from its first token to the next one's, warm-up left out.

    Args:
        kind: the way of generating.
        context: tokens of the prompt.
        num_rounds: timed, after the warm-up.
        draft_length: tokens a round.
    """
    num_tokens = (num_rounds + WARM_UP_ROUNDS + 1) * (draft_length + 1 if kind.drafter else 1)
    times: list[float] = []
    for number, _ in generate(kind, context, num_tokens, draft_length):
        if number > len(times):
            times.append(time.perf_counter())
    return np.diff(times[WARM_UP_ROUNDS:]).tolist()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print median and 95th percentile by kind."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=32_000, help="tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=500, help="timed of each (%(default)s)")
    parser.add_argument(
        "--num-draft-tokens", type=int, default=4, metavar="K", help="(%(default)s)"
    )
    args = parser.parse_args(arguments)
    rows = []
    for kind in tqdm(kinds(args.num_draft_tokens), desc="host time", file=sys.stderr):
        seconds = round_seconds(kind, args.context, args.rounds, args.num_draft_tokens)
        median, high = 1e3 * np.quantile(seconds, [0.5, 0.95])
        rows.append([kind.name, str(len(seconds)), f"{median:.3f}", f"{high:.3f}"])
    header = ["round", "rounds", "median ms", "95% ms"]
    print(f"Context: {args.context} tokens.\n\n{markdown_table(header, rows, num_text_columns=1)}")


if __name__ == "__main__":
    main()
