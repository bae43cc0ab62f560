"""Every architecture of mlx-lm: speculative decoding writes what plain decoding writes.

All of `lossless.Case` for those of `tiny.REPRESENTATIVE`; a short case for one of each kind that
the page about architectures tells apart; and in the full run one of every file.
"""

from __future__ import annotations

import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

import tiny
from lossless import (
    BIT_EQUAL,
    HALVES,
    INEXACT,
    NEAR_TIE,
    NUM_IN_HALVES,
    PROMPT,
    ROUGH,
    SECOND_PROMPT,
    Case,
    HalfRow,
    Text,
    halves_of,
    largest_difference,
    noisy_copy,
    only_counting,
    page,
    plain_text,
    rows_of,
    spoken,
)
from scripted import Recorder
from selection import FULL, cases, each
from specdec_mlx import ModelDrafter
from specdec_mlx.caches import Rollback, leaves
from specdec_mlx.memory.drafter_states import StatesOnCache
from specdec_mlx.target import Verifier

RUNS = [name for name in tiny.architecture_files() if name not in tiny.CANNOT_RUN]
EXACT = [name for name in RUNS if name not in INEXACT]
PAGE = Path(__file__).parents[2] / "docs" / "architectures.md"
ROWS, HALF_ROWS = rows_of(PAGE.read_text()), halves_of(PAGE.read_text())
TOLD_APART = {(row[1:], row.architecture in HALF_ROWS): row.architecture for row in ROWS[::-1]}
"""One architecture for all whose rows say the same: caches, ways back, what can be read, trees, and
whether 16 bits round otherwise."""

IN_SHORT = ("llama", "llama4", "rwkv7", "qwen3_next")
KINDS = sorted(set(TOLD_APART.values()) & set(RUNS) | set(tiny.REPRESENTATIVE))
ACROSS_THE_WINDOW = 32
LAST_PLACES = {"bfloat16": 0.1, "float16": 0.02}  # of a log-probability

as_users_have_it = pytest.mark.usefixtures("compiled")
on_cpu = pytest.mark.skipif(mx.metal.is_available(), reason="the table is about the CPU")


@pytest.fixture(scope="module", params=cases(tiny.REPRESENTATIVE, *IN_SHORT))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module", params=cases(sorted(INEXACT), "plamo3"))
def inexact(request: pytest.FixtureRequest) -> Case:
    return Case(request.param, briefly=True)


def test_every_architecture_file_has_a_configuration() -> None:
    """A new file of a later mlx-lm fails here until it has a row in tests/tiny."""
    assert set(tiny.architecture_files()) == set(tiny.CONFIGS) | set(tiny.CANNOT_RUN)
    assert set(INEXACT) | set(ROUGH) <= set(RUNS)
    assert len(EXACT) >= 115


@pytest.mark.parametrize("name", sorted(set(KINDS) - {*IN_SHORT, *INEXACT}))
def test_half_right_drafts_across_the_window_leave_no_trace(name: str) -> None:
    """Before, across and after the end of a window; one of each kind that the page tells apart."""
    half_right(name)


@as_users_have_it
@FULL
@pytest.mark.parametrize("begin", range(4))
def test_the_page_is_right(begin: int) -> None:
    """About texts of every architecture, whether trees are drafted for it, and all of the row of
    one of each kind."""
    each(EXACT[begin::4], is_as_the_page_says)


def half_right(name: str) -> Case:
    case = Case(name, num_tokens=ACROSS_THE_WINDOW, briefly=True)
    assert case.plain.smallest_gap > NEAR_TIE
    assert not case.has_failed(case.deviations["oracle", 4])
    assert 0.2 < case.runs["oracle", 4][-1].stats.acceptance_rate < 1
    return case


