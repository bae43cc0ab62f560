"""Acceptance rules: from the target's law and a draft to how many tokens are kept and what follows.

Pure functions over arrays. They run on MLX in float32 inside the loop and on NumPy in float64 in
the exact tests: one body of code, whichever library its arrays come from. They know no model and
no cache. In the maths p is the target's law and q the law that the draft was drawn from; in the
code they are `target_probs` [K+1, V] and `draft_probs` [K, V].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.errors import UnknownNameError
from specdec_mlx.types import AcceptanceRule, Verdict

Array = Any  # an mx.array or a np.ndarray


def acceptance_probability(target_probs: Array, draft_probs: Array, tokens: Array) -> Array:
    r"""Chance that each draft token is kept, $\min(1, p(x) / q(x))$; [K].

    target_probs, draft_probs: [K, V] probabilities; tokens: [K] (Leviathan et al. 2023,
    Algorithm 1). A token with q(x) = 0 cannot have been drawn; its chance is 0 where p(x) = 0 and
    1 elsewhere.
    """
    return _capped_ratio(_at(target_probs, tokens), _at(draft_probs, tokens))


def residual(target_probs: Array, draft_probs: Array, weight: Array = 1.0) -> Array:
    r"""Law of the token that replaces a rejected one, $\mathrm{norm}(\max(0, w p - q))$; [..., V].

    p is the target, q the draft, and w = 1 but for block verification (Leviathan et al. 2023,
    Algorithm 1). Where p = q the excess has no mass, rejection cannot happen, and p itself is
    returned.
    """
    xp = _library(target_probs)
    excess = xp.maximum(weight * target_probs - draft_probs, 0)
    mass = xp.sum(excess, axis=-1, keepdims=True)
    return xp.where(mass > 0, excess / xp.where(mass > 0, mass, 1), target_probs)


def point_mass(tokens: Array, like: Array) -> Array:
    """Law [K, V] of a drafter that would always propose `tokens` [K]; dtype and V as in `like`."""
    xp = _library(like)
    hits = xp.arange(like.shape[-1])[None, :] == tokens[:, None]
    return xp.where(hits, xp.ones_like(like[:1]), xp.zeros_like(like[:1]))


def match(target_tokens: Array, draft_tokens: Array) -> Verdict:
    """Keep the draft as far as it equals the target's own tokens; the next token is the target's.

    target_tokens: [K+1], one draw of the target per position; draft_tokens: [K]. Lossless for any
    way of drawing them, since what is emitted is always the target's own draw.
    """
    num_accepted = leading_run(target_tokens[:-1] == draft_tokens)
    return Verdict(num_accepted, _row(target_tokens, num_accepted))


def decide(
    rule: AcceptanceRule,
    target_probs: mx.array,
    draft_tokens: mx.array,
    draft_probs: mx.array | None,
    uniform: mx.array,
    gumbel: mx.array,
) -> Verdict:
    """Verdict of a rule, given its randomness: `uniform` [K] in [0, 1), `gumbel` [V] standard."""
    if draft_probs is None:
        draft_probs = point_mass(draft_tokens, target_probs)
    coins = uniform < rule.accept_probs(target_probs, draft_tokens, draft_probs)
    num_accepted = rule.num_accepted(coins)
    law = rule.next_probs(target_probs, draft_tokens, draft_probs, num_accepted)
    return Verdict(num_accepted, mx.argmax(mx.log(law) + gumbel))


@dataclass(frozen=True)
class Rejection:
    """Token by token (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

    name: str = "rejection"

    def accept_probs(self, target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
        """min(1, p/q) at each draft token; [K]."""
        return acceptance_probability(target_probs[:-1], draft_probs, draft_tokens)

    def num_accepted(self, coins: Array) -> Array:
        """Tokens before the first tails."""
        return leading_run(coins)

    def next_probs(
        self, target_probs: Array, draft_tokens: Array, draft_probs: Array, num_accepted: Array
    ) -> Array:
        """Residual at the rejected position, or p after the last draft token; [V]."""
        return residual(
            _row(target_probs, num_accepted), _row(_with_zero_row(draft_probs), num_accepted)
        )


@dataclass(frozen=True)
class Block:
    r"""The draft as a whole (Sun et al. 2024, arXiv 2403.10444).

    What is kept ends at the last heads, not at the first tails: a token that fell short is saved
    by those after it. In expectation it keeps at least as many as `Rejection`, and as many at
    K = 1 and for point masses. The coins weigh $p_i = \min(1, p_{i-1} p(x_i) / q(x_i))$, $p_0 = 1$,
    the chance that at least the first i tokens are kept, given those.
    """

    name: str = "block"

    def accept_probs(self, target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
        r"""$h_i = s_i / (s_i + 1 - p_i)$, $s_i$ the mass of $\max(0, p_i p - q)$ after x_i; [K].

        Nothing is excluded after the last token: $s_K = h_K = p_K$. 0/0 means that x_i is sure to
        be kept and that p = q after it, and so is the next token; 1 is taken.
        """
        xp = _library(target_probs)
        weights = _running_weights(target_probs, draft_tokens, draft_probs)
        excess = weights[:, None] * target_probs - _with_zero_row(draft_probs)
        mass = xp.sum(xp.maximum(excess, 0), axis=-1)[1:]
        total = mass + (1 - weights[1:])
        return xp.where(total > 0, mass / xp.where(total > 0, total, 1), xp.ones_like(mass))

    def num_accepted(self, coins: Array) -> Array:
        """Tokens up to the last heads."""
        return coins.shape[0] - leading_run(_library(coins).logical_not(coins[::-1]))

    def next_probs(
        self, target_probs: Array, draft_tokens: Array, draft_probs: Array, num_accepted: Array
    ) -> Array:
        r"""$\mathrm{norm}(\max(0, p_n p - q))$, or p after the last draft token; [V]."""
        weights = _running_weights(target_probs, draft_tokens, draft_probs)
        return residual(
            _row(target_probs, num_accepted),
            _row(_with_zero_row(draft_probs), num_accepted),
            _row(weights, num_accepted),
        )


RULES: dict[str, AcceptanceRule] = {rule.name: rule for rule in (Rejection(), Block())}
MATCH = "match"
COUPLED = "coupled"
"""Match, with draft tokens drawn from the noise that the target's tokens are drawn from (Daliri et
al. 2024, arXiv 2408.07978): what is accepted follows as in `match`, and is equal far more often."""


def rule_names() -> list[str]:
    """Names that `rule=` takes."""
    return ["auto", MATCH, COUPLED, *RULES]


def check_rule_name(name: str) -> None:
    """Raise UnknownNameError unless `name` is one of `rule_names()`."""
    if name not in rule_names():
        raise UnknownNameError(f"Unknown rule {name!r}. Known: {', '.join(rule_names())}.")


def leading_run(coins: Array) -> Array:
    """How many of the leading entries of `coins` [K] are true."""
    xp = _library(coins)
    return xp.sum(xp.cumprod(coins.astype(xp.int32)))


def _library(array: Array) -> Any:
    return mx if isinstance(array, mx.array) else np


def _capped_ratio(p: Array, q: Array) -> Array:
    """min(1, p/q), with 0 for 0/0 and 1 for p/0."""
    xp = _library(p)
    return xp.where(p < q, p / xp.where(p < q, q, 1), (p > 0) * xp.ones_like(p))


def _running_weights(target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
    """p_0 ... p_K of block verification; [K+1]."""
    xp = _library(target_probs)
    p = _at(target_probs[:-1], draft_tokens)
    q = _at(draft_probs, draft_tokens)
    weights = [xp.ones_like(target_probs[0, 0])]
    for i in range(draft_tokens.shape[0]):
        weights.append(_capped_ratio(weights[-1] * p[i], q[i]))
    return xp.stack(weights)


def _at(probs: Array, tokens: Array) -> Array:
    """probs[i, tokens[i]] for each row i; [K]."""
    return _library(probs).take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def _row(array: Array, index: Array) -> Array:
    return _library(array).take(array, index, axis=0)


def _with_zero_row(probs: Array) -> Array:
    """Probabilities with a further row of zeros: after the last draft token nothing is excluded."""
    xp = _library(probs)
    return xp.concatenate([probs, xp.zeros((1, probs.shape[-1]), probs.dtype)])
