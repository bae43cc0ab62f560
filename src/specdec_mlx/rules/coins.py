"""Rules by coins: the base for whatever decides by a chance at each draft token."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Bool, Integer

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

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Decision:
        """Toss the coins and draw the token after; see `AcceptanceRule.decide`."""
        if target.greedy and self.matches_greedy:
            return Agreement(target.tokens)
        p, tokens = target.probs, to_ids(draft.tokens)
        q = point_mass(tokens, p) if draft.probs is None else draft.probs
        coins = randomness.uniform(len(tokens)) < self.accept_probs(p, tokens, q)
        num_accepted = self.num_accepted(coins)
        after = self.next_probs(p, tokens, q, num_accepted)
        return Verdict(num_accepted, draw(after, randomness.gumbel(after.shape[-1])))
