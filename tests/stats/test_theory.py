"""The paper's formulas: its own numbers, its limits, and dice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_mlx.stats import theory

TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]

TABLE_4 = [  # acceptance, K, c, expected speedup
    (0.75, 7, 0.02, 3.2),
    (0.8, 7, 0.04, 3.3),
    (0.82, 7, 0.11, 2.5),
    (0.71, 3, 0.11, 2.0),
    (0.53, 5, 0.02, 1.9),
]


def test_tables_1_and_4_of_the_paper():
    """Leviathan et al. 2023: Table 1 at c = 0, Table 4 as far as its rounded inputs tell."""
    for alpha, K, operations, speed in TABLE_1:
        assert theory.expected_speedup(alpha, K) == pytest.approx(speed, abs=0.006)
        assert theory.expected_operations(alpha, K) == pytest.approx(operations, abs=0.006)
    for alpha, K, cost, speed in TABLE_4:
        low = theory.expected_speedup(alpha - 0.005, K, cost + 0.005)
        high = theory.expected_speedup(alpha + 0.005, K, cost - 0.005)
        assert low - 0.05 <= speed <= high + 0.05
        assert high - low < 0.4
    with pytest.raises(ValueError, match="expected"):
        theory.expected_operations(1.1, 2)


@given(st.floats(0, 1), st.integers(0, 20), st.floats(0, 1))
def test_expected_tokens_and_speedup_are_the_papers(alpha, K, cost):
    """Equation 1 as the sum that it is, over K c + 1 passes, also on a curve in other units.
    Corollary 3.9: if alpha > c some draft gains at least (1 + alpha) / (1 + c); else none does."""
    tokens = sum(alpha**i for i in range(K + 1))
    assert theory.expected_tokens(alpha, K) == pytest.approx(tokens)
    speedup = tokens / (K * cost + 1)
    assert theory.expected_speedup(alpha, K, cost) == pytest.approx(speedup)
    on_curve = theory.expected_speedup(alpha, K, 2 * cost, lambda m: 2.0)
    assert on_curve == pytest.approx(speedup)
    best = theory.expected_speedup(alpha, theory.best_draft_length(alpha, cost), cost)
    gain = (1 + alpha) / (1 + cost)
    assert best >= gain - 1e-12 if alpha > cost else best == pytest.approx(1)


def test_acceptance_is_recovered_from_counts():
    """The likeliest alpha after simulated rounds is the one that they were simulated with."""
    accepted = np.cumprod(np.random.default_rng(1).random((50_000, 4)) < 0.7, axis=1).sum(axis=1)
    got = theory.acceptance_from_counts(int(accepted.sum()), int((accepted < 4).sum()))
    assert got == pytest.approx(0.7, abs=0.01)
    assert theory.acceptance_from_counts(0, 0) == 0


def test_best_draft_length_on_a_curve_with_steps():
    """Where rows come in tiles of 5, the best K fills a tile; where nothing is saved, it is 0."""

    def tiles(num_positions: int) -> float:
        return 1 + 0.6 * ((num_positions - 1) // 5)

    assert theory.best_draft_length(0.8, cost=tiles) == 4
    assert theory.best_draft_length(0.97, cost=tiles) in (9, 14, 19)
    assert theory.best_draft_length(0.99, cost=float) == 0
