"""Expected tokens of a tree of drafts, and the tree that gains most.

The chance of a node is its parent's times the acceptance of its rank among its siblings; the
expected tokens of a round are 1 plus the sum of all chances.
"""

from __future__ import annotations

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
    """The tree grown node by node, each time by the one of the greatest chance.

    Chances fall from parent to child and from rank to rank, so of all trees of its size it has the
    greatest expected tokens.

    Args:
        acceptance: by depth and rank, falling in the rank; nothing is added below the last depth.
        size: most nodes.
        cost: c(m); if given, the tree is cut where expected tokens over c(K + 1) are greatest.

    Returns:
        Parents [K], and the rank of each node [K].
    """
    parents: list[int] = []
    ranks: list[int] = []
    tokens = [1.0]
    waiting: list[tuple[float, int, int, int]] = []

    def wait(above: float, depth: int, parent: int, rank: int) -> None:
        if depth < len(acceptance) and rank < len(acceptance[depth]):
            heapq.heappush(waiting, (-above * acceptance[depth][rank], depth, parent, rank))

    wait(1.0, 0, ROOT, 0)
    while waiting and waiting[0][0] < 0 and len(parents) < size:
        loss, depth, parent, rank = heapq.heappop(waiting)
        tokens.append(tokens[-1] - loss)
        parents.append(parent)
        ranks.append(rank)
        wait(-loss / acceptance[depth][rank], depth, parent, rank + 1)
        wait(-loss, depth + 1, len(parents) - 1, 0)
    if cost is not None:
        best = max(range(len(tokens)), key=lambda k: tokens[k] / cost(k + 1))
        parents, ranks = parents[:best], ranks[:best]
    return parents, ranks
