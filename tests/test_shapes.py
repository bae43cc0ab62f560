"""Shapes are checked while tests run, so that a wrong one is seen where it is made."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from selection import in_one_test
from specdec_mlx.rules.block import Block

K, V = 3, 5


@in_one_test("library", [mx, np])
def test_a_rule_meets_one_row_more_of_the_target_than_of_the_draft(library):
    """[K+1, V] meets [K, V]: a rule that is given as many rows of both is not run."""
    target, draft = library.ones((K + 1, V)) / V, library.ones((K, V)) / V
    tokens = library.zeros((K,)).astype(library.int32)
    assert Block().accept_probs(target, tokens, draft).shape == (K,)
    with pytest.raises(TypeCheckError, match="rows-1"):
        Block().accept_probs(target[:K], tokens, draft)


def test_tokens_are_integers_and_chances_are_not():
    """Neither may stand for the other."""
    probs = mx.ones((2, V)) / V
    with pytest.raises(TypeCheckError, match="Integer"):
        Block().accept_probs(probs, mx.array([0.5]), probs[:1])
    with pytest.raises(TypeCheckError, match="Float"):
        Block().accept_probs(mx.ones((2, V), mx.int32), mx.array([1]), probs[:1])
