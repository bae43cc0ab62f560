"""Drafters that propose trees: the shape of what they propose, and plain text with all of them."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from heads import HEADS, random_head
from lossless import PROMPT, TOLERANCE, plain_text, spoken
from scripted import OracleDrafter, ScriptedDrafter
from specdec_mlx import NGramDrafter, PromptLookupDrafter, Sampling, speculate
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.tree_of import TreeOf, merged
from specdec_mlx.errors import HeadError
from specdec_mlx.stats.trees import best_first
from specdec_mlx.testing import check_drafter
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import ROOT, Draft, DraftContext, FeatureRows
from specdec_mlx.types.trees import chain, depths_of, path_to

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


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "deepseek_v3", "mamba2"])
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


def test_look_ups_in_one_tree_keep_the_contract_of_a_drafter():
    """Both of them at once; the text repeats itself, so that they have something to say."""
    check_drafter(TreeOf(PromptLookupDrafter(), NGramDrafter()), vocab_size=16)


def test_what_may_not_be_thrown_away_is_refused():
    """A drafter takes what is observed for the part of its draft that was kept."""
    with pytest.raises(ValueError, match="OracleDrafter proposes may not be thrown away"):
        TreeOf(OracleDrafter([1], 9)).begin([1], DraftContext())
    with pytest.raises(ValueError, match="at least one"):
        TreeOf()


BRANCHES = ((0.6, 0.2, 0.1), (0.5, 0.2), (0.4, 0.1))


@functools.cache
def medusa(name: str, **options: Any) -> HeadDrafter:
    """Random heads, that propose trees."""
    return HeadDrafter(random_head(HEADS["medusa"], tiny.build(name)), branches=BRANCHES, **options)


@pytest.mark.parametrize("limit", [1, 2, 5, 12, 99])
def test_a_medusa_tree_is_the_product_of_the_heads_guesses(limit):
    """At each node the guess of its depth that has its rank, of the last state shown."""
    drafter = medusa("qwen2")
    vocab_size = drafter.head.lm_heads[0].weight.shape[0]
    session = drafter.begin(PROMPT, DraftContext(vocab_size=vocab_size))
    state = mx.random.normal((1, drafter.head.ends.width), key=mx.random.key(0))
    session.see(FeatureRows({}, head_input=state))
    draft = session.propose(limit)
    guesses = [
        np.argsort(-np.array(drafter.head.logits(state, i)[0]), kind="stable") for i in range(3)
    ]
    parents, ranks = best_first(BRANCHES, limit)
    expected = [
        int(guesses[depth][rank]) for depth, rank in zip(depths_of(parents), ranks, strict=True)
    ]
    assert draft.tokens.tolist() == expected
    assert draft.logprobs is None
    assert list(chain(len(draft)) if draft.parents is None else draft.parents) == parents
    assert len(draft) == min(limit, 3 + 3 * 2 + 3 * 2 * 2)


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "qwen3_5"])
def test_text_with_a_medusa_tree_is_plain_text(name):
    """Greedy, and a seed's text under match; also where the model takes chains alone."""
    model, drafter = tiny.build(name), medusa(name)
    plain = plain_text(model, PROMPT, 40)
    items = list(speculate(model, PROMPT, drafter, max_tokens=40, draft_length=12))
    assert spoken(items).deviation(plain) < TOLERANCE
    options: dict[str, Any] = {"sampler": Sampling(temp=1.0), "seed": 5, "max_tokens": 40}
    texts = [
        [t.token for t in speculate(model, PROMPT, one, draft_length=12, rule="match", **options)]
        for one in (None, drafter)
    ]
    assert texts[0] == texts[1]


def test_heads_that_draft_chains_refuse_branches():
    """Rather than draft chains in silence; and the key says which trees are drafted."""
    with pytest.raises(HeadError, match="heads draft chains"):
        HeadDrafter(random_head(HEADS["eagle1"], tiny.build("qwen2")), branches=BRANCHES)
    assert str(BRANCHES) in medusa("qwen2").key


def test_a_draft_that_was_drawn_is_not_merged():
    """Its distribution is of a chain; the first drafter's goes alone, a later one's is left out."""
    drawn = Draft([1], mx.zeros((1, 1)))
    for order, expected in [((drawn, Draft([2])), drawn), ((Draft([2]), drawn), Draft([2]))]:
        parts = [Cheap(lambda start, limit: []) for _ in order]
        session: Any = TreeOf(*parts).begin([1], DraftContext())
        for part, draft in zip(session.sessions, order, strict=True):
            part.propose = functools.partial(lambda draft, limit: draft, draft)
        assert session.propose(4).tokens == expected.tokens
