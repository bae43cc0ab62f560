"""Shapes of trees: best-first against every shape there is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exact_trees import depth, shapes
from specdec_mlx.contracts.trees import chain
from specdec_mlx.stats.theory import (
    best_draft_length_on_curve,
    best_first,
    chances_of,
    expected_tokens,
    expected_tree_tokens,
)

falling = st.lists(st.floats(0.01, 0.5), min_size=1, max_size=3).map(
    lambda ranks: sorted((x / max(1.0, sum(ranks)) for x in ranks), reverse=True)
)


@given(st.lists(falling, min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=25)
def test_best_first_is_the_best_of_all_shapes(acceptance, size):
    """Of all trees of up to 6 tokens none has more expected tokens, with acceptance by depth."""
    parents, ranks = best_first(acceptance, size)
    allowed = [shape for shape in shapes(len(parents)) if depth(shape) <= len(acceptance)]
    most = max(expected_tree_tokens(shape, acceptance) for shape in allowed)
    assert expected_tree_tokens(parents, acceptance) == pytest.approx(most, abs=1e-12)
    assert ranks == [parents[:node].count(parent) for node, parent in enumerate(parents)]
    chances = chances_of(parents, acceptance)
    assert chances == sorted(chances, reverse=True)


@given(falling, st.lists(st.floats(0.0, 0.5), min_size=7, max_size=7))
@settings(max_examples=25)
def test_a_tree_is_as_large_as_pays(by_rank, steps):
    """On any rising curve of costs no tree of up to 6 tokens brings more per unit of cost."""

    def cost(positions: int) -> float:
        return 1 + sum(steps[:positions])

    def value(parents: Sequence[int]) -> float:
        return expected_tree_tokens(parents, [by_rank]) / cost(len(parents) + 1)

    parents, _ = best_first([by_rank] * 6, 6, cost)
    most = max(value(shape) for n in range(7) for shape in shapes(n))
    assert value(parents) == pytest.approx(most, abs=1e-12)


def test_with_one_rank_a_tree_is_a_chain():
    """The formulas are those of a chain, and so is the length that pays."""
    assert best_first([[0.8]] * 9, 5) == (chain(5), [0] * 5)
    assert expected_tree_tokens(chain(5), [[0.8]]) == pytest.approx(expected_tokens(0.8, 5))

    def cost(positions: int) -> float:
        return 1 + 0.1 * (positions - 1)

    parents, _ = best_first([[0.8]] * 64, 64, cost)
    assert len(parents) == best_draft_length_on_curve(0.8, cost)


@pytest.mark.parametrize(("acceptance", "size"), [([], 4), ([[]], 4), ([[0.0]], 4), ([[0.5]], 0)])
def test_nothing_is_grown_from_nothing(acceptance, size):
    """No depth, no rank, no chance, no room."""
    assert best_first(acceptance, size) == ([], [])
