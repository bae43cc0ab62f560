"""Host time of a round at long context: `python -m benchmarks.host_time --context 32000`.

The target is a table of logits by token behind a real key-value cache, so that its passes cost next
to nothing and what is left of a round is the loop's own: drafting, launching, reading, handing out.

`--beside-mlx-lm` compares rounds with a draft model to rounds of mlx-lm's own loop. It counts what
stands between the reading of a verdict and the launch of the next passes. A device that computes
while Python builds graphs has nothing to do in this time.
"""

from __future__ import annotations

import argparse
import io
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models import llama
from mlx_lm.sample_utils import make_logits_processors

import specdec_mlx
from specdec_mlx import lab
from specdec_mlx.contracts import Drafter, LogitsProcessor
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.generation import stream_generate
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.loop import Token, speculate

VOCAB_SIZE = 512
BEST, OTHERS = 20.0, -20.0
"""Logits of the next token and of all others: so far apart that no penalty swaps them."""

WARM_UP_ROUNDS = 32
PENALTY = 1.1
PROMPT = [1, 2, 3]
NUM_LAYERS = (2, 28)  # 28 as Qwen3-0.6B
PACKAGES = tuple(package.__path__[0] for package in (specdec_mlx, mlx_lm))


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


def thin_model(num_layers: int, vocab_size: int = VOCAB_SIZE) -> nn.Module:
    """A thin random llama, whose passes need as much Python as the layers of a real model."""
    mx.random.seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": vocab_size}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    how = {"model_type": "llama", "num_hidden_layers": num_layers, "rms_norm_eps": 1e-5}
    model: nn.Module = llama.Model(llama.ModelArgs(**how, **sizes, **heads))
    mx.eval(model.parameters())
    return model


def our_tokens(model: nn.Module, **options: Any) -> Iterator[Any]:
    """Our tokens, where a model drafts for itself."""
    return speculate(model, PROMPT, ModelDrafter(model), probe=False, **options)


def our_text(model: nn.Module, **options: Any) -> Iterator[Any]:
    """Our text, where a model drafts for itself."""
    tokenizer = lab.load_pair().tokenizer
    return stream_generate(
        model, tokenizer, PROMPT, drafter=ModelDrafter(model), probe=False, **options
    )


def mlx_lm_tokens(model: nn.Module, **options: Any) -> Iterator[Any]:
    """mlx-lm's tokens, where a model drafts for itself."""
    tokens: Iterator[Any] = speculative_generate_step(mx.array(PROMPT), model, model, **options)
    return tokens


def mlx_lm_text(model: nn.Module, **options: Any) -> Iterator[Any]:
    """mlx-lm's text, where a model drafts for itself."""
    tokenizer = lab.load_pair().tokenizer
    text: Iterator[Any] = mlx_lm.stream_generate(
        model, tokenizer, PROMPT, draft_model=model, **options
    )
    return text


Loop = Callable[..., Iterator[Any]]

LOOPS: dict[str, tuple[Loop, Loop]] = {
    "tokens": (our_tokens, mlx_lm_tokens),
    "text": (our_text, mlx_lm_text),
}
"""Ours and mlx-lm's."""


@dataclass
class Gap:
    """Work of the host between the reading of a verdict and a launch.

    Attributes:
        seconds: in which this thread computed, without the launches in between. How long a launch
            takes follows from its operations.
        calls: of Python functions of this package and of mlx-lm, if they are counted.
        operations: of MLX in the graphs that were launched, if they are counted.
    """

    seconds: float
    calls: int = 0
    operations: int = 0


@dataclass
class GapClock:
    """Notes the gaps of each round, one for each launch.

    Attributes:
        counts: count calls and operations. This takes so long that the seconds say nothing.
    """

    counts: bool = False
    rounds: list[list[Gap]] = field(default_factory=list)
    _gap: Gap = field(default_factory=lambda: Gap(0.0))
    _since: float = 0.0

    def launches(self, arrays: Sequence[Any], launch: Callable[..., None]) -> None:
        """Note a launch, and launch."""
        self._gap.seconds += time.thread_time() - self._since
        if self.rounds:
            self._gap.operations += num_operations(arrays) if self.counts else 0
            self.rounds[-1].append(replace(self._gap))
        launch(*arrays)
        self._since = time.thread_time()

    def has_read(self) -> None:
        """Note that a verdict was read."""
        self.rounds.append([])
        self._gap, self._since = Gap(0.0), time.thread_time()

    def count_call(self, frame: Any, event: str, argument: Any) -> None:
        """Count a Python function, as `sys.setprofile` reports it."""
        self._gap.calls += event == "call" and frame.f_code.co_filename.startswith(PACKAGES)


