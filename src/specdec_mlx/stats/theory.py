"""Gains of speculative decoding, in formulas (Leviathan, Kalman, Matias 2023).

α: chance that a draft token is accepted, independent and equal at every position; K: draft tokens a
round (the paper's γ). ValueError out of range.
"""

from __future__ import annotations

from collections.abc import Callable

# c(m): cost of a pass of the target over m positions, in any unit
Cost = Callable[[int], float]


def expected_tokens(acceptance: float, draft_length: int) -> float:
    r"""Expected tokens a round, $(1 - \alpha^{K+1}) / (1 - \alpha)$ (equation 1)."""
    _check(0 <= acceptance <= 1, f"acceptance={acceptance}: expected a chance in [0, 1].")
    _check(draft_length >= 0, f"draft_length={draft_length}: expected an int >= 0.")
    return float(sum(acceptance**i for i in range(draft_length + 1)))


def acceptance_from_counts(accepted: int, rejections: int) -> float:
    """Likeliest α after these numbers of accepted and rejected draft tokens. 0 without any."""
    _check(accepted >= 0 and rejections >= 0, "Counts are ints >= 0.")
    trials = accepted + rejections
    return accepted / trials if trials else 0.0


def flat(num_positions: int) -> float:
    """Cost of passes that cost the same at any width, as in the paper."""
    return 1.0


def expected_speedup(
    acceptance: float, draft_length: int, draft_cost: float = 0.0, cost: Cost = flat
) -> float:
    """Expected walltime improvement, tokens over $K c + 1$ (theorem 3.8).

    draft_cost: c, of a draft token. cost: measured c(m), if wider passes cost more.
    """
    _check(draft_cost >= 0, f"draft_cost={draft_cost}: expected a number >= 0.")
    round_cost = cost(draft_length + 1) + draft_length * draft_cost
    return expected_tokens(acceptance, draft_length) * cost(1) / round_cost


def expected_operations(acceptance: float, draft_length: int, draft_share: float = 0.0) -> float:
    """Expected factor of operations (theorem 3.11); draft_share: ĉ, a draft token's."""
    _check(draft_share >= 0, f"draft_share={draft_share}: expected a number >= 0.")
    operations = draft_length * draft_share + draft_length + 1
    return operations / expected_tokens(acceptance, draft_length)


def best_draft_length(
    acceptance: float, draft_cost: float = 0.0, cost: Cost = flat, longest: int = 64
) -> int:
    """The shortest K from 0 to `longest` of the greatest expected speedup (section 3.5)."""
    speedups = [expected_speedup(acceptance, K, draft_cost, cost) for K in range(longest + 1)]
    return speedups.index(max(speedups))


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
