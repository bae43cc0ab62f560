"""Shapes are checked while tests run, so that a wrong one is seen where it is made."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from selection import in_one_test
from specdec_mlx.rules import Block

K, V = 3, 5


@in_one_test("library", [mx, np])
def test_wrong_shapes_and_types_are_seen_where_they_are_made(library):
    """[K+1, V] meets [K, V]: a rule that is given as many rows of both is not run; tokens are
    integers, and chances are not.
    """
    target, draft = library.ones((K + 1, V)) / V, library.ones((K, V)) / V
    tokens = library.zeros((K,)).astype(library.int32)
    assert Block().accept_probs(target, tokens, draft).shape == (K,)
    for wrong, named in (
        ((target[:K], tokens, draft), "rows-1"),
        ((target, draft[:, 0], draft), "Integer"),
        ((target.astype(library.int32), tokens, draft), "Float"),
    ):
        with pytest.raises(TypeCheckError, match=named):
            Block().accept_probs(*wrong)
