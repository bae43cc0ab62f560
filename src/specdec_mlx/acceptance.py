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
    xp = _library(target_probs)
    p = _at(target_probs, tokens)
    q = _at(draft_probs, tokens)
    return xp.where(p >= q, (p > 0) * xp.ones_like(p), p / xp.where(q > 0, q, 1))


def residual(target_probs: Array, draft_probs: Array) -> Array:
    r"""Law of the token that replaces a rejected one, $\mathrm{norm}(\max(0, p - q))$; [..., V].

    p is the target, q the draft (Leviathan et al. 2023, Algorithm 1). Where p = q the excess has
    no mass, rejection cannot happen, and p itself is returned.
    """
    xp = _library(target_probs)
    excess = xp.maximum(target_probs - draft_probs, 0)
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


RULES: dict[str, AcceptanceRule] = {"rejection": Rejection()}
MATCH = "match"


def rule_names() -> list[str]:
    """Names that `rule=` takes."""
    return ["auto", MATCH, *RULES]


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


def _at(probs: Array, tokens: Array) -> Array:
    """probs[i, tokens[i]] for each row i; [K]."""
    return _library(probs).take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def _row(array: Array, index: Array) -> Array:
    return _library(array).take(array, index, axis=0)


def _with_zero_row(probs: Array) -> Array:
    """Probabilities with a further row of zeros: after the last draft token nothing is excluded."""
    xp = _library(probs)
    return xp.concatenate([probs, xp.zeros_like(probs[:1])])
