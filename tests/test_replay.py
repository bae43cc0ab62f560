"""Replay: the counts of a live run, the seconds of a curve, and bounds that are bounds."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

import narrow
import scripted
import specdec_mlx as sd
from benchmarks import replay as experiment
from benchmarks.oracles import LENGTH_ORACLE, TEXT_ORACLE, length_oracle, text_oracle
from selection import cases, in_one_test
from specdec_mlx.bench import recorded, replay
from specdec_mlx.bench.contenders import make_contenders, ours
from specdec_mlx.bench.cost import CostCurve, linear_cost, parse_cost
from specdec_mlx.bench.record import Record, RecordedText, save_record
from specdec_mlx.bench.recorded import Modelled, replay_text
from specdec_mlx.bench.run import run_bench
from specdec_mlx.bench.summary import ALL
from specdec_mlx.bench.timing import Settings, time_generation
from specdec_mlx.contracts import Draft, DraftContext, Evidence, RoundRecord
from specdec_mlx.draft_length.costs import CURVES, WIDTHS
from specdec_mlx.draft_length.policy import Fixed, make_draft_length
from specdec_mlx.draft_length.store import Tuning

FLAT = linear_cost(0.0)
SOME_CURVES = (FLAT, linear_cost(0.24), linear_cost(1.0))
END = {3}


@dataclasses.dataclass(frozen=True, eq=False)
class Eager:
    """Prompt lookup that is not cheap, so that the loop may not look ahead with it."""

    inner: sd.PromptLookupDrafter

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.inner.begin(prompt, context)
        session.cheap = False
        return session


LOOKUP, NGRAM = sd.PromptLookupDrafter(min_ngram=1), sd.NGramDrafter()
LONG, LONG_NOT_CHEAP = "long matches", "long matches, not cheap"
DRAFTERS: dict[str, Any] = {
    "prompt lookup": LOOKUP,
    "short matches": sd.PromptLookupDrafter(max_ngram=1, min_ngram=1),
    "n-gram": NGRAM,
    LONG: sd.PromptLookupDrafter(min_ngram=3),
    LONG_NOT_CHEAP: Eager(sd.PromptLookupDrafter(min_ngram=3)),
    "model": sd.ModelDrafter(narrow.model(seed=1)),
    "none": None,
}


@cache
def record(max_tokens: int = 32, ends: bool = False) -> Record:
    """A live benchmark of a few texts."""
    model = narrow.model()
    settings = Settings(max_tokens=max_tokens, end_tokens=END if ends else ())
    contenders = make_contenders(model, ["prompt-lookup"], ["4"])
    return run_bench(model, narrow.tasks(), contenders, settings, measure_cost=False)


def replayed(
    text: RecordedText,
    drafter: Any,
    length: Any = 4,
    cost: CostCurve = FLAT,
    max_tokens: int = 32,
    **options: Any,
) -> Modelled:
    options |= {"max_tokens": max_tokens, "vocab_size": narrow.VOCAB}
    return replay_text(text, drafter, make_draft_length(length), cost, **options)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("ends", cases([False, True], True))
def test_counts_are_those_of_a_live_run(name: str, ends: bool) -> None:
    """At temperature 0: target passes, drafted and accepted tokens, text by text."""
    settings = Settings(max_tokens=32, end_tokens=END if ends else ())
    for length in ("0", "1", "2", "4", "8", "heuristic"):
        live = ours(narrow.model(), DRAFTERS[name], name, length)
        for task, text in zip(narrow.tasks(), record(ends=ends).texts, strict=True):
            sample = time_generation(live, task, settings, 0)
            assert sample.tokens == text.generated
            model = replayed(text, DRAFTERS[name], int(length) if length.isdecimal() else length)
            counts = sample.passes, sample.drafted, sample.accepted
            assert (model.passes, model.drafted, model.accepted) == counts


def test_the_texts_put_replay_to_the_test() -> None:
    """Some texts end with an end token, drafts are rejected, and looking ahead shows in counts."""
    texts = record().texts
    assert min(len(text.generated) for text in record(ends=True).texts) < 32
    models = [replayed(text, LOOKUP) for text in texts]
    assert sum(m.drafted for m in models) > sum(m.accepted for m in models) > 0
    cheap, eager = (
        [replayed(text, DRAFTERS[name], 1).drafted for text in texts]
        for name in (LONG, LONG_NOT_CHEAP)
    )
    assert cheap != eager


def test_seconds_are_read_off_the_curve_and_drafting_costs() -> None:
    """A drafter that knows the text: the first token, and 32 more in 8 passes of 4 positions."""
    text = record(33).texts[0]
    oracle = scripted.OracleDrafter(text.generated, narrow.VOCAB)
    model = replayed(text, oracle, 3, CostCurve("c", (1, 4), (1.0, 1.5)), 33)
    assert (model.passes, model.drafted, model.accepted) == (9, 24, 24)
    assert model.seconds == pytest.approx(1 + 8 * 1.5)
    assert model.plain_seconds == pytest.approx(33)
    model = replayed(text, oracle, 3, FLAT, 33, draft_seconds=FLAT(1) / 10)
    assert model.seconds == pytest.approx(FLAT(1) * (9 + 24 / 10))
    # a look-up costs its positions alone, beside a drafter that takes time, too
    drafter = sd.FirstOf(LOOKUP, scripted.OracleDrafter([], narrow.VOCAB))
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


def test_free_steps_cost_nothing() -> None:
    for is_free, num_steps in ((True, 0), (False, 3)):
        evidence = Evidence(match=1, is_free=is_free)
        session: Any = SimpleNamespace()
        length = recorded.ModelledLength(Fixed(3), FLAT, 1.0)
        session.propose_while = lambda n, go, given=evidence: [go([given]) for _ in range(n)]
        recorded._ModelledSteps(session, length).propose(3)
        assert length.num_steps == num_steps


def test_draft_length_hears_the_curve_and_not_the_clock() -> None:
    """A policy that learns costs learns those of the curve."""
    heard: list[RoundRecord] = []
    length, curve = Fixed(4), linear_cost(0.5)
    object.__setattr__(length, "record", heard.append)
    replayed(record().texts[0], LOOKUP, length, curve)
    assert len({r.fed for r in heard}) > 1
    for r in heard:
        assert r.seconds == r.verify_seconds == curve(r.fed)
        assert r.draft_seconds == 0


def test_plain_decoding_is_the_unit() -> None:
    """Without drafts the speedup is 1 on any curve; on a flat one it is tokens per pass."""
    for curve in (FLAT, linear_cost(0.7)):
        for drafter, length in ((None, 4), (NGRAM, 0)):
            model = replayed(record().texts[0], drafter, length, curve)
            assert model.seconds == pytest.approx(model.plain_seconds)
    scores = replay.score_record(record(), {"ngram": NGRAM}, ["2", "4"], FLAT)
    assert all(score.speedup == pytest.approx(score.tokens_per_pass) for score in scores)


def test_length_oracle_wastes_nothing() -> None:
    """It accepts all that it drafts, and is no slower than drafting as much without knowing."""
    for text, drafter, curve in itertools.product(record().texts, (LOOKUP, NGRAM), SOME_CURVES):
        bound = length_oracle(text, drafter, curve, vocab_size=narrow.VOCAB)
        assert bound.drafted == bound.accepted
        assert bound.passes + bound.accepted == bound.tokens == 32
        assert bound.seconds <= replayed(text, drafter, 15, curve).seconds + 1e-9


@in_one_test("longest", [0, 2, 15])
@in_one_test("curve", [*SOME_CURVES, CostCurve("steps", (1, 2, 3, 4), (2, 3, 3.1, 9))])
def test_text_oracle_is_the_cheapest_way(curve: CostCurve, longest: int) -> None:
    """No way to cut 9 tokens into passes is cheaper, by trying all 256."""
    ways = []
    for number in range(256):
        ends = [i + 1 for i in range(8) if number >> i & 1]
        ways.append([b - a for a, b in itertools.pairwise([0, *ends, 9])])
    cheapest = min(sum(map(curve, way)) for way in ways if max(way) <= longest + 1)
    bound = text_oracle(RecordedText("t", "c", [0], [1] * 9), curve, longest)
    assert bound.seconds == pytest.approx(cheapest)
    assert bound.passes + bound.accepted == 9


def test_random_drafts_are_refused() -> None:
    drawn = scripted.ScriptedDrafter(lambda start, limit: [0])

    class Random:
        def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
            session = drawn.begin(prompt, context)
            session.propose = lambda limit: Draft([0], mx.zeros((1, 1)))  # type: ignore[method-assign]
            return session

    with pytest.raises(ValueError, match="not random"):
        replayed(record().texts[0], Random())


def test_scores_add_up_and_carry_the_live_ratio() -> None:
    """Category "all" sums the others; live ratios belong to the measured curve alone."""
    measured = dataclasses.replace(linear_cost(0.1), name="measured")
    drafters = {"prompt-lookup": LOOKUP, "none": None}
    scores = replay.score_record(record(), drafters, ["4", "auto"], measured)
    keys = {(s.drafter, s.draft_length) for s in scores}
    assert keys == {("prompt-lookup", "4"), ("prompt-lookup", "auto"), ("none", "")}
    for key in keys:
        own = {s.category: s for s in scores if (s.drafter, s.draft_length) == key}
        for count in ("texts", "tokens", "target_passes", "drafted", "accepted"):
            parts = sum(getattr(s, count) for s in own.values() if s.category != ALL)
            assert getattr(own[ALL], count) == parts
        live = record().live_ratio(*key, ALL)
        assert own[ALL].live_ratio == live
        assert (live is not None) == (key == ("prompt-lookup", "4"))
    other = replay.score_record(record(), drafters, ["4"], FLAT)
    assert {score.live_ratio for score in other} == {None}


def test_the_commands_score_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table per curve, and the same numbers in the file; the experiment's adds bounds and rows.

    With 3 draft tokens at most, the text oracle writes 4 tokens a pass on either curve.
    """
    path, scored = tmp_path / "record.json", tmp_path / "scores.json"
    save_record(record(), path)

    def score(*flags: str) -> int:
        parser = argparse.ArgumentParser()
        replay.add_arguments(parser)
        return replay.main(parser.parse_args([str(path), *flags]))

    named = ["--drafter", "ngram", "--draft-length", "2", "--json", str(scored)]
    curves = ["--cost", "linear:0", "--cost", "1,1.5,2", "--draft-cost", "0.1"]
    assert score(*named, *curves) == 0
    report = capsys.readouterr().out
    assert report.count("| drafter") == 2
    assert "kind 0" in report
    assert {s["cost"] for s in json.loads(scored.read_text())} == {"linear:0", "1,1.5,2"}
    assert score() == 0
    assert "cost linear:0.24" in capsys.readouterr().out
    assert experiment.main([str(path), *named, *curves, "--longest", "3"]) == 0
    assert capsys.readouterr().out.count(f"| {LENGTH_ORACLE}") == 2
    scores = json.loads(scored.read_text())
    oracle = [s for s in scores if s["drafter"] == TEXT_ORACLE and s["category"] == ALL]
    assert [s["tokens_per_pass"] for s in oracle] == [4, 4]
    assert experiment.main([str(path), *named, "--rows", "1", "--rows", "2"]) == 0
    assert "| rows" in capsys.readouterr().out
    assert [score["rows"] for score in json.loads(scored.read_text())] == [1, 2]
