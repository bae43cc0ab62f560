"""Losses: how far a drafter's q is from the target's p (DistillSpec, Zhou et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from jaxtyping import Float
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from specdec_mlx.training.features import Batch
from specdec_mlx.training.trainees import Trainee

DECAY = 0.8
"""Weight of a draft's position relative to the one before: later tokens matter less often."""

Divergence = Callable[[mx.array, mx.array], mx.array]
"""Log-probabilities [..., V] of p and of q -> a number [...] for each position."""


def forward_kl(
    target_logprobs: Float[mx.array, "*n vocab"], draft_logprobs: Float[mx.array, "*n vocab"]
) -> Float[mx.array, "*n"]:
    """KL(p || q), in nats: q has to cover all that p does. Teaches fast, and is the default."""
    probs = mx.exp(target_logprobs)
    logs = mx.where(probs > 0, target_logprobs - draft_logprobs, 0)  # finite gradients too
    return mx.sum(probs * logs, axis=-1)


def total_variation(
    target_logprobs: Float[mx.array, "*n vocab"], draft_logprobs: Float[mx.array, "*n vocab"]
) -> Float[mx.array, "*n"]:
    """Half of sum(|p - q|): the chance of a rejection (Leviathan et al. 2023, corollary 3.6)."""
    difference = mx.exp(target_logprobs) - mx.exp(draft_logprobs)
    return 0.5 * mx.sum(mx.abs(difference), axis=-1)


LOSSES: dict[str, Divergence] = {
    "forward-kl": forward_kl,
    "tv": total_variation,
    "forward-kl+tv": lambda p, q: forward_kl(p, q) + total_variation(p, q),
}
"""Name -> loss."""


def loss_and_gradients(trainee: Trainee, batch: Batch, compare: Divergence) -> tuple[Any, Any]:
    """Mean divergence of each draft position, weighted by DECAY, and its gradients."""
    module, own = trainee.module, trainee.module.trainable_parameters()
    head = {name: own[name] for name in trainee.head_names if name in own}
    states, inside = zip(*drafted(trainee, batch), strict=True)
    decay = DECAY ** np.arange(len(states))
    shares = [x / max(1, x.sum()) * d / decay.sum() for x, d in zip(inside, decay, strict=True)]
    assert batch.features.head_input is not None
    read = batch.features.head_input[tuple(map(mx.array, batch.counted.nonzero()))]
    slopes: list[list[mx.array]] = [[] for _ in states]
    total, of_head = mx.array(0.0), tree_map(mx.zeros_like, head)
    mx.eval(states, read)

    def loss_of(given: Any, target: mx.array, weights: mx.array) -> mx.array:
        module.update(given["head"])
        logits = trainee.logits(given["states"]).astype(mx.float32)
        size = min(logits.shape[-1], target.shape[-1])
        each = compare(nn.log_softmax(target[:, :size]), nn.log_softmax(logits[:, :size]))
        return mx.sum(weights * each)

    for start in range(0, len(read), trainee.rows_at_once):
        part = slice(start, start + trainee.rows_at_once)
        target = trainee.target_logits(read[part]).astype(mx.float32)
        for x, share, slopes_of_position in zip(states, shares, slopes, strict=True):
            given, weights = {"states": x[part], "head": head}, mx.array(share[part], mx.float32)
            value, slope = mx.value_and_grad(loss_of)(given, target, weights)
            of_head = tree_map(mx.add, of_head, slope["head"])
            total += value
            slopes_of_position.append(slope["states"])
            mx.eval(total, slope["states"], of_head)
    module.update(head)

    def rest() -> mx.array:
        rows = (x for x, _ in drafted(trainee, batch))
        each = [mx.sum(mx.concatenate(s) * x) for s, x in zip(slopes, rows, strict=True)]
        return mx.sum(mx.stack(each))

    gradients = dict(tree_flatten(nn.value_and_grad(module, rest)()[1]))
    gradients |= {name: gradients[name] + slope for name, slope in tree_flatten(of_head)}
    return total, tree_unflatten(list(gradients.items()))


def drafted(trainee: Trainee, batch: Batch) -> Iterator[tuple[mx.array, np.ndarray]]:
    """For each draft position: states [n, D] at the n counted places, and which of them exist."""
    row, place = batch.counted.nonzero()
    for states, first in trainee.predictions(batch):
        index = np.clip(place - first, 0, states.shape[1] - 1)
        yield states[mx.array(row), mx.array(index)], index == place - first
