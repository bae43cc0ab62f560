"""Benchmarks: what is compared, what is counted, and that a wrong loop does not get through."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec import to_builtins
from msgspec.structs import replace

import narrow
import scripted
import specdec_mlx as sd
from benchmarks import replay as experiment
from benchmarks.oracles import LENGTH_ORACLE, TEXT_ORACLE
from selection import cases, in_one_test
from specdec_mlx.cli.commands import main
from specdec_mlx.contracts import Draft, DraftContext, Outcome, RoundRecord
from specdec_mlx.draft_length.costs import CURVES, WIDTHS
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import Fixed, make_draft_length
from specdec_mlx.drafters.choosing import choice
from specdec_mlx.drafters.choosing.choice import DrafterChoice, DraftModel
from specdec_mlx.lab.bench import replay, run, summary, timing
from specdec_mlx.lab.bench.cost import CostCurve, CostMeter, linear_cost, parse_cost
from specdec_mlx.lab.bench.record import (
    Record,
    format_cost,
    format_record,
    load_record,
    save_record,
)
from specdec_mlx.lab.bench.replay import replay_text
from specdec_mlx.lab.bench.summary import (
    ALL,
    Result,
)
from specdec_mlx.lab.bench.timing import (
    MLX_LM_SPECULATION,
    PLAIN,
    Contender,
    Emitted,
    Sample,
    Settings,
    make_contenders,
    ours,
    run_interleaved,
    time_generation,
)
from specdec_mlx.lab.commands import bench as bench_command
from specdec_mlx.lab.estimates import ratio_of
from specdec_mlx.lab.pair import head_path, load_pair
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.target import LazyPass

SETTINGS = Settings(max_tokens=24, repeats=2)
ONCE = Settings(max_tokens=24)
LOOKUP = "prompt-lookup"
END = {3}


def bench(
    drafters: Sequence[str] = (LOOKUP,),
    lengths: Sequence[str] = ("3",),
    settings: Settings = SETTINGS,
    temp: float = 0.0,
    num_texts: int = 4,
    **options: Any,
) -> Record:
    model = narrow.model()
    chosen = DrafterChoice(drafters, DraftModel(options.pop("draft_model", None)))
    how = replace(settings, temp=temp)
    contenders = make_contenders(model, chosen, lengths, how, **options)
    return run.run_bench(model, narrow.tasks(num_texts), contenders, how, measure_cost=False)


@cache
def record_of(max_tokens: int = 32, ends: bool = False) -> Record:
    """A live benchmark of a few texts: prompt lookup with K = 4."""
    return bench(lengths=["4"], settings=Settings(max_tokens, end_tokens=END if ends else set()))


def only(record: Record, drafter: str, category: str = ALL) -> Result:
    (result,) = (r for r in record.results if (r.drafter, r.category) == (drafter, category))
    return result


def sample(text: str, drafter: str = PLAIN, tokens: Sequence[int] = (1, 2), **made: Any) -> Sample:
    """A generation in which nothing was drafted."""
    values = {"repeat": 0, "first_round": 1, "first_seconds": 1.0, "decode_seconds": 1.0} | made
    counts = {"passes": 2, "drafted": 0, "accepted": 0, "drafting_rounds": 0, "peak_bytes": 0}
    own = {"tokens": list(tokens), "num_tokens": len(tokens), **values, **counts}
    return Sample(drafter, id=text, category="kind 0", **own)


def test_a_drafter_has_a_row_with_kernels_and_one_without() -> None:
    """With the same texts; the table names the kernels, and has no such column otherwise."""
    record = bench(num_texts=1, kernels=["split"])
    rows = [r for r in record.results if r.category == ALL]
    assert [(r.drafter, r.kernels, r.identical) for r in rows] == [
        (PLAIN, "", 1),
        (LOOKUP, "", 1),
        (LOOKUP, "split", 1),
    ]
    assert re.search(rf"\| {LOOKUP} .*\| split +\|", format_record(record))
    assert "kernels" not in format_record(record_of())


def test_near_ties_that_plain_passes_decide_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their passes count among all passes; the table has the column where there are ties."""
    monkeypatch.setattr("specdec_mlx.target.tie_bound", lambda model, kernels: 1e9)
    result = only(record := bench(num_texts=1, settings=replace(ONCE, ties="plain")), LOOKUP)
    assert result.ties == result.drafting_share * result.target_passes > 0
    assert result.identical == 1
    assert result.tokens_per_pass < 1
    assert re.search(r"\| drafting \| ties \|", format_record(record))
    assert "| ties |" not in format_record(record_of())


