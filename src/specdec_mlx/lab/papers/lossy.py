"""Rules that change the target's distribution. No default uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from jaxtyping import Bool, Float, Integer

from specdec_mlx.contracts import Decision, Draft, Randomness, TargetRows, Verdict
from specdec_mlx.rules import (
    Array,
    Chances,
    CoinRule,
    Drawn,
    Ids,
    Law,
    Rows,
    acceptance_probability,
    at,
    leading_run,
    namespace_of,
    row,
)
from specdec_mlx.token_ids import to_ids
from specdec_mlx.trees.tree_rules import TreeCoinRule, longest


@dataclass(frozen=True)
class Lenient(CoinRule):
    r"""Changes the target's distribution: accepts more than a lossless rule (Leviathan et al. A.5).

    A draft token is accepted with probability $\min(1, p(x) / (l q(x)))$. With a greedy target it
    is accepted if $p(x) \ge l \max p$, where p is the distribution before the temperature.

    No token is emitted with a probability above p(x) / l, nor above p(x) if q(x) <= p(x). After a
    rejection the residual is the same as in `Rejection`. It leaves the smallest distance to p, the
    sum of min(q, p/l) - p over q > p.

    Args:
        lenience: l in (0, 1]. With l = 1 the rule is `Rejection`.
    """

    name = "lenient"
    lenience: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            raise ValueError(
                f"Lenient(lenience={self.lenience!r}): expected a number in (0, 1]; no token is "
                "emitted with more than 1/lenience times its chance (1: no lenience)."
            )

    def accept_probs(self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn) -> Chances:
        # min(1, p / (l q)) is the rejection rule with l q in place of q.
        return acceptance_probability(target_probs[:-1], self.lenience * draft_probs, draft_tokens)

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        """Decide by coins. With a greedy target, accept the tokens that nearly match."""
        if not target.greedy:
            return super().decide(target, draft, randomness)
        num_accepted = leading_run(self.nearly_matches(target.logprobs, to_ids(draft.tokens)))
        return Verdict(num_accepted, target.tokens[num_accepted])

    def nearly_matches(self, target_logprobs: Rows, draft_tokens: Ids) -> Bool[Array, " rows-1"]:
        """True where p(x) >= l max p, [K]. `target_logprobs` [K+1, V] have no temperature."""
        # p(x) >= l max p, as a difference of logarithms
        best = target_logprobs[:-1].max(axis=-1)
        return at(target_logprobs[:-1], draft_tokens) - best >= log(self.lenience)


@dataclass(frozen=True)
class Typical(TreeCoinRule, CoinRule):
    r"""Changes the target's distribution: accepts typical tokens (Cai et al. 2024, 2.3.1).

    A draft token is accepted if $p(x) > \min(\epsilon, \delta e^{-H(p)})$, where H is the entropy
    in nats. It does not matter how the token was drawn. In a tree, the first of the longest paths
    of typical tokens is accepted. The next token is drawn from p. With a greedy target the rule is
    exact match.

    A token at or below the threshold is emitted with a probability of at most p(x). Another token
    is emitted with a probability below p(x) / threshold.

    Args:
        epsilon: upper limit of the threshold.
        delta: factor of the threshold.
    """

    name = "typical"
    matches_greedy = True
    # Without typical tokens the path is empty, as without a draft.
    find_path = staticmethod(longest)
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "delta"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"Typical({name}={value!r}): expected a number in [0, 1).")

    def threshold(self, target_probs: Float[Array, "*batch vocab"]) -> Float[Array, "*batch"]:
        """Least p(x) of accepted tokens, [...] for probabilities [..., V]."""
        xp = namespace_of(target_probs)
        # H(p) = - sum p log p, and the threshold is min(epsilon, delta e^-H)
        entropy = -xp.sum(target_probs * log_where_positive(target_probs), axis=-1)
        return xp.minimum(self.epsilon, self.delta * xp.exp(-entropy))

    def accept_probs(self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn) -> Chances:
        """1 if the draft token is typical, and 0 otherwise, [K]."""
        return self._is_typical(target_probs[:-1], draft_tokens)

    def next_probs(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, num_accepted: Array | int
    ) -> Law:
        return row(target_probs, num_accepted)

    def judge(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, parents: Sequence[int]
    ) -> tuple[Chances, Rows]:
        """1 if a node is typical after its parent, and 0 otherwise; and p after each row."""
        # Row 0 is the root, and row i + 1 follows node i.
        above = namespace_of(target_probs).array(parents) + 1
        return self._is_typical(target_probs[above], draft_tokens), target_probs

    def _is_typical(
        self, target_probs: Float[Array, "k vocab"], tokens: Integer[Array, " k"]
    ) -> Float[Array, " k"]:
        p = at(target_probs, tokens)
        return (p > self.threshold(target_probs)) * namespace_of(p).ones_like(p)


LOSSY: dict[str, type[CoinRule]] = {"lenient": Lenient, "typical": Typical}
"""The rules by the names that `pyproject.toml` gives them."""


def log_where_positive(probs: Any) -> Any:
    xp = namespace_of(probs)
    return xp.log(xp.where(probs > 0, probs, 1))
