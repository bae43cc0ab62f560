"""Trees whose branches are rows of a batch, where no mask can be given: exact, and plain text."""

from __future__ import annotations

import copy
import warnings
from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

import tiny
from exact_trees import shapes
from lossless import PROMPT, SECOND_PROMPT, TOLERANCE, plain_text, spoken
from scripted import TREE, OracleTrees
from selection import FULL
from specdec_mlx import Sampling, speculate
from specdec_mlx.contracts.trees import path_to
from specdec_mlx.target import exactness
from specdec_mlx.target.exactness import rows_pay
from specdec_mlx.target.model_pass import ModelPass
from specdec_mlx.target.rollback import Rollback
from specdec_mlx.target.strategies import leaves
from specdec_mlx.target.tree_passes import BranchRows, tree_logits

UNMASKED = ("mamba2", "qwen3_next", "rwkv7", "falcon_h1", "gpt2", "llama4")
"""Recurrent states, alone and beside attention; learned positions; a mask of its own."""

PARENTS = st.integers(1, 7).flatmap(lambda size: st.sampled_from(shapes(size)))


@given(PARENTS)
def test_every_node_stands_behind_its_own_path(parents: tuple[int, ...]) -> None:
    """In the row and column where its logits are taken; each path once, from its leaf."""
    rows = BranchRows.of(parents)
    fed = rows.fed(mx.array([99, *range(len(parents))])).tolist()
    for node, (row, column) in zip(range(-1, len(parents)), rows.places, strict=True):
        assert fed[row][: column + 1] == [99, *path_to(node, parents)]
    assert len(set(map(tuple, rows.paths))) == len(rows.paths) == len(fed)


def test_the_caches_are_left_alone() -> None:
    model = tiny.build("falcon_h1")
    caches = make_prompt_cache(model)
    model(mx.array([PROMPT]), cache=caches)
    before = copy.deepcopy(caches)
    mx.eval(tree_logits(model, caches, mx.array([3, *range(8)]), TREE))
    one, other = (model(mx.array([[5]]), cache=held) for held in (caches, before))
    assert mx.array_equal(one, other).item()


@pytest.mark.parametrize("name", UNMASKED)
def test_greedy_text_with_rows_is_plain_text(name: str) -> None:
    """60 tokens, past the windows; later branches are kept. A seed's text, too."""
    model = tiny.build(name)
    rows_pay.put(model, True)
    plain = plain_text(model, PROMPT, 60)
    drafter = OracleTrees(plain.tokens, plain.logprobs.shape[-1])
    items = list(speculate(model, PROMPT, drafter, max_tokens=60, draft_length=len(TREE)))
    assert spoken(items).deviation(plain) < TOLERANCE
    assert sum(b.row > a.row + 1 for a, b in pairwise(items)) > 3
    options: dict[str, Any] = {"sampler": Sampling(temp=0.8), "seed": 3, "rule": "coupled"}
    alone = [t.token for t in speculate(model, PROMPT, max_tokens=30, **options)]
    drafter = OracleTrees(alone, plain.logprobs.shape[-1])
    texts = speculate(model, PROMPT, drafter, max_tokens=30, draft_length=len(TREE), **options)
    assert [t.token for t in texts] == alone


@pytest.mark.parametrize("name", ["qwen3_5", "gpt2"])
def test_an_early_end_leaves_the_caches_at_what_was_handed_out(name: str) -> None:
    """In the middle of a tree that was kept; the second turn is as after plain decoding."""
    model = tiny.build(name)
    rows_pay.put(model, True)
    plain = plain_text(model, PROMPT, 40)
    drafter = OracleTrees(plain.tokens, plain.logprobs.shape[-1])
    for taken in (5, 6, 7, 12):
        caches = make_prompt_cache(model)
        loop = speculate(model, PROMPT, drafter, prompt_cache=caches, draft_length=len(TREE))
        assert [next(loop).token for _ in range(taken)] == plain.tokens[:taken]
        loop.close()
        offsets = {cache.offset for cache in leaves(caches) if hasattr(cache, "offset")}
        assert offsets == {len(PROMPT) + taken}
        afresh = plain_text(model, PROMPT + plain.tokens[:taken] + SECOND_PROMPT, 8)
        again = speculate(model, SECOND_PROMPT, None, prompt_cache=caches, max_tokens=8)
        assert spoken(again).deviation(afresh) < TOLERANCE


@pytest.mark.parametrize("cost", [0.9, 2.3])
def test_rows_are_taken_only_where_they_cost_no_more_than_a_chain(
    monkeypatch: pytest.MonkeyPatch, cost: float
) -> None:
    """Measured once for a model; elsewhere chains are drafted, and one line says why."""
    monkeypatch.setattr(exactness, "rows_cost", lambda model: cost)
    model = tiny.build("mamba2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            target = ModelPass(model, Rollback(make_prompt_cache(model)))
            assert target.takes_trees() == target.by_rows == (cost < 1)
    target.taps = object()  # type: ignore[assignment]
    assert not target.takes_trees(), "a head's rows are those of one text"
    assert len(caught) == (cost > 1)
    assert all("2.3 times as much as a chain" in str(warning.message) for warning in caught)


@FULL
def test_what_rows_cost_is_measured() -> None:
    assert exactness.rows_cost(tiny.build("mamba2")) > 0.2