def test_texts_are_identical_and_counts_add_up() -> None:
    """Greedy: every text is plain decoding's. Sums over categories are those of "all"."""
    record = bench([LOOKUP, "none"], ["2", "5"])
    assert {r.identical for r in record.results if r.category == ALL} == {4}
    assert record.differences == []
    for key in {r.key for r in record.results}:
        own = [r for r in record.results if r.key == key]
        (total,) = (r for r in own if r.category == ALL)
        for count in ("texts", "tokens", "target_passes", "drafted", "accepted", "identical"):
            parts = sum(getattr(r, count) for r in own if r.category != ALL)
            assert getattr(total, count) == parts, count
        assert total.tokens == 4 * SETTINGS.max_tokens
        assert total.tokens_per_pass == 2 * total.tokens / total.target_passes
        assert total.accepted_share == (total.accepted / total.drafted if total.drafted else 0)
    assert only(record, "none").drafting_share == 0
    assert only(record, PLAIN).tokens_per_pass == only(record, "none").tokens_per_pass == 1
    assert only(record, PLAIN).ratio == 1
    assert any(r.drafted > r.accepted > 0 for r in record.results)
    assert [t.prompt for t in record.texts] == [t.prompt for t in narrow.tasks()]
    assert record.settings == replace(SETTINGS, vocab_size=narrow.VOCAB, dtype="float32")


def test_where_texts_part_by_how_much_and_a_near_tie_is_an_excuse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a beginning and the whole, the shorter one's length; the gap is that of the logits."""
    assert summary.first_difference([1, 2], [1, 2]) is None
    assert summary.first_difference([1, 2], [1, 3]) == 1
    assert summary.first_difference([1], [1, 3]) == 1
    assert summary.first_difference([1, 3, 4], [1, 3]) == 2
    (task,) = narrow.tasks(1)
    text = [t.token for t in sd.speculate(narrow.model(), task.prompt, None, max_tokens=6)]
    logits = narrow.model()(mx.array([task.prompt + text[:5]]))[0, -1]
    second, best = np.sort(np.array(logits))[-2:]
    gap = summary.top_two_gap(narrow.model(), task.prompt, 5)
    assert gap == pytest.approx(best - second, abs=1e-4)
    samples = [sample("task 0", tokens=[1, 2, 3]), sample("task 0", "d", tokens=[1, 0, 3])]
    for gap, excused in ((1e-5, True), (1e-3, False)):
        monkeypatch.setattr(summary, "top_two_gap", lambda *args, gap=gap: gap)
        (found,) = summary.find_differences(narrow.model(), [task], samples)
        assert (found.position, found.top_two_gap, found.excused) == (1, gap, excused)
    again = [replace(s, repeat=1, tokens=s.tokens[:1]) for s in samples]  # both were cut short
    assert len(summary.find_differences(narrow.model(), [task], samples + again)) == 1


