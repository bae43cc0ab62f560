"""How far a drafter's distribution is from the target's, as a loss to train it with.

DistillSpec (Zhou et al. 2023, arXiv 2310.08461, section 3) compares them for draft models. In all
of them p is the target's and q the drafter's distribution, both as log-probabilities over the same
tokens; the target's is a constant.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
from jaxtyping import Float

Divergence = Callable[[mx.array, mx.array], mx.array]
"""Log-probabilities [..., V] of p and of q -> a number [...] for each position."""


def forward_kl(
    target_logprobs: Float[mx.array, "*n vocab"], draft_logprobs: Float[mx.array, "*n vocab"]
) -> Float[mx.array, "*n"]:
    """KL(p || q), in nats: q has to cover all that p does. Teaches fast, and is the default."""
    difference = target_logprobs - draft_logprobs
    return mx.sum(_times(mx.exp(target_logprobs), difference), axis=-1)


def reverse_kl(
    target_logprobs: Float[mx.array, "*n vocab"], draft_logprobs: Float[mx.array, "*n vocab"]
) -> Float[mx.array, "*n"]:
    """KL(q || p), in nats: q keeps to the likeliest of what p does."""
    difference = draft_logprobs - target_logprobs
    return mx.sum(_times(mx.exp(draft_logprobs), difference), axis=-1)


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
    "reverse-kl": reverse_kl,
    "tv": total_variation,
}
"""Name -> loss."""


def parse_loss(text: str) -> str:
    """The names of losses with `+` between them, as they are; raises ValueError."""
    unknown = [name for name in text.split("+") if name not in LOSSES]
    if unknown:
        raise ValueError(f"loss {unknown[0]!r}: expected {', '.join(LOSSES)}, or a sum with '+'.")
    return text


def divergence(text: str) -> Divergence:
    """The loss of a name, or the sum of several as in "forward-kl+tv"; raises ValueError."""
    parts = [LOSSES[name] for name in parse_loss(text).split("+")]

    def total(target_logprobs: mx.array, draft_logprobs: mx.array) -> mx.array:
        each = [part(target_logprobs, draft_logprobs) for part in parts]
        return mx.sum(mx.stack(each), axis=0)

    return total
