"""Token Recycling: the table holds what the target thought next, and its chains are drafted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.contracts import Evidence, all_drafters
from specdec_mlx.contracts.drafting import share_class
from specdec_mlx.drafters.recycling import BRANCHES, TOP, RecyclingDrafter, SuccessorTable

PROMPT = [5, 17, 99, 3]
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("qwen2")


def text_of(model: Any, drafter: Any, **options: Any) -> list[sd.responses.Token]:
    options = {"max_tokens": NUM_TOKENS, "draft_length": 3, **options}
    return list(sd.speculate(model, PROMPT, drafter, **options))


def tops(model: Any, tokens: list[int]) -> list[list[int]]:
    """The likeliest tokens at each position of a text, by one pass."""
    logits = model(mx.array([tokens]))[0]
    return mx.argsort(-logits, axis=-1)[:, :TOP].tolist()


DRAWN = {"sampler": sd.Sampling(temp=0.5), "seed": 3}


@in_one_test(("options", "context"), [({}, 1), ({}, 2), (DRAWN, 1)])
def test_the_text_is_the_targets_own(options: dict[str, Any], context: int, model: Any) -> None:
    """Greedy or drawn with a seed; the second time the table knows what is coming."""
    drafter = RecyclingDrafter(table=SuccessorTable(), context=context)
    plain = [item.token for item in text_of(model, None, **options)]
    first, second = (text_of(model, drafter, **options) for _ in range(2))
    for items in (first, second):
        assert [item.token for item in items] == plain
    assert second[-1].stats.drafted >= first[-1].stats.drafted > 0
    assert second[-1].stats.accepted >= first[-1].stats.accepted


@in_one_test("context", [1, 2])
def test_the_table_is_the_targets_own_opinion(context: int, model: Any) -> None:
    """With nothing rejected: under each token, or pair, what was likeliest after it at last; the
    rows before the prompt's last token are left out.
    """
    table = SuccessorTable()
    items = text_of(model, RecyclingDrafter(table=table, context=context), draft_length=0)
    text = PROMPT + [item.token for item in items]
    expected = tops(model, text)
    ends = range(len(PROMPT) - 1, len(text) - 1)
    latest = {tuple(text[i + 1 - context : i + 1]): expected[i] for i in ends}
    assert {place: known.tokens for place, known in table.successors.items()} == latest
    end = len(text) - 2
    chains = table.drafts([9, *text[: end + 1]], 1, context)
    assert [draft.tokens[0] for draft in chains] == expected[end][:BRANCHES]


@in_one_test("context", [1, 2])
def test_what_was_rejected_is_noted_where_its_context_is_known(context: int, model: Any) -> None:
    """A token that was tried in vain has successors, and a pair that did not stand there none."""
    table, wrong = SuccessorTable(), 7
    plain = [item.token for item in text_of(model, None)]
    text = PROMPT + plain
    assert wrong not in text
    for place in ((PROMPT[-1],), (plain[0],), (PROMPT[-1], plain[0]), (plain[0], wrong)):
        table.note(place, [wrong] * TOP)
    items = text_of(model, RecyclingDrafter(table=table, context=context))
    assert items[-1].stats.drafted > items[-1].stats.accepted
    assert ((wrong,) in table.successors) == (context == 1)
    pairs = {place for place in table.successors if len(place) == 2}
    assert pairs <= {*pairwise(text), (plain[0], wrong)}


def test_the_contexts_noted_longest_ago_make_way() -> None:
    """Of more than there may be; one that is noted again is the latest."""
    table = SuccessorTable(most=2)
    for token in (1, 2, 1, 3):
        table.note((token,), [5])
    assert list(table.successors) == [(1,), (3,)]
    assert table.successors[1,].seen == 1


def test_a_chain_follows_the_likeliest_and_says_how_steady_it_was() -> None:
    """1 -> 2 -> 3, and evidence grows with each time that the target says so again."""
    table = SuccessorTable()
    for context, likeliest in ((1, [2, 9]), (1, [2, 9]), (1, [2, 9]), (2, [9, 3]), (2, [3, 9])):
        table.note((context,), likeliest)
    (draft,) = table.drafts([7, 1], 5, branches=1)
    assert list(draft.tokens) == [2, 3]
    assert draft.evidence == [Evidence(3, share_class(1.0)), Evidence(1, share_class(0.0))]


@in_one_test("trees", [False, True])
def test_the_default_keeps_what_the_target_thought_of_if_asked(trees: bool, model: Any) -> None:
    """From one generation to the next; the text is the target's own."""
    plain = [item.token for item in text_of(model, None)]
    kept, default = (
        sd.make_drafter(f"auto:recycling={on},trees={trees}".lower()) for on in (True, False)
    )
    tables, none = (
        [part.table for part in all_drafters(one) if isinstance(part, RecyclingDrafter)]
        for one in (kept, default)
    )
    assert isinstance(kept, sd.TreeOf if trees else sd.BestOf)
    assert len(tables) == 2
    assert none == [None] * trees
    for _ in range(2):
        assert [item.token for item in text_of(model, kept, draft_length="auto")] == plain
    assert all(table is not None and table.successors for table in tables)
