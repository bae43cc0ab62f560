"""Lookahead decoding: a pool of n-grams that the target guessed in parallel, beside the draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import specdec_mlx as sd
import tiny
from lossless import PROMPT
from selection import in_one_test
from specdec_mlx.contracts import DraftContext, FeatureRows, RoundRecord, key_of
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.lookahead import LookaheadSession, Window
from specdec_mlx.token_ids import to_list


@cache
def target(name: str) -> nn.Module:
    return tiny.build(name)


DRAWN = {"sampler": sd.Sampling(0.8), "seed": 11, "rule": "coupled"}


@in_one_test("options", [{}, DRAWN])
@in_one_test("length", [3, 24, "auto"])
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_the_text_is_the_targets_own(name: str, length: int | str, options: Any) -> None:
    """Greedy, and a seed's under the coupled rule; where a tree is verified in one pass, and where
    only its first chain is; with others too.
    """
    alone = sd.LookaheadDrafter(window=4)
    plain, *texts = (
        list(sd.speculate(target(name), PROMPT, one, max_tokens=60, draft_length=length, **options))
        for one in (None, alone, sd.TreeOf(sd.PromptLookupDrafter(min_ngram=1), alone))
    )
    for tokens in texts:
        assert [token.token for token in tokens] == [token.token for token in plain]
    stats = texts[0][-1].stats
    assert stats.drafted > 60 or length == "auto"
    assert stats.drafted <= 3 * stats.target_passes or name == "llama"


def own_choice(model: nn.Module, text: Sequence[int]) -> int:
    return int(mx.argmax(model(mx.array([list(text)]))[0, -1]).item())


def test_n_grams_end_with_what_the_target_says_after_them() -> None:
    """The last token is the likeliest after text, trunk and column, to the target run alone."""
    model = target("llama")
    checked: list[tuple[int, ...]] = []

    class Watched(LookaheadSession):
        def n_grams(self) -> set[tuple[int, ...]]:
            return {(first, *rest) for first, some in self._pool.items() for rest in some}

        def observe(self, tokens: Sequence[int]) -> None:
            text, before = list(self._tokens), self.n_grams()
            columns = [] if self._window is None else self._window.columns()
            super().observe(tokens)
            for n_gram in self.n_grams() - before:
                paths = [
                    path
                    for j, path in enumerate(columns)
                    if ((*text, *path[:j])[-1], *path[j:]) == n_gram[:-1]
                ]
                if len(n_gram) == 3:  # not a pair, of a draft without rows
                    assert n_gram[-1] in [own_choice(model, [*text, *path]) for path in paths]
                    checked.append(n_gram)

    class Drafter(sd.LookaheadDrafter):
        def begin(self, prompt: Sequence[int], context: DraftContext) -> LookaheadSession:
            return Watched(self, prompt)

    list(sd.speculate(model, PROMPT, Drafter(window=3, ngram=3), max_tokens=16, draft_length=16))
    assert len(checked) > 10


def test_the_window_moves_with_the_text() -> None:
    """The first level goes, and columns whose places were written; nothing said, levels stay."""
    window = Window(3, 3, [9])
    window.levels = [[9, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert window.columns() == [(3, 6), (1, 4, 7), (1, 2, 5, 8)]
    window = Window(3, 2, [9])
    window.levels = [[9, 1, 2], [3, 4, 5]]
    window.advance([6, 7, None], [9, 30], 1)
    assert window.levels == [[30, 4, 5], [6, 7, 5]]
    window.advance([16, 17, 18], [9, 30, 31, 32], 2)
    assert [level[:2] for level in window.levels] == [[32, 5], [17, 18]]
    window.levels = [[32, 1, 2], [3, 4, 5]]
    window.advance([None, None, None], [9, 30, 31, 32, 33], 1)
    assert [level[:2] for level in window.levels] == [[33, 2], [4, 5]]
    assert all(len(level) == 3 for level in window.levels)


def session(**options: Any) -> LookaheadSession:
    return sd.LookaheadDrafter(**options).begin([5, 6, 7], DraftContext())


def test_n_grams_of_the_pool_come_first_and_then_the_rows() -> None:
    """As many as there is room for; a limit cuts whole columns, never an n-gram's beginning."""
    begun = session(window=2, ngram=3)
    for rest in ((40, 41), (40, 42)):
        begun._note(7, rest)
    draft = begun.propose(9)
    assert draft.parents is not None
    assert (to_list(draft.tokens)[:3], list(draft.parents)[:3]) == ([40, 42, 41], [-1, 0, 0])
    assert len(draft) == 3 + 3
    assert len(begun.propose(4)) == 4
    assert to_list(begun.propose(2).tokens) == [40, 42]
    assert len(begun.propose(0)) == 0


def test_the_pools_n_grams_are_chains_the_latest_first() -> None:
    """Within the limit; of each first token so many; one that came again is as new as any."""
    begun = session()
    for last in (*range(20), 5):
        begun._note(7, (50, last))
    drafts = begun.candidates(2)
    assert [draft.tokens for draft in drafts[:2]] == [(50, 5), (50, 19)]
    assert [draft.match for draft in drafts[:2]] == [2, 1]
    assert len(drafts) == 16
    assert drafts[1].head(1) == begun.candidates(1)[1]
    assert begun.candidates(0) == []


@in_one_test(
    ("verified", "said", "noted"),
    [
        ([51, 50, 52], [60, 61, 62], {7: {(51, 60): 1}, 50: {(52, 62): 1}}),
        ([51], [61], {7: {(51, 61): 1}}),  # the first chain, of a target without trees
        ([8, 9], [18, 19], {8: {(18,): 1}, 9: {(19,): 1}}),  # another's draft, none of its own
    ],
)
def test_what_is_said_after_rejected_rows_is_noted(
    verified: list[int], said: list[int], noted: dict[int, Any]
) -> None:
    """As n-grams, which are drafts where their first token comes up."""
    begun = session(window=2, ngram=3)
    if verified[0] == 51:
        begun.propose(20)
        assert begun._window is not None
        begun._window.levels = [[7, 50], [51, 52]]
        draft = begun.propose(20)
        assert verified in (to_list(draft.tokens), to_list(draft.first_chain().tokens))
    begun.see_rejected(verified, FeatureRows({}, top_tokens=mx.array(said)[:, None]))
    begun.observe([50])
    assert begun._pool == noted
    if 50 in noted:
        assert to_list(begun.propose(20).tokens)[:2] == [52, 62]


KEY = key_of(sd.LookaheadDrafter())


@in_one_test(("slope", "are_rows"), [(0.0, True), (0.005, True), (0.1, False), (None, False)])
def test_rows_ride_where_positions_cost_little(slope: float | None, are_rows: bool) -> None:
    """A price is that of the whole pass at the going rate; too much where nothing was measured."""
    auto = Auto(Tuning())
    for size in (0, 4, 8, 14, 16, 24) * 8 if slope is not None else ():
        auto.limit(KEY, True)
        seconds = 1.0 + (slope or 0.0) * size
        auto.record(RoundRecord(size, 0, 1, 1 + size, [1], seconds, part=KEY if size else ""))
    price = math.inf if slope is None else pytest.approx(12 * slope, abs=0.01)
    assert auto.extra_price(4, 16) == price
    for may_fork in (True, False):
        draft = auto.begin(KEY, session(), lambda: may_fork)(64)  # noqa: B023
        assert (len(draft) > 0) == (are_rows and may_fork)
