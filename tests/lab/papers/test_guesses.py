"""Lookahead decoding and Token Recycling: drafts of what the target itself guessed would follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import (
    DraftContext,
    Evidence,
    FeatureRows,
    LookUpSession,
    RoundRecord,
    all_drafters,
    share_class,
)
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import Auto
from specdec_mlx.lab.papers.lookahead import LookaheadIndex
from specdec_mlx.lab.papers.recycling import BRANCHES, TOP, SuccessorTable
from specdec_mlx.lab.papers.tree_drafts import TreeSession
from specdec_mlx.token_ids import to_list

PROMPT = [5, 17, 99, 3]


@cache
def target(name: str) -> nn.Module:
    return tiny.build(name)


def text_of(name: str, drafter: Any, **options: Any) -> list[sd.generation.Token]:
    options = {"max_tokens": 40, "num_draft_tokens": 3, **options}
    return list(sd.speculate(target(name), PROMPT, drafter, **options))


def ids(items: Sequence[sd.generation.Token]) -> list[int]:
    return [item.token for item in items]


LOOKAHEAD = lab.LookaheadDrafter(window=4)
DRAFTERS: dict[str, Callable[[], Any]] = {
    "lookahead": lambda: LOOKAHEAD,
    "lookahead, with others": lambda: lab.TreeOf(sd.PromptLookupDrafter(min_ngram=1), LOOKAHEAD),
    "recycling": lambda: lab.RecyclingDrafter(table=SuccessorTable()),
    "recycling of pairs": lambda: lab.RecyclingDrafter(table=SuccessorTable(), context=2),
    "auto": lambda: sd.drafters.make_drafter("auto-recycling"),
    "auto with trees": lambda: sd.drafters.make_drafter("trees:recycling=true"),
}

SEEDED = {"sampler": sd.Sampling(0.8), "seed": 11, "rule": "coupled"}


@in_one_test("drafter", DRAFTERS)
@in_one_test(("length", "options"), [("auto", {}), (24, SEEDED)])
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_the_text_is_the_targets_own(
    name: str, length: int | str, options: Any, drafter: str
) -> None:
    """Greedy, and a seed's under the coupled rule; where a tree is verified in one pass, and where
    only its first chain is; the second time a table knows what is coming.
    """
    plain, one = text_of(name, None, **options), DRAFTERS[drafter]()
    texts = [text_of(name, one, num_draft_tokens=length, **options) for _ in range(2)]
    assert [ids(items) for items in texts] == [ids(plain)] * 2
    first, second = (items[-1].stats for items in texts)
    if length != "auto":
        assert second.drafted > 0
        assert second.accepted >= first.accepted or "recycling" not in drafter
    tables = [getattr(part, "table", None) for part in all_drafters(one)]
    assert all(table.successors for table in tables if isinstance(table, SuccessorTable))
    if "auto" in drafter:
        assert isinstance(one, lab.TreeOf if "trees" in drafter else sd.BestOf)
        assert sum(isinstance(table, SuccessorTable) for table in tables) == 2


@in_one_test("context", [1, 2])
def test_the_table_is_the_targets_own_opinion(context: int) -> None:
    """With nothing rejected: under each token, or pair, what was likeliest after it at last; the
    rows before the prompt's last token are left out.
    """
    table = SuccessorTable()
    drafter = lab.RecyclingDrafter(table=table, context=context)
    text = PROMPT + ids(text_of("qwen2", drafter, num_draft_tokens=0))
    logits = target("qwen2")(mx.array([text]))[0]
    expected = mx.argsort(-logits, axis=-1)[:, :TOP].tolist()
    ends = range(len(PROMPT) - 1, len(text) - 1)
    latest = {tuple(text[i + 1 - context : i + 1]): [(t,) for t in expected[i]] for i in ends}
    assert {place: known.texts for place, known in table.successors.items()} == latest
    end = len(text) - 2
    chains = table.drafts([9, *text[: end + 1]], 1, context)
    assert [draft.tokens[0] for draft in chains] == expected[end][:BRANCHES]


@in_one_test("context", [1, 2])
def test_what_was_rejected_is_noted_where_its_context_is_known(context: int) -> None:
    """A token that was tried in vain has successors, and a pair that did not stand there none."""
    table, wrong = SuccessorTable(), 7
    plain = ids(text_of("qwen2", None))
    text = PROMPT + plain
    assert wrong not in text
    for place in ((PROMPT[-1],), (plain[0],), (PROMPT[-1], plain[0]), (plain[0], wrong)):
        table.note(place, (wrong,))
    items = text_of("qwen2", lab.RecyclingDrafter(table=table, context=context))
    assert items[-1].stats.drafted > items[-1].stats.accepted
    assert ((wrong,) in table.successors) == (context == 1)
    pairs = {place for place in table.successors if len(place) == 2}
    assert pairs <= {*pairwise(text), (plain[0], wrong)}


def test_what_was_noted_longest_ago_makes_way() -> None:
    """Of contexts, and of guesses after one: what is noted again is the latest."""
    table = SuccessorTable(most=2, top=2)
    for token, guess in ((1, 5), (2, 5), (1, 6), (1, 5), (1, 7), (3, 5)):
        table.note((token,), (guess,))
    assert {place: at.texts for place, at in table.successors.items()} == {
        (1,): [(7,), (5,)],
        (3,): [(5,)],
    }


def test_a_chain_follows_the_likeliest_and_says_how_steady_it_was() -> None:
    """1 -> 2 -> 3, and evidence grows with each time that the target says so again."""
    table = SuccessorTable()
    for token, likeliest in ((1, [2, 9]), (1, [2, 9]), (1, [2, 9]), (2, [9, 3]), (2, [3, 9])):
        table.note((token,), *((guess,) for guess in likeliest))
    (draft,) = table.drafts([7, 1], 5, branches=1)
    assert list(draft.tokens) == [2, 3]
    assert draft.evidence == [Evidence(3, share_class(1.0)), Evidence(1, share_class(0.0))]


def test_n_grams_end_with_what_the_target_says_after_them() -> None:
    """The last token is the likeliest after text, trunk and column, to the target run alone."""
    checked: list[tuple[int, ...]] = []

    class Watched(LookaheadIndex):
        def n_grams(self) -> set[tuple[int, ...]]:
            known = self._pool.successors.items()
            return {(*first, *rest) for first, some in known for rest in some.texts}

        def append(self, tokens: Sequence[int]) -> None:
            text, before, columns = list(self._tokens), self.n_grams(), self._window.columns()
            super().append(tokens)
            for n_gram in self.n_grams() - before:
                paths = [
                    path
                    for j, path in enumerate(columns)
                    if ((*text, *path[:j])[-1], *path[j:]) == n_gram[:-1]
                ]
                if len(n_gram) == 3:  # not a pair, of a draft without rows
                    rows = [target("llama")(mx.array([[*text, *path]]))[0, -1] for path in paths]
                    assert n_gram[-1] in [mx.argmax(row).item() for row in rows]
                    checked.append(n_gram)

    class Drafter(lab.LookaheadDrafter):
        def begin(self, prompt: Sequence[int], context: DraftContext) -> TreeSession:
            return TreeSession(self.key, [(self.key, LookUpSession(Watched(self, prompt)))])

    text_of("llama", Drafter(window=3, ngram=3), max_tokens=16, num_draft_tokens=16)
    assert len(checked) > 10


def index(**options: Any) -> LookaheadIndex:
    return LookaheadIndex(lab.LookaheadDrafter(**options), [5, 6, 7])


def test_n_grams_of_the_pool_come_first_and_then_the_rows() -> None:
    """The latest n-gram first; a limit cuts whole columns, never an n-gram's beginning."""
    begun = index(window=2, ngram=3)
    for rest in ((40, 41), (40, 42)):
        begun._pool.note((7,), rest)
    assert [draft.tokens for draft in begun.chains(2)] == [(40, 42), (40, 41)]
    assert [draft.tokens for draft in begun.chains(1)] == [(40,)] * 2
    assert begun.chains(0) == []
    draft = begun.draft(9)
    assert draft.parents is not None
    assert (to_list(draft.tokens)[:3], list(draft.parents)[:3]) == ([40, 42, 41], [-1, 0, 0])
    assert len(draft) == 3 + 3
    assert len(begun.draft(4)) == 4
    assert to_list(begun.draft(2).tokens) == [40, 42]
    assert len(begun.draft(0)) == 0