def num_operations(arrays: Sequence[Any]) -> int:
    """Operations of MLX in the graphs of some arrays that are not computed yet."""
    dot, lists = io.StringIO(), [[one] if isinstance(one, mx.array) else one for one in arrays]
    mx.export_to_dot(dot, *(one for some in lists for one in some if isinstance(one, mx.array)))
    return dot.getvalue().count("label")


@contextmanager
def watched(clock: GapClock) -> Iterator[None]:
    """Report the launches and the readings of this block to a clock."""
    wait, launch = mx.eval, mx.async_eval

    def waiting(*arrays: Any) -> None:
        clock.launches(arrays, wait)
        clock.has_read()

    mx.eval = waiting
    mx.async_eval = lambda *arrays: clock.launches(arrays, launch)
    if clock.counts:
        sys.setprofile(clock.count_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        mx.eval, mx.async_eval = wait, launch


def gaps(
    loop: Loop, model: nn.Module, draft_length: int, num_rounds: int, *, counts: bool = False
) -> tuple[list[Gap], list[Gap]]:
    """The gaps before the first launch of a round, and before the pass that verifies.

    Args:
        loop: generates.
        model: it drafts for itself.
        draft_length: tokens a round.
        num_rounds: of the generation, after the warm-up.
        counts: count calls and operations instead of measuring seconds.
    """
    clock = GapClock(counts)
    num_tokens = (num_rounds + WARM_UP_ROUNDS) * (draft_length + 1)
    with (
        watched(clock),
        closing(
            loop(model, num_draft_tokens=draft_length, max_tokens=num_tokens)  # type: ignore[type-var]
        ) as stream,
    ):
        for _ in stream:
            pass
    # K launches draft, and one verifies. Ours waits for the verdict later, which is no launch.
    rounds = [one[: draft_length + 1] for one in clock.rounds if len(one) > draft_length]
    rounds = rounds[WARM_UP_ROUNDS:-1]
    return [one[0] for one in rounds], [one[-1] for one in rounds]


def beside_mlx_lm(draft_lengths: Sequence[int], num_rounds: int, repeats: int) -> str:
    """A table of both loops: counts, and medians of seconds that are measured in turns."""
    models = {"table": Table(256)} | {f"{n} layers": thin_model(n, 256) for n in NUM_LAYERS}
    rows = []
    for (level, loops), name, draft_length in product(LOOPS.items(), models, draft_lengths):
        how = models[name], draft_length
        found = [[gaps(loop, *how, num_rounds) for loop in loops] for _ in range(repeats)]
        counted = [gaps(loop, *how, 8, counts=True) for loop in loops]
        for i, until in enumerate(("first", "last")):
            cells = []
            for which in range(len(loops)):
                gap = counted[which][i][-1]
                seconds = [gap.seconds for turn in found for gap in turn[which][i]]
                cells.append((gap.calls, gap.operations, 1e6 * float(np.median(seconds))))
            (calls, operations, ours), (their_calls, their_operations, theirs) = cells
            rows.append(
                [
                    *(level, name, str(draft_length), until),
                    *(f"{calls} to {their_calls}", f"{operations} to {their_operations}"),
                    *(f"{ours:.0f} to {theirs:.0f}", f"{ours / theirs:.2f}"),
                ]
            )
    header = ["yields", "model", "K", "launch", "calls", "operations", "µs", "ours / mlx-lm's"]
    return markdown_table(header, rows, num_text_columns=4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print median and 95th percentile by kind, or both loops beside each other."""
    from tqdm import tqdm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=32_000, help="tokens (%(default)s)")
    parser.add_argument("--rounds", type=int, default=500, help="timed of each (%(default)s)")
    parser.add_argument(
        "--num-draft-tokens", type=int, default=4, metavar="K", help="(%(default)s)"
    )
    parser.add_argument("--beside-mlx-lm", action="store_true", help="compare with mlx-lm's loop")
    parser.add_argument("--repeats", type=int, default=6, help="of each loop (%(default)s)")
    args = parser.parse_args(arguments)
    if args.beside_mlx_lm:
        print(beside_mlx_lm((4, 8), min(args.rounds, 50), args.repeats))
        return
    rows = []
    for kind in tqdm(kinds(args.num_draft_tokens), desc="host time", file=sys.stderr):
        seconds = round_seconds(kind, args.context, args.rounds, args.num_draft_tokens)
        median, high = 1e3 * np.quantile(seconds, [0.5, 0.95])
        rows.append([kind.name, str(len(seconds)), f"{median:.3f}", f"{high:.3f}"])
    header = ["round", "rounds", "median ms", "95% ms"]
    print(f"Context: {args.context} tokens.\n\n{markdown_table(header, rows, num_text_columns=1)}")


if __name__ == "__main__":
    main()
