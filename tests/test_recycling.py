"""Token Recycling: the table holds what the target thought next, and its chains are drafted."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest

import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.contracts import DraftContext, FeatureRows, all_drafters
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


@in_one_test("context", [1, 2])
@in_one_test("options", [{}, {"sampler": sd.Sampling(temp=0.5), "seed": 3}])
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
    """With nothing rejected: under each token, or pair, what was likeliest after it at last."""
    table = SuccessorTable()
    items = text_of(model, RecyclingDrafter(table=table, context=context), draft_length=0)
    text = PROMPT + [item.token for item in items]
    expected = tops(model, text)
    ends = range(len(PROMPT) - 1, len(text) - 1)
    places = {i: text[i] if context == 1 else tuple(text[i - 1 : i + 1]) for i in ends}
    latest = {place: expected[i] for i, place in places.items()}
    assert {place: known.tokens for place, known in table.successors.items()} == latest
    end = len(text) - 2
    chains = table.drafts([9, *text[: end + 1]], 1, context)
    assert [draft.tokens[0] for draft in chains] == expected[end][:BRANCHES]
    assert table.drafts(text[end : end + 1], 1, 2) == []


def test_of_rejected_tokens_pairs_are_not_known(model: Any) -> None:
    """What stood before a rejected token is not told, so that nothing is noted of it."""
    table = SuccessorTable()
    plain = [item.token for item in text_of(model, None)]
    table.note((PROMPT[-1], plain[0]), [7] * TOP)
    table.note((plain[0], 7), [8] * TOP)
    items = text_of(model, RecyclingDrafter(table=table, context=2))
    assert items[-1].stats.drafted > items[-1].stats.accepted
    text = PROMPT + plain
    assert set(table.successors) <= {*pairwise(text), (plain[0], 7)}


def test_the_contexts_noted_longest_ago_make_way() -> None:
    """Of more than there may be; one that is noted again is the latest."""
    table = SuccessorTable(most=2)
    for context in (1, 2, 1, 3):
        table.note(context, [5])
    assert list(table.successors) == [1, 3]
    assert table.successors[1].seen == 1


def test_positions_that_were_rejected_are_noted_too(model: Any) -> None:
    """A token that never came into the text, but was tried, has successors."""
    table = SuccessorTable()
    wrong = 7
    plain = [item.token for item in text_of(model, None)]
    assert wrong not in plain
    table.note(PROMPT[-1], [wrong] * TOP)
    table.note(plain[0], [wrong] * TOP)
    text_of(model, RecyclingDrafter(table=table))
    assert wrong in table.successors
    assert wrong not in PROMPT


def test_the_prompts_rows_are_dropped_uncomputed() -> None:
    """Only rows from the prompt's last token on are noted."""
    table = SuccessorTable()
    session = RecyclingDrafter(table=table).begin([1, 2, 3], DraftContext())
    rows = mx.arange(2 * TOP).reshape(2, TOP)
    session.see(FeatureRows({}, top_tokens=rows))
    session.see(FeatureRows({}, top_tokens=rows[:1] + 50))
    session.observe([4])
    assert list(table.successors) == [3]
    assert table.successors[3].tokens == list(range(50, 50 + TOP))
    assert not session.propose(4)


def test_a_chain_follows_the_likeliest_and_says_how_steady_it_was() -> None:
    """1 -> 2 -> 3, and evidence grows with each time that the target says so again."""
    table = SuccessorTable()
    for _ in range(3):
        table.note(1, [2, 9])
    table.note(2, [9, 3])
    table.note(2, [3, 9])
    (draft,) = table.drafts([7, 1], 5, branches=1)
    assert list(draft.tokens) == [2, 3]
    assert draft.evidence is not None
    first, second = draft.evidence
    assert (first.match, second.match) == (3, 1)
    assert (first.share, second.share) == (share_class(1.0), share_class(0.0))
    assert first.share > second.share


def test_numbers_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="expected >= 1"):
        RecyclingDrafter(num_draft=0)
    with pytest.raises(ValueError, match="expected 1 or 2"):
        RecyclingDrafter(context=3)


@in_one_test("trees", [False, True])
def test_the_default_combination_keeps_what_the_target_thought_of_if_asked(
    trees: bool, model: Any
) -> None:
    """From one generation to the next; the text is the target's own."""
    plain = [item.token for item in text_of(model, None)]
    kept = sd.make_drafter(f"auto:recycling=true,trees={str(trees).lower()}")
    assert isinstance(kept, sd.TreeOf if trees else sd.BestOf)
    tables = [part.table for part in all_drafters(kept) if isinstance(part, RecyclingDrafter)]
    assert len(tables) == 2
    for _ in range(2):
        assert [item.token for item in text_of(model, kept, draft_length="auto")] == plain
    assert all(table is not None and table.successors for table in tables)
    default = sd.make_drafter(f"auto:trees={str(trees).lower()}")
    assert all(
        part.table is None for part in all_drafters(default) if isinstance(part, RecyclingDrafter)
    )
