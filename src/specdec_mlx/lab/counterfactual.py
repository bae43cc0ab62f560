"""Tokens that every rule would have accepted, from one run and without changing its text.

Two estimates, from the distributions p and q at the positions of each draft:

- *By position*: the chance of each rule to accept a token drawn at position i, over the drafts
  whose first i tokens were accepted. It is sum min(p, q) for rejection, sum c(x) for shared noise
  (see `coupled_probs`), sum p q for match, p(argmax q) for a greedy draft.

- *By round*: with a_j the chance to keep x_j, a_1 .. a_(i-1) times the chance at position i is an
  unbiased estimate of the chance to keep i tokens. a(x) is min(1, p/q) for rejection, c(x)/q(x) for
  shared noise, p(x) for match, and p(x)/q(x) at x = argmax q, else 0, for a greedy draft. Block
  verification keeps i tokens or more with chance w_i = min(1, w_(i-1) p/q), w_0 = 1 (Sun et al.
  2024); averaged over the token at position i, that is sum min(w_(i-1) p, q).

Another rule would have begun its rounds elsewhere. For point-mass drafts q is a one-hot.

    account = Counterfactual()
    generate(model, tokenizer, prompt, draft_model=small, rule=account.counting("block"))
    print(account)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from specdec_mlx.contracts import (
    AcceptanceRule,
    Decision,
    Draft,
    Outcome,
    Randomness,
    TargetRows,
    shares_noise,
)
from specdec_mlx.lab.estimates import Estimate, mean_of, wilson
from specdec_mlx.lab.tables import markdown_table
from specdec_mlx.rules import (
    Array,
    acceptance_probability,
    at,
    make_rule,
    namespace_of,
    point_mass,
    running_weights,
)
from specdec_mlx.token_ids import to_ids

BY_TOKEN = ("rejection", "coupled", "match", "greedy draft")  # rules that decide token by token
BY_ROUND = ("block", *BY_TOKEN)
COLUMNS = 2 * len(BY_TOKEN) + 1


def chances(target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
    """Acceptance probabilities of a draft [K] with p [K+1, V] and q [K, V].

    The first columns of [K, COLUMNS] are the probability to accept a token drawn here, for each
    rule of `BY_TOKEN`. The next columns are the probability to accept this token. The last column
    is the probability that block verification keeps the position.
    """
    xp = namespace_of(target_probs)
    p, q = target_probs[:-1], draft_probs
    own_p, own_q = at(p, draft_tokens), at(q, draft_tokens)
    both = coupled_probs(p, q)
    best = xp.argmax(q, axis=-1)
    # p(x) / q(x), where a drawn token has q(x) > 0
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
    r"""Probability [..., V] that p and q with the same Gumbel noise both draw the token.

    $1 / \sum_y \max(p_y/p_x, q_y/q_x)$ (Daliri et al. 2024), by two running sums over q/p sorted.
    """
    xp = namespace_of(target_probs)
    p, q = target_probs, draft_probs
    # Sorted by q/p, max(p_y/p_x, q_y/q_x) is p_y/p_x before x and q_y/q_x from x on.
    order = xp.argsort(xp.where(p > 0, q / xp.where(p > 0, p, 1), np.inf), axis=-1)
    p, q = (xp.take_along_axis(x, order, axis=-1) for x in (p, q))
    up_to, from_on = xp.cumsum(p, axis=-1), xp.cumsum(q[..., ::-1], axis=-1)[..., ::-1]
    shared = (p > 0) & (q > 0)
    # sum_y max(p_y/p_x, q_y/q_x). Both sums contain y = x, hence - 1.
    total = up_to / xp.where(shared, p, 1) + from_on / xp.where(shared, q, 1) - 1
    sorted_probs = xp.where(shared, 1 / xp.where(shared, total, 1), 0)
    return xp.take_along_axis(sorted_probs, xp.argsort(order, axis=-1), axis=-1)


class Position(NamedTuple):
    """Acceptance at position i, over drafts whose first i tokens were accepted.

    Attributes:
        reached: number of these drafts.
        observed: share of them whose token i was accepted.
        expected: rule -> mean probability to accept.
    """

    reached: int
    observed: Estimate
    expected: dict[str, Estimate]


@dataclass
class Counterfactual:
    """Account of the tokens that every rule would have accepted. The module has the formulas."""

    _tables: list[np.ndarray] = field(default_factory=list)
    _accepted: list[int] = field(default_factory=list)

    def counting(self, rule: str | AcceptanceRule = "auto", *, is_seeded: bool = False) -> Counting:
        """A rule that decides like another rule, and adds each round to this account.

        Args:
            rule: a rule, or its name with options. It must work on chains.
            is_seeded: True if the generation gets a seed. Then "auto" is the coupled rule.
        """
        return Counting(make_rule(rule, is_seeded=is_seeded), self)

    def record(self, table: Float[np.ndarray, "k columns"], num_accepted: int) -> None:
        """Add a round with its `chances` and the number of accepted tokens."""
        self._tables.append(np.asarray(table, np.float64))
        self._accepted.append(num_accepted)

    @property
    def rounds(self) -> int:
        """Rounds with a draft."""
        return len(self._tables)

    @property
    def observed(self) -> Estimate | None:
        """Accepted draft tokens in each round. None before the first round."""
        return mean_of(np.array(self._accepted)) if self.rounds else None

    @property
    def accepted_per_round(self) -> dict[str, Estimate]:
        """Draft tokens that each rule would accept in a round."""
        if not self.rounds:
            return {}
        accepted = [[table[:, -1].sum(), *kept_by_token(table)] for table in self._tables]
        return dict(zip(BY_ROUND, map(mean_of, np.array(accepted).T), strict=True))

    @property
    def positions(self) -> list[Position]:
        """Expected and observed acceptance at each position."""
        rounds = list(zip(self._tables, self._accepted, strict=True))
        positions = []
        for i in range(max(map(len, self._tables), default=0)):
            # Drafts that were accepted up to position i, and are longer than i.
            rows = np.array([table[i] for table, n in rounds if len(table) > i <= n])
            if len(rows):
                observed = wilson(sum(n > i for n in self._accepted), len(rows))
                expected = dict(zip(BY_TOKEN, map(mean_of, rows.T), strict=False))
                positions.append(Position(len(rows), observed, expected))
        return positions

    def as_dict(self) -> dict[str, Any]:
        """The account for JSON, with each estimate as [mean, low, high]."""
        names = ("rounds", "observed", "accepted_per_round")
        positions = [position._asdict() for position in self.positions]
        return {name: getattr(self, name) for name in names} | {"positions": positions}

    def __str__(self) -> str:
        """A table by rule, and a table by position."""
        if self.observed is None:
            return "No drafts."
        accepted = {"observed": self.observed, **self.accepted_per_round}
        by_rule = [(name, str(estimate)) for name, estimate in accepted.items()]
        by_position = []
        for i, position in enumerate(self.positions):
            means = (f"{estimate.mean:.3f}" for estimate in position.expected.values())
            by_position.append((str(i), str(position.reached), *means, str(position.observed)))
        parts = [
            f"Draft tokens kept in a round, {self.rounds} rounds:",
            markdown_table(["rule", "kept"], by_rule, 1),
            "Chance to accept where all before was accepted:",
            markdown_table(["position", "reached", *BY_TOKEN, "observed"], by_position, 0),
        ]
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Counting:
    """A rule that decides like another rule on chains, and adds each round to an account."""

    rule: AcceptanceRule
    account: Counterfactual
    needs_distribution = True

    @property
    def name(self) -> str:
        return f"{self.rule.name}, with a counterfactual account"

    @property
    def shares_noise(self) -> bool:
        return shares_noise(self.rule)

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        tokens, q = to_ids(draft.tokens), draft.probs
        q = point_mass(tokens, target.probs) if q is None else q
        table = chances(target.probs, tokens, q)
        return CountedDecision(self.rule.decide(target, draft, randomness), table, self.account)


@dataclass(frozen=True)
class CountedDecision(Decision):
    """A decision that adds the `chances` of its draft to the account."""

    decision: Decision
    table: Float[Array, "k columns"]
    account: Counterfactual

    def arrays(self) -> dict[str, Any]:
        return {**self.decision.arrays(), "chances": self.table}

    def outcome(self, numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        outcome = self.decision.outcome(numbers, drafted)
        self.account.record(np.array(numbers["chances"]), outcome.num_accepted)
        return outcome


def kept_by_token(table: np.ndarray) -> np.ndarray:
    """Unbiased estimates [4] of the tokens that the rules of `BY_TOKEN` accept."""
    count = len(BY_TOKEN)
    # chance to reach position i: a_1 ... a_(i-1)
    before = np.cumprod(table[:-1, count : 2 * count], axis=0)
    reach = np.vstack([np.ones((1, count)), before])
    accepted: np.ndarray = (reach * table[:, :count]).sum(axis=0)
    return accepted
