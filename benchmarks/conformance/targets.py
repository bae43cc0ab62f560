"""The tiny targets of the questions, and plain decoding with mlx-lm as the reference."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_sampler

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import tiny

VOCAB = 6
"""Tokens of a target. With few tokens, n-grams recur in any text, so that look-ups always draft."""

PLAIN, WINDOWED, HYBRID = "qwen3", "gemma3_text", "qwen3_5"
"""Architectures: key-value caches, sliding windows of 16 positions, and gated delta."""

Processor = Callable[[mx.array, mx.array], mx.array]


@dataclass(frozen=True)
class Call:
    """One call of a package.

    Attributes:
        max_tokens: length of the text.
        temp: temperature; 0 is greedy.
        seed: of the random numbers.
        processors: logits processors as mlx-lm takes them.
        kv_bits: bits of quantized keys and values, in groups of 64.
        cache: the caller's caches, which hold the whole text afterwards.
        close_after: number of tokens after which the caller closes the generator.
    """

    max_tokens: int = 60
    temp: float = 0.0
    seed: int = 0
    processors: Sequence[Processor] = ()
    kv_bits: int | None = None
    cache: list[Any] | None = None
    close_after: int | None = None

    def with_(self, **changes: Any) -> Call:
        """The same call with other values."""
        return replace(self, **changes)


def target(name: str, seed: int = 0) -> nn.Module:
    """The architecture's tiny model with `VOCAB` tokens."""
    changes: dict[str, Any] = {"vocab_size": VOCAB}
    if name == PLAIN:
        changes["head_dim"] = 64  # a group of quantized keys has 64
    if "text_config" in tiny.CONFIGS[name]:
        changes["text_config"] = tiny.CONFIGS[name]["text_config"] | changes
    return tiny.build(name, seed=seed, **changes)


def prompt(seed: int, length: int = 96) -> list[int]:
    """Random tokens, in which most pairs and many triples recur with other continuations."""
    return [int(token) for token in np.random.default_rng(seed).integers(1, VOCAB, length)]


def plain_text(model: nn.Module, tokens: Sequence[int], call: Call) -> list[int]:
    """The reference: the text of mlx-lm's plain `generate_step` with the same options."""
    mx.random.seed(call.seed)
    steps = generate_step(
        mx.array(list(tokens)),
        model,
        max_tokens=call.max_tokens,
        sampler=make_sampler(call.temp),
        logits_processors=list(call.processors) or None,
        prompt_cache=call.cache,
        kv_bits=call.kv_bits,
        kv_group_size=64,
        quantized_kv_start=0,
    )
    return [int(token) for token, _ in steps]


def distribution(model: nn.Module, tokens: Sequence[int], length: int) -> np.ndarray:
    """Probability of every text of `length` tokens at temperature 1, [VOCAB ** length], float64."""
    chances: np.ndarray = np.ones(1)
    for depth in range(length):
        prefixes = np.indices((VOCAB,) * depth).reshape(depth, VOCAB**depth).T
        batch = np.hstack([np.tile(tokens, (len(prefixes), 1)), prefixes]).astype(np.int32)
        parts = [model(mx.array(part)) for part in np.array_split(batch, len(batch) // 256 + 1)]
        rows = [getattr(part, "logits", part)[:, -1] for part in parts]  # mlx-vlm has more
        logprobs = mx.concatenate([row - mx.logsumexp(row, -1, keepdims=True) for row in rows])
        chances = (chances[:, None] * np.exp(np.array(logprobs, np.float64))).reshape(-1)
    return np.asarray(chances / chances.sum())
