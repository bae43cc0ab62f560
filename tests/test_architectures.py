"""Every architecture of mlx-lm: speculative decoding writes what plain decoding writes.

One case per file that defines a model; all of `lossless.Case` for those of `tiny.REPRESENTATIVE`.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache, make_prompt_cache

import lossless
import tiny
from lossless import INEXACT, NEAR_TIE, PROMPT, ROUGH, SECOND_PROMPT, Case, Text, plain_text, spoken
from scripted import Recorder
from selection import FULL, cases
from specdec_mlx import ModelDrafter
from specdec_mlx.loop import Token
from specdec_mlx.target.rollback import Rollback

RUNS = [name for name in tiny.architecture_files() if name not in tiny.CANNOT_RUN]
EXACT = [name for name in RUNS if name not in INEXACT]
OTHERS = [name for name in EXACT if name not in tiny.REPRESENTATIVE]
ALWAYS = ("llama", "deepseek_v3", "llama4", "mamba2", "rwkv7", "lfm2")
"""Those that have every test in the short run too."""

ACROSS_THE_WINDOW = 32
PAGE = (Path(__file__).parent.parent / "docs" / "architectures.md").read_text()
ROWS = lossless.rows_of(PAGE)

on_cpu = pytest.mark.skipif(mx.metal.is_available(), reason="the table is about the CPU")


@pytest.fixture(scope="module", params=cases(tiny.REPRESENTATIVE, *ALWAYS))
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def test_every_architecture_file_has_a_configuration() -> None:
    """A new file of a later mlx-lm fails here until it has a row in tests/tiny."""
    assert set(tiny.architecture_files()) == set(tiny.CONFIGS) | set(tiny.CANNOT_RUN)
    assert set(INEXACT) | set(ROUGH) <= set(RUNS)
    assert len(EXACT) >= 115


def brief(name: str) -> Case:
    return Case(name, num_tokens=ACROSS_THE_WINDOW, briefly=True)


@pytest.mark.parametrize("name", [name for name in EXACT if name not in ALWAYS])
def test_half_right_drafts_across_the_window_leave_no_trace(name: str) -> None:
    """The case of every architecture, before, across and after the end of the window."""
    case = brief(name)
    assert case.plain.smallest_gap > NEAR_TIE
    assert not case.has_failed(case.deviations["oracle", 4])
    assert 0.2 < case.runs["oracle", 4][-1].stats.acceptance_rate < 1


@FULL
@pytest.mark.parametrize("begin", range(4))
def test_the_page_has_the_rows_of_all_others(begin: int) -> None:
    assert not [name for name in OTHERS[begin::4] if brief(name).row not in ROWS]


@FULL
def test_the_page_has_the_row_that_was_measured(case: Case) -> None:
    """docs/architectures.md says of each architecture what this run has found."""
    assert case.row in ROWS, "run docs/generate_architectures.py"


def test_the_page_is_written_by_its_generator() -> None:
    """Nobody edited it by hand, it has every architecture, and nearly all can be read."""
    assert lossless.page(PAGE, ROWS) == PAGE, "run docs/generate_architectures.py"
    assert [row.architecture for row in ROWS] == tiny.architecture_files()
    reads = [row.reads for row in ROWS if row.architecture in RUNS]
    assert reads.count("yes") >= 118
    assert all(read == "yes" or read.startswith("not the ") for read in reads)


def test_text_and_logprobs_are_those_of_plain_decoding(case: Case) -> None:
    """Whatever is drafted, and however much of it: half of the oracle's drafts are right, none of
    the wrong ones. No position is near a tie, and without speculation wide passes are exact."""
    assert case.plain.smallest_gap > NEAR_TIE
    assert case.width_deviation <= case.tolerance
    assert not {run: d for run, d in case.deviations.items() if case.has_failed(d)}
    stats = {run: items[-1].stats for run, items in case.runs.items()}
    assert 0.3 < stats["oracle", 4].accepted_share < 1
    for length in (1, 4, 7):
        assert stats["always wrong", length].drafted > 50
        assert stats["always wrong", length].accepted == 0


def test_without_rollback_the_text_is_another(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a rollback that only counts is found out."""
    monkeypatch.setattr(Rollback, "rewind_to", lossless.only_counting)
    assert case.has_failed(spoken(case.speculate(case.oracle(), 4)).deviation(case.plain))


@pytest.mark.parametrize("is_closed", [False, True])
def test_a_second_turn_goes_on_inside_a_block(case: Case, is_closed: bool) -> None:
    """Cut by max_tokens or by the caller, although the pass after the next was under way: the
    caches hold exactly prompt + emitted."""
    caches = make_prompt_cache(case.model)
    length = case.inside_a_block()
    most = case.num_tokens if is_closed else length
    items = case.speculate(case.oracle(), 7, max_tokens=most, prompt_cache=caches)
    first = take(items, length) if is_closed else list(items)
    assert [item.token for item in first] == case.plain.tokens[:length]
    assert case.continued(length, caches) <= case.tolerance