def test_contenders_take_turns_and_what_auto_learned_is_kept_within_a_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One memory per contender and repeat: texts seen before must not help. A sweep before each."""
    seen: list[Any] = []
    speculate = sd.speculate

    def spy(*args: Any, tuning: Any, **kwargs: Any) -> Any:
        seen.append(tuning)
        return speculate(*args, tuning=tuning, **kwargs)

    monkeypatch.setattr("specdec_mlx.lab.bench.timing.speculate", spy)
    chosen = DrafterChoice((LOOKUP, "ngram"))
    contenders = make_contenders(narrow.model(), chosen, ["auto"], Settings())
    settings, order = Settings(max_tokens=4, repeats=2), []
    sweep = SimpleNamespace(id="", repeat=0, drafter="sweep")
    for s in run_interleaved(narrow.tasks(2), contenders, settings, lambda: order.append(sweep)):
        order.append(s)
    ways = [(repeat, name) for repeat in (0, 1) for name in (PLAIN, LOOKUP, "ngram")]
    expected = [("", 0, "sweep"), *(("task 0", *way) for way in ways)]
    expected += [("", 0, "sweep"), *(("task 1", *way) for way in ways)]
    assert [(s.id, s.repeat, s.drafter) for s in order] == expected
    timed = [id(tuning) for tuning in seen[2:]]  # after the warm-up of both
    assert timed[:4] == timed[4:]
    assert len({id(tuning) for tuning in seen}) == 6


@pytest.mark.full
def test_mlx_lms_own_speculation_takes_part_with_a_draft_model() -> None:
    """A draft model that is the target has all accepted; with another, K a round are drafted."""
    record = bench(["model"], settings=ONCE, num_texts=2, draft_model=narrow.model())
    # 24 tokens: in 6 rounds of 3 + 1; the first one, 5 rounds of 3 + 1 and one of 2 + 1
    for name, passes in ((MLX_LM_SPECULATION, 6), ("model", 1 + 5 + 1)):
        result = only(record, name)
        assert result.identical == 2
        assert result.accepted == result.drafted > 0
        assert result.tokens_per_pass == 24 / passes
    record = bench(["none"], settings=ONCE, draft_model=narrow.model(seed=1))
    for found in record.samples:
        if found.drafter == MLX_LM_SPECULATION:
            assert 3 * (found.passes - 1) <= found.drafted <= 3 * found.passes
            assert found.passes + found.accepted in (24, 25)
    assert 0 < only(record, MLX_LM_SPECULATION).accepted_share < 1


def test_random_texts_are_not_compared_and_those_of_a_single_round_have_no_speed() -> None:
    """Above temperature 0 the draws differ, so identity says nothing; repeats have other seeds."""
    record = bench(temp=1.0, num_texts=2)
    assert {r.identical for r in record.results} == {None}
    assert record.differences == []
    first, second = (s for s in record.samples if s.drafter == PLAIN and s.id == "task 0")
    assert first.tokens != second.tokens
    record = bench(settings=Settings(max_tokens=1))
    result = only(record, LOOKUP)
    assert (result.ratio, result.total_tokens_per_second, result.end_to_end_ratio) == (None,) * 3
    assert (result.identical, result.tokens, result.tokens_per_pass) == (4, 4, 1)
    assert "- to -" in format_record(record)
    assert "| rule" not in format_record(record)


@pytest.mark.full
def test_a_seed_that_is_given_is_measured_as_a_caller_has_it() -> None:
    """One text at every length; without one the rule is that of calls without a seed."""
    options: dict[str, Any] = {"temp": 1.0, "num_texts": 1, "draft_model": narrow.model(seed=1)}
    for is_seeded in (True, False):
        settings = Settings(max_tokens=24, seed=3 if is_seeded else None)
        record = bench(["model"], ["2", "5"], settings, **options)
        own = [s for s in record.samples if s.drafter == "model"]
        texts = {tuple(s.tokens) for s in own}
        assert (len(texts) == 1) == is_seeded


def test_the_pass_after_the_first_token_counts_for_the_tokens_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def start(prompt: list[int], max_tokens: int, seed: int) -> Any:
        for token in range(max_tokens):
            now[0] += 1.0 if token else 5.0
            yield Emitted(token)

    def synchronize(stream: Any) -> None:
        now[0] += 0.25

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.mx, "synchronize", synchronize)
    found = timing.time_generation(Contender("d", start=start), narrow.tasks(1)[0], SETTINGS, 0)
    assert found.first_seconds == 5.0
    assert found.decode_seconds == 0.25 + (SETTINGS.max_tokens - 1) * 1.0 + 0.25


def test_throughput_is_total_over_total_and_its_bootstrap_interval_covers() -> None:
    """Of 300 benchmarks of 60 texts in 90% to 98.5%: a percentile interval of so few has 93%."""
    own, plain = np.array([[10.0, 1.0], [90.0, 3.0]]), np.array([[10.0, 1.0], [90.0, 9.0]])
    assert ratio_of(own, plain) == pytest.approx((10 / 4, 1, 3))
    rng = np.random.default_rng(3)
    covered = 0
    for i in range(300):
        seconds, ratios = rng.uniform(1, 3, 60), rng.lognormal(0.3, 0.4, 60)
        own, plain = (np.stack([np.full(60, 50.0), x], 1) for x in (seconds / ratios, seconds))
        _, low, high = ratio_of(own, plain, seed=i, num_resamples=500)
        covered += low <= np.exp(0.3 - 0.4**2 / 2) <= high  # 1 / E[1 / ratio]
    assert 270 <= covered <= 295


def test_record_survives_json_and_another_file_is_refused(tmp_path: Path) -> None:
    """All of it comes back; a field that is wrong or unknown is named."""
    record, path = replace(record_of(), cost=linear_cost(0.1)), tmp_path / "record.json"
    save_record(record, path)
    data = json.loads(path.read_text())
    assert list(data) == list(Record.__struct_fields__)
    loaded = load_record(path)
    assert loaded == record
    assert loaded.live_ratio(LOOKUP, "4", ALL) == only(record, LOOKUP).ratio
    assert loaded.live_ratio(LOOKUP, "9", ALL) is None
    for name, value, said in (
        ("tokens", -1, r"results[1].tokens is -1: Expected `int` >= 0"),
        ("ratio", "x", r"results[1].ratio is 'x': Expected `float | null`"),
        ("colour", 3, r"results[1].colour is 3: Object contains unknown field"),
    ):
        data["results"][1] |= {name: value}
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=re.escape(said)):
            load_record(path)
        data = json.loads(path.read_text()) | {"results": [to_builtins(r) for r in record.results]}
    loaded.results[:] = [replace(r, rule=r.rule and "match") for r in loaded.results]
    assert loaded.live_ratio(LOOKUP, "4", ALL) is None
    for text in ("[]", "{}", "no JSON"):
        path.write_text(text)
        with pytest.raises(ValueError, match="no record of a benchmark"):
            load_record(path)


def command(*arguments: str) -> int:
    return main(["bench", "--model", "anything", *arguments])


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> narrow.FakeTokenizer:
    """The command line loads the narrow model, whatever it is asked for."""
    tokenizer = narrow.FakeTokenizer()
    for module, name in ((bench_command, "load_target"), (choice, "load_model")):
        monkeypatch.setattr(module, name, lambda name: (narrow.model(), tokenizer))
    return tokenizer


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    rows = [
        {"id": f"{c}{i}", "category": c, "turns": [f"{c} please number {i}", "again"]}
        for c in ("edit", "chat")
        for i in range(4)
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return str(path)


def test_the_command_runs_and_reports(
    loaded: narrow.FakeTokenizer,
    prompts_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every flag has its effect; the report and the file say the same, in aligned tables."""
    out = tmp_path / "out.json"
    drafters = ["--drafter", f"{LOOKUP}:max_ngram=3", "--drafter", "none"]
    lengths = ["--num-draft-tokens", "2", "--num-draft-tokens", "4", "--max-tokens", "12"]
    which = ["--prompts", prompts_file, "--per-category", "2", "--repeats", "1"]
    assert command(*which, *drafters, *lengths, "--json", str(out)) == 0
    report = capsys.readouterr().out
    record = load_record(out)
    assert [t.id for t in record.texts] == ["edit0", "edit2", "chat0", "chat2"]
    assert loaded.seen[0] == [{"role": "user", "content": "edit please number 0"}]
    keys = {(r.drafter, r.draft_length) for r in record.results}
    lookups = {(f"{LOOKUP}:max_ngram=3", length) for length in ("2", "4")}
    assert keys == {(PLAIN, ""), ("none", ""), *lookups}
    assert record.cost is not None
    assert all(record.machine.values())
    for part in ("mlx 0", "max_tokens 12", "identical", "4 of 4", "positions", "float32"):
        assert part in report
    tables = [part.splitlines() for part in report.split("\n\n") if part.startswith("|")]
    assert [len({len(line) for line in table}) for table in tables] == [1, 1, 1]
    assert re.fullmatch(r"\| -{8} \|.*-: \|", tables[0][1])
    assert "Texts that differ" not in report


