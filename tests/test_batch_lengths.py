"""Draft lengths of a batch: what tokens save of the time left, and batches of recorded texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

import narrow
import scripted
import specdec_mlx as sd
from specdec_mlx.batch.generation import BatchGeneration
from specdec_mlx.batch.rows import Request
from specdec_mlx.bench import batches
from specdec_mlx.bench.cost import CostCurve, linear_cost
from specdec_mlx.bench.prompts import Task, groups_of
from specdec_mlx.bench.record import Record, RecordedText
from specdec_mlx.bench.recorded import Modelled
from specdec_mlx.bench.recorded_rows import (
    ModelledPace,
    RecordedBatch,
    plain_seconds,
    replay_rows,
    score_rows,
)
from specdec_mlx.draft_length import shared
from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.costs import RoundCosts
from specdec_mlx.draft_length.shared import SharedLength
from specdec_mlx.draft_length.shared_costs import SharedCosts
from specdec_mlx.draft_length.time_left import SHARPEST, progress
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.types import Draft, DraftContext, Drafter

ROW_COST = 0.1

SLOPED = linear_cost(0.1)

LEFT = st.lists(st.integers(1, 4000), min_size=1, max_size=8)


@given(LEFT, st.floats(0, 1))
def test_a_plain_pass_is_worth_a_token_of_each_row(left: list[int], row_cost: float) -> None:
    """Whatever is left of the texts, and whatever a row costs."""
    assert progress(left, [1.0] * len(left), row_cost) == pytest.approx(len(left), rel=1e-9)


@given(LEFT, st.data())
def test_no_token_is_worth_less_than_its_row_costs(left: list[int], data: st.DataObject) -> None:
    """One more token of a row saves at least what its row costs, and at most a whole pass."""
    tokens = [1.0] * len(left)
    row = data.draw(st.integers(0, len(left) - 1))
    before = progress(left, tokens, ROW_COST)
    tokens[row] += 1
    more = progress(left, tokens, ROW_COST) - before
    pass_over_one = len(left) / (1 + ROW_COST * (len(left) - 1))
    assert ROW_COST * pass_over_one - 1e-6 <= more <= pass_over_one + 1e-6


def test_a_token_of_the_row_that_ends_last_is_worth_most() -> None:
    """With 40 tokens between two rows about a whole pass, and of the other what its row costs."""
    pass_over_one = 2 / (1 + ROW_COST)
    last = progress([60, 20], [2, 1], ROW_COST) - 2
    other = progress([60, 20], [1, 2], ROW_COST) - 2
    assert last == pytest.approx(pass_over_one, rel=0.01)
    assert other == pytest.approx(ROW_COST * pass_over_one, rel=0.01)


def test_a_row_that_gets_ahead_is_worth_less_with_every_token() -> None:
    """Of rows that are level, the first tokens of one save more than those after them."""
    worth = [progress([20, 20], [1 + n, 1], ROW_COST) for n in range(10)]
    gains = [b - a for a, b in pairwise(worth)]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] < gains[0] / 3


@pytest.mark.parametrize("left", [None, [7]])
def test_tokens_count_alike_where_no_end_is_known(left: Sequence[int] | None) -> None:
    """Where others wait for a place, or one row is alone, what counts are tokens."""
    assert progress(left, [5], ROW_COST) == 5


def test_far_from_its_limit_a_lead_says_little() -> None:
    """Texts end before their limit: with 4,000 tokens left 100 more do not decide."""
    last = progress([4000, 3900], [2, 1], ROW_COST) - 2
    other = progress([4000, 3900], [1, 2], ROW_COST) - 2
    assert last == pytest.approx(other, rel=0.1)
    assert SHARPEST < 10 < 100


@given(st.integers(1, 8), st.floats(0.01, 0.4))
def test_what_a_row_costs_is_measured(num_rows: int, slope: float) -> None:
    """By positions: passes of widths 2 and 5 move it from the prior towards what one row adds."""
    costs = SharedCosts()
    assert costs.row_cost(num_rows) == pytest.approx(costs.slope)
    cost = linear_cost(slope)
    for width in (1, 2, 5) * 7:
        costs.of("", num_rows).add(width - 1, cost(width * num_rows))
    nearer, farther = sorted((slope, (slope + 2 * costs.slope) / 3))
    assert 0.9 * nearer <= costs.row_cost(num_rows) <= 1.1 * farther


@pytest.mark.parametrize(("measured", "asked"), [(2, 8), (8, 2), (1, 4), (4, 1)])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.24])
def test_what_was_measured_with_some_rows_says_what_others_cost(
    measured: int, asked: int, slope: float
) -> None:
    """Exactly, where every position costs alike: not the same ratio with other rows.

    Also where those were met before; and what is then measured with them counts more.
    """
    cost, costs = linear_cost(slope), SharedCosts()
    costs.of("", asked)
    costs.of("", measured).add(0, cost(measured))
    for length in (2, 4):
        for _ in range(3):
            costs.add("", measured, length, cost(measured * (length + 1)))
    for length in (2, 4):
        expected = cost(asked * (length + 1)) / cost(asked)
        assert costs.of("", asked).is_measured(length)
        assert costs.of("", asked).ratio(length) == pytest.approx(expected)
    costs.of("", asked).add(0, 1.0)
    for _ in range(5):
        costs.add("", asked, 4, 2.5)
    assert costs.of("", asked).ratio(4) == pytest.approx(2.5)


class Guesses:
    """Free drafts for each of some texts, with a wrong token in every `period`-th place."""

    def __init__(self, texts: Sequence[RecordedText], period: int) -> None:
        self.texts = {tuple(text.prompt): text.generated for text in texts}
        self.period = period

    def begin(self, prompt: Sequence[int], context: DraftContext) -> scripted.ScriptedSession:
        drafts = [
            (token + 1) % narrow.NUM_TOKENS if i % self.period == 0 else token
            for i, token in enumerate(self.texts[tuple(prompt)], start=1)
        ]
        session = scripted.ScriptedSession(lambda start, limit: drafts[start : start + limit])
        session.cheap = True  # type: ignore[attr-defined]
        return session


def recorded(lengths: Sequence[int]) -> list[RecordedText]:
    """Texts of the narrow model, of these lengths."""
    texts = []
    for task, length in zip(narrow.tasks(len(lengths)), lengths, strict=True):
        tokens = [t.token for t in sd.speculate(narrow.model(), task.prompt, max_tokens=length)]
        texts.append(RecordedText(task.id, task.category, task.prompt, tokens))
    return texts


@pytest.mark.parametrize("rows", [2, 3])
@pytest.mark.parametrize("length", [0, 1, 4])
def test_counts_are_those_of_a_live_batch(rows: int, length: int) -> None:
    """At temperature 0: passes, drafted and accepted tokens of all rows, which end one by one."""
    texts = recorded([24, 9, 17][:rows])
    drafter = Guesses(texts, 5) if length else None
    live = BatchGeneration(narrow.model(), drafter, draft_length=length)
    for text in texts:
        live.insert(Request(text.prompt, len(text.generated)))
    tokens = list(live.run())
    stats = {row.uid: row.token.stats for row in tokens}
    modelled = replayed(texts, drafter, length)
    assert modelled.passes == live.num_rounds
    assert modelled.drafted == sum(account.drafted for account in stats.values())
    assert modelled.accepted == sum(row.token.from_draft for row in tokens)
    assert bool(modelled.accepted) == bool(length)


def replayed(
    texts: Sequence[RecordedText],
    drafter: Drafter | None,
    length: int | str,
    cost: CostCurve = SLOPED,
    memory: nn.Module | None = None,
) -> Modelled:
    kept_with = nn.Module() if memory is None else memory
    return replay_rows(texts, drafter, length, cost, vocab_size=narrow.VOCAB, memory=kept_with)


def test_a_plain_batch_costs_what_it_costs() -> None:
    """Three rows while all are there, then two, then one; without drafts that is all."""
    texts = recorded([4, 2, 3])
    curve = CostCurve("c", (1, 2, 3), (1.0, 1.25, 2.0))
    expected = 2 * 2.0 + 1.25 + 1.0
    assert plain_seconds([4, 2, 3], curve) == expected
    modelled = replayed(texts, None, 0, curve)
    assert modelled.seconds == modelled.plain_seconds == expected


def test_rows_are_padded_to_the_longest_draft() -> None:
    """A right draft of 3 in one of two rows is billed as 4 positions in each."""
    texts = recorded([5, 5])
    drafter = Guesses(texts, 100)
    drafter.texts[tuple(texts[1].prompt)] = []
    curve = CostCurve("c", (1, 2, 8), (1.0, 2.0, 8.0))
    modelled = replayed(texts, drafter, 3, curve)
    assert modelled.seconds == pytest.approx(2.0 + 8.0 + 3 * 1.0)


@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("period", [1, 2, 3, 100])
@pytest.mark.parametrize("slope", [0.0, 0.24, 1.0])
def test_a_chosen_length_hardly_ever_costs_more_than_it_brings(
    rows: int, period: int, slope: float
) -> None:
    """Always wrong drafts, or half right, or right; free positions, or as expensive as passes.

    In a first batch, with what finding that out costs.
    """
    texts = recorded([30 + 3 * row for row in range(rows)])
    modelled = replayed(texts, Guesses(texts, period), "auto", linear_cost(slope))
    assert modelled.seconds < 1.06 * modelled.plain_seconds


def test_right_drafts_are_taken_where_positions_are_free() -> None:
    """All rows have them: a batch that is over in less than half the time."""
    texts = recorded([60, 50, 55, 60])
    modelled = replayed(texts, Guesses(texts, 100), "auto", linear_cost(0.0))
    assert modelled.seconds < 0.5 * modelled.plain_seconds


def test_a_row_that_is_ahead_does_not_slow_the_last_one() -> None:
    """Right drafts for a text that ends first anyway bring little, and are left alone."""
    texts = recorded([60, 20])
    for has_drafts, others in ((texts[0], texts[1]), (texts[1], texts[0])):
        memory = nn.Module()
        drafter = Guesses(texts, 100)
        replayed(texts, drafter, "auto", SLOPED, memory)  # what passes cost is known by now
        drafter.texts[tuple(others.prompt)] = []
        modelled = replayed(texts, drafter, "auto", SLOPED, memory)
        assert bool(modelled.drafted) == (has_drafts is texts[0])


def rows_of_a_server(texts: list[RecordedText], cost: CostCurve) -> list[float]:
    """How much later than in a plain batch each text ended, in plain passes; texts may come."""
    pace = ModelledPace(cost=cost)
    batch = RecordedBatch(
        nn.Module(),
        Guesses(texts, 1000),
        max_rows=len(texts),
        pace=pace,
        vocab_size=narrow.VOCAB,
        texts=texts,
        is_open=True,
    )
    for text in texts:
        batch.insert(Request(text.prompt, len(text.generated)))
    ended = {token.uid: pace.total for token in batch.run()}
    return [ended[row] / cost(len(texts)) - len(text.generated) for row, text in enumerate(texts)]


def test_a_row_without_drafts_is_not_made_to_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a server, though three others would gain more than half of their time by it."""
    texts = recorded([160] * 4)
    texts[3] = replace(texts[3], prompt=[*texts[3].prompt, 0])
    without = Guesses.begin

    def begin(self: Guesses, prompt: Sequence[int], context: DraftContext) -> object:
        if list(prompt) == texts[3].prompt:
            return scripted.ScriptedSession(lambda start, limit: [])
        return without(self, prompt, context)

    monkeypatch.setattr(Guesses, "begin", begin)
    late = rows_of_a_server(texts, SLOPED)
    assert max(late) < 2
    assert min(late) < 0
    monkeypatch.setattr(shared, "PATIENCE", 1000.0)
    assert rows_of_a_server(texts, SLOPED)[3] > 8


