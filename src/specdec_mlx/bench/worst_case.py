"""Where speculation can only lose: our loop against plain mlx-lm, side by side.

`python -m specdec_mlx.bench.worst_case`. Three cases: no drafter at all, a drafter that is always
wrong and sure of itself, and a prompt of random words, where look-ups find little.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.nn as nn

from specdec_mlx.bench.contenders import PLAIN, Contender, ours, plain
from specdec_mlx.bench.prompts import Task, builtin_prompts, encode_chat
from specdec_mlx.bench.report import markdown_table
from specdec_mlx.bench.summary import ALL, Result, summarise
from specdec_mlx.bench.timing import Settings, run_interleaved, time_generation
from specdec_mlx.drafters.model import logit_width
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.lab.demo_model import demo_model_path
from specdec_mlx.models import load_model
from specdec_mlx.types import Draft, DraftContext, Evidence

NUM_WORDS = 120
LONG_MATCH = 20
"""Tokens of the match that the drafter pretends to have."""


@dataclass
class AlwaysWrong:
    """Proposes, with every sign of certainty, what does not come.

    texts: prompt -> the target's own continuation.
    """

    vocab_size: int
    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> AlwaysWrongSession:
        """Look up what will come."""
        return AlwaysWrongSession(self.texts.get(tuple(prompt), []), self.vocab_size)


class AlwaysWrongSession:
    """One generation; knows how far it has come."""

    cheap = True

    def __init__(self, coming: Sequence[int], vocab_size: int) -> None:
        """Begin before the first token of `coming`."""
        self._coming, self._vocab_size, self._done = coming, vocab_size, 0

    def propose(self, limit: int) -> Draft:
        """The tokens that come, each but for one."""
        right = self._coming[self._done : self._done + limit]
        wrong = [(token + 1) % self._vocab_size for token in right]
        return Draft(wrong, evidence=[Evidence(LONG_MATCH, 2, 2)] * len(wrong))

    def observe(self, tokens: Sequence[int]) -> None:
        """Move on."""
        self._done += len(tokens)


def measure(
    model: nn.Module, tokenizer: Any, num_prompts: int, settings: Settings
) -> dict[str, Result]:
    """Run the three cases.

    Args:
        model: the target.
        tokenizer: the target's.
        num_prompts: texts of each case.
        settings: how both loops generate.

    Returns:
        Case -> result of our loop, with speeds relative to plain decoding's.
    """
    texts = tasks_of(tokenizer, [p.text for p in builtin_prompts()[:num_prompts]], "prompts")
    words = tasks_of(tokenizer, random_words(tokenizer, num_prompts), "random words")
    reference = plain(model)
    wrong = AlwaysWrong(logit_width(model))
    for task in texts:
        wrong.texts[tuple(task.prompt)] = time_generation(reference, task, settings, 0).tokens
    cases: list[tuple[str, Contender, list[Task]]] = [
        ("no drafter", ours(model, None, "ours", ""), texts),
        ("always wrong", ours(model, wrong, "ours", "auto"), texts),
        ("random words", ours(model, PromptLookupDrafter(), "ours", "auto"), words),
    ]
    results = {}
    for name, contender, tasks in cases:
        samples = run_interleaved(tasks, [reference, contender], settings)
        found = [r for r in summarise(samples, []) if r.category == ALL and r.drafter != PLAIN]
        results[name] = found[0]
    return results


def tasks_of(tokenizer: Any, texts: Sequence[str], category: str) -> list[Task]:
    """Prompts through the chat template.

    Args:
        tokenizer: the target's.
        texts: user messages.
        category: what results call them.
    """
    return [
        Task(f"{category}/{i}", category, encode_chat(tokenizer, text))
        for i, text in enumerate(texts)
    ]


def random_words(tokenizer: Any, num_prompts: int) -> list[str]:
    """Lists of different words out of the tokenizer's vocabulary, to be continued with others."""
    rng = random.Random(0)
    ids = range(len(tokenizer.get_vocab()))
    pieces = {tokenizer.decode([i]).strip() for i in rng.sample(ids, min(len(ids), 8192))}
    words = sorted(piece for piece in pieces if len(piece) > 3 and piece.isalpha())
    lists = [" ".join(rng.sample(words, min(len(words), NUM_WORDS))) for _ in range(num_prompts)]
    return [f"{words}\n\nGo on with other random words." for words in lists]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="model folder or Hugging Face name (default: a small one)")
    parser.add_argument("--num-prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model, tokenizer = load_model(args.model or demo_model_path())
    settings = Settings(args.max_tokens, args.repeats, 0, tokenizer.eos_token_ids)
    rows = [
        [
            name,
            f"{r.ratio:.3f}",
            f"{r.ratio_low:.3f} to {r.ratio_high:.3f}",
            f"{r.drafted}",
            f"{r.tokens_per_pass:.2f}",
        ]
        for name, r in measure(model, tokenizer, args.num_prompts, settings).items()
    ]
    header = ["case", "of plain's speed", "95%", "drafted", "tokens per pass"]
    print(markdown_table(header, rows, num_text_columns=1))


if __name__ == "__main__":
    main()
