"""Rules by coins: the base for whatever decides by a chance at each draft token."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable

import mlx.core as mx
from jaxtyping import Bool, Float, Integer

from specdec_mlx.contracts import (
    Agreement,
    Decision,
    Draft,
    Randomness,
    TargetRows,
    Verdict,
)
from specdec_mlx.rules.arithmetic import (
    Array,
    Chances,
    Drawn,
    Ids,
    Law,
    Rows,
    draw,
    leading_run,
    point_mass,
)
from specdec_mlx.token_ids import to_ids


class CoinRule(ABC):
    """A rule for chains whose round follows from three functions of p, q and the draft.

    `accept_probs` gives the chance of each coin's heads, `num_accepted` turns the K coins into n,
    `next_probs` is the distribution of the token after; all three take NumPy arrays too, to be
    enumerated in float64. matches_greedy: with a greedy target the rule comes down to exact match,
    which is then computed, as every lossless rule does.
    """

    name: str
    matches_greedy: bool = False

    @abstractmethod
    def accept_probs(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn
    ) -> Chances:
        """Chance that the coin of each draft position shows heads; [K]."""

    def num_accepted(self, coins: Bool[Array, " k"]) -> Integer[Array, ""]:
        """How many draft tokens K coins keep; by default those before the first tails."""
        return leading_run(coins)

    @abstractmethod
    def next_probs(
        self,
        target_probs: Rows,
        draft_tokens: Ids,
        draft_probs: Drawn,
        num_accepted: Array | int,
    ) -> Law:
        """Distribution of the token that follows n kept ones; [V]."""

    def weigh(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn
    ) -> tuple[Chances, Callable[[Array | int], Law]]:
        """`accept_probs`, and what is proportional to `next_probs` of n; they may share work."""
        given = target_probs, draft_tokens, draft_probs
        return self.accept_probs(*given), functools.partial(self.next_probs, *given)

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Decision:
        """Toss the coins and draw the token after; see `AcceptanceRule.decide`."""
        if target.greedy and self.matches_greedy:
            return Agreement(target.tokens)
        return decide_by_coins(
            self, target.probs, to_ids(draft.tokens), draft.probs, randomness
        )


def decide_by_coins(
    rule: CoinRule,
    target_probs: Float[mx.array, "rows vocab"],
    draft_tokens: Integer[mx.array, " rows-1"],
    draft_probs: Float[mx.array, "rows-1 vocab"] | None,
    randomness: Randomness,
) -> Verdict:
    """Verdict of a rule on a draft of K tokens; draft_probs: None for a point mass."""
    if draft_probs is None:
        draft_probs = point_mass(draft_tokens, target_probs)
    uniform = randomness.uniform(draft_tokens.shape[0])
    accept_probs, next_weights = rule.weigh(target_probs, draft_tokens, draft_probs)
    num_accepted = rule.num_accepted(uniform < accept_probs)
    weights = next_weights(num_accepted)
    return Verdict(num_accepted, draw(weights, randomness.gumbel(weights.shape[-1])))
