"""Draft lengths of a batch: one width for all rows, and batches of recorded texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import narrow
import scripted
import specdec_mlx as sd
from benchmarks import batches
from benchmarks.recorded_rows import BilledPasses, RecordedBatch, replay_rows
from selection import in_one_test
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request, Schedule
from specdec_mlx.contracts import Draft, DraftContext, Drafter, Evidence
from specdec_mlx.draft_length.batches import RowLength, SharedLength
from specdec_mlx.draft_length.costs import WIDTHS, Curve
from specdec_mlx.draft_length.store import BUDGET, Account, Tuning
from specdec_mlx.draft_length.value import LENGTHS
from specdec_mlx.lab.bench.cost import CostCurve, linear_cost
from specdec_mlx.lab.bench.timing import Sample
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.options import Options

SLOPED = linear_cost(0.1)

STAIRS = Curve(((1, 1.0), (5, 1.1), (8, 1.9), (20, 2.3), (21, 3.5), (64, 9.0)))


def shared_by(num_rows: int, costs: Curve = STAIRS, rate: float = 0.0) -> SharedLength:
    """A batch of so many rows whose costs are as a curve says, at a going rate."""
    length = SharedLength(Tuning(costs))
    cost_model = length.tuning.cost_model(num_texts=num_rows)
    for rows in (1, 1, 1, 64, 64):
        cost_model.add(rows, cost_model(rows))
    length.prices.tokens, length.prices.spent = rate, 1.0
    length.resize(num_rows)
    return length


@dataclass
class Reaching:
    """A row that knows the chances of its draft. budget: what it may fall behind."""

    reached: Sequence[float]
    budget: float = BUDGET

    def reaches(self, part: str, draft: Draft) -> Sequence[float]:
        return self.reached

    @property
    def account(self) -> Account:
        return Account(self.budget)


def shared_width(length: SharedLength, rows: Sequence[Reaching]) -> int:
    given: Any = [(row, "it", Draft([1] * len(row.reached))) for row in rows]
    return max(len(draft) for draft in length.share(given))


REACHES = st.lists(st.lists(st.floats(0.05, 1.0), max_size=12), min_size=1, max_size=5)


@given(REACHES, st.floats(0, 9), st.lists(st.floats(-2, 4), min_size=5))
def test_one_width_is_worth_most_to_all_rows_together(
    chances: list[list[float]], rate: float, budgets: list[float]
) -> None:
    num_rows = len(chances)
    length = shared_by(num_rows, rate=rate)
    rows = [Reaching([*accumulate(row, mul)], b) for row, b in zip(chances, budgets, strict=False)]
    longest = max(len(row.reached) for row in rows)
    values = {0: 0.0}
    for width in (n for n in range(1, longest + 1) if n in LENGTHS or n == longest):
        mean = sum(sum(row.reached[:width]) for row in rows) / num_rows
        values[width] = mean - max(1.0, rate) * (length.prices.cost_model(1 + width) - 1)

    def is_fair(width: int) -> bool:
        cost = length.prices.cost_model(1 + width) - 1
        return all(cost - sum(row.reached[:width]) <= row.budget for row in rows)

    best = max(values, key=lambda width: (values[width], -width))
    found = shared_width(length, rows)
    assert found == 0 or is_fair(found)
    assert not any(is_fair(width) for width in range(found + 1, best + 1))
    assert found <= best or values[found] == pytest.approx(values[best], abs=1e-6)


@given(st.integers(1, 8), st.sampled_from(WIDTHS))
def test_what_a_pass_over_rows_costs_is_read_from_the_same_prior(num_rows: int, rows: int) -> None:
    """R texts with m rows each are R m rows of one text, in passes over R, until it is measured."""
    cost_model = Tuning(STAIRS).cost_model(num_texts=num_rows)
    assert cost_model(rows) == pytest.approx(STAIRS(num_rows * rows) / STAIRS(num_rows), rel=1e-6)


def test_a_plain_pass_is_measured_before_anything_is_drafted() -> None:
    """One, and again for another number of rows."""
    length, certain = SharedLength(Tuning()), [Reaching([1.0] * 4)] * 8
    length.resize(8)
    assert shared_width(length, certain) == 0
    length.record(0, [(RowLength(length), 1)] * 8, 0.1, steady=True)
    length.resize(8)
    assert shared_width(length, certain) > 0
    length.resize(7)
    assert shared_width(length, certain[:7]) == 0


def test_a_draft_that_was_drawn_is_cut_by_its_length_alone() -> None:

    def kept(tokens: list[int], told: Evidence, *, drawn: bool) -> list[int]:
        length = shared_by(2, Curve(((1, 1.0), (64, 7.3))))
        rows = [(RowLength(length), "look-up") for _ in range(2)]
        assert all(row.limit("look-up", cheap=True) >= 4 for row, _ in rows)
        logprobs = mx.log(mx.full((4, 9), 1 / 9)) if drawn else None
        draft = Draft(tokens, logprobs, evidence=[told] * 4)
        return [len(one) for one in length.share([(*row, draft) for row in rows])]

    unlikely, likely = Evidence(1, rank=6), Evidence(64)
    for tokens in ([1, 2, 3, 4], [8, 8, 8, 8]):
        assert kept(tokens, unlikely, drawn=True) == kept(tokens, likely, drawn=True) != [0, 0]
    assert kept([1, 2, 3, 4], unlikely, drawn=False) == [0, 0]
    assert kept([1, 2, 3, 4], likely, drawn=False) == [4, 4]


class Guesses(sd.Drafter):
    """Drafts the texts, wrong at every `period`th token."""

    def __init__(self, texts: Sequence[RecordedText], period: int) -> None:
        self.texts = {tuple(text.prompt): text.generated for text in texts}
        self.period = period

    def begin(self, prompt: Sequence[int], context: DraftContext) -> scripted.ScriptedSession:
        drafts = list(self.texts[tuple(prompt)])
        for i in range(self.period - 1, len(drafts), self.period):
            drafts[i] = (drafts[i] + 1) % narrow.NUM_TOKENS
        session = scripted.ScriptedSession(lambda start, limit: drafts[start : start + limit])
        session.cheap = True
        return session


def recorded(lengths: Sequence[int]) -> list[RecordedText]:
    texts = []
    for task, length in zip(narrow.tasks(len(lengths)), lengths, strict=True):
        tokens = [t.token for t in sd.speculate(narrow.model(), task.prompt, max_tokens=length)]
        texts.append(RecordedText(task.id, task.category, task.prompt, tokens))
    return texts


@in_one_test(("rows", "length"), product([2, 3], [0, 1, 4]))
def test_counts_are_those_of_a_live_batch(rows: int, length: int) -> None:
    texts = recorded([24, 9, 17][:rows])
    drafter = Guesses(texts, 5) if length else None
    live = BatchGeneration(narrow.model(), drafter, Options(num_draft_tokens=length))
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
) -> Sample:
    return replay_rows(texts, drafter, length, cost, vocab_size=narrow.VOCAB, memory=nn.Module())


def test_rows_are_padded_to_the_longest_draft() -> None:
    """A right draft of 3 in one of two rows is billed as 4 positions in each. Without drafts a
    pass costs as the rows that are still there."""
    curve = CostCurve("c", (1, 2, 3, 8), (1.0, 1.25, 2.0, 8.0))
    plain = replayed(recorded([4, 2, 3]), None, 0, curve)
    assert plain.seconds == plain.plain_seconds == 2 * 2.0 + 1.25 + 1.0
    texts = recorded([5, 5])
    drafter = Guesses(texts, 100)
    drafter.texts[tuple(texts[1].prompt)] = []
    assert replayed(texts, drafter, 3, curve).seconds == pytest.approx(1.25 + 8.0 + 3 * 1.0)


@pytest.mark.full
@pytest.mark.parametrize("rows", [2, 4, 8])
@in_one_test(("period", "slope"), product([1, 2, 3, 100], [0.0, 0.24, 1.0]))
def test_a_chosen_length_hardly_ever_costs_more_than_it_brings(
    rows: int, period: int, slope: float
) -> None:
    """Always wrong drafts, or half right, or right, which take less than half the time where
    positions are free."""
    texts, cost = recorded([30 + 3 * row for row in range(rows)]), linear_cost(slope)
    modelled = replayed(texts, Guesses(texts, period), "auto", cost)
    assert modelled.seconds < 1.01 * modelled.plain_seconds + (BUDGET + 1.0) * cost(rows)
    if period == 100 and slope == 0 and rows == 4:
        assert modelled.seconds < 0.5 * modelled.plain_seconds


@pytest.mark.full
def test_a_row_without_drafts_is_not_made_to_wait_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a server, though three others would gain more than half of their time by it."""
    texts = recorded([160] * 4)
    texts[3] = replace(texts[3], prompt=[*texts[3].prompt, 0])
    drafter = Guesses(texts, 1000)
    drafter.texts[tuple(texts[3].prompt)] = []

    def delays() -> list[float]:
        """How much later than in a plain batch each text ended, in plain passes."""
        clock = BilledPasses(cost=SLOPED)
        about: dict[str, Any] = {"clock": clock, "vocab_size": narrow.VOCAB, "texts": texts}
        batch = RecordedBatch(nn.Module(), drafter, schedule=Schedule(4), **about)
        for text in texts:
            batch.insert(Request(text.prompt, 160))
        ended = {token.uid: clock.total for token in batch.run()}
        return [ended[row] / SLOPED(4) - 160 for row in range(4)]

    assert max(delays()) < 2
    assert min(delays()) < 0
    monkeypatch.setattr(Account, "add", lambda self, amount=0.0: setattr(self, "budget", 99.0))
    assert delays()[3] > 8