def is_as_the_page_says(name: str) -> None:
    case = half_right(name)
    (row,) = (row for row in ROWS if row.architecture == name)
    assert row.ours == "right"
    if name in KINDS:
        assert case.row == row, "run docs/generate_architectures.py"
    target = Verifier(case.model, Rollback(make_prompt_cache(case.model)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert target.takes_trees() == (row.trees == "exact")


@as_users_have_it
def test_text_and_logprobs_are_those_of_plain_decoding(case: Case) -> None:
    """Whatever is drafted, and however much of it; no position of the reference is near a tie."""
    assert case.plain.smallest_gap > NEAR_TIE
    assert case.width_deviation <= case.tolerance, "it is one of the inexact"
    assert not {run: d for run, d in case.deviations.items() if case.has_failed(d)}
    stats = {run: items[-1].stats for run, items in case.runs.items()}
    assert 0.3 < stats["oracle", 4].accepted_share < 1
    assert stats["always wrong", 4].drafted > 50
    assert stats["always wrong", 4].accepted == 0


def test_without_rollback_the_text_is_another(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rollback, "rewind_to", only_counting)
    assert case.has_failed(spoken(case.speculate(case.oracle(), 4)).deviation(case.plain))


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_second_turn_goes_on_inside_a_block(case: Case, is_closed: bool) -> None:
    """Cut by max_tokens or by the caller, although the pass after the next was under way: the
    caches hold exactly prompt + emitted."""
    caches = make_prompt_cache(case.model)
    length = case.inside_a_block()
    most = case.num_tokens if is_closed else length
    items = case.speculate(case.oracle(), 7, max_tokens=most, prompt_cache=caches)
    first = list(islice(items, length if is_closed else None))
    items.close()
    assert [item.token for item in first] == case.plain.tokens[:length]
    assert case.continued(length, caches) <= case.tolerance


def test_the_page_is_written_by_its_generator() -> None:
    """Nobody edited its table or its counts by hand, and it has every architecture; nearly all can
    be read and draft trees, and those that cannot be read have the reason."""
    text = PAGE.read_text()
    assert text == page(text, ROWS, list(HALF_ROWS.values())), "run docs/generate_architectures.py"
    assert [row.architecture for row in ROWS] == tiny.architecture_files()
    rows = [row for row in ROWS if row.architecture in RUNS]
    unread = [row.reads for row in rows if row.reads != "yes"]
    assert len(rows) - len(unread) >= 118
    assert all(reason.startswith("not the ") for reason in unread)
    assert sum(row.trees == "exact" for row in rows) >= 90


@on_cpu
@pytest.mark.parametrize("name", sorted(tiny.CANNOT_RUN))
def test_what_cannot_run_fails_for_the_reason_in_the_table(name: str) -> None:
    kind, _, message = tiny.CANNOT_RUN[name].partition(". ")[0].partition(": ")
    with pytest.raises(BaseException) as raised:  # noqa: PT011
        model = tiny.build(name)
        mx.eval(model(mx.array([[1, 2]]), cache=make_prompt_cache(model)))
    assert type(raised.value).__name__ == kind
    assert message in str(raised.value)
    assert Case(name).row in ROWS


def test_what_is_inexact_is_written_one_token_at_a_time(inexact: Case) -> None:
    """Passes of five positions are far from single ones without speculation; nothing is drafted
    there, and the text is right."""
    assert inexact.width_deviation > 1e-2
    with pytest.warns(UserWarning, match="nothing is drafted there"):
        assert not any(map(inexact.has_failed, inexact.deviations.values()))
    room_in_window = 16 - (len(PROMPT) - 1)
    assert all(items[-1].stats.drafted <= room_in_window for items in inexact.runs.values())
    assert inexact.row in ROWS


@as_users_have_it
@on_cpu
@pytest.mark.filterwarnings("ignore:.*nothing is drafted there")  # the probe met another expert
@pytest.mark.parametrize("name", cases(KINDS, "mamba2"))
def test_in_16_bits_text_is_plain_decodings_up_to_the_rounding_on_the_page(name: str) -> None:
    """In bfloat16, and in float16 for each kind of cache and where the page has a row. Bit for bit
    where the page says that several positions at once are bit-equal to single ones; elsewhere
    that is as far off as it says, and a text parts where that explains it."""
    told = HALF_ROWS.get(name, HalfRow(name, BIT_EQUAL, BIT_EQUAL))
    in_both = name in HALF_ROWS or name in tiny.REPRESENTATIVE
    for kind, dtype in HALVES.items() if in_both else [("bfloat16", mx.bfloat16)]:
        case = Case(name, dtype, NUM_IN_HALVES, briefly=True)
        worst, found = case.rounding
        on_page = getattr(told, kind)
        said = spoken(case.speculate(case.oracle(), 4))
        if name in INEXACT or on_page == BIT_EQUAL:
            kinds = {type(cache) for cache in leaves(make_prompt_cache(case.model))}
            moves = RotatingKVCache in kinds  # sums over keys in another order, once it wraps
            assert said.deviation(case.plain) <= (LAST_PLACES[kind] if moves else 0), kind
        if on_page == BIT_EQUAL:
            assert found == BIT_EQUAL, kind
            continue
        share, on_page_share = (float(text.partition(" ")[0]) for text in (found, on_page))
        assert on_page_share / 2 <= share <= on_page_share * 2, "generate_architectures.py"
        pairs = zip(said.tokens, case.plain.tokens, strict=True)
        end = next((i for i, (a, b) in enumerate(pairs) if a != b), len(case.plain))
        if end < len(case.plain):
            assert Text([0], case.plain.logprobs[end : end + 1]).smallest_gap <= 2 * worst


@pytest.mark.parametrize("name", cases(IN_SHORT, "llama", "rwkv7"))
def test_a_rejected_draft_leaves_no_trace_in_the_draft_model(name: str) -> None:
    """It proposes what it would write after reading the text afresh, in a second turn too, whether
    the caller keeps its caches or a server's store. The target's own drafts are accepted, all of
    them, long past the window."""
    case, draft_model = Case(name), noisy_copy(name, 0.1)
    items = list(case.speculate(ModelDrafter(case.model), 4))
    assert spoken(items).deviation(case.plain) <= case.tolerance
    assert items[-1].stats.acceptance_rate == 1
    said = PROMPT + case.plain.tokens[:50] + SECOND_PROMPT

    def begin(drafter: Any, **options: Any) -> None:
        generation = case.speculate(drafter, 4, **options)
        items = list(islice(generation, 50))
        generation.close()
        assert 0 < items[-1].stats.accepted_share < 0.9

    caches = make_prompt_cache(case.model) + make_prompt_cache(draft_model)
    recorder = Recorder(ModelDrafter(draft_model))
    begin(recorder, prompt_cache=caches)
    for text, proposed in recorder.proposals[3::3]:
        assert proposed == plain_text(draft_model, text, len(proposed)).tokens
    again = Recorder(ModelDrafter(draft_model))
    generation = case.speculate(again, 4, prompt_tokens=SECOND_PROMPT, prompt_cache=caches)
    first, _ = islice(generation, 2)
    generation.close()
    text, proposed = again.proposals[0]
    assert text == [*said, first.token]
    assert proposed == plain_text(draft_model, [*said, first.token], len(proposed)).tokens
    own = make_prompt_cache(case.model)
    begin(ModelDrafter(draft_model), prompt_cache=own)
    caches, num_held = StatesOnCache(own).fetch(draft_model, said)
    rest = said[num_held:]
    assert len(rest) < 20
    afresh = draft_model(mx.array([said]), cache=make_prompt_cache(draft_model))[0, -1]
    got = draft_model(mx.array([rest]), cache=caches)[0, -1]
    assert largest_difference(got, afresh) <= case.tolerance
