"""The arithmetic that acceptance rules share: pure functions over distributions.

MLX in float32 inside the loop, NumPy in float64 in the exact tests. p, the target's, is
`target_probs` [K+1, V], and q, that of the draft, `draft_probs` [K, V].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from jaxtyping import Bool, Float, Integer

if TYPE_CHECKING:
    Array = Any
else:
    # of either library; shapes are checked under pytest
    Array = mx.array | np.ndarray | np.generic

Rows = Float[Array, "rows vocab"]  # [K+1, V] probabilities of the target
Ids = Integer[Array, " rows-1"]  # [K] draft tokens
# [K, V] probabilities that the draft tokens were drawn from
Drawn = Float[Array, "rows-1 vocab"]
Chances = Float[Array, " rows-1"]  # [K] chances that draft tokens are kept
Law = Float[Array, " vocab"]  # [V] distribution of the next token
SMALLEST = 1e-37  # stands for 0 in a denominator: the reciprocal is still a float32


def acceptance_probability(
    target_probs: Float[Array, "k vocab"],
    draft_probs: Float[Array, "k vocab"],
    tokens: Integer[Array, " k"],
) -> Float[Array, " k"]:
    r"""Chance that each draft token is kept, $\min(1, p(x) / q(x))$; [K].

    target_probs, draft_probs: [K, V]; tokens: [K] (Leviathan et al. 2023, Algorithm 1). Where q(x)
    = 0 it is 0 if p(x) = 0, else 1.
    """
    return capped_ratio(at(target_probs, tokens), at(draft_probs, tokens))


def residual(
    target_probs: Float[Array, "*batch vocab"],
    draft_probs: Float[Array, "*batch vocab"],
    weight: Float[Array, ""] | float = 1.0,
) -> Float[Array, "*batch vocab"]:
    r"""Distribution of the token after a rejection, $\mathrm{norm}(\max(0, w p - q))$; [..., V].

    w = 1 but for block verification (Leviathan et al. 2023, Algorithm 1). Where p = q the excess
    has no mass, rejection cannot happen, and p itself is returned.
    """
    xp = namespace_of(target_probs)
    excess = xp.maximum(weight * target_probs - draft_probs, 0)
    mass = xp.sum(excess, axis=-1, keepdims=True)
    return xp.where(mass > 0, ratio(excess, mass), target_probs)


def point_mass(
    tokens: Integer[Array, " k"], like: Float[Array, "rows vocab"]
) -> Float[Array, "k vocab"]:
    """Distribution of a drafter that would always propose `tokens`; dtype and V as in `like`."""
    xp = namespace_of(like)
    hits = xp.arange(like.shape[-1])[None, :] == tokens[:, None]
    return xp.where(hits, xp.ones_like(like[:1]), xp.zeros_like(like[:1]))


def draw(
    probs: Float[mx.array, "*batch vocab"], gumbel: Float[mx.array, " vocab"]
) -> Integer[mx.array, "*batch"]:
    """Token drawn from each distribution with standard Gumbel noise; never one without mass.

    probs: [..., V] probabilities, or what is proportional to them.
    """
    return mx.argmax(mx.log(probs) + gumbel, axis=-1)


def leading_run(coins: Bool[Array, " k"]) -> Integer[Array, ""]:
    """Number of leading entries of `coins` [K] that are true."""
    xp = namespace_of(coins)
    return xp.sum(xp.cumprod(coins.astype(xp.int32)))


def namespace_of(array: Any) -> Any:
    """The library whose functions an array goes through."""
    return mx if isinstance(array, mx.array) else np


def ratio(p: Any, q: Any) -> Any:
    """p/q, with 0 for 0/0 and a number that is far above 1 for p/0."""
    return p / namespace_of(q).maximum(q, SMALLEST)


def capped_ratio(p: Any, q: Any) -> Any:
    """min(1, p/q), with 0 for 0/0 and 1 for p/0."""
    return namespace_of(p).minimum(ratio(p, q), 1)


def log_where_positive(probs: Any) -> Any:
    """log p, with 0 for p = 0."""
    xp = namespace_of(probs)
    return xp.log(xp.where(probs > 0, probs, 1))


def at(
    probs: Float[Array, "k vocab"], tokens: Integer[Array, " k"]
) -> Float[Array, " k"]:
    """probs[i, tokens[i]] for each row i; [K]."""
    return namespace_of(probs).take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def row(array: Any, index: Any) -> Any:
    """Row `index` of an array, which may be a scalar array itself."""
    return namespace_of(array).take(array, index, axis=0)


def with_zero_row(probs: Float[Array, "k vocab"]) -> Float[Array, "k+1 vocab"]:
    """Probabilities with a further row of zeros: after the last draft token nothing is excluded."""
    xp = namespace_of(probs)
    return xp.concatenate([probs, xp.zeros((1, probs.shape[-1]), probs.dtype)])