def test_a_row_that_is_behind_may_catch_up() -> None:
    """A pass that brings a late row more than it costs is taken, however late the row is."""
    assert shared._is_fair(1.2, [1.5], [7.0])
    assert not shared._is_fair(1.2, [1.5, 1.0], [7.0, 1.0])
    assert shared._is_fair(1.2, [1.5, 1.0], [7.0, 0.5])


def test_what_gains_even_at_the_worst_cost_is_tried_without_a_budget() -> None:
    """An earlier trial that lost much does not keep rows from a length that cannot lose."""
    costs = SharedCosts()
    for _ in range(3):
        costs.of("", 2).add(0, 1.0)
        costs.add("", 2, 1, 1.1)
    costs.budgets[""] = -5.0
    length = SharedLength(costs, Tuning(), num_rows=2)
    right = AcceptanceHistory()
    for _ in range(200):
        right.learn(0, 0, True)
    rows = []
    for _ in range(2):
        row = length.of_row()
        row.limit("look-up", cheap=True)
        row._histories["look-up"] = right
        rows.append((row, "look-up", Draft([1, 2, 3, 4])))
    assert [len(draft) for draft in length.share(rows)] == [4, 4]


@pytest.mark.parametrize("num_rows", [2, 4, 8])
@pytest.mark.parametrize("slope", [0.0, 0.02, 0.24])
def test_what_single_texts_cost_says_what_several_do(num_rows: int, slope: float) -> None:
    """Exactly, where every position costs alike; until a batch of any size has measured it."""
    cost, costs, one = linear_cost(slope), SharedCosts(), RoundCosts(0.0, slope)
    one.add(0, cost(1))
    for length in (1, 2, 4):
        for _ in range(3):
            one.add(length, cost(length + 1))
    costs.of("", num_rows)
    costs.take_over("", one)
    for rows in (num_rows, 3):  # met before, and after
        for length in (1, 2, 4):
            expected = cost(rows * (length + 1)) / cost(rows)
            assert costs.of("", rows).is_measured(length)
            assert costs.of("", rows).ratio(length) == pytest.approx(expected, rel=0.02)
    for _ in range(5):
        costs.of("", 3).add(0, 1.0)
        costs.add("", 3, 4, 2.5)
    costs.take_over("", one)
    assert costs.of("", 3).ratio(4) == pytest.approx(2.5)


