"""The joint distribution of a generation's first three tokens, known exactly and counted.

By single-token passes of a tiny random Llama over all 6 x 6 x 6 texts, and by generations from
fixed seeds: the whole path, in MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import specdec_mlx as sd
import tiny
from specdec_mlx.lab.proof.chi_square import ChiSquare
from specdec_mlx.lab.proof.subject import Remembered, Subject, probabilities
from specdec_mlx.loop import SHORT
from specdec_mlx.rules import make_rule

V = 6
LENGTH = 3
NUM_DRAFT = 2  # so that the bonus token is among the three
PROMPT = [1, 4, 1]  # look-ups find 4, 1, 4

SETTINGS = {
    "temperature 1": sd.Sampling(temp=1.0),
    "top-p": sd.Sampling(temp=0.8, top_p=0.8),
    "top-k": sd.Sampling(temp=1.2, top_k=3),
    "min-p": sd.Sampling(temp=0.8, min_p=0.2),
}

TARGET, DRAFT = 10, 6
"""Seeds of two models: of a few dozen pairs, one for which wrong rules show soon."""


@cache
def tiny_llama(seed: int) -> nn.Module:
    """One layer, six tokens."""
    sizes = {"vocab_size": V, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    return tiny.build("llama", seed=seed, **sizes)


@cache
def joint_law(sampling: sd.Sampling) -> np.ndarray:
    """Exact law [V, V, V] of the target's first three tokens."""
    memory, joint = Remembered(tiny_llama(TARGET), PROMPT), np.ones(())
    for length in range(LENGTH):
        logits = [memory.after([*PROMPT, *text]) for text in np.ndindex((V,) * length)]
        laws = [probabilities(sampling.log_distribution(row)) for row in logits]
        joint = joint[..., None] * np.reshape(laws, (V,) * (length + 1))
    return joint


@dataclass
class Count:
    """Texts [V, V, V] that were generated, and how many draft tokens were kept and not."""

    texts: np.ndarray
    accepted: int = 0
    rejected: int = 0


def the_prompts_last(tokens: mx.array, logits: mx.array) -> mx.array:
    """Makes the first token certain; a logits processor."""
    if tokens.shape[0] >= len(PROMPT):
        return logits
    return mx.where(mx.arange(V) == PROMPT[-1], 0.0, -mx.inf)[None]


the_prompts_last.pure = True  # type: ignore[attr-defined]


def generate(
    model: nn.Module, drafter: Any, sampling: sd.Sampling, runs: int, rule: Any = "auto"
) -> Count:
    """Three tokens from each of the seeds 0 ... runs - 1, behind one that is certain.

    Of longer texts: those of a few tokens are drafted from the certain one on.
    "auto" is what it is for callers without a seed.
    """
    subject = Subject(model, drafter, sampling, make_rule(rule), [], V, NUM_DRAFT)
    options: dict[str, Any] = {"sampler": sampling, "logits_processors": [the_prompts_last]}
    count = Count(np.zeros((V,) * LENGTH))
    for seed in range(runs):
        text = replace(subject, seed=seed)
        items = text.text(PROMPT[:-1], 1 + LENGTH, room=SHORT - LENGTH, **options)
        assert items[0].token == PROMPT[-1]
        count.texts[tuple(item.token for item in items[1:])] += 1
        count.accepted += items[-1].stats.accepted
        count.rejected += items[-1].stats.drafted - items[-1].stats.accepted
    return count


def p_value(seen: np.ndarray, law: np.ndarray) -> float:
    """Chance of a chi-square as large as this under the law."""
    return ChiSquare.of(seen.ravel(), law.ravel() * seen.sum()).p_value