@in_one_test(
    ("verified", "said", "noted", "window"),
    [
        (
            [51, 50, 52],
            [60, 61, 62],
            {(7,): [(51, 60)], (50,): [(52, 62), (61,)], (51,): [(60,)], (52,): [(62,)]},
            [[50, 52], [60, 62]],
        ),
        ([51], [61], {(51,): [(61,)]}, [[50], [52]]),  # the first chain, of a target without trees
        ([8, 9], [18, 19], {(8,): [(18,)], (9,): [(19,)]}, [[50], [52]]),  # another's draft
    ],
)
def test_what_is_said_after_rejected_rows_is_noted(
    verified: list[int], said: list[int], noted: dict[Any, Any], window: list[list[int]]
) -> None:
    """As pairs, and n-grams where the rows were verified as they are: the window's first level goes
    then; else columns go whose places were written.
    """
    begun = index(window=2, ngram=3)
    begun._window.levels = [[7, 50], [51, 52]]
    if verified[0] == 51:
        assert to_list(begun.draft(20).tokens) == [51, 50, 52]
    begun.see_rejected(verified, FeatureRows({}, top_tokens=mx.array(said)[:, None]))
    begun.append([50])
    assert {first: known.texts for first, known in begun._pool.successors.items()} == noted
    assert [level[: len(window[0])] for level in begun._window.levels] == window


KEY = lab.LookaheadDrafter().key


@in_one_test(("slope", "are_rows"), [(0.0, True), (0.005, True), (0.1, False), (None, False)])
def test_rows_ride_where_positions_cost_little(slope: float | None, are_rows: bool) -> None:
    """A price is that of the whole pass at the going rate; too much where nothing was measured."""
    auto = Auto(Tuning())
    for size in (0, 4, 8, 14, 16, 24) * 8 if slope is not None else ():
        auto.limit(KEY, True)
        seconds = 1.0 + (slope or 0.0) * size
        auto.record(RoundRecord(size, 0, 1, 1 + size, [1], seconds, part=KEY if size else ""))
    price = math.inf if slope is None else pytest.approx(auto.price(4) + 12 * slope, abs=0.01)
    assert auto.price(16) == price
    for may_fork in (True, False):
        session = lab.LookaheadDrafter().begin([5, 6, 7], DraftContext())
        draft = auto.begin(KEY, session, lambda: may_fork)(64)  # noqa: B023
        assert (len(draft) > 0) == (are_rows and may_fork)