def take(items: Generator[Token], number: int) -> list[Token]:
    """The first items of a generator, which is then closed."""
    taken = [next(items) for _ in range(number)]
    items.close()
    return taken


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


@pytest.mark.parametrize("name", cases(INEXACT, "plamo3"))
def test_what_is_inexact_is_written_one_token_at_a_time(name: str) -> None:
    """Passes of five positions are far from single ones without speculation; nothing is drafted
    there, and the text is right."""
    inexact = Case(name)
    assert inexact.width_deviation > 1e-2
    with pytest.warns(UserWarning, match="nothing is drafted there"):
        assert not any(map(inexact.has_failed, inexact.deviations.values()))
    room_in_window = 16 - (len(PROMPT) - 1)
    assert all(items[-1].stats.drafted <= room_in_window for items in inexact.runs.values())
    assert inexact.row in ROWS


@FULL
@pytest.mark.parametrize("name", ROUGH)
def test_what_is_rough_is_so_for_the_reason_in_the_table(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the rounding of activations the tolerance of the others is kept."""
    assert brief(name).deviations["oracle", 4] > lossless.TOLERANCE
    for rounding in ("_fake_quant_fp8", "_fake_quant_fp4"):
        monkeypatch.setattr(f"mlx_lm.models.{name}.{rounding}", lambda x, *args, **kwargs: x)
    assert brief(name).deviations["oracle", 4] <= lossless.TOLERANCE


EXPERTS = {"gpt_oss", "deepseek_v3", "llama4", "qwen3_next"}
"""Their mixtures run on a CPU in float32 only."""


@on_cpu
@pytest.mark.parametrize("name", [name for name in tiny.REPRESENTATIVE if name not in EXPERTS])
def test_bfloat16_text_is_plain_decodings_up_to_a_tie(name: str) -> None:
    """Bit for bit with plain key-value caches; with others, which round otherwise in a wide pass,
    up to a tie."""
    case = Case(name, mx.bfloat16)
    said = spoken(case.speculate(case.oracle(), 4, probe=False))
    if all(type(cache) is KVCache for cache in make_prompt_cache(case.model)):
        assert said.deviation(case.plain) == 0
    else:
        assert deviation_before_a_tie(said, case.plain, tie=0.1) < 0.2


def deviation_before_a_tie(said: Text, plain: Text, tie: float) -> float:
    """Deviation of the parts before the texts part, if they do so at a tie; else infinite."""
    pairs = zip(said.tokens, plain.tokens, strict=True)
    end = next((i for i, (a, b) in enumerate(pairs) if a != b), len(plain))
    if end < len(plain) and Text([0], plain.logprobs[end : end + 1]).smallest_gap > tie:
        return math.inf
    return lossless.largest_difference(said.logprobs[:end], plain.logprobs[:end])


DRAFT_MODELS = ["llama", "llama4", "rwkv7", "qwen3_next", "deepseek_v41"]
"""The last has its own class of cache."""


@pytest.mark.parametrize("name", cases(DRAFT_MODELS, *DRAFT_MODELS[:3]))
def test_a_rejected_draft_leaves_no_trace_in_the_draft_model(name: str) -> None:
    """It proposes what it would write after reading the text afresh, in a second turn too; the
    target as its own drafter is always right, long past the window."""
    case = Case(name)
    items = list(case.speculate(ModelDrafter(case.model), 4))
    assert spoken(items).deviation(case.plain) <= case.tolerance
    assert items[-1].stats.acceptance_rate == 1
    draft_model = perturbed(name)
    caches = make_prompt_cache(case.model) + make_prompt_cache(draft_model)
    recorder = Recorder(ModelDrafter(draft_model))
    items = take(case.speculate(recorder, 4, prompt_cache=caches), 50)
    assert 0 < items[-1].stats.accepted_share < 0.9
    for text, proposed in recorder.proposals[3::3]:
        assert proposed == plain_text(draft_model, text, len(proposed)).tokens
    again = Recorder(ModelDrafter(draft_model))
    first, _ = take(case.speculate(again, 4, prompt_tokens=SECOND_PROMPT, prompt_cache=caches), 2)
    said = PROMPT + case.plain.tokens[:50] + SECOND_PROMPT + [first.token]
    text, proposed = again.proposals[0]
    assert text == [*SECOND_PROMPT, first.token]
    assert proposed == plain_text(draft_model, said, len(proposed)).tokens


def perturbed(name: str, share: float = 0.1) -> nn.Module:
    """The architecture's model with weights near its own, so that it is right now and then."""
    model = tiny.build(name)
    others = tree_flatten(tiny.build(name, seed=1).parameters())
    own = tree_flatten(model.parameters())
    mixed = [
        (path, a + share * (b - a))
        for (path, a), (_, b) in zip(own, others, strict=True)
        if mx.issubdtype(a.dtype, mx.floating)
    ]
    model.update(tree_unflatten(mixed))
    return model
