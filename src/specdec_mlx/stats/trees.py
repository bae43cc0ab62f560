"""What a tree of drafts can gain, and which shape gains most.

In these formulas every node has a *chance*, that the text goes through it: its parent's, times the
acceptance of its own rank among its siblings. The expected tokens of a round are 1 plus the sum of
the chances. Pure functions of numbers, as in `theory`.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence

from specdec_mlx.stats.theory import Cost
from specdec_mlx.types.trees import ROOT, depths_of

Ranks = Sequence[Sequence[float]]
"""Acceptance by depth and rank: the chance that the text goes on with the guess of that rank."""


def chances_of(parents: Sequence[int], acceptance: Ranks) -> list[float]:
    """Chance of each node of a tree; [K].

    Args:
        parents: [K], see `Draft.parents`; siblings have the ranks 0, 1, ... in their order.
        acceptance: by depth and rank; the last depth's stands for all below it too.
    """
    chances: list[float] = []
    num_children = [0] * (len(parents) + 1)
    for parent, depth in zip(parents, depths_of(parents), strict=True):
        by_rank = acceptance[min(depth, len(acceptance) - 1)]
        rank = num_children[parent + 1]
        num_children[parent + 1] += 1
        above = 1.0 if parent == ROOT else chances[parent]
        chances.append(above * (by_rank[rank] if rank < len(by_rank) else 0.0))
    return chances


def expected_tree_tokens(parents: Sequence[int], acceptance: Ranks) -> float:
    """Expected tokens of a round that verifies a tree; see `chances_of`."""
    return 1 + sum(chances_of(parents, acceptance))


def best_first(
    acceptance: Ranks, size: int, cost: Cost | None = None
) -> tuple[list[int], list[int]]:
    """The tree that is grown node by node, each time by the one of the greatest chance.

    Chances fall on the way down and from rank to rank, so of all trees of its size it has the
    greatest expected tokens.

    Args:
        acceptance: by depth and rank, falling in the rank; nothing is added below the last depth.
        size: most nodes.
        cost: c(m); if given, the tree is cut where expected tokens over c(K + 1) are greatest.
            All sizes are tried, since measured curves have steps.

    Returns:
        Parents [K], and the rank of each node [K].
    """
    parents: list[int] = []
    ranks: list[int] = []
    tokens = [1.0]
    waiting = [(-acceptance[0][0], 0, ROOT, 0)] if acceptance and acceptance[0] else []
    while waiting and len(parents) < size:
        loss, depth, parent, rank = heapq.heappop(waiting)
        chance = -loss
        node = len(parents)
        if chance <= 0:
            break
        tokens.append(tokens[-1] + chance)
        parents.append(parent)
        ranks.append(rank)
        above = chance / acceptance[depth][rank]
        if rank + 1 < len(acceptance[depth]):
            sibling = above * acceptance[depth][rank + 1]
            heapq.heappush(waiting, (-sibling, depth, parent, rank + 1))
        if depth + 1 < len(acceptance) and acceptance[depth + 1]:
            child = chance * acceptance[depth + 1][0]
            heapq.heappush(waiting, (-child, depth + 1, node, 0))
    if cost is not None:
        best = max(range(len(tokens)), key=lambda k: tokens[k] / cost(k + 1))
        parents, ranks = parents[:best], ranks[:best]
    return parents, ranks


def most_tree_tokens(by_rank: Sequence[float], size: int, depth: int) -> float:
    """Expected tokens of the best tree, by Sequoia's dynamic programme.

    (Chen et al. 2024, arXiv 2402.12374, section 3.1.) T(n, d) = 1 + the best way to give n - 1
    nodes to the children, rank by rank; a child of n nodes brings its acceptance times T(n, d - 1).

    Args:
        by_rank: acceptance of each rank, at every depth the same.
        size: nodes besides the root.
        depth: tokens on the longest path.
    """

    @functools.cache
    def below(nodes: int, levels: int) -> float:
        """Expected tokens of the best tree with so many nodes, its root included."""
        return 1 + shared(nodes - 1, levels, 0)

    @functools.cache
    def shared(nodes: int, levels: int, rank: int) -> float:
        """The same of the children from a rank on."""
        if nodes == 0 or levels == 0 or rank == len(by_rank):
            return 0.0
        return max(
            shared(nodes - own, levels, rank + 1)
            + (by_rank[rank] * below(own, levels - 1) if own else 0.0)
            for own in range(nodes + 1)
        )

    return below(size + 1, depth)
