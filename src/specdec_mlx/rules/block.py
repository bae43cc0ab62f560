"""Block verification: the draft as a whole."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Bool, Float, Integer

from specdec_mlx.rules.arithmetic import (
    Array,
    Chances,
    Drawn,
    Ids,
    Law,
    Rows,
    at,
    namespace_of,
    ratio,
    residual,
    row,
    with_zero_row,
)
from specdec_mlx.rules.coins import CoinRule


@dataclass(frozen=True)
class Block(CoinRule):
    r"""The draft as a whole (Sun et al. 2024, arXiv 2403.10444).

    The kept tokens end at the last heads: a token that fell short is saved by those after it. In
    expectation it keeps at least as many as `Rejection`. The coins weigh $p_i = \min(1, p_{i-1}
    p(x_i) / q(x_i))$, $p_0 = 1$, the chance that at least the first i tokens are kept, given those.
    """

    name = "block"
    matches_greedy = True

    def accept_probs(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn
    ) -> Chances:
        r"""$h_i = s_i / (s_i + 1 - p_i)$, $s_i$ the mass of $\max(0, p_i p - q)$ after x_i; [K].

        $s_K = h_K = p_K$. 0/0 means that x_i is sure to be kept and p = q after it; 1 is taken.
        """
        xp = namespace_of(target_probs)
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        excess = weights[:, None] * target_probs - with_zero_row(draft_probs)
        mass = xp.sum(xp.maximum(excess, 0), axis=-1)
        total = mass + (1 - weights)
        # a row of no distribution ends the draft
        at_end = xp.where(xp.isnan(mass), weights, 1)
        return xp.where(total > 0, ratio(mass, total), at_end)[1:]

    def num_accepted(self, coins: Bool[Array, " k"]) -> Integer[Array, ""]:
        """Tokens up to the last heads."""
        xp = namespace_of(coins)
        kept = coins * xp.arange(1, coins.shape[0] + 1)
        return xp.max(kept) if coins.shape[0] else xp.sum(kept)

    def next_probs(
        self,
        target_probs: Rows,
        draft_tokens: Ids,
        draft_probs: Drawn,
        num_accepted: Array | int,
    ) -> Law:
        r"""$\mathrm{norm}(\max(0, p_n p - q))$, or p after the last draft token; [V]."""
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        return residual(
            row(target_probs, num_accepted),
            row(with_zero_row(draft_probs), num_accepted),
            row(weights, num_accepted),
        )


def running_weights(
    target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn
) -> Float[Array, " rows"]:
    r"""p_0 ... p_K of `Block`; [K+1].

    Unrolled, $p_i$ is the smallest product of the ratios $p(x_l) / q(x_l)$ of any run of tokens
    that ends with x_i, the empty run's 1 included; a product that overflowed before a 0 is 0.
    """
    xp = namespace_of(target_probs)
    ratios = ratio(at(target_probs[:-1], draft_tokens), at(draft_probs, draft_tokens))
    ratios = xp.concatenate([xp.ones_like(target_probs[:1, 0]), ratios])
    places = xp.arange(ratios.shape[0])
    # [start, end]
    products = xp.cumprod(xp.where(places[:, None] < places, ratios, 1), axis=1)
    return xp.min(xp.where(xp.isnan(products), 0, products), axis=0)
