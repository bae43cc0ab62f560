"""Gains of speculative decoding, in formulas (Leviathan, Kalman, Matias 2023).

α: chance that a draft token is accepted, independent and equal at every position; K: draft tokens a
round (the paper's γ). ValueError out of range.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from specdec_mlx.contracts.trees import ROOT, depths_of

Cost = Callable[[int], float]  # c(m): cost of a pass of the target over m positions, in any unit
Ranks = Sequence[Sequence[float]]
"""Acceptance by depth and rank: the chance that the text goes on with the guess of that rank."""


def expected_tokens(acceptance: float, draft_length: int) -> float:
    r"""Expected tokens a round, $(1 - \alpha^{K+1}) / (1 - \alpha)$ (equation 1)."""
    _check(0 <= acceptance <= 1, f"acceptance={acceptance}: expected a chance in [0, 1].")
    _check(draft_length >= 0, f"draft_length={draft_length}: expected an int >= 0.")
    return float(sum(acceptance**i for i in range(draft_length + 1)))


def acceptance_from_counts(accepted: int, rejections: int) -> float:
    """Likeliest α after so many accepted and rejected draft tokens; 0 without any."""
    _check(accepted >= 0 and rejections >= 0, "Counts are ints >= 0.")
    trials = accepted + rejections
    return accepted / trials if trials else 0.0


def expected_speedup(acceptance: float, draft_length: int, draft_cost: float = 0.0) -> float:
    r"""Expected walltime improvement, tokens over $K c + 1$ (theorem 3.8); c: draft_cost."""
    return expected_speedup_on_curve(acceptance, draft_length, lambda _: 1.0, draft_cost)


def expected_operations(acceptance: float, draft_length: int, draft_share: float = 0.0) -> float:
    """Expected factor of operations (theorem 3.11); draft_share: ĉ, a draft token's."""
    _check(draft_share >= 0, f"draft_share={draft_share}: expected a number >= 0.")
    operations = draft_length * draft_share + draft_length + 1
    return operations / expected_tokens(acceptance, draft_length)


def best_draft_length(acceptance: float, draft_cost: float, longest: int = 64) -> int:
    """The shortest K from 0 to `longest` of the greatest expected speedup (section 3.5)."""
    return best_draft_length_on_curve(acceptance, lambda _: 1.0, draft_cost, longest)


def expected_speedup_on_curve(
    acceptance: float, draft_length: int, cost: Cost, draft_cost: float = 0.0
) -> float:
    """Expected speedup where wider passes cost more: theorem 3.8 with c(m) as measured."""
    _check(draft_cost >= 0, f"draft_cost={draft_cost}: expected a number >= 0.")
    round_cost = cost(draft_length + 1) + draft_length * draft_cost
    return expected_tokens(acceptance, draft_length) * cost(1) / round_cost


def best_draft_length_on_curve(
    acceptance: float, cost: Cost, draft_cost: float = 0.0, longest: int = 64
) -> int:
    """The shortest K from 0 to `longest` of the greatest expected speedup on a curve."""
    speedups = [
        expected_speedup_on_curve(acceptance, K, cost, draft_cost) for K in range(longest + 1)
    ]
    return speedups.index(max(speedups))


def chances_of(parents: Sequence[int], acceptance: Ranks) -> list[float]:
    """Chances [K] of the nodes of a tree: the parent's, times the acceptance of the node's rank.

    parents [K] as in `Draft.parents`. The last depth's acceptance stands for all below it.
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
    """Expected tokens of a round that verifies a tree: 1 plus the sum of all chances."""
    return 1 + sum(chances_of(parents, acceptance))


def best_first(
    acceptance: Ranks, size: int, cost: Cost | None = None
) -> tuple[list[int], list[int]]:
    """The tree grown node by node, by the greatest chance each time: parents, ranks [K].

    Of all trees of its size it has the greatest expected tokens. With a cost c(m) it is cut where
    expected tokens over c(K + 1) are greatest.
    """
    parents, ranks, tokens = list[int](), list[int](), [1.0]
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


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
