"""Rules for trees: how much of a draft that forks is kept, and what follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import mlx.core as mx
from jaxtyping import Bool, Float, Integer

from specdec_mlx.contracts import (
    ROOT,
    Decision,
    Draft,
    Outcome,
    Randomness,
    TargetRows,
)
from specdec_mlx.rules import (
    Array,
    AutoRule,
    Block,
    Chances,
    Coupled,
    Drawn,
    Ids,
    Law,
    Match,
    Rejection,
    Rows,
    acceptance_probability,
    draw,
    namespace_of,
    point_mass,
    ratio,
    residual,
)
from specdec_mlx.token_ids import to_ids
from specdec_mlx.trees.shape import children_of, path_to


@dataclass(frozen=True)
class TreeVerdict(Decision):
    """Decision about a tree: coins and tokens for all its nodes; the path is found on the host.

    coins: [K] how each token's coin fell. after: [K+1] the token that follows if the kept ones end
    at this row. kept: K coins -> the kept tokens, from the root down.
    """

    coins: Bool[mx.array, " k"]
    after: Integer[mx.array, " k+1"]
    kept: Callable[[Sequence[bool]], list[int]]

    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome."""
        return {"coins": self.coins, "after": self.after}

    def outcome(self, numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        kept = self.kept(numbers["coins"])
        row = kept[-1] + 1 if kept else 0
        return Outcome(kept, [*(drafted[i] for i in kept), numbers["after"][row]])


def walk(coins: Sequence[bool], parents: Sequence[int]) -> list[int]:
    """The path from the root down, each time to the first child whose coin shows heads."""
    children = children_of(parents)
    path: list[int] = []
    heads = [child for child in children[0] if coins[child]]
    while heads:
        path.append(heads[0])
        heads = [child for child in children[heads[0] + 1] if coins[child]]
    return path


def climb(coins: Sequence[bool], parents: Sequence[int]) -> list[int]:
    """The path to the first token, in post-order, whose coin shows heads."""
    children = children_of(parents)
    first = next((node for node in post_order(ROOT, children) if coins[node]), ROOT)
    return path_to(first, parents)


def longest(coins: Sequence[bool], parents: Sequence[int]) -> list[int]:
    """The longest path all of whose coins show heads, of several the one whose end is first."""
    # of the path to each row; -inf where a coin showed tails
    lengths: list[float] = [0]
    for coin, parent in zip(coins, parents, strict=True):
        lengths.append(lengths[parent + 1] + 1 if coin else -inf)
    return path_to(lengths.index(max(lengths)) - 1, parents)


def post_order(node: int, children: Sequence[Sequence[int]]) -> Iterator[int]:
    """The tokens below a node, each after all that continue it; the node itself is left out."""
    for child in children[node + 1]:
        yield from post_order(child, children)
        yield child


class TreeRule(ABC):
    """Pure decision about a tree; see `AcceptanceRule`."""

    @abstractmethod
    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        """The path that is kept of a tree, at least one token, and what follows."""


@dataclass(frozen=True)
class OwnTokens(TreeRule):
    """Match: draw the target's own token at the row, go on to the child that carries it."""

    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        """Compare with the target's own draws."""
        parents = draft.tree
        own = target.tokens[mx.array([parent + 1 for parent in parents])]
        coins = to_ids(draft.tokens) == to_ids(own)
        return TreeVerdict(coins, target.tokens, lambda heads: walk(heads, parents))


class TreeCoinRule(TreeRule):
    """A rule for trees that follows from the chance of each token's coin.

    kept: (coins [K], parents [K]) -> the tokens that these keep, from the root down.
    """

    kept: staticmethod[[Sequence[bool], Sequence[int]], list[int]]

    @abstractmethod
    def judge(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, parents: Sequence[int]
    ) -> tuple[Chances, Rows]:
        """Chance of each token's heads [K], and the distribution after each row [K+1, V].

        draft_probs: [K, V], of each given its earlier siblings. parents: [K], see `Draft.parents`.
        """

    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        """Toss the coins and draw what follows; one noise serves all rows, as coins choose one."""
        if target.greedy:
            return OwnTokens().decide_tree(target, draft, randomness)
        parents, tokens, p = draft.tree, to_ids(draft.tokens), target.probs
        q = point_mass(tokens, p) if draft.probs is None else draft.probs
        chances, after = self.judge(p, tokens, q, parents)
        coins = randomness.uniform(len(parents)) < chances
        drawn = draw(after, randomness.gumbel(after.shape[-1]))
        return TreeVerdict(coins, drawn, lambda heads: self.kept(heads, parents))


def remaining_laws(target_probs: Array, draft_probs: Array) -> Array:
    r"""What is left of the target's distribution after k rejections, $p_k$; [C + 1, V].

    $p_0 = p$ and $p_k = \mathrm{norm}(\max(0, p_{k-1} - q_k))$; where nothing is left $p_{k-1}$
    stands.
    """
    left = [target_probs]
    for row in draft_probs:
        left.append(residual(left[-1], row))
    return namespace_of(target_probs).stack(left)


@dataclass(frozen=True)
class MultiRound(TreeCoinRule):
    """Children tried in turn, each against what those before it have left of the target.

    (SpecInfer, Miao et al. 2024, algorithm 2; without replacement Sequoia, Chen et al. 2024.)
    """

    kept = staticmethod(walk)

    def judge(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, parents: Sequence[int]
    ) -> tuple[Chances, Rows]:
        """One position at a time, by `at_node`."""
        xp = namespace_of(target_probs)
        chances: dict[int, Any] = {}
        after = []
        for row, children in enumerate(children_of(parents)):
            p = target_probs[row]
            if children:
                ids = xp.array(children)
                coins, left = self.at_node(p, draft_tokens[ids], draft_probs[ids])
                chances |= dict(zip(children, coins, strict=True))
            else:  # as in Rejection, nothing is excluded after the last token
                left = residual(p, xp.zeros_like(p))
            after.append(left)
        return xp.stack([chances[node] for node in range(len(parents))]), xp.stack(after)

    def at_node(
        self, target_probs: Law, tokens: Integer[Array, " c"], draft_probs: Float[Array, "c vocab"]
    ) -> tuple[Float[Array, " c"], Law]:
        """Chances of C siblings if none before was kept, and what is left after all."""
        left = remaining_laws(target_probs, draft_probs)
        return acceptance_probability(left[:-1], draft_probs, tokens), left[-1]


@dataclass(frozen=True)
class Traversal(TreeCoinRule):
    r"""From the leaves up, so that a token that fell short is saved by those after it.

    (Traversal verification, Weng et al. 2025, arXiv 2505.12398; on a chain `Block`.) The root's
    weight w is 1, and below it $\min(1, w p(x) / q(x))$. When a child is rejected, with all that
    continues it, its parent's p becomes $\mathrm{norm}(\max(0, w p - q))$ and its w $s / (s + 1 -
    w)$, s the mass of that excess. A token's coin weighs the w that it has when its last child is
    rejected. Give the deepest branch first.
    """

    kept = staticmethod(climb)

    def judge(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, parents: Sequence[int]
    ) -> tuple[Chances, Rows]:
        """Each coin given that all before it, in post-order, showed tails."""
        xp = namespace_of(target_probs)
        children = children_of(parents)
        left = [target_probs[row] for row in range(len(parents) + 1)]
        weights = [xp.ones_like(target_probs[0, 0])] * (len(parents) + 1)

        def settle(row: int) -> None:
            for child in children[row]:
                q, token = draft_probs[child], draft_tokens[child]
                weights[child + 1] = xp.minimum(weights[row] * ratio(left[row][token], q[token]), 1)
                settle(child + 1)
                exclude(row, q)
            # as in Block, nothing is excluded after the last token
            if not children[row]:
                exclude(row, xp.zeros_like(left[row]))

        def exclude(row: int, q: Any) -> None:
            mass = xp.sum(xp.maximum(weights[row] * left[row] - q, 0))
            left[row] = residual(left[row], q, weights[row])
            total = mass + (1 - weights[row])
            at_end = xp.where(xp.isnan(mass), weights[row], 1)  # as in Block
            weights[row] = xp.where(total > 0, mass / xp.where(total > 0, total, 1), at_end)

        settle(0)
        return xp.stack(weights[1:]), xp.stack(left)


@dataclass(frozen=True)
class AutoTree(TreeRule):
    """The target's own tokens, and traversal for drafts drawn at random."""

    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        """Pass on to the rule that suits the draft."""
        is_drawn = draft.logprobs is not None and target.has_distribution
        rule: TreeRule = Traversal() if is_drawn else OwnTokens()
        return rule.decide_tree(target, draft, randomness)


ON_TREES: dict[type, TreeRule] = {
    Match: OwnTokens(),
    Coupled: OwnTokens(),
    Rejection: MultiRound(),
    Block: Traversal(),
    AutoRule: AutoTree(),
}
"""The rule for trees that goes with each class of rules for chains."""


def tree_rule_for(rule: Any) -> Any:
    """The rule for trees that goes with a rule; None where it decides about chains alone."""
    return rule if hasattr(rule, "decide_tree") else ON_TREES.get(type(rule))