def test_scores_are_sums_over_groups_of_neighbours() -> None:
    """Five texts make two pairs, and the fifth is left out."""
    texts = recorded([12, 9, 15, 8, 10])
    record = Record("", {}, {"vocab_size": narrow.VOCAB}, texts)
    (plain, drafted) = score_rows(
        record, {"guesses": lambda: Guesses(texts, 4)}, ["0", "3"], [2], SLOPED
    )
    assert (plain.groups, plain.tokens, plain.speedup, plain.least) == (2, 44, 1.0, 1.0)
    pairs = [replayed(texts[i : i + 2], Guesses(texts, 4), 3) for i in (0, 2)]
    seconds = sum(pair.seconds for pair in pairs)
    assert drafted.speedup == pytest.approx(sum(p.plain_seconds for p in pairs) / seconds)
    assert drafted.least == min(pair.plain_seconds / pair.seconds for pair in pairs)
    assert drafted.drafted == sum(pair.drafted for pair in pairs)


def test_groups_are_neighbours_at_equal_distances() -> None:
    """What is left over is left out."""
    assert groups_of(range(7), 2) == [range(2), range(2, 4), range(4, 6)]
    assert groups_of(range(12), 3, 2) == [range(3), range(6, 9)]


def test_a_group_is_written_by_all_contenders_in_turns() -> None:
    """Each writes its tokens to the end, however many turns that takes, and is waited for."""

    def writes(lengths: Sequence[int]) -> batches.Start:
        def start(tasks: Sequence[Task], max_tokens: int) -> Iterator[tuple[int, int, int]]:
            for step in range(max_tokens):
                for index, length in enumerate(lengths):
                    if step < length:
                        turns.append(lengths)
                        yield index, step, step + 1

        return start

    turns: list[Sequence[int]] = []
    contenders = {batches.PLAIN: writes([20, 16]), "ours": writes([20, 15])}
    plain, ours = batches.race(contenders, narrow.tasks(2), max_tokens=20, repeats=8)
    assert (plain.num_tokens, plain.passes, plain.same) == (36, 20, 2)
    assert (ours.num_tokens, ours.passes, ours.same) == (35, 20, 1)
    assert len(ours.seconds) == len(ours.prompt_seconds) == 8
    repeats = [turns[start : start + 71] for start in range(0, len(turns), 71)]
    for repeat in repeats:
        assert sorted(repeat[:2]) == [[20, 15], [20, 16]], "first tokens come before any turn"
    assert len({tuple(repeat[0]) for repeat in repeats}) == 2, "who begins is drawn"
    assert any(repeat[2] != repeat[34] for repeat in repeats), "and anew each time around"
    for repeat in repeats:
        assert repeat[2:34].count([20, 16]) == repeat[2:34].count([20, 15]) == 16, "a turn of each"


def test_speeds_are_medians_over_repeats_and_sums_over_groups() -> None:
    """By hand: two groups, three repeats, prompts of one second."""

    def group(name: str, seconds: list[float]) -> batches.Group:
        return batches.Group(
            name, ["a", "b"], ["x", "x"], 16, 8, 2, seconds, [1.0, 1.0, 1.0], seconds
        )

    groups = [
        group(batches.PLAIN, [5.0, 9.0, 5.0]),
        group("ours", [3.0, 3.0, 9.0]),
        group(batches.PLAIN, [3.0, 3.0, 3.0]),
        group("ours", [3.0, 3.0, 3.0]),
    ]
    (row,) = batches.summarize(2, groups)
    assert row.with_prompts == pytest.approx((5 + 3) / (3 + 3))
    assert row.speed == pytest.approx((4 + 2) / (2 + 2))
    assert (row.least, row.most) == (1.0, pytest.approx(5 / 3))
    assert (row.tokens_per_pass, row.same, row.texts) == (2.0, 4, 4)
    assert "ours" in batches.format_rows([row])
