"""What speculative decoding can gain, in formulas (Leviathan, Kalman, Matias 2023).

α is the chance that a draft token is accepted, independent and equal at every position; K the
number of draft tokens a round (the paper's γ). Numbers outside their range raise ValueError.
"""

from __future__ import annotations

from collections.abc import Callable

Cost = Callable[[int], float]
"""c(m): cost of a pass of the target over m positions, in any unit."""


def expected_tokens(acceptance: float, draft_length: int) -> float:
    r"""Expected tokens a round, $(1 - \alpha^{K+1}) / (1 - \alpha)$ (equation 1)."""
    _check(0 <= acceptance <= 1, f"acceptance={acceptance}: expected a chance in [0, 1].")
    _check(draft_length >= 0, f"draft_length={draft_length}: expected an int >= 0.")
    if acceptance == 1:
        return float(draft_length + 1)
    return float((1 - acceptance ** (draft_length + 1)) / (1 - acceptance))


def acceptance_from_counts(accepted: int, rejections: int) -> float:
    """Likeliest α after `accepted` draft tokens and `rejections`; 0 without any trial.

    Draft tokens after a rejected one were never judged and do not count.
    """
    _check(accepted >= 0 and rejections >= 0, "Counts are ints >= 0.")
    trials = accepted + rejections
    return accepted / trials if trials else 0.0


def expected_speedup(acceptance: float, draft_length: int, draft_cost: float = 0.0) -> float:
    r"""Expected walltime improvement, expected tokens over $K c + 1$ (theorem 3.8).

    A pass over K + 1 positions is taken to cost as much as one over a single position.

    Args:
        acceptance: α.
        draft_length: K.
        draft_cost: c, one step of the drafter over one pass of the target.
    """
    return expected_speedup_on_curve(acceptance, draft_length, lambda _: 1.0, draft_cost)


def expected_operations(acceptance: float, draft_length: int, draft_share: float = 0.0) -> float:
    """Expected factor by which arithmetic operations grow (theorem 3.11).

    Args:
        acceptance: α.
        draft_length: K.
        draft_share: ĉ, operations per token of the drafter over those of the target.
    """
    _check(draft_share >= 0, f"draft_share={draft_share}: expected a number >= 0.")
    operations = draft_length * draft_share + draft_length + 1
    return operations / expected_tokens(acceptance, draft_length)


def best_draft_length(acceptance: float, draft_cost: float, longest: int = 64) -> int:
    """The shortest K from 0 to `longest` of the greatest expected speedup (section 3.5)."""
    return best_draft_length_on_curve(acceptance, lambda _: 1.0, draft_cost, longest)


def expected_speedup_on_curve(
    acceptance: float, draft_length: int, cost: Cost, draft_cost: float = 0.0
) -> float:
    """Expected speedup where wider passes cost more: theorem 3.8 with c(m) measured.

    Args:
        acceptance: α.
        draft_length: K.
        cost: c(m).
        draft_cost: of one draft token, in the unit of `cost`.
    """
    _check(draft_cost >= 0, f"draft_cost={draft_cost}: expected a number >= 0.")
    round_cost = cost(draft_length + 1) + draft_length * draft_cost
    return expected_tokens(acceptance, draft_length) * cost(1) / round_cost


def best_draft_length_on_curve(
    acceptance: float, cost: Cost, draft_cost: float = 0.0, longest: int = 64
) -> int:
    """The shortest K from 0 to `longest` of the greatest expected speedup on a measured curve.

    All lengths are tried, since measured curves have steps: a kernel that reads the weights once
    for 5 rows makes K = 4 better than 3 and 5. Arguments as for `expected_speedup_on_curve`.
    """
    return max(
        range(longest + 1),
        key=lambda K: expected_speedup_on_curve(acceptance, K, cost, draft_cost),
    )


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
