"""Drafters that propose trees: the shape of what they propose, and plain text with all of them."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from lossless import PROMPT, TOLERANCE, plain_text, spoken
from scripted import OracleDrafter, ScriptedDrafter
from selection import FULL, in_one_test
from specdec_mlx import NGramDrafter, PromptLookupDrafter, speculate
from specdec_mlx.contracts import ROOT, Draft, DraftContext
from specdec_mlx.contracts.trees import path_to
from specdec_mlx.drafters.tree_of import TreeOf, merged
from specdec_mlx.testing import check_drafter
from specdec_mlx.token_ids import to_list

chains = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=4)


def texts(draft: Draft) -> set[tuple[int, ...]]:
    """What a tree says at each of its nodes."""
    parents = range(ROOT, len(draft) - 1) if draft.parents is None else draft.parents
    paths = [path_to(node, parents) for node in range(len(draft))]
    tokens = to_list(draft.tokens)
    return {tuple(tokens[node] for node in path) for path in paths}


@given(chains)
def test_a_tree_of_chains_says_what_they_say(drafts):
    """Every head of every chain stands in it once, and nothing else; parents stand first."""
    tree = merged([Draft(tokens) for tokens in drafts])
    heads = {tuple(tokens[:n]) for tokens in drafts for n in range(1, len(tokens) + 1)}
    assert texts(tree) == heads
    assert len(tree) == len(heads)
    if tree.parents is not None:
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert texts(merged([tree, *map(Draft, drafts)])) == heads


def test_the_first_drafters_tokens_are_tried_first():
    """At each depth; one chain stays a chain, and cutting leaves a tree."""
    tree = merged([Draft([1, 2, 3]), Draft([4]), Draft([1, 5])])
    assert tree == Draft([1, 4, 2, 5, 3], parents=[ROOT, ROOT, 0, 0, 2])
    assert texts(tree.head(3)) == {(1,), (4,), (1, 2)}
    assert tree.first_chain() == Draft([1, 2, 3])
    assert merged([Draft([1, 2]), Draft([1])]) == Draft([1, 2])


class Cheap(ScriptedDrafter):
    """What it proposes may be thrown away."""

    def begin(self, prompt, context):
        session: Any = super().begin(prompt, context)
        session.cheap = True
        return session


@in_one_test("name", ["llama", "gemma3_text", "deepseek_v3", "mamba2"])
@pytest.mark.filterwarnings("ignore:specdec_mlx")
def test_text_with_a_tree_of_drafters_is_plain_text(name):
    """One that is wrong and one that is right: where trees work the second is kept."""
    model = tiny.build(name)
    plain = plain_text(model, PROMPT, 40)
    wrong = Cheap(lambda start, limit: [(t + 1) % 90 for t in plain.tokens[start : start + 2]])
    right = Cheap(lambda start, limit: plain.tokens[start : start + limit])
    items = list(speculate(model, PROMPT, TreeOf(wrong, right), max_tokens=40, draft_length=6))
    assert spoken(items).deviation(plain) < TOLERANCE
    accepted = items[-1].stats.accepted
    assert accepted == 0 if name == "mamba2" else accepted > 25


@FULL
def test_look_ups_in_one_tree_keep_the_contract_of_a_drafter():
    """Both of them at once; the text repeats itself, so that they have something to say."""
    check_drafter(TreeOf(PromptLookupDrafter(), NGramDrafter()), vocab_size=16, num_draws=100)


def test_what_may_not_be_thrown_away_is_refused():
    """A drafter takes what is observed for the part of its draft that was kept."""
    with pytest.raises(ValueError, match="OracleDrafter proposes may not be thrown away"):
        TreeOf(OracleDrafter([1], 9)).begin([1], DraftContext())


def test_a_draft_that_was_drawn_is_not_merged():
    """Its distribution is of a chain; the first drafter's goes alone, a later one's is left out."""
    drawn = Draft([1], mx.zeros((1, 1)))
    for order, expected in [((drawn, Draft([2])), drawn), ((Draft([2]), drawn), Draft([2]))]:
        parts = [Cheap(lambda start, limit: []) for _ in order]
        session: Any = TreeOf(*parts).begin([1], DraftContext())
        for part, draft in zip(session.sessions, order, strict=True):
            part.propose = functools.partial(lambda draft, limit: draft, draft)
        assert session.propose(4).tokens == expected.tokens