@pytest.mark.usefixtures("loaded")
def test_a_wrong_loop_is_found_out(
    prompts_file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One that accepts a token too many: its texts are listed without excuse, and status is 1."""
    read = LazyPass.read

    def lenient(self: LazyPass) -> Outcome:
        outcome = read(self)
        n = outcome.num_accepted
        if n == len(self.draft):
            return outcome
        return Outcome(range(n + 1), [*self.draft.tokens[: n + 1], outcome.tokens[-1]])

    monkeypatch.setattr(LazyPass, "read", lenient)
    out = tmp_path / "out.json"
    which = ["--prompts", prompts_file, "--drafter", LOOKUP, "--num-draft-tokens", "3"]
    assert command(*which, "--no-cost", "--max-tokens", "24", "--json", str(out)) == 1
    assert ", NOT excused" in capsys.readouterr().out
    record = load_record(out)
    assert only(record, PLAIN).identical == 8 > (only(record, LOOKUP).identical or 0)
    assert only(record, LOOKUP).excused == 0
    assert {(d.drafter, d.excused) for d in record.differences} == {(LOOKUP, False)}


ONE_CHAT = ("--no-cost", "--max-tokens", "6", "--categories", "chat", "--per-category", "1")


@pytest.mark.full
@pytest.mark.usefixtures("loaded")
def test_a_draft_model_brings_both_speculations_and_a_trained_head_only_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """mlx-lm's own has no use for a head, and nor have flags of whole models."""
    assert command("--draft-model", "any", *ONE_CHAT) == 0
    report = capsys.readouterr().out
    assert MLX_LM_SPECULATION in report
    assert "| auto " in report, "as `generate` drafts: look-up and the model compete"
    pair = load_pair()
    monkeypatch.setattr(bench_command, "load_target", lambda name: (pair.target, pair.tokenizer))
    head = ["--draft-model", str(head_path("medusa")), *ONE_CHAT]
    cases = ("model:greedy=true", "cascade", "ngram")
    named = [word for name in cases for word in ("--drafter", name)]
    assert command(*head, *named, "--num-draft-tokens", "2") == 0
    report = capsys.readouterr().out
    assert MLX_LM_SPECULATION not in report
    assert all(f"| {name} " in report for name in cases)
    assert command(*head, "--draft-layers", "1") == 2
    assert re.search(r"--draft-layers: .* no layers to leave out", capsys.readouterr().err)


def test_cost_curves_run_through_their_points() -> None:
    """Straight lines between points; the last slope goes on."""
    curve = CostCurve("c", (1, 2, 4), (1.0, 1.5, 1.7))
    assert [curve(m) for m in (1, 2, 3, 4, 6)] == pytest.approx([1, 1.5, 1.6, 1.7, 1.9])
    assert curve.relative() == (1, 1.5, 1.7)
    measured = CostCurve("measured", (1, 2), (0.1, 0.15))
    assert parse_cost("measured", measured) is measured
    costs = {"linear:0.5": 0.2, "2,3,5": 0.25}
    assert {text: parse_cost(text, measured)(3) for text in costs} == pytest.approx(costs)
    wrong = "measured", "linear:x", "quadratic", "1,x", "linear:-1", "1,0", "0,1", ""
    for text in (*wrong, "linear:nan", "linear:inf", "1,nan"):
        with pytest.raises(ValueError, match=r"[Cc]ost"):
            parse_cost(text, None)
    for positions, numbers in [((2, 1), (1, 1)), ((2, 3), (1, 1)), ((1, 2), (1,)), ((1,), (1,))]:
        with pytest.raises(ValueError, match="expected increasing positions from 1"):
            CostCurve("c", positions, numbers)


def test_a_cost_meter_leaves_the_cache_as_it_was_and_the_pace_of_the_machine_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that is three times as slow in every other sweep gives the same relative costs."""
    meter = CostMeter(narrow.model(), [1, 2, 3], widths=(1, 2, 5))
    rollback = meter._verifier.rollback
    before = rollback.position
    meter.sweep()
    assert rollback.position == before
    assert {cache.offset for cache in rollback.caches} == {before}
    assert meter.curve().positions == (1, 2, 5)
    assert min(meter.curve().seconds) > 0
    meter = CostMeter(narrow.model(), [1, 2, 3], widths=(1, 2, 5))
    pace = 1.0
    monkeypatch.setattr(meter, "_time", lambda width: pace * (1 + 0.1 * (width - 1)))
    for i in range(8):
        pace = 3.0 if i % 2 else 1.0
        meter.sweep()
    curve = meter.curve()
    assert curve.relative() == pytest.approx((1, 1.1, 1.4))
    assert curve.low == pytest.approx(curve.seconds) == curve.high
    assert "1.40 to 1.40" in format_cost(curve)


# Replay: the counts of a live run, the seconds of a curve, and bounds that are bounds -------------

FLAT = linear_cost(0.0)


@dataclass(frozen=True, eq=False)
class Eager(sd.Drafter):
    """Prompt lookup that is not cheap, so that the loop may not look ahead with it."""

    inner: sd.PromptLookupDrafter

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.inner.begin(prompt, context)
        session.cheap = False
        return session


LOOK_UP, NGRAM = sd.PromptLookupDrafter(min_ngram=1), sd.NGramDrafter()
LONG, LONG_NOT_CHEAP = "long matches", "long matches, not cheap"
DRAFTERS: dict[str, Any] = {
    "prompt lookup": LOOK_UP,
    "short matches": sd.PromptLookupDrafter(max_ngram=1, min_ngram=1),
    "n-gram": NGRAM,
    LONG: sd.PromptLookupDrafter(min_ngram=3),
    LONG_NOT_CHEAP: Eager(sd.PromptLookupDrafter(min_ngram=3)),
    "model": sd.ModelDrafter(narrow.model(seed=1)),
    "none": None,
}


def replayed(
    text: RecordedText,
    drafter: Any,
    length: Any = 4,
    cost: CostCurve = FLAT,
    max_tokens: int = 32,
    **options: Any,
) -> Sample:
    options |= {"max_tokens": max_tokens, "vocab_size": narrow.VOCAB}
    return replay_text(text, drafter, make_draft_length(length), cost, **options)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("ends", cases([False, True], True))
def test_counts_are_those_of_a_live_run(name: str, ends: bool) -> None:
    """At temperature 0: target passes, drafted and accepted tokens, text by text."""
    settings = Settings(max_tokens=32, end_tokens=END if ends else set())
    for length in ("0", "2", "8"):
        live = ours(narrow.model(), DRAFTERS[name], name, length)
        for task, text in zip(narrow.tasks(), record_of(ends=ends).texts, strict=True):
            sample = time_generation(live, task, settings, 0)
            assert sample.tokens == text.generated
            model = replayed(text, DRAFTERS[name], int(length))
            counts = sample.passes, sample.drafted, sample.accepted
            assert (model.passes, model.drafted, model.accepted) == counts


def test_some_texts_end_early_and_some_drafts_are_rejected_or_made_ahead() -> None:
    """So that the counts above say something."""
    assert min(len(text.generated) for text in record_of(ends=True).texts) < 32
    some = [replayed(text, LOOK_UP) for text in record_of().texts]
    assert sum(m.drafted for m in some) > sum(m.accepted for m in some) > 0
    ways = (DRAFTERS[LONG], DRAFTERS[LONG_NOT_CHEAP])
    cheap, eager = ([replayed(t, way, 1).drafted for t in record_of().texts] for way in ways)
    assert cheap != eager


def test_seconds_are_read_off_the_curve_and_drafting_costs() -> None:
    """A drafter that knows the text: the first token, and 32 more in 8 passes of 4 positions.

    The draft length hears the curve's seconds, not the clock's.
    """
    text = record_of(33).texts[0]
    oracle = scripted.OracleDrafter(text.generated, narrow.VOCAB)
    heard, length = list[RoundRecord](), Fixed(3)
    object.__setattr__(length, "record", heard.append)
    model = replayed(text, oracle, length, CostCurve("c", (1, 4), (1.0, 1.5)), 33)
    assert [r.seconds for r in heard] == [r.verify_seconds for r in heard] == [1.0, *[1.5] * 8]
    assert (model.passes, model.drafted, model.accepted) == (9, 24, 24)
    assert model.seconds == pytest.approx(1 + 8 * 1.5)
    assert model.plain_seconds == pytest.approx(33)
    model = replayed(text, oracle, 3, FLAT, 33, draft_seconds=FLAT(1) / 10)
    assert model.seconds == pytest.approx(FLAT(1) * (9 + 24 / 10))
    # a look-up costs its positions alone, beside a drafter that takes time, too
    drafter = sd.drafters.FirstOf(LOOK_UP, scripted.OracleDrafter([], narrow.VOCAB))
    free, other = (replayed(text, drafter, 3, FLAT, 33, draft_seconds=s) for s in (0.0, 1.0))
    assert free.seconds == other.seconds > 0


@in_one_test("chip", CURVES)
def test_a_copy_is_drafted_widely_whatever_chip_of_the_family_it_was_expected_on(chip: str) -> None:
    """At a speed within reach of the best width's, also where few rows bring nothing."""
    words = random.Random(0).choices(range(1000), k=400)
    text = RecordedText("copy", "copy", words, words[:380])
    best = max(rows / CURVES[chip](rows) for rows in WIDTHS)
    expected = {name for name, curve in CURVES.items() if curve.fits and name[:2] == chip[:2]}
    sizes, cost = {"max_tokens": 380, "vocab_size": 1000}, parse_cost(chip, None)
    for name in expected | {"mildest", chip} | ({"m1-m2"} if chip == "m2-max-27b" else set()):
        length = make_draft_length("auto", Tuning(CURVES[name]))
        copied = replay_text(text, sd.SuffixDrafter(), length, cost, **sizes)
        assert copied.plain_seconds > 0.35 * best * copied.seconds, name


def test_random_drafts_are_refused() -> None:
    drawn = Draft([0], mx.zeros((1, 1)))
    session = SimpleNamespace(propose=lambda limit: drawn, observe=lambda tokens: None)
    with pytest.raises(ValueError, match="not random"):
        replayed(record_of().texts[0], SimpleNamespace(begin=lambda prompt, context: session))


def test_scores_add_up_and_carry_the_live_ratio() -> None:
    """Category "all" sums the others; live ratios belong to the measured curve alone."""
    measured = replace(linear_cost(0.1), name="measured")
    drafters = {"prompt-lookup": LOOK_UP, "none": None}
    scores = replay.score_record(record_of(), drafters, ["4", "auto"], measured).results
    keys = [("prompt-lookup", "4"), ("prompt-lookup", "auto"), ("none", "")]
    assert list(dict.fromkeys((s.drafter, s.draft_length) for s in scores)) == keys
    for key in keys:
        own = {s.category: s for s in scores if (s.drafter, s.draft_length) == key}
        for count in ("texts", "tokens", "target_passes", "drafted", "accepted"):
            parts = sum(getattr(s, count) for s in own.values() if s.category != ALL)
            assert getattr(own[ALL], count) == parts
        live = record_of().live_ratio(*key, ALL)
        assert own[ALL].live_ratio == live
        assert (live is not None) == (key == ("prompt-lookup", "4"))
    other = replay.score_record(record_of(), drafters, ["4"], FLAT).results
    assert {score.live_ratio for score in other} == {None}


def test_the_commands_score_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table per curve, and the same numbers in the file; the experiment's adds bounds and rows.

    With 3 draft tokens at most, the text oracle writes 4 tokens a pass on either curve.
    """
    path, scored = tmp_path / "record.json", tmp_path / "scores.json"
    save_record(record_of(), path)
    named = ["--drafter", "ngram", "--num-draft-tokens", "2", "--json", str(scored)]
    curves = ["--cost", "linear:0", "--cost", "1,1.5,2", "--draft-cost", "0.1"]
    assert main(["replay", str(path), *named, *curves]) == 0
    report = capsys.readouterr().out
    assert report.count("| category") == 2
    assert "kind 0" in report
    assert {s["cost"] for s in json.loads(scored.read_text())} == {"linear:0", "1,1.5,2"}
    picture = tmp_path / "speeds.svg"
    lengths = ["--num-draft-tokens", "2", "--num-draft-tokens", "8"]
    assert main(["replay", str(path), *lengths, "--plot", str(picture)]) == 0
    assert "auto, K = 8" in picture.read_text()
    assert "cost linear:0.24" in capsys.readouterr().out
    assert experiment.main([str(path), *named, *curves, "--longest", "3"]) == 0
    assert (
        capsys.readouterr().out.count(f"| {LENGTH_ORACLE}") == 2 * 3
    )  # two curves; two kinds of text, and all
    scores = json.loads(scored.read_text())
    oracle = [s for s in scores if s["drafter"] == TEXT_ORACLE and s["category"] == ALL]
    assert [s["tokens_per_pass"] for s in oracle] == [4, 4]
    assert experiment.main([str(path), *named, "--rows", "1", "--rows", "2"]) == 0
    assert "| rows" in capsys.readouterr().out
    assert [score["rows"] for score in json.loads(scored.read_text())] == [1, 2]
