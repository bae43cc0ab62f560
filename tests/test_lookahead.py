"""Lookahead decoding: a pool of n-grams that the target guessed in parallel, beside the draft."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import specdec_mlx as sd
import tiny
from lossless import PROMPT, plain_text
from selection import in_one_test
from specdec_mlx.contracts import Draft, DraftContext, FeatureRows, RoundRecord, key_of
from specdec_mlx.contracts.trees import path_to
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.lookahead import LookaheadSession, Pool, Window, _Proposal
from specdec_mlx.token_ids import to_list


@cache
def target(name: str) -> nn.Module:
    return tiny.build(name)


# The text is the target's own ---------------------------------------------------------------------


@pytest.mark.parametrize("length", [3, 24, "auto"])
@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_greedy_text_is_the_targets_own_over_100_tokens(name: str, length: int | str) -> None:
    """Where a tree is verified in one pass, and where only its first chain is."""
    drafter = sd.LookaheadDrafter(window=4)
    tokens = list(sd.speculate(target(name), PROMPT, drafter, max_tokens=100, draft_length=length))
    assert [token.token for token in tokens] == plain_text(target(name), PROMPT, 100).tokens
    if length != "auto":
        assert tokens[-1].stats.drafted > 100


@pytest.mark.parametrize("name", ["llama", "mamba2"])
def test_a_seed_has_one_text_under_the_coupled_rule(name: str) -> None:
    """With rows, with fewer of them, and without drafts."""
    options: dict[str, Any] = {"max_tokens": 40, "sampler": sd.Sampling(0.8), "seed": 11}
    texts = [
        [
            token.token
            for token in sd.speculate(
                target(name), PROMPT, drafter, rule="coupled", draft_length=length, **options
            )
        ]
        for drafter, length in (
            (None, 0),
            (sd.LookaheadDrafter(), 5),
            (sd.LookaheadDrafter(), 20),
        )
    ]
    assert texts[0] == texts[1] == texts[2]


# The rows are what they are said to be ------------------------------------------------------------


def own_choice(model: nn.Module, text: Sequence[int]) -> int:
    return int(mx.argmax(model(mx.array([list(text)]))[0, -1]).item())


def test_n_grams_end_with_what_the_target_says_after_them() -> None:
    """The last token is the likeliest after text, trunk and column, to the target run alone."""
    model = target("llama")
    checked: list[tuple[int, ...]] = []

    class Watched(LookaheadSession):
        def n_grams(self) -> set[tuple[int, ...]]:
            return {(first, *rest) for first, some in self._pool.known.items() for rest in some}

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


def test_a_column_hangs_from_the_trunk_in_front_of_its_first_token() -> None:
    """With the text's last token before the first column."""
    window = Window(3, 3, [9])
    window.levels = [[9, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert window.columns() == [(3, 6), (1, 4, 7), (1, 2, 5, 8)]
    proposal = _Proposal()
    ends = [proposal.add(path) for path in window.columns()]
    draft = proposal.draft()
    assert draft.parents is not None
    paths = [path_to(end, draft.parents) for end in ends if end is not None]
    assert [tuple(draft.tokens[i] for i in path) for path in paths] == window.columns()
    assert len(draft) == 2 + 3 * 2


def test_the_window_moves_with_the_text() -> None:
    """The first level goes, and columns whose places were written; nothing said, levels stay."""
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


def test_the_pool_keeps_the_latest() -> None:
    """Of each first token so many, the latest first; one that came again is as new as any."""
    pool = Pool()
    for last in range(20):
        pool.add(1, (2, last))
    pool.add(1, (2, 5))
    assert pool.after([7, 1])[:2] == [((2, 5), 2), ((2, 19), 1)]
    assert len(pool.after([1])) == 16
    assert pool.after([7]) == pool.after([]) == []


# What is proposed ---------------------------------------------------------------------------------


def session(**options: Any) -> LookaheadSession:
    return sd.LookaheadDrafter(**options).begin([5, 6, 7], DraftContext())


def reject(begun: LookaheadSession, said: Callable[[int], int], next_token: int) -> Draft:
    """A round in which nothing is kept; said: node -> what the target says after it."""
    draft = begun.propose(20)
    tops = mx.array([[said(node)] for node in range(len(draft))])
    begun.see_rejected(to_list(draft.tokens), FeatureRows({}, top_tokens=tops))
    begun.observe([next_token])
    return draft


def test_n_grams_of_the_pool_come_first_and_then_the_rows() -> None:
    """As many as there is room for; a limit cuts whole columns, never an n-gram's beginning."""
    begun = session(window=2, ngram=3)
    begun._pool.add(7, (40, 41))
    begun._pool.add(7, (40, 42))
    draft = begun.propose(9)
    assert to_list(draft.tokens)[:3] == [40, 42, 41]
    assert draft.parents is not None
    assert list(draft.parents)[:3] == [-1, 0, 0]
    assert len(draft) == 3 + 3
    assert len(begun.propose(4)) == 4
    assert to_list(begun.propose(2).tokens) == [40, 42]
    assert len(begun.propose(0)) == 0


def test_what_is_said_after_rejected_rows_becomes_a_draft() -> None:
    """The n-gram whose first token comes up is proposed then."""
    begun = session(window=2, ngram=3)
    assert begun._window is None
    begun.propose(20)
    assert begun._window is not None
    begun._window.levels = [[7, 50], [51, 52]]
    draft = reject(begun, lambda node: 60 + node, next_token=50)
    paths = [tuple(draft.tokens[i] for i in path_to(n, draft.parents or [])) for n in range(3)]
    assert paths == [(51,), (50,), (50, 52)]
    assert begun._pool.after([50]) == [((52, 62), 1)]
    assert to_list(begun.propose(20).tokens)[:2] == [52, 62]


def test_of_a_target_without_trees_the_first_chain_is_noted() -> None:
    begun = session(window=2, ngram=3)
    begun.propose(20)
    assert begun._window is not None
    begun._window.levels = [[7, 50], [51, 52]]
    verified = to_list(begun.propose(20).first_chain().tokens)
    begun.see_rejected(verified, FeatureRows({}, top_tokens=mx.array([[61]])))
    begun.observe([50])
    assert (verified, begun._pool.known) == ([51], {7: {(51, 61): 1}})


def test_the_rows_of_another_draft_are_bigrams() -> None:
    """What was verified may be another drafter's: of that only pairs are known."""
    begun = session(window=2, ngram=3)
    begun.see_rejected([8, 9], FeatureRows({}, top_tokens=mx.array([[18], [19]])))
    begun.observe([3])
    assert begun._pool.known == {8: {(18,): 1}, 9: {(19,): 1}}


def test_its_chains_go_into_trees_of_several() -> None:
    """The n-grams that go on from the last token, the latest first, within the limit."""
    begun = session(ngram=4)
    begun._pool.add(7, (50, 51, 52))
    begun._pool.add(7, (40, 41, 42))
    begun._pool.add(41, (43,))
    assert [draft.tokens for draft in begun.candidates(2)] == [(40, 41), (50, 51)]
    assert begun.candidates(0) == []
    together = sd.TreeOf(sd.PromptLookupDrafter(min_ngram=1), sd.LookaheadDrafter())
    for length in (12, "auto"):
        drafted = sd.speculate(
            target("llama"), PROMPT, together, max_tokens=50, draft_length=length
        )
        assert [t.token for t in drafted] == plain_text(target("llama"), PROMPT, 50).tokens


# Their price --------------------------------------------------------------------------------------


KEY = key_of(sd.LookaheadDrafter())


def tuned(slope: float) -> Auto:
    """A draft length that has measured rounds of every size, in a text of plain pace."""
    auto = Auto(Tuning())
    for _ in range(8):
        for size in (0, 4, 8, 14, 16, 24):
            auto.limit(KEY, True)
            seconds = 1.0 + slope * size
            auto.record(RoundRecord(size, 0, 1, 1 + size, [1], seconds, part=KEY if size else ""))
    return auto


def asked(auto: Auto, may_fork: bool) -> Draft:
    """A draft of a session that begins."""
    return auto.begin(KEY, session(), lambda: may_fork)(64)


@in_one_test(("slope", "are_rows"), [(0.0, True), (0.005, True), (0.1, False)])
def test_rows_ride_where_positions_cost_less_than_they_are_worth(
    slope: float, are_rows: bool
) -> None:
    """With the automatic length; a price is that of the whole pass at the going rate."""
    auto = tuned(slope)
    assert auto.extra_price(4, 16) == pytest.approx(12 * slope, abs=0.01)
    assert (len(asked(auto, True)) > 0) == are_rows
    assert len(asked(auto, False)) == 0


def test_a_price_that_is_not_known_is_too_much() -> None:
    """Before plain rounds were measured nothing is tried."""
    auto = Auto()
    assert auto.extra_price(0, 8) == math.inf
    assert len(asked(auto, True)) == 0


# How it is made -----------------------------------------------------------------------------------


def test_it_has_a_name_and_refuses_what_means_nothing() -> None:
    """On the command line as `--drafter lookahead:window=8,ngram=5`."""
    assert sd.make_drafter("lookahead:window=8,ngram=5") == sd.LookaheadDrafter(8, 5)
    for wrong in ({"window": 0}, {"ngram": 1}, {"num_candidates": 0}, {"worth": -1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            sd.LookaheadDrafter(**wrong)  # type: ignore[arg-type]


def test_a_target_without_trees_verifies_its_first_chain() -> None:
    """The drafts are chains there, and some of what is said after them is drafted."""
    drafter = sd.LookaheadDrafter(window=3, ngram=3)
    tokens = list(sd.speculate(target("mamba2"), PROMPT, drafter, max_tokens=60, draft_length=6))
    stats = tokens[-1].stats
    assert 0 < stats.drafted <= 2 * stats.target_passes