def test_a_group_is_written_by_all_contenders_in_turns() -> None:
    """Each writes its tokens to the end, however many turns that takes, and is waited for."""
    turns: list[Sequence[int]] = []

    def writes(lengths: Sequence[int]) -> batches.Start:
        def start(tasks: Sequence[RecordedText], max_tokens: int) -> Iterator[tuple[int, int, int]]:
            for step, index in product(range(max_tokens), range(2)):
                if step < lengths[index]:
                    turns.append(lengths)
                    yield index, step, step + 1

        return start

    contenders = {batches.PLAIN: writes([20, 16]), "ours": writes([20, 15])}
    groups = batches.race(contenders, narrow.tasks(2), max_tokens=20, repeats=8)
    assert [(g.num_tokens, g.passes, g.same) for g in groups] == [(36, 20, 2), (35, 20, 1)]
    repeats = [turns[start : start + 71] for start in range(0, len(turns), 71)]
    assert len({tuple(repeat[0]) for repeat in repeats}) == 2, "who begins is drawn"
    assert any(repeat[2] != repeat[34] for repeat in repeats), "and anew each time around"
    for repeat in repeats:
        assert sorted(repeat[:2]) == [[20, 15], [20, 16]], "first tokens come before any turn"
        assert repeat[2:34].count([20, 16]) == repeat[2:34].count([20, 15]) == 16, "a turn of each"


def test_speeds_are_medians_over_repeats_and_sums_over_groups() -> None:
    """By hand: two groups, three repeats, prompts of one second."""
    given = [("ours", [3.0, 3.0, 9.0]), ("ours", [3.0] * 3)]
    given += [(batches.PLAIN, [5.0, 9.0, 5.0]), (batches.PLAIN, [3.0] * 3)]
    groups = [
        batches.Group(name, ["a", "b"], ["x", "x"], 16, 8, 2, seconds, [1.0] * 3, seconds)
        for name, seconds in given
    ]
    (row,) = batches.summarize(2, groups)
    assert (row.with_prompts, row.speed) == pytest.approx(((5 + 3) / (3 + 3), (4 + 2) / (2 + 2)))
    assert (row.least, row.most) == (1.0, pytest.approx(5 / 3))
    assert (row.tokens_per_pass, row.same, row.texts) == (2.0, 4, 4)
    assert "ours" in batches.format_rows([row])
