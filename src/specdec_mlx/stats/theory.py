"""What speculative decoding can gain, in formulas (Leviathan, Kalman, Matias 2023).

Throughout, α is the chance that a draft token is accepted, taken to be the same and
independent at every position, and K the number of draft tokens a round (the paper's γ).
Pure functions of numbers: no model, no cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Cost = Callable[[int], float]
"""c(m): what a pass of the target over m positions costs, in seconds or any other unit."""


def expected_tokens(acceptance: float, draft_length: int) -> float:
    r"""Expected tokens a round, $(1 - \alpha^{K+1}) / (1 - \alpha)$ (equation 1).

    The sum $1 + \alpha + \dots + \alpha^K$: position i is reached if all before it were accepted.
    Raises ValueError for an acceptance outside [0, 1] or a draft length below 0.
    """
    _check(0 <= acceptance <= 1, f"acceptance={acceptance}: expected a chance in [0, 1].")
    _check(draft_length >= 0, f"draft_length={draft_length}: expected an int >= 0.")
    if acceptance == 1:
        return float(draft_length + 1)
    return float((1 - acceptance ** (draft_length + 1)) / (1 - acceptance))


def expected_accepted(acceptance: float, draft_length: int) -> float:
    """Expected accepted draft tokens a round: all of a round's tokens but the last."""
    return expected_tokens(acceptance, draft_length) - 1


def acceptance_from_counts(accepted: int, rejections: int) -> float:
    """Likeliest α after `accepted` draft tokens and `rejections` rounds that ended in one.

    Draft tokens behind a rejected one were never judged and do not count. 0 without any trial.
    """
    _check(accepted >= 0 and rejections >= 0, "Counts are ints >= 0.")
    trials = accepted + rejections
    return accepted / trials if trials else 0.0


def expected_speedup(acceptance: float, draft_length: int, draft_cost: float = 0.0) -> float:
    r"""Expected walltime improvement, expected tokens over $K c + 1$ (theorem 3.8).

    A pass over K + 1 positions is taken to cost as much as one over a single position.

    Args:
        acceptance: α, in [0, 1].
        draft_length: K, at least 0.
        draft_cost: c, one step of the drafter over one pass of the target.

    Raises:
        ValueError: for a number outside its range.
    """
    _check(draft_cost >= 0, f"draft_cost={draft_cost}: expected a number >= 0.")
    return expected_tokens(acceptance, draft_length) / (draft_length * draft_cost + 1)


def expected_operations(acceptance: float, draft_length: int, draft_share: float = 0.0) -> float:
    """Expected factor by which arithmetic operations grow (theorem 3.11).

    Args:
        acceptance: α, in [0, 1].
        draft_length: K, at least 0.
        draft_share: ĉ, operations per token of the drafter over those of the target.

    Raises:
        ValueError: for a number outside its range.
    """
    _check(draft_share >= 0, f"draft_share={draft_share}: expected a number >= 0.")
    operations = draft_length * draft_share + draft_length + 1
    return operations / expected_tokens(acceptance, draft_length)


def best_draft_length(acceptance: float, draft_cost: float, longest: int = 64) -> int:
    """The K from 0 to `longest` of the greatest expected speedup (section 3.5).

    Of several equally good ones the shortest; 0 where no draft pays.

    Args:
        acceptance: α, in [0, 1].
        draft_cost: c, one step of the drafter over one pass of the target.
        longest: greatest K that is tried.
    """
    return _argmax([expected_speedup(acceptance, K, draft_cost) for K in range(longest + 1)])


def expected_speedup_on_curve(
    acceptance: float, draft_length: int, cost: Cost, draft_cost: float = 0.0
) -> float:
    """Expected speedup where a pass over more positions costs more: theorem 3.8 with c(m) measured.

    With c(m) = 1 for all m this is `expected_speedup`.

    Args:
        acceptance: α, in [0, 1].
        draft_length: K, at least 0.
        cost: c(m), in any unit.
        draft_cost: of one draft token, in the unit of `cost`.
    """
    round_cost = cost(draft_length + 1) + draft_length * draft_cost
    return expected_tokens(acceptance, draft_length) * cost(1) / round_cost


def best_draft_length_on_curve(
    acceptance: float, cost: Cost, draft_cost: float = 0.0, longest: int = 64
) -> int:
    """The K from 0 to `longest` of the greatest expected speedup on a measured curve.

    All lengths are tried, since measured curves have steps: a kernel that reads the weights once
    for 5 rows makes K = 4 better than 3 and 5.

    Args:
        acceptance: α, in [0, 1].
        cost: c(m), in any unit.
        draft_cost: of one draft token, in the unit of `cost`.
        longest: greatest K that is tried.
    """
    lengths = range(longest + 1)
    return _argmax([expected_speedup_on_curve(acceptance, K, cost, draft_cost) for K in lengths])


def _argmax(values: Sequence[float]) -> int:
    """Index of the first greatest value."""
    return max(range(len(values)), key=lambda i: values[i])


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)
