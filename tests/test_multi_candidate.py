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
from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.rules.trees import MultiRound, remaining_laws

EXACT = 1e-12
sizes = st.tuples(st.integers(1, 5), st.integers(1, 3))


def candidate_accept_probs(target_probs: Any, candidates: Any, draft_probs: Any) -> Any:
    """Chance [C] that each candidate is kept if none before it was."""
    return MultiRound().at_node(target_probs, candidates, draft_probs)[0]


def without_replacement(law: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Law [C, V] of each candidate given that it differs from those before it."""
    rows = [law]
    for token in candidates[:-1]:
        left = np.where(np.arange(len(law)) == token, 0, rows[-1])
        rows.append(left / left.sum())
    return np.stack(rows)


def outcome(p: np.ndarray, candidates: np.ndarray, laws: np.ndarray) -> tuple[np.ndarray, float]:
    """Law [V] of the token, given the candidates, and the chance that one of them is kept."""
    law, left = np.zeros_like(p), 1.0
    for token, chance in zip(candidates, candidate_accept_probs(p, candidates, laws), strict=True):
        law[token] += left * chance
        left *= 1 - chance
    return law + left * remaining_laws(p, laws)[-1], 1 - left


def over_all_draws(p: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, float]:
    """The same over independent draws of each candidate from its row [C, V]."""
    law, kept = np.zeros_like(p), 0.0
    for candidates in product(*[np.flatnonzero(row).tolist() for row in rows]):
        weight = np.prod(rows[range(len(rows)), candidates])
        given_these, kept_of_these = outcome(p, np.array(candidates), rows)
        law += weight * given_these
        kept += weight * kept_of_these
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


@given(st.integers(2, 5).flatmap(strategies.law_pairs), st.integers(1, 3))
def test_draws_without_replacement_leave_the_law_alone(pair, count):
    """Each candidate has the law that is left by those before it."""
    p, q = pair
    count = min(count, np.count_nonzero(q))
    law, total = np.zeros_like(p), 0.0
    for candidates in product(np.flatnonzero(q), repeat=count):
        if len(set(candidates)) < count:
            continue
        rows = without_replacement(q, np.array(candidates))
        weight = np.prod(rows[range(count), candidates])
        law += weight * outcome(p, np.array(candidates), rows)[0]
        total += weight
    assert total == pytest.approx(1, abs=EXACT)
    np.testing.assert_allclose(law, p, atol=EXACT)


@given(st.integers(1, 5).flatmap(strategies.laws), st.data())
def test_fixed_candidates_are_kept_as_often_as_p_has_mass_on_them(p, data):
    """Point masses, all different: p is left alone, and their mass under p is kept."""
    token = st.integers(0, len(p) - 1)
    candidates = np.array(data.draw(st.lists(token, min_size=1, unique=True)))
    law, kept = outcome(p, candidates, point_mass(candidates, p[None]))
    np.testing.assert_allclose(law, p, atol=EXACT)
    assert kept == pytest.approx(p[candidates].sum(), abs=EXACT)


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
