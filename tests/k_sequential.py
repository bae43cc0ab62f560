"""SpecTr's k-sequential selection, a rule for trees that multi-round is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Integer

from specdec_mlx.rules import Array, Law, Rejection, acceptance_probability, namespace_of, residual
from specdec_mlx.trees.tree_rules import MultiRound

HALVINGS = 20  # of the interval of the factor, which is then at most 3e-6 C too large, and exact


@dataclass(frozen=True)
class KSequential(MultiRound, Rejection):
    r"""SpecTr's k-sequential selection (Sun et al. 2023, arXiv 2310.15141, algorithm 3).

    C independent draws from one distribution are each kept with chance $\min(1, p(x) / (\rho
    q(x)))$, all against the same p. With $\beta$ the chance that one draw is kept, $\rho$ is the
    least factor with $1 - (1 - \beta)^C \le \rho \beta$. Siblings whose rows differ go to
    `MultiRound`.
    """

    name = "k-sequential"

    def at_node(
        self,
        target_probs: Law,
        tokens: Integer[Array, " c"],
        draft_probs: Float[Array, "c vocab"],
    ) -> tuple[Float[Array, " c"], Law]:
        """See `MultiRound.at_node`."""
        one_by_one = super().at_node(target_probs, tokens, draft_probs)
        count = tokens.shape[0]
        if count == 1:
            return one_by_one
        xp, p, q = namespace_of(target_probs), target_probs, draft_probs[0]
        factor = _least_factor(p, q, count)
        one_try = xp.minimum(q, p / factor)
        beta = xp.sum(one_try)
        tries = xp.where(beta > 0, (1 - (1 - beta) ** count) / xp.where(beta > 0, beta, 1), count)
        chances = acceptance_probability(xp.stack([p] * count), factor * draft_probs, tokens)
        together = chances, residual(p, tries * one_try)
        is_one = xp.all(draft_probs == q)
        return tuple(xp.where(is_one, a, b) for a, b in zip(together, one_by_one, strict=True))


def _least_factor(p: Any, q: Any, count: int) -> Any:
    r"""The least $\rho$ in [1, C] of `KSequential`, from above, by halving the interval."""
    xp = namespace_of(p)
    low, high = xp.ones_like(p[0]), count * xp.ones_like(p[0])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        beta = xp.sum(xp.minimum(q, p / middle))
        is_enough = 1 - (1 - beta) ** count <= middle * beta
        low, high = xp.where(is_enough, low, middle), xp.where(is_enough, middle, high)
    return high
