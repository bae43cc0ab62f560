"""The account of a generation, from records with known numbers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    """The first round waits for the prompt, and a change of mode is no yardstick."""
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


def test_the_acceptance_rate_is_the_papers_and_the_share_is_of_all_drafted() -> None:
    """Of 4 drafted and 1 accepted two were judged; the two behind them only lower the share."""
    stats = account(a_round(4, 1, 1.0), a_round(2, 2, 1.0), a_round(0, 0, 1.0))
    assert stats.acceptance_rate == pytest.approx(3 / 4)
    assert stats.accepted_share == pytest.approx(3 / 6)
    assert "accepted 3 of 6 drafted (50%)" in str(stats)
    plain = account(a_round(0, 0, 1.0))
    assert plain.acceptance_rate == plain.accepted_share == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(0, 9))
def test_emitted_tokens_follow_from_the_other_counts(
    pairs: list[tuple[int, int]], too_many: int
) -> None:
    """One more a pass than were accepted, less what is beyond max_tokens in the last round."""
    rounds = [(max(pair), min(pair)) for pair in pairs]
    records = [a_round(*pair, 1.0) for pair in rounds]
    if records:
        cut = min(too_many, records[-1].accepted)
        records[-1] = replace(records[-1], emitted=records[-1].emitted - cut)
    stats = account(*records)
    assert stats.emitted == sum(record.emitted for record in records)
    assert stats.emitted + stats.cut == stats.accepted + stats.target_passes
    assert stats.as_dict()["emitted"] == stats.emitted
    assert [row["emitted"] for row in stats.rows()] == [record.emitted for record in records]
    for name in ("drafted", "accepted"):
        assert sum(row[name] for row in stats.rows()) == getattr(stats, name)


def test_the_account_is_json_with_both_rates() -> None:
    """What the server's `usage` and `--json` files say: plain numbers, by the names of the code."""
    stats = account(a_round(4, 1, 1.0), a_round(2, 2, 1.0))
    said = json.loads(json.dumps(stats.as_dict()))
    assert said["acceptance_rate"] == stats.acceptance_rate > said["accepted_share"]
    assert said["accepted_share"] == stats.accepted_share
    assert "view" not in said


def test_the_account_shows_itself_wherever_it_was_imported_from() -> None:
    """`stats` knows no notebook, and yet plot() and the HTML are there in a fresh interpreter."""
    program = (
        "from specdec_mlx.stats.account import SpeculationStats as S;"
        "print(S()._repr_html_()[:6], len(S().plot().axes))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "<table 4\n", shown.stderr


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
    assert stats.acceptance_rate == pytest.approx(0.8)
    assert stats.observed_speedup == pytest.approx(3.0 / 1.4, rel=0.02)
    assert stats.expected_speedup == pytest.approx(3.3616 / 1.4, rel=0.02)
