"""Block verification: the draft as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Integer

from specdec_mlx.rules.arithmetic import (
    Array,
    at,
    capped_ratio,
    leading_run,
    namespace_of,
    residual,
    row,
    with_zero_row,
)
from specdec_mlx.rules.coins import CoinRule


@dataclass(frozen=True)
class Block(CoinRule):
    r"""The draft as a whole (Sun et al. 2024, arXiv 2403.10444).

    What is kept ends at the last heads, not at the first tails: a token that fell short is saved
    by those after it. In expectation it keeps at least as many as `Rejection`, and as many at
    K = 1 and for point masses. The coins weigh $p_i = \min(1, p_{i-1} p(x_i) / q(x_i))$, $p_0 = 1$,
    the chance that at least the first i tokens are kept, given those.
    """

    name = "block"
    matches_greedy = True

    def accept_probs(
        self,
        target_probs: Float[Array, "rows vocab"],
        draft_tokens: Integer[Array, " rows-1"],
        draft_probs: Float[Array, "rows-1 vocab"],
    ) -> Float[Array, " rows-1"]:
        r"""$h_i = s_i / (s_i + 1 - p_i)$, $s_i$ the mass of $\max(0, p_i p - q)$ after x_i; [K].

        Nothing is excluded after the last token: $s_K = h_K = p_K$. 0/0 means that x_i is sure to
        be kept and that p = q after it, and so is the next token; 1 is taken.
        """
        xp = namespace_of(target_probs)
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        excess = weights[:, None] * target_probs - with_zero_row(draft_probs)
        mass = xp.sum(xp.maximum(excess, 0), axis=-1)[1:]
        total = mass + (1 - weights[1:])
        return xp.where(total > 0, mass / xp.where(total > 0, total, 1), xp.ones_like(mass))

    def num_accepted(self, coins: Bool[Array, " k"]) -> Integer[Array, ""]:
        """Tokens up to the last heads."""
        return coins.shape[0] - leading_run(namespace_of(coins).logical_not(coins[::-1]))

    def next_probs(
        self,
        target_probs: Float[Array, "rows vocab"],
        draft_tokens: Integer[Array, " rows-1"],
        draft_probs: Float[Array, "rows-1 vocab"],
        num_accepted: Array | int,
    ) -> Float[Array, " vocab"]:
        r"""$\mathrm{norm}(\max(0, p_n p - q))$, or p after the last draft token; [V]."""
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        return residual(
            row(target_probs, num_accepted),
            row(with_zero_row(draft_probs), num_accepted),
            row(weights, num_accepted),
        )


def running_weights(
    target_probs: Float[Array, "rows vocab"],
    draft_tokens: Integer[Array, " rows-1"],
    draft_probs: Float[Array, "rows-1 vocab"],
) -> Float[Array, " rows"]:
    """p_0 ... p_K of `Block`; [K+1]."""
    xp = namespace_of(target_probs)
    p = at(target_probs[:-1], draft_tokens)
    q = at(draft_probs, draft_tokens)
    weights = [xp.ones_like(target_probs[0, 0])]
    for i in range(draft_tokens.shape[0]):
        weights.append(capped_ratio(weights[-1] * p[i], q[i]))
    return xp.stack(weights)
