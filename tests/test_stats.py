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

from specdec_mlx.contracts import RoundRecord
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stats.theory import expected_speedup_on_curve


def a_round(drafted: int, accepted: int, seconds: float, *, steady: bool = True) -> RoundRecord:
    return RoundRecord(drafted, accepted, accepted + 1, drafted + 1, seconds=seconds, steady=steady)


def account(*records: RoundRecord) -> SpeculationStats:
    stats = SpeculationStats()
    for record in records:
        stats.record(record)
    return stats


def test_the_observed_speedup_is_tokens_over_their_time_in_plain_rounds():
    """The first round waits for the prompt, and a change of mode is no yardstick."""
    changing = a_round(0, 0, 5.0, steady=False)
    rounds = [a_round(0, 0, 99.0), a_round(0, 0, 1.0), changing]
    stats = account(*rounds, a_round(4, 3, 1.5), a_round(4, 0, 1.5))
    assert stats.observed_speedup == pytest.approx((1 + 1 + 4 + 1) / (1.0 + 5.0 + 1.5 + 1.5))
    for unknown in (account(a_round(0, 0, 1.0), a_round(4, 4, 1.0)), account(*rounds), account()):
        assert unknown.observed_speedup is unknown.expected_speedup is None


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30), st.integers(0, 9))
def test_all_counts_follow_from_the_rounds(pairs, too_many):
    """Emitted: one more a pass than were accepted, less what is beyond max_tokens in the last.

    The account is JSON, with the paper's rate and the share of all drafted.
    """
    rounds = [(max(pair), min(pair)) for pair in pairs]
    records = [a_round(*pair, 1.0) for pair in rounds]
    if records:
        cut = min(too_many, records[-1].accepted)
        records[-1] = replace(records[-1], emitted=records[-1].emitted - cut)
    stats = account(*records)
    assert stats.emitted == sum(record.emitted for record in records)
    assert stats.emitted + stats.cut == stats.accepted + stats.target_passes
    assert [row["emitted"] for row in stats.rows()] == [record.emitted for record in records]
    for index, name in enumerate(("drafted", "accepted")):
        assert sum(row[name] for row in stats.rows()) == getattr(stats, name)
        by_position = getattr(stats, f"{name}_at")
        assert by_position == [sum(r[index] > i for r in rounds) for i in range(len(by_position))]
    shares = [a / d for a, d in zip(stats.accepted_at, stats.drafted_at, strict=True)]
    assert stats.acceptance_by_position == shares
    said = json.loads(json.dumps(stats.as_dict()))
    judged = sum(accepted + (accepted < drafted) for drafted, accepted in rounds)
    for name, trials in (("acceptance_rate", judged), ("accepted_share", stats.drafted)):
        assert said[name] == getattr(stats, name)
        assert said[name] == pytest.approx(stats.accepted / trials if trials else 0)


def test_the_account_shows_itself_wherever_it_was_imported_from():
    """`stats` knows no notebook, and yet plot() and the HTML are there in a fresh interpreter."""
    program = (
        "from specdec_mlx.stats.account import SpeculationStats as S;"
        "print(S()._repr_html_()[:6], len(S().plot().axes))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert shown.stdout == "<table 4\n", shown.stderr
    assert "accepted 3 of 6 drafted (50%)" in str(account(a_round(4, 1, 1.0), a_round(2, 2, 1.0)))


def test_the_expected_speedup_is_the_observed_one_of_independent_tokens_alone():
    """Both are the formula's, on the curve that the rounds took; not if all or none are right."""
    coins = random.Random(1)
    before = a_round(0, 0, 9.0), a_round(0, 0, 1.0)
    runs = [next((n for n in range(4) if coins.random() >= 0.7), 4) for _ in range(20_000)]
    stats = account(*before, *(a_round(4, run, 1.4) for run in runs))
    formula = expected_speedup_on_curve(0.7, 4, lambda m: 1.4 if m == 5 else 1.0)
    assert stats.expected_speedup == pytest.approx(formula, rel=0.01)
    assert stats.observed_speedup == pytest.approx(formula, rel=0.01)
    stats = account(*before, *(a_round(4, 4 * (i % 2), 1.4) for i in range(100)))
    assert stats.acceptance_rate == pytest.approx(0.8)
    assert stats.observed_speedup == pytest.approx(3.0 / 1.4, rel=0.02)
    assert stats.expected_speedup == pytest.approx(3.3616 / 1.4, rel=0.02)
