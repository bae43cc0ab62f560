"""How far a drafter's distribution is from the target's, as a loss to train it with.

DistillSpec (Zhou et al. 2023, arXiv 2310.08461, section 3) compares them for draft models. In all
of them p is the target's and q the drafter's distribution, both as log-probabilities over the same
tokens; the target's is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from jaxtyping import Float

from specdec_mlx.training.features import Batch
from specdec_mlx.training.trainees import Trainee

DECAY = 0.8
"""Weight of a draft's next position, of that of the one before: later tokens matter less often."""

Divergence = Callable[[mx.array, mx.array], mx.array]
"""Log-probabilities [..., V] of p and of q -> a number [...] for each position."""


def forward_kl(
    target_logprobs: Float[mx.array, "*n vocab"], draft_logprobs: Float[mx.array, "*n vocab"]
) -> Float[mx.array, "*n"]:
    """KL(p || q), in nats: q has to cover all that p does. Teaches fast, and is the default."""
    difference = target_logprobs - draft_logprobs
    return mx.sum(_times(mx.exp(target_logprobs), difference), axis=-1)


def total_variation(
    target_logprobs: Float[mx.array, "*n vocab"], draft_logprobs: Float[mx.array, "*n vocab"]
) -> Float[mx.array, "*n"]:
    """Half of sum(|p - q|): the chance of a rejection (Leviathan et al. 2023, corollary 3.6)."""
    difference = mx.exp(target_logprobs) - mx.exp(draft_logprobs)
    return 0.5 * mx.sum(mx.abs(difference), axis=-1)


def _times(probs: mx.array, logs: mx.array) -> mx.array:
    """probs * logs, 0 where the probability is 0, in the gradients too."""
    return probs * mx.where(probs > 0, logs, 0)


LOSSES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "tv": total_variation,
    "forward-kl+tv": lambda p, q: forward_kl(p, q) + total_variation(p, q),
}
"""Name -> loss."""


def loss_of(trainee: Trainee, batch: Batch, compare: Divergence) -> mx.array:
    """Mean divergence of each draft position, weighted by DECAY, where the next token is learnt.

    Logits, many times as wide as the states that they come from, are made for a few rows at a time,
    and made once more for the gradients instead of being kept.
    """
    row, place = batch.counted.nonzero()
    assert batch.features.head_input is not None
    given = [batch.features.head_input[mx.array(row), mx.array(place)]]
    shares = []
    for states, first in trainee.predictions(batch):
        index = np.clip(place - first, 0, states.shape[1] - 1)
        given.append(states[mx.array(row), mx.array(index)])
        inside = index == place - first
        shares.append(inside / max(1, inside.sum()))
    decay = DECAY ** np.arange(len(shares))
    weights = mx.array(np.stack(shares) * (decay / decay.sum())[:, None], mx.float32)
    head = trainee.head_parameters()

    @mx.checkpoint
    def part(head: Any, given: list[mx.array], weights: mx.array) -> mx.array:
        trainee.module.update(head)
        target = mx.stop_gradient(trainee.target_logits(given[0]).astype(mx.float32))
        total = mx.array(0.0)
        for states, weight in zip(given[1:], weights, strict=True):
            logits = trainee.logits(states).astype(mx.float32)
            size = min(logits.shape[-1], target.shape[-1])
            each = compare(nn.log_softmax(target[:, :size]), nn.log_softmax(logits[:, :size]))
            total += mx.sum(weight * each)
        return total

    total = mx.array(0.0)
    for start in range(0, len(row), trainee.rows_at_once):
        rows = slice(start, start + trainee.rows_at_once)
        total += part(head, [x[rows] for x in given], weights[:, rows])
    trainee.module.update(head)
    return total
