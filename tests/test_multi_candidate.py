"""Several candidates for one position: the token has the target's law, by enumeration."""

from __future__ import annotations

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import strategies
from selection import in_one_test
from specdec_mlx.rules.trees import MultiRound, remaining_laws

EXACT = 1e-12
sizes = st.tuples(st.integers(1, 5), st.integers(1, 3))


def candidate_accept_probs(target_probs: Any, candidates: Any, draft_probs: Any) -> Any:
    """Chance [C] that each candidate is kept if none before it was."""
    return MultiRound().at_node(target_probs, candidates, draft_probs)[0]


def over_all_draws(p: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, float]:
    """Law [V] of the token, and the chance that one of the candidates, each of its row, is kept."""
    law, kept = np.zeros_like(p), 0.0
    for candidates in product(*[np.flatnonzero(row).tolist() for row in rows]):
        left = np.prod(rows[range(len(rows)), candidates])
        chances = candidate_accept_probs(p, np.array(candidates), rows)
        for token, chance in zip(candidates, chances, strict=True):
            law[token] += left * chance
            kept += left * chance
            left *= 1 - chance
        law += left * remaining_laws(p, rows)[-1]
    return law, kept


@st.composite
def candidate_laws(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Target's law [V], and laws [C, V] of the candidates, of one law or of several."""
    vocab_size, count = draw(sizes)
    p, first = draw(strategies.law_pairs(vocab_size))
    more = [st.just(first), strategies.laws(vocab_size)]
    return p, np.stack([first, *[draw(st.one_of(more)) for _ in range(count - 1)]])


@given(candidate_laws())
def test_independent_candidates_leave_the_law_alone(laws):
    """One from each of several laws: the token's law is p to 1e-12, and more of them keep more."""
    p, rows = laws
    kept = []
    for count in range(1, len(rows) + 1):
        law, chance = over_all_draws(p, rows[:count])
        np.testing.assert_allclose(law, p, atol=EXACT)
        kept.append(chance)
    assert np.all(np.diff(kept) >= -EXACT)
    assert kept[0] == pytest.approx(np.minimum(p, rows[0]).sum(), abs=EXACT)


@in_one_test("array", [np.array, mx.array])
def test_edges(array):
    """A vocabulary of 1; p = q; one-hots; candidates that p excludes; the same fixed one twice."""
    one = array([1.0])
    assert candidate_accept_probs(one, array([0, 0]), array([[1.0]] * 2)).tolist() == [1, 1]
    p = array([0.75, 0.25, 0.0])
    same = candidate_accept_probs(p, array([1, 0]), array([[0.75, 0.25, 0.0]] * 2))
    assert same.tolist() == [1, 1]
    twice = candidate_accept_probs(p, array([0, 0]), array([[1.0, 0.0, 0.0]] * 2))
    assert twice.tolist() == [0.75, 0.0]
    excluded = candidate_accept_probs(p, array([2]), array([[0.0, 0.0, 1.0]]))
    assert excluded.tolist() == [0]
    assert remaining_laws(p, array([[0.0, 0.0, 1.0]])).tolist() == [[0.75, 0.25, 0]] * 2
