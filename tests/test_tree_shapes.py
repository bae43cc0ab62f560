"""The best tree of a size: against every shape there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exact_trees import depth, shapes
from specdec_mlx.contracts.trees import ROOT, depths_of
from specdec_mlx.stats.theory import best_draft_length_on_curve, expected_tokens, greatest_chances

falling = st.lists(st.floats(0.01, 0.5), min_size=1, max_size=3).map(
    lambda ranks: sorted((x / max(1.0, sum(ranks)) for x in ranks), reverse=True)
)


def expected(parents: Sequence[int], acceptance: Sequence[Sequence[float]]) -> float:
    """Expected tokens of a round that verifies a tree, from the definition."""
    chances: list[float] = []
    for node, (parent, level) in enumerate(zip(parents, depths_of(parents), strict=True)):
        by_rank, rank = acceptance[level], list(parents[:node]).count(parent)
        above = 1.0 if parent == ROOT else chances[parent]
        chances.append(above * by_rank[rank] if rank < len(by_rank) else 0.0)
    return 1 + sum(chances)


@given(st.lists(falling, min_size=1, max_size=4), st.integers(1, 6))
@settings(max_examples=25)
def test_no_shape_has_more_expected_tokens(acceptance, size):
    """Of all trees of up to 6 tokens, with acceptance by depth and rank; none of nothing."""
    found = greatest_chances(acceptance, size)
    allowed = [shape for n in range(1, size + 1) for shape in shapes(n)]
    most = max(expected(s, acceptance) for s in allowed if depth(s) <= len(acceptance))
    assert 1 + sum(found) == pytest.approx(most, abs=1e-12)
    assert greatest_chances(acceptance, 0) == greatest_chances([], size) == []


def test_with_one_rank_a_tree_is_a_chain():
    """The formulas are those of a chain, and so is the length that pays."""
    tokens = [1.0, *(1 + total for total in accumulate(greatest_chances([[0.8]] * 64, 64)))]
    assert tokens[5] == pytest.approx(expected_tokens(0.8, 5))
    speeds = [n / (1 + 0.1 * length) for length, n in enumerate(tokens)]
    best = best_draft_length_on_curve(0.8, lambda m: 1 + 0.1 * (m - 1))
    assert speeds.index(max(speeds)) == best
