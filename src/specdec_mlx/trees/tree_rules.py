"""Rules for trees: the path of a forking draft that is accepted, and the token that follows."""

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
    """Decision about a tree: coins and tokens of all its nodes.

    Attributes:
        coins: [K] True for heads of a token's coin.
        after: [K+1] token that follows if the path ends at this row.
        find_path: K coins -> the accepted tokens, from the root down.
    """

    coins: Bool[mx.array, " k"]
    after: Integer[mx.array, " k+1"]
    find_path: Callable[[Sequence[bool]], list[int]]

    def arrays(self) -> dict[str, mx.array]:
        return {"coins": self.coins, "after": self.after}

    def outcome(self, numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        # on the host, since the path depends on every coin and a tree is small
        path = self.find_path(numbers["coins"])
        row = path[-1] + 1 if path else 0
        return Outcome(path, [*(drafted[i] for i in path), numbers["after"][row]])


def walk(coins: Sequence[bool], parents: Sequence[int]) -> list[int]:
    """The path from the root down, at each row to the first child whose coin shows heads."""
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
    """The longest path whose coins all show heads. Of several, the one that ends first."""
    # length of the path to each row, -inf behind a coin that shows tails
    lengths: list[float] = [0]
    for coin, parent in zip(coins, parents, strict=True):
        lengths.append(lengths[parent + 1] + 1 if coin else -inf)
    return path_to(lengths.index(max(lengths)) - 1, parents)


def post_order(node: int, children: Sequence[Sequence[int]]) -> Iterator[int]:
    """The tokens below a node, each after all tokens that continue it."""
    for child in children[node + 1]:
        yield from post_order(child, children)
        yield child


class TreeRule(ABC):
    """Pure decision about a tree; see `AcceptanceRule`."""

    @abstractmethod
    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        """Decide about a tree of at least one token."""


@dataclass(frozen=True)
class OwnTokens(TreeRule):
    """Match for trees: go to the child with the target's own token, while there is one."""

    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        parents = draft.tree
        target_tokens = target.tokens[mx.array([parent + 1 for parent in parents])]
        coins = to_ids(draft.tokens) == to_ids(target_tokens)
        return TreeVerdict(coins, target.tokens, lambda heads: walk(heads, parents))


class TreeCoinRule(TreeRule):
    """A rule for trees that follows from the chance of each token's coin.

    Attributes:
        find_path: (coins [K], parents [K]) -> the accepted tokens, from the root down.
    """

    find_path: staticmethod[[Sequence[bool], Sequence[int]], list[int]]

    @abstractmethod
    def judge(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, parents: Sequence[int]
    ) -> tuple[Chances, Rows]:
        """Chance of heads of each token [K], and the distribution after each row [K+1, V].

        Args:
            target_probs: [K+1, V].
            draft_tokens: [K].
            draft_probs: [K, V] of each token given its earlier siblings.
            parents: [K], see `Draft.parents`.
        """

    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
        """Toss the coins and draw the tokens that may follow."""
        if target.greedy:
            return OwnTokens().decide_tree(target, draft, randomness)
        parents, tokens, p = draft.tree, to_ids(draft.tokens), target.probs
        q = point_mass(tokens, p) if draft.probs is None else draft.probs
        chances, after = self.judge(p, tokens, q, parents)
        coins = randomness.uniform(len(parents)) < chances
        # The coins select a single row, so that all rows may share one noise.
        drawn = draw(after, randomness.gumbel(after.shape[-1]))
        return TreeVerdict(coins, drawn, lambda heads: self.find_path(heads, parents))


def remaining_laws(target_probs: Array, draft_probs: Array) -> Array:
    r"""The target's distribution after k rejections, $p_k$; [C + 1, V].

    $p_0 = p$ and $p_k = \mathrm{norm}(\max(0, p_{k-1} - q_k))$. Where this has no mass, $p_k =
    p_{k-1}$.
    """
    left = [target_probs]
    for row in draft_probs:
        left.append(residual(left[-1], row))
    return namespace_of(target_probs).stack(left)


@dataclass(frozen=True)
class MultiRound(TreeCoinRule):
    """Children tried in turn, each against the rest of the target's distribution.

    (SpecInfer, Miao et al. 2024, algorithm 2; without replacement Sequoia, Chen et al. 2024.)
    """

    find_path = staticmethod(walk)

    def judge(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, parents: Sequence[int]
    ) -> tuple[Chances, Rows]:
        xp = namespace_of(target_probs)
        chances: dict[int, Any] = {}
        after = []
        for row, children in enumerate(children_of(parents)):
            p = target_probs[row]
            if children:
                ids = xp.array(children)
                coins, left = self.at_node(p, draft_tokens[ids], draft_probs[ids])
                chances |= dict(zip(children, coins, strict=True))
            else:  # as in `Rejection`, nothing is excluded after the last token
                left = residual(p, xp.zeros_like(p))
            after.append(left)
        return xp.stack([chances[node] for node in range(len(parents))]), xp.stack(after)

    def at_node(
        self, target_probs: Law, tokens: Integer[Array, " c"], draft_probs: Float[Array, "c vocab"]
    ) -> tuple[Float[Array, " c"], Law]:
        """Chances of C siblings if none before was accepted, and the distribution after all."""
        left = remaining_laws(target_probs, draft_probs)
        return acceptance_probability(left[:-1], draft_probs, tokens), left[-1]


@dataclass(frozen=True)
class Traversal(TreeCoinRule):
    r"""From the leaves up, so that later tokens can save a token that fell short.

    (Traversal verification, Weng et al. 2025, arXiv 2505.12398; on a chain `Block`.) The root's
    weight w is 1, and below it w is $\min(1, w p(x) / q(x))$. When a child and all its
    continuations are rejected, its parent's p becomes $\mathrm{norm}(\max(0, w p - q))$ and its w
    becomes $s / (s + 1 - w)$, where s is the mass of that excess. A token's coin weighs the w that
    it has when its last child is rejected. Propose the deepest branch first.
    """

    find_path = staticmethod(climb)

    def judge(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, parents: Sequence[int]
    ) -> tuple[Chances, Rows]:
        """Chance of each coin, given tails of all coins before it in post-order."""
        xp = namespace_of(target_probs)
        children = children_of(parents)
        left = [target_probs[row] for row in range(len(parents) + 1)]
        weights = [xp.ones_like(target_probs[0, 0])] * (len(parents) + 1)

        def settle(row: int) -> None:
            for child in children[row]:
                q, token = draft_probs[child], draft_tokens[child]
                # w := min(1, w p(x) / q(x))
                weights[child + 1] = xp.minimum(weights[row] * ratio(left[row][token], q[token]), 1)
                settle(child + 1)
                exclude(row, q)
            # as in `Block`, nothing is excluded after the last token
            if not children[row]:
                exclude(row, xp.zeros_like(left[row]))

        def exclude(row: int, q: Any) -> None:
            # p := norm(max(0, w p - q)), w := s / (s + 1 - w)
            mass = xp.sum(xp.maximum(weights[row] * left[row] - q, 0))
            left[row] = residual(left[row], q, weights[row])
            total = mass + (1 - weights[row])
            at_end = xp.where(xp.isnan(mass), weights[row], 1)  # as in `Block`
            weights[row] = xp.where(total > 0, mass / xp.where(total > 0, total, 1), at_end)

        settle(0)
        return xp.stack(weights[1:]), xp.stack(left)


@dataclass(frozen=True)
class AutoTree(TreeRule):
    """The target's own tokens, or traversal for drafts drawn at random."""

    def decide_tree(self, target: TargetRows, draft: Draft, randomness: Randomness) -> TreeVerdict:
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
"""Rule for trees that belongs to each class of rules for chains."""


def tree_rule_for(rule: Any) -> Any:
    return rule if hasattr(rule, "decide_tree") else ON_TREES.get(type(rule))
