"""What every rule would have accepted, from one run and without changing its text.

Two questions are answered, from the distributions p and q at the positions of each draft:

- *By position.* At position i of the drafts whose first i tokens were accepted in reality, so that
  the text before is one that was written: with what chance would each rule accept a token drawn
  there? That is sum min(p, q) for rejection, the formula of Daliri et al. for shared noise, sum p q
  for match, and p(argmax q) for a drafter that proposes its likeliest token. Beside it stands what
  was observed. Under rejection, coupled and match the two agree in expectation, each with its own
  column. (For block verification a single position has no chance of its own.)
- *By round.* How many draft tokens would each rule have kept on average, starting from the same
  text? All K tokens of a draft were drawn from q and scored by the target, the rejected ones too,
  so with a_j = a(x_j) the chance that a rule keeps x_j, the product a_1 .. a_(i-1) times the chance
  at position i is an unbiased estimate of the chance that i tokens are kept. a(x) is min(1, p/q)
  for rejection, p(x) for match, c(x)/q(x) for shared noise, c(x) the chance that both draw x, and
  p(x)/q(x) at x = argmax q, else 0, for the greedy draft, whose estimate is therefore the noisiest.
  Block verification keeps i tokens or more of a draft with chance w_i = min(1, w_(i-1) p/q), w_0 =
  1 (Sun et al. 2024), and so in its place stands the mean over the token at position i, the sum of
  min(w_(i-1) p, q): never less than rejection's, draft by draft.

The rounds are those that the run had: another rule would have begun its rounds elsewhere in the
text. Point-mass drafts count as what they are, q a one-hot, where all rules accept alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from specdec_mlx.rules.arithmetic import (
    Array,
    acceptance_probability,
    at,
    namespace_of,
)
from specdec_mlx.rules.block import running_weights
from specdec_mlx.stats.estimates import Estimate, Mean, wilson

BY_TOKEN = ("rejection", "coupled", "match", "greedy draft")
"""Rules that decide token by token, in the order of the columns below."""
BY_ROUND = ("block", *BY_TOKEN)
COLUMNS = 2 * len(BY_TOKEN) + 1


def chances(target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
    """All that the account needs of a round.

    Args:
        target_probs: [K+1, V] the target's probabilities at the draft's positions and after it.
        draft_tokens: [K] the draft.
        draft_probs: [K, V] the probabilities that each draft token was drawn from.

    Returns:
        [K, COLUMNS]: the chance to accept a token at this position by each rule of `BY_TOKEN`; the
        chance to accept this very token by each; and the chance that block verification keeps this
        position, whichever token is drawn.
    """
    xp = namespace_of(target_probs)
    p, q = target_probs[:-1], draft_probs
    own_p, own_q = at(p, draft_tokens), at(q, draft_tokens)
    both = coupled_probs(p, q)
    best = xp.argmax(q, axis=-1)
    ratio = own_p / xp.where(own_q > 0, own_q, 1)
    weights = running_weights(target_probs, draft_tokens, draft_probs)[:-1, None]
    columns = [
        xp.sum(xp.minimum(p, q), axis=-1),
        xp.sum(both, axis=-1),
        xp.sum(p * q, axis=-1),
        at(p, best),
        acceptance_probability(p, q, draft_tokens),
        at(both, draft_tokens) / xp.where(own_q > 0, own_q, 1),
        own_p,
        xp.where(best == draft_tokens, ratio, 0),
        xp.sum(xp.minimum(weights * p, q), axis=-1),
    ]
    return xp.stack(columns, axis=-1)


def coupled_probs(target_probs: Array, draft_probs: Array) -> Array:
    r"""Chance [..., V] that each token is drawn from both p and q with the same Gumbel noise.

    $1 / \sum_y \max(p_y/p_x, q_y/q_x)$ (Daliri et al. 2024). Sorted by q/p, the maximum is the
    first of the two up to x and the second after it, so that two running sums do for all x.
    """
    xp = namespace_of(target_probs)
    p, q = target_probs, draft_probs
    order = xp.argsort(xp.where(p > 0, q / xp.where(p > 0, p, 1), np.inf), axis=-1)
    p, q = (xp.take_along_axis(x, order, axis=-1) for x in (p, q))
    up_to, from_on = xp.cumsum(p, axis=-1), xp.cumsum(q[..., ::-1], axis=-1)[..., ::-1]
    shared = (p > 0) & (q > 0)
    total = up_to / xp.where(shared, p, 1) + from_on / xp.where(shared, q, 1) - 1
    sorted_probs = xp.where(shared, 1 / xp.where(shared, total, 1), 0)
    return xp.take_along_axis(sorted_probs, xp.argsort(order, axis=-1), axis=-1)


class Position(NamedTuple):
    """Position i of the drafts, where the first i tokens were accepted.

    reached: drafts that got there. observed: share of them whose token i was accepted as well
    (Wilson's interval). expected: chance to accept, by rule, as a mean over the same drafts.
    """

    reached: int
    observed: Estimate
    expected: dict[str, Estimate]


@dataclass
class Counterfactual:
    """Account of what every rule would have accepted; see the module for what is estimated."""

    _rounds: Mean = field(default_factory=Mean)
    _observed: Mean = field(default_factory=Mean)
    _positions: list[Mean] = field(default_factory=list)
    _accepted: list[int] = field(default_factory=list)

    def record(self, table: Float[np.ndarray, "k columns"], num_accepted: int) -> None:
        """Add a round: its `chances` [K, COLUMNS], and how many tokens were accepted."""
        table = np.asarray(table, np.float64)
        count = len(BY_TOKEN)
        for i, row in enumerate(table[: num_accepted + 1]):
            if i == len(self._positions):
                self._positions.append(Mean())
                self._accepted.append(0)
            self._positions[i].add(row[:count])
            self._accepted[i] += i < num_accepted
        self._rounds.add(np.array([table[:, -1].sum(), *kept_by_token(table)]))
        self._observed.add(float(num_accepted))

    def merge(self, other: Counterfactual) -> None:
        """Add all rounds of another account, such as another text's."""
        self._rounds.merge(other._rounds)
        self._observed.merge(other._observed)
        for i, (mean, accepted) in enumerate(zip(other._positions, other._accepted, strict=True)):
            if i == len(self._positions):
                self._positions.append(Mean())
                self._accepted.append(0)
            self._positions[i].merge(mean)
            self._accepted[i] += accepted

    @property
    def rounds(self) -> int:
        """Rounds that had a draft."""
        return self._rounds.count

    @property
    def observed(self) -> Estimate | None:
        """Draft tokens that were kept in a round; None before the first."""
        return self._observed.estimates()[0] if self.rounds else None

    @property
    def accepted_per_round(self) -> dict[str, Estimate]:
        """Draft tokens that each rule would keep in a round."""
        if not self.rounds:
            return {}
        return dict(zip(BY_ROUND, self._rounds.estimates(), strict=True))

    @property
    def positions(self) -> list[Position]:
        """[i] what was expected and observed at position i."""
        return [
            Position(
                mean.count,
                wilson(accepted, mean.count),
                dict(zip(BY_TOKEN, mean.estimates(), strict=True)),
            )
            for mean, accepted in zip(self._positions, self._accepted, strict=True)
        ]

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON: each estimate as [mean, low, high]."""
        return {
            "rounds": self.rounds,
            "observed": self.observed,
            "accepted_per_round": self.accepted_per_round,
            "positions": [position._asdict() for position in self.positions],
        }

    def __str__(self) -> str:
        """Two tables: by round, and by position."""
        if self.observed is None:
            return "No drafts."
        lines = [f"draft tokens kept in a round, {self.rounds} rounds"]
        lines += [f"  {'observed':<13}{self.observed}"]
        lines += [f"  {name:<13}{e}" for name, e in self.accepted_per_round.items()]
        header = "".join(f"{name:>14}" for name in BY_TOKEN)
        lines += [
            "chance to accept where all before was accepted",
            f"  at reached{header}  observed",
        ]
        for i, position in enumerate(self.positions):
            means = "".join(f"{e.mean:>14.3f}" for e in position.expected.values())
            lines.append(f"  {i:>2}{position.reached:>8}{means}  {position.observed}")
        return "\n".join(lines)


def kept_by_token(table: np.ndarray) -> np.ndarray:
    """Unbiased estimates of how many tokens of a round the rules of `BY_TOKEN` keep; [4]."""
    count = len(BY_TOKEN)
    before = np.cumprod(table[:-1, count : 2 * count], axis=0)
    reach = np.vstack([np.ones((1, count)), before])
    kept: np.ndarray = (reach * table[:, :count]).sum(axis=0)
    return kept
