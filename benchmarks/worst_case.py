"""Where speculation can only lose: our loop beside plain mlx-lm's, on the lab's pair.

    python -m benchmarks.worst_case

Five cases: no drafter, a draft model that is never asked, one that knows nothing and that the
automatic draft length pauses, a drafter that is always wrong and sure of itself, and a prompt of
random words, where look-ups find little. The lab's target takes about 2 ms a token, so that every
operation and every line of Python shows. With another model the draft model's two cases are left
out.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from msgspec.structs import replace

from specdec_mlx import lab
from specdec_mlx.contracts import Draft, DraftContext, Drafter, Evidence, Session
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.lab.bench.summary import ALL, Result, summarise
from specdec_mlx.lab.bench.timing import (
    PLAIN,
    Contender,
    Emitted,
    Settings,
    ours,
    plain,
    run_interleaved,
    time_generation,
)
from specdec_mlx.lab.prompts import RecordedText, encode_chat, read_prompts
from specdec_mlx.lab.tables import markdown_table, or_dash
from specdec_mlx.models.anatomy import vocab_size_of
from specdec_mlx.models.loading import load_model

NO_DRAFTER, ALWAYS_WRONG, RANDOM_WORDS = "no drafter", "always wrong", "random words"
NEVER_ASKED, PAUSED = "draft model, never asked", "draft model, paused"

NUM_WORDS = 120
LONG_MATCH = 20  # tokens of the match that the drafter pretends to have


@dataclass
class AlwaysWrong(Drafter):
    """Proposes, with every sign of certainty, what does not come.

    texts: prompt -> the target's own continuation.
    """

    vocab_size: int
    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> AlwaysWrongSession:
        """Look up what will come."""
        return AlwaysWrongSession(self.texts.get(tuple(prompt), []), self.vocab_size)


class AlwaysWrongSession(Session):
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
    model: nn.Module,
    tokenizer: Any,
    num_prompts: int,
    temp: float,
    settings: Settings,
    useless: nn.Module | None = None,
) -> dict[str, Result]:
    """Run all cases that share their prompts side by side, and random words after them.

    Args:
        model: the target.
        tokenizer: the target's.
        num_prompts: texts of each case.
        temp: temperature; above 0 nobody can be always wrong.
        settings: how all loops generate.
        useless: a draft model that knows nothing, see `shuffled`; None leaves its cases out.

    Returns:
        Case -> result of our loop, with speeds relative to plain decoding's.
    """
    texts = tasks_of(tokenizer, [p.text for p in read_prompts()[:num_prompts]], "prompts")
    reference = plain(model, temp)
    contenders = [ours(model, None, NO_DRAFTER, "", temp)]
    if useless is not None:
        drafter, tuning = ModelDrafter(useless), Tuning.for_model(model)
        paused = ours(model, drafter, PAUSED, "auto", temp, tuning_for_text=lambda: tuning)
        time_generation(paused, texts[0], settings, settings.repeats)  # until it is paused
        contenders += [ours(model, drafter, NEVER_ASKED, "0", temp), paused]
    if temp == 0:
        wrong = AlwaysWrong(vocab_size_of(model))
        longer = replace(settings, max_tokens=settings.max_tokens + 1)
        for task in texts:
            wrong.texts[tuple(task.prompt)] = time_generation(reference, task, longer, 0).tokens
        contenders.append(ours(model, wrong, ALWAYS_WRONG, "auto", temp))
    results = _results(texts, [reference, *contenders], settings)
    words = tasks_of(tokenizer, random_words(tokenizer, num_prompts), "random words")
    look_ups = ours(model, PromptLookupDrafter(), RANDOM_WORDS, "auto", temp)
    return results | _results(words, [reference, look_ups], settings)


def _results(
    tasks: Sequence[RecordedText], contenders: Sequence[Contender], settings: Settings
) -> dict[str, Result]:
    ways = [unended(contender) for contender in contenders]
    samples = list(run_interleaved(tasks, ways, settings))
    results = summarise(samples, [], greedy=False)
    return {r.drafter: r for r in results if r.category == ALL and r.drafter != PLAIN}


def unended(contender: Contender) -> Contender:
    """The same, timed in the middle of a text.

    At the last token that is wanted some loops have a pass under way that nobody needs, and others
    do not; with one token more to come all have.
    """

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        return contender.start(prompt, max_tokens + 1, seed)

    return replace(contender, start=start)


def shuffled(model: nn.Module) -> nn.Module:
    """The same model with the numbers of each weight in another order: it knows nothing more."""
    key = mx.random.key(0)
    weights = tree_map(
        lambda w: mx.random.permutation(w.flatten(), key=key).reshape(w.shape), model.parameters()
    )
    model.update(weights)
    return model


def tasks_of(tokenizer: Any, texts: Sequence[str], category: str) -> list[RecordedText]:
    """User messages through the chat template; `category` is what results call them."""
    return [
        RecordedText(f"{category}/{i}", category, encode_chat(tokenizer, text))
        for i, text in enumerate(texts)
    ]


def random_words(tokenizer: Any, num_prompts: int) -> list[str]:
    """Lists of different words out of the tokenizer's vocabulary, to be continued with others.

    A vocabulary of bytes has no words, and lists of its characters take their place.
    """
    rng = random.Random(0)
    ids = range(len(tokenizer.get_vocab()))
    pieces = {tokenizer.decode([i]).strip() for i in rng.sample(ids, min(len(ids), 8192))}
    letters = sorted(piece for piece in pieces if piece.isalpha())
    words = [piece for piece in letters if len(piece) > 3] or letters
    lists = [" ".join(rng.sample(words, min(len(words), NUM_WORDS))) for _ in range(num_prompts)]
    return [f"{words}\n\nGo on with other random words." for words in lists]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worst_case")
    add = parser.add_argument
    add("--model", help="model folder or Hugging Face name (default: the lab's target)")
    add("--num-prompts", type=int, default=4, help="(%(default)s)")
    add("--max-tokens", type=int, default=192, help="of each (%(default)s)")
    add("--repeats", type=int, default=5, help="(%(default)s)")
    add("--temp", type=float, default=0.0, help="temperature (%(default)s)")
    args = parser.parse_args(arguments)
    useless = None
    if args.model:
        model, tokenizer = load_model(args.model)
    else:
        model, draft, tokenizer = lab.load_pair()
        useless = shuffled(draft)
    settings = Settings(args.max_tokens, args.repeats)
    rows = [
        [
            name,
            or_dash(r.ratio, 3),
            f"{or_dash(r.ratio_low, 3)} to {or_dash(r.ratio_high, 3)}",
            f"{r.drafted}",
            f"{r.tokens_per_pass:.2f}",
        ]
        for name, r in measure(
            model, tokenizer, args.num_prompts, args.temp, settings, useless
        ).items()
    ]
    header = ["case", "of plain's speed", "95%", "drafted", "tokens per pass"]
    print(markdown_table(header, rows, num_text_columns=1))


if __name__ == "__main__":
    main()
