"""The account of a generation, from records with known numbers."""

from __future__ import annotations

import random

import pytest

from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stats.theory import expected_speedup_on_curve
from specdec_mlx.types import RoundRecord


def a_round(drafted: int, accepted: int, seconds: float, *, steady: bool = True) -> RoundRecord:
    return RoundRecord(drafted, accepted, accepted + 1, drafted + 1, seconds=seconds, steady=steady)


def account(*records: RoundRecord) -> SpeculationStats:
    stats = SpeculationStats()
    for record in records:
        stats.record(record)
    return stats


def test_the_observed_speedup_is_tokens_over_their_time_in_plain_rounds() -> None:
    """The first round waits for the prompt, and a shift of gears is no yardstick."""
    stats = account(
        a_round(0, 0, 99.0),
        a_round(0, 0, 1.0),
        a_round(0, 0, 5.0, steady=False),
        a_round(4, 3, 1.5),
        a_round(4, 0, 1.5),
    )
    assert stats.observed_speedup == pytest.approx((1 + 1 + 4 + 1) / (1.0 + 5.0 + 1.5 + 1.5))


def test_nothing_is_said_before_a_plain_round_was_seen() -> None:
    stats = account(a_round(0, 0, 1.0), a_round(4, 4, 1.0))
    assert stats.observed_speedup is None
    assert stats.expected_speedup is None
    assert SpeculationStats().as_dict()["expected_speedup"] is None


def test_acceptance_counts_what_was_judged() -> None:
    """Of 4 drafted and 1 accepted, two were judged."""
    assert account(a_round(4, 1, 1.0), a_round(2, 2, 1.0)).acceptance == pytest.approx(3 / 4)


def test_independent_tokens_come_out_as_expected() -> None:
    """Then both speedups are the formula's, on the curve that the rounds took."""
    coins = random.Random(1)
    stats = account(a_round(0, 0, 9.0), a_round(0, 0, 1.0))
    for _ in range(20_000):
        accepted = 0
        while accepted < 4 and coins.random() < 0.7:
            accepted += 1
        stats.record(a_round(4, accepted, 1.4))
    formula = expected_speedup_on_curve(0.7, 4, lambda m: 1.4 if m == 5 else 1.0)
    assert stats.expected_speedup == pytest.approx(formula, rel=0.01)
    assert stats.observed_speedup == pytest.approx(formula, rel=0.01)


def test_tokens_that_are_right_together_are_not() -> None:
    """All or nothing: as many accepted in all, and more or fewer expected than observed."""
    stats = account(a_round(0, 0, 9.0), a_round(0, 0, 1.0))
    for i in range(100):
        stats.record(a_round(4, 4 * (i % 2), 1.4))
    assert stats.acceptance == pytest.approx(0.8)
    assert stats.observed_speedup == pytest.approx(3.0 / 1.4, rel=0.02)
    assert stats.expected_speedup == pytest.approx(3.3616 / 1.4, rel=0.02)
