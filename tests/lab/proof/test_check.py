"""The check that users run: it passes what is right, and names what is wrong."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from xml.etree.ElementTree import fromstring

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache
from scipy import stats

import specdec_mlx as sd
import tiny
from command_line import both_ways, run
from exact import (
    WRONG_RULES,
    Altered,
    ByRule,
    Drawn,
    Rounds,
    Source,
    at_temperature,
    continued,
    declared_at_power,
    dropped,
    state_after,
    up_to,
)
from lossless import noisy_copy
from selection import FULL, cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.cli import commands as cli
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.lab.commands import check as check_command
from specdec_mlx.lab.papers.lossy import Lenient
from specdec_mlx.lab.probing import ProbeReport, probe
from specdec_mlx.lab.proof import distributions, one_step
from specdec_mlx.lab.proof import run as run_module
from specdec_mlx.lab.proof.chi_square import (
    FALSE_ALARM,
    ChiSquare,
    growth_for,
    power,
)
from specdec_mlx.lab.proof.distributions import Cells, Draws, check_declared, check_joint
from specdec_mlx.lab.proof.enumeration import sources
from specdec_mlx.lab.proof.one_step import VARIANTS, check_one_step, lossless
from specdec_mlx.lab.proof.report import CheckReport, Part
from specdec_mlx.lab.proof.run import run_parts
from specdec_mlx.lab.proof.subject import Place, Remembered, Subject, Work
from specdec_mlx.lab.proof.texts import (
    check_greedy,
    check_state,
    check_widths,
    depends_on_text_alone,
)
from specdec_mlx.rules import CoinRule, Rejection, make_rule
from specdec_mlx.trees.tree_rules import MultiRound, TreeVerdict, walk

V = 12
PROMPTS = [[3, 1, 2, 3, 1], [7, 7, 4, 7, 7], [5, 9, 8, 2, 5, 9]]  # look-ups find something
DRAWN_PARTS = ["one-step distribution", "joint distribution", "declared distribution"]
ALL_PARTS = ["widths", *DRAWN_PARTS, "drafter's state", "greedy text"]
GREEDY, AT_ONE = sd.Sampling(), sd.Sampling(temp=1.0)
WORK = Work(math.inf)  # samples are limited by number here


@cache
def model(copied_with_noise: float = 0.0) -> nn.Module:
    """A tiny random Llama, or a copy of it that is a little off, as a 4-bit copy would be."""
    sizes = {"vocab_size": V, "num_hidden_layers": 1}
    return noisy_copy("llama", copied_with_noise, **sizes)


def model_drafter(**options: Any) -> sd.ModelDrafter:
    return sd.ModelDrafter(model(0.3), **options)


def subject(drafter: Any = None, rule: Any = "auto", **changes: Any) -> Subject:
    sampling = changes.pop("sampling", sd.Sampling(temp=0.8, top_p=0.95))
    drafter = drafter or model_drafter()
    return Subject(model(), drafter, sampling, make_rule(rule), PROMPTS, V, **changes)


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributions, "TEXTS_PER_CONTEXT", 250)
    monkeypatch.setattr(distributions, "NUM_CONTEXTS", 1)


# What is right passes -----------------------------------------------------------------------------

LOOK_UP = "prompt-lookup:min_ngram=1"


def best_of_everything() -> sd.BestOf:
    """Point masses and drawn drafts, free ones and ones that cost time; all of them get a turn."""
    return sd.BestOf(
        sd.PromptLookupDrafter(min_ngram=2),
        model_drafter(),
        sd.SuffixDrafter(min_match=2),
        lab.RecyclingDrafter(num_draft=2),
        lab.StochasticNGramDrafter(min_order=1),
    )


RIGHT = {
    "model": (model_drafter, "auto"),
    "model, greedy": (lambda: model_drafter(greedy=True), "block"),
    "model, sharper": (lambda: model_drafter(draft_temp=0.6), "rejection"),
    "model, flatter, coupled": (lambda: model_drafter(draft_temp=1.6), "coupled"),
    "n-gram, drawn": (lambda: lab.StochasticNGramDrafter(min_order=1), "auto"),
    "prompt lookup": (lambda: sd.PromptLookupDrafter(min_ngram=1), "match"),
    "cascade, coupled": (lambda: lab.Cascade(model_drafter(), LOOK_UP, 1), "coupled"),
    "best of everything": (best_of_everything, "auto"),
}
"""Every kind of drafter and every rule: neither knows the other."""

FILTERS = [AT_ONE, sd.Sampling(temp=1.2, top_k=3), sd.Sampling(temp=0.8, min_p=0.2)]


@pytest.mark.parametrize("case", cases(RIGHT, "model"))
def test_what_is_right_passes(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part, for every kind of drafter and rule.

    The texts follow the target's joint distribution, by the whole loop.
    """
    make, rule = RIGHT[case]
    if case == "n-gram, drawn":  # its drafts are nearly certain, so that faults show late
        monkeypatch.setattr(distributions, "TEXTS_PER_CONTEXT", 500)
    parts = run_parts(subject(make(), rule), WORK, progress=False)
    assert [part.name for part in parts] == ALL_PARTS
    passes_and_has_drafted(parts)


@FULL
@in_one_test(("rule", "sampling"), zip(("auto", "coupled", "auto"), FILTERS, strict=True))
def test_what_is_drawn_passes_under_other_filters(rule: str, sampling: sd.Sampling) -> None:
    passes_and_has_drafted(drawn_parts(subject(rule=rule, sampling=sampling)).parts)


def passes_and_has_drafted(parts: Sequence[Part]) -> None:
    """Some drafts were kept and some were not."""
    few_drawn = "declared distribution", "not run"  # by drafters that are nearly certain
    assert not [p for p in parts if not p.passed and (p.name, p.status) != few_drawn]
    (joint,) = (part.numbers for part in parts if part.name == "joint distribution")
    assert 20 < joint["accepted"] < joint["draft_tokens"] - 20


def two_models(**options: Any) -> lab.TreeOf:
    """Drafts that fork at the first token, and go on."""
    drafters = (sd.ModelDrafter(model(noise), **options) for noise in (0.3, 0.6))
    return lab.TreeOf(*drafters)


TREES = {
    "rejection": two_models,
    "block": lambda: model_drafter(branches=2),
    "match": lambda: two_models(greedy=True),
    "coupled": two_models,
}


@pytest.mark.parametrize("rule", cases(TREES, "rejection"))
def test_texts_verify_trees(rule: str) -> None:
    """Trees of drawn and of certain tokens, verified as trees; what is right passes."""
    part = joint(subject(TREES[rule](), rule))
    assert part.passed
    assert part.numbers["trees"] >= part.numbers["texts"]
    assert part.numbers["accepted"] > 50


def joint(given: Subject) -> Part:
    (part,) = (p for p in drawn_parts(given).parts if p.name == "joint distribution")
    return part


@dataclass(frozen=True)
class Keeping(MultiRound, Rejection):
    """Wrong: right for chains, and of a tree it keeps the first child, or the tokens that `kept`
    takes of the right coins."""

    always: bool = True
    name = "wrong on trees"

    def decide_tree(self, target: Any, draft: Any, randomness: Any) -> Any:
        right = MultiRound().decide_tree(target, draft, randomness)
        if target.greedy:
            return right
        if self.always:
            return TreeVerdict(right.coins, target.tokens, lambda heads: [0])
        # a token of the second child is followed by what the first child's row says
        return TreeVerdict(
            right.coins, mx.roll(right.after, 1), lambda heads: walk(heads, draft.tree)
        )


@pytest.mark.parametrize("always", cases([True, False], True))
def test_a_rule_that_is_wrong_on_trees_alone_fails(always: bool) -> None:
    part = joint(subject(two_models(), Keeping(always)))
    assert part.status == "failed"
    assert part.numbers["trees"] > 0


# What is wrong is named ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class OutOfStep(sd.Drafter):
    """Wrong: a draft model whose rejected tokens stay in its cache."""

    model: nn.Module

    def models(self) -> list[nn.Module]:
        return [self.model]

    def begin(self, prompt: Any, context: sd.drafters.DraftContext) -> sd.Session:
        session: Any = sd.ModelDrafter(self.model).begin(prompt, context)

        def observe(tokens: list[int]) -> None:
            text, read = session.source.tokens, session.source.rollback
            text += tokens
            read.position = min(read.position, len(text) - 1)

        session.observe = observe
        return session


RULES_AT_FAULT: dict[str, Any] = {**WRONG_RULES, "none of the named faults": "typical"}


def drawn_parts(given: Subject) -> CheckReport:
    """The three parts that are about what is drawn."""
    steps, draws = list[Place](), Draws()
    answers = [check_one_step(given, WORK, steps), check_joint(given, WORK, steps, draws)]
    named = zip(DRAWN_PARTS, [*answers, check_declared(draws)], strict=True)
    return CheckReport([Part(name, *answer) for name, answer in named])


@pytest.mark.parametrize("case", RULES_AT_FAULT)
def test_a_wrong_rule_is_named(case: str) -> None:
    """With what is wrong about it, and what to do."""
    part = check_one_step(subject(None, RULES_AT_FAULT[case]), WORK, [])
    assert part.status == "failed"
    assert f"this is {case}. Use rule='auto'" in part.verdict
    names = "largest_total_variation", "largest_of_the_token_after"
    assert sum(part.numbers[name] for name in names) > 0.01


@pytest.mark.parametrize("rule", [Rejection(), sd.rules.Block()])
@pytest.mark.parametrize("most_tokens", [1000, 2])
def test_the_emitted_distribution_is_exact(
    rule: CoinRule, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To float64's rounding, and as far as was looked; what is kept is the sum of min(p, q)."""
    monkeypatch.setattr(one_step, "MOST_TOKENS", most_tokens)
    random = np.random.default_rng(0)
    for p, q in zip(*random.dirichlet(np.ones(6), size=(2, 20)), strict=True):
        result = one_step.masses_of(rule, p, q)
        tail = np.sort(q)[:-most_tokens].sum()
        assert result.left_out == pytest.approx(tail, abs=1e-12)
        assert abs(result.distance) < 1e-12
        assert result.bonus_distance < 1e-12
        likeliest = np.where(q >= np.sort(q)[-most_tokens:][0], q, 0)
        assert result.overlap == pytest.approx(np.minimum(p, likeliest / likeliest.sum()).sum())
        assert result.accepted == pytest.approx(result.overlap)


SWAPPED = "p and q swapped"
FAULTS_IN_DRAWS: dict[str, tuple[Any, Any, str]] = {
    "declared sharper": (
        declared_at_power(1 / 0.7),
        "auto",
        "which is flatter. Hand over, as Draft.logprobs",
    ),
    "declared flatter": (declared_at_power(0.6), "auto", "from another one, which is sharper"),
    "a drawn token dropped": (dropped, "auto", "whether to draft a token before drawing it"),
    SWAPPED: (lambda draft: draft, WRONG_RULES[SWAPPED], f"they look like: {SWAPPED}"),
}


@FULL
@pytest.mark.parametrize("case", FAULTS_IN_DRAWS)
def test_what_is_wrong_with_draws_is_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong drafter by its draws, and not the rule; a wrong rule by its texts too."""
    monkeypatch.setattr(distributions, "TEXTS_PER_CONTEXT", 1200)
    alter, rule, words = FAULTS_IN_DRAWS[case]
    report = drawn_parts(subject(Altered(model_drafter(), alter), rule))
    is_by_drafter = rule == "auto"
    part = report["declared distribution" if is_by_drafter else "joint distribution"]
    assert part.status == "failed"
    assert words in part.verdict
    assert report["one-step distribution"].passed == is_by_drafter


@FULL
def test_a_draft_cache_out_of_step_changes_no_text_and_is_named() -> None:
    report = CheckReport(run_parts(subject(OutOfStep(model(0.3))), WORK, progress=False))
    assert [part.name for part in report.parts if not part.passed] == ["drafter's state"]
    assert "its cache is out of step with the text" in report["drafter's state"].verdict
    assert report.verdict == "FAILED: drafter's state."


def test_a_greedy_text_that_is_not_the_targets_is_a_fault_unless_the_probe_excuses_it() -> None:
    """A lenient rule keeps near misses; logits that rounding moves by 100 explain them."""
    given = subject(None, Lenient(0.01), sampling=GREEDY)
    row = replace(probe(model()).rows[0], bitwise=False, rounding=100.0)
    part, excused = (check_greedy(given, WORK, p) for p in (None, ProbeReport((), None, (row,))))
    assert part.status == "failed"
    assert "no rounding explains that" in part.verdict
    first = part.numbers["differences"][0]
    assert first["verdict"] == "fault"
    assert first["top_two_gap"] > part.numbers["near_tie_below"]
    assert excused.status == "passed"
    assert {entry["verdict"] for entry in excused.numbers["differences"]} == {"near tie"}


def test_a_model_that_is_not_exact_or_whose_window_takes_too_long_is_named() -> None:
    """plamo3's mask is one wider than its cache, once its window is full."""
    probed: list[ProbeReport] = []
    part = check_widths(tiny.build("plamo3"), WORK, probed)
    assert not probed[0].exact
    assert part.status == "failed"
    assert "specdec-mlx probe" in part.verdict
    part = check_widths(tiny.build("gemma3_text"), Work(0.0), [])
    assert part.status == "not run"
    assert "--budget" in part.verdict


def test_a_drafter_that_breaks_its_contract_fails_and_the_rest_goes_on() -> None:
    """Impossible tokens: the error of the loop is the verdict of the part."""
    draws = Altered(model_drafter(), lambda draft: sd.Draft([V + 1]))
    parts = run_parts(subject(draws, "match"), WORK, progress=False)
    assert len(parts) == len(ALL_PARTS)
    verdicts = {part.name: part.verdict for part in parts if part.status == "failed"}
    assert "The drafter proposed token 13" in verdicts["one-step distribution"]


# The numbers --------------------------------------------------------------------------------------


def texts_of(target: Source, draft: Source, tokens: Sequence[Any]) -> Any:
    """Stands for `joint.Texts`, with probabilities of sources instead of models."""
    return SimpleNamespace(
        tokens=tokens,
        target_probs=lambda continuation: target.after(0, tuple(continuation)),
        draft_probs=lambda continuation: draft.after(0, tuple(continuation)),
    )


TARGET, DRAFT = sources(4, 1)
EXACT = {
    "lossless": (Drawn(DRAFT, up_to(2)), Rejection()),
    **{name: (Drawn(DRAFT, up_to(2)), rule) for name, rule in WRONG_RULES.items()},
    "declared q other than the drawn": (
        Drawn(at_temperature(DRAFT, 1 / 0.7), up_to(2), declared=DRAFT),
        Rejection(),
    ),
    "a drawn token dropped": (Drawn(DRAFT, up_to(2), dropped_below=0.2), Rejection()),
}


def joint_of_texts(name: str) -> np.ndarray:
    """Chances [V, V, V] of texts of three tokens: the loop drafts two, and never the last one."""
    drafting, rule = EXACT[name]
    two, one = (
        Rounds(TARGET, replace(drafting, go_on=up_to(length)), ByRule(rule)) for length in (2, 1)
    )
    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for kept, masses in two.outcomes_from(0).items():
        for token, chance in enumerate(masses):
            if kept:
                texts[*kept, token] += chance
                continue
            for more, later in one.outcomes_from(state_after(0, (token,))).items():
                for last, chance_of_more in enumerate(later):
                    texts[token, *more, last] += chance * chance_of_more
    return continued(TARGET, texts, 3)


@in_one_test("num_texts", [60, 1_000_000])
@in_one_test("name", EXACT)
def test_cells_of_the_faults_have_the_chances_of_enumeration(name: str, num_texts: int) -> None:
    """To 1e-12, with a cell for each text and with shared ones."""
    cells = Cells(texts_of(TARGET, DRAFT, range(num_texts)))
    joint_probs = joint_of_texts(name)
    expected: dict[Any, Any] = dict.fromkeys(cells.chances(), 0.0)
    for tokens in np.ndindex(joint_probs.shape):
        expected[cells.cell_of(tokens)] += joint_probs[tokens]
    found = cells.expected(VARIANTS.get(name, lossless)) / num_texts
    np.testing.assert_allclose(found, list(expected.values()), atol=1e-12)
    assert (len(found) > 4**3) == (num_texts > 60)
    assert set(VARIANTS) == set(EXACT) - {"lossless"}


def draft_of(probs: np.ndarray, token: int) -> sd.Draft:
    return sd.Draft([token], mx.array(np.log(probs)[None], dtype=mx.float32))


def test_too_few_samples_are_not_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no named fault would be found, and where there are next to none."""
    random, probs, draws = np.random.default_rng(0), np.array([0.97, 0.03]), Draws()
    for _ in range(120):
        draws.add(draft_of(probs, random.choice(2, p=probs)), 1)
    part = check_declared(draws)
    assert part.status == "not run"
    assert "too few for any of the named faults" in part.verdict
    monkeypatch.setattr(distributions, "TEXTS_PER_CONTEXT", 9)
    joint = drawn_parts(subject())["joint distribution"]
    assert joint.status == "not run"
    assert "9 texts of 3 tokens are too few" in joint.verdict


def test_chi_square_joins_rare_cells_and_sees_the_impossible() -> None:
    """Statistic, p-value and power are scipy's."""
    seen, expected = np.array([18.0, 30.0, 12.0]), np.array([20.0, 25.0, 15.0])
    test, known = ChiSquare.of(seen, expected), stats.chisquare(seen, expected)
    assert (test.statistic, test.p_value) == pytest.approx((known.statistic, known.pvalue))
    least = stats.chi2.isf(FALSE_ALARM, 2)
    found = stats.ncx2.sf(least, 2, ChiSquare.of(4 * seen, 4 * expected).statistic)
    assert power(4 * seen, 4 * expected) == pytest.approx(found)
    # cells that expect less than 8 are joined, and what is impossible is not to be seen
    few = ChiSquare.of(np.array([50.0, 1, 3, 2, 9]), np.array([50.0, 2, 2, 2, 9]))
    assert few == ChiSquare(0.0, 1)
    right, wrong = np.array([100.0, 100.0, 0.0]), np.array([100.0, 98.0, 2.0])
    assert ChiSquare.of(wrong, right).p_value == 0
    assert power(wrong, right) == pytest.approx(1 - math.exp(-2), abs=1e-3)


@in_one_test("temp", [0.0, 1.0])
def test_without_scipy_the_pip_command_is_named_before_any_work(
    temp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At temperature 0 nothing is drawn, and the check needs no statistics."""
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setattr(run_module, "run_parts", lambda *_: PARTS[:1])
    options: dict[str, Any] = {"drafter": "ngram", "prompts": PROMPTS, "progress": False}
    if temp == 0:
        assert lab.check(model(), None, **options).passed
        return
    with pytest.raises(MissingPackageError, match=r"pip install 'specdec-mlx\[lab\]'"):
        lab.check(model(), None, sampler=sd.Sampling(temp), **options)


# What is remembered -------------------------------------------------------------------------------


def test_remembered_logits_are_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the common context, after a rollback, and for a text that leaves it; computed once."""
    memory = Remembered(model(), [3, 1, 2])
    caches = make_prompt_cache(memory)
    memory(mx.array([[3, 1, 2]]), cache=caches)
    wrong = memory(mx.array([[5, 5]]), cache=caches)[0, 1]
    caches[0].trim(1)
    right = memory(mx.array([[6]]), cache=caches)[0, 0]
    elsewhere = memory.after([3, 9, 2, 4])
    texts = [([3, 1, 2, 5, 5], wrong), ([3, 1, 2, 5, 6], right), ([3, 9, 2, 4], elsewhere)]
    for text, logits in texts:
        expected = model()(mx.array([text]), cache=make_prompt_cache(model()))[0, -1]
        assert mx.allclose(logits, expected, atol=1e-5)
    assert not mx.allclose(right, wrong)
    assert mx.all(mx.isnan(memory.after([3, 1])))
    monkeypatch.setattr(type(model()), "__call__", pytest.fail)
    assert memory.after([3, 9, 2, 4]) is elsewhere
    memory.after([3, 9, 2])


# The drafter's state ------------------------------------------------------------------------------


class Learning(sd.Drafter):
    """Drafts its own next number, whatever the text; nothing says that it must not."""

    def begin(self, prompt: Any, context: sd.drafters.DraftContext) -> Any:
        numbers = iter(range(100))
        session = model_drafter().begin(prompt, context)
        session.propose = lambda limit: sd.Draft([next(numbers) % V])
        return session


def test_a_drafter_that_may_learn_is_not_blamed() -> None:
    part = check_state(subject(Learning()), WORK)
    assert part.status == "not applicable"
    assert "learns from its own drafts" in part.verdict
    known = sd.PromptLookupDrafter(), model_drafter()
    assert depends_on_text_alone(sd.drafters.FirstOf(*known))
    assert not depends_on_text_alone(sd.drafters.FirstOf(*known, sd.SuffixDrafter()))


# The report ---------------------------------------------------------------------------------------

PARTS = [
    Part("widths", "passed", "Well.", {"caches": ["KVCache (trim)"], "passes": [{"x": 1}]}, 1.0),
    Part("joint distribution", "failed", "<b>Wrong</b> & bad.", {"power": {"a < b": 0.5}}, 2.0),
    Part("greedy text", "not run", "No time.", {"differences": []}),
]


def test_a_report_passes_only_if_every_part_ran_and_passed() -> None:
    """What does not apply does no harm; what was not run does."""
    assert CheckReport([PARTS[0], replace(PARTS[1], status="not applicable")]).passed
    assert not CheckReport(PARTS[:2]).passed
    assert not CheckReport([PARTS[0], PARTS[2]]).passed
    assert CheckReport([PARTS[0], PARTS[2]]).verdict.startswith("INCOMPLETE: greedy text")
    with pytest.raises(KeyError, match="the parts are widths, joint distribution, greedy text"):
        CheckReport(PARTS)["joint"]


def test_a_report_says_everything_as_text_as_json_and_in_a_notebook() -> None:
    """Its HTML is balanced and escaped."""
    report = CheckReport(PARTS, {"model": "<i>", "temp": 0.8})
    for part in PARTS:
        assert {part.name, part.status, part.verdict} <= set(re.split(r"\s\s+|\n", str(report)))
    assert "caches: KVCache (trim)" in str(report)
    assert str(report).endswith("FAILED: joint distribution.  (3 s)")
    data = json.loads(report.to_json())
    assert (data["passed"], data["settings"]["temp"]) == (False, 0.8)
    assert data["parts"][1]["numbers"] == {"power": {"a < b": 0.5}}
    page = report._repr_html_()
    fromstring(f"<div>{page}</div>")
    for words in ("&lt;b&gt;Wrong&lt;/b&gt; &amp; bad.", "a &lt; b", "&lt;i&gt;"):
        assert words in page


# The call and the command -------------------------------------------------------------------------


@both_ways
def test_the_command_passes_at_temperature_0(folder: Path, tmp_path: Path) -> None:
    """Exit status 0, the report on stdout, nothing else in a pipe, and the same as JSON."""
    path = tmp_path / "report.json"
    done = run("check", "--model", folder, "--draft-model", folder, "--json", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("PASSED")
    assert done.stderr == ""
    data = json.loads(path.read_text())
    assert data["passed"] is True
    assert data["settings"]["model"] == str(folder)
    assert [part["name"] for part in data["parts"]] == ALL_PARTS
    not_drawn = [part["name"] for part in data["parts"] if part["status"] == "not applicable"]
    assert not_drawn == DRAWN_PARTS


def test_ties_of_greedy_texts_are_decided_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """If every row is a tie, each round takes a plain pass, and the report says how many."""
    monkeypatch.setattr("specdec_mlx.target.tie_bound", lambda model, kernels: 1e9)
    given = subject(model_drafter(), sampling=GREEDY, ties="plain")
    finding = check_greedy(given, WORK)
    assert finding.status == "passed"
    assert finding.numbers["ties_decided"] > 0
    assert f"plain passes decided {finding.numbers['ties_decided']} near ties" in finding.verdict


@in_one_test("seed", [None, 0, 2])
def test_what_is_checked_is_the_rule_that_a_call_would_take(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a seed and no rule named, the one that has one text for it."""
    subjects: list[Subject] = []
    monkeypatch.setattr(run_module, "run_parts", lambda subject, *_: subjects.append(subject) or [])
    options: dict[str, Any] = {"drafter": model_drafter(), "prompts": PROMPTS, "sampler": AT_ONE}
    lab.check(model(), None, seed=seed, progress=False, **options)
    assert subjects[0].rule.name == ("auto" if seed is None else "coupled")
    assert subjects[0].seed == (seed or 0)


def test_flags_reach_the_check(
    monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    check = Mock(return_value=CheckReport(PARTS))
    monkeypatch.setattr(check_command, "check", check)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "Hello."}) + "\n")
    flags = "--drafter ngram:max_order=3 --temp 0.7 --top-p 0.9 --min-p 0.1 --top-k 5 --seed 2"
    flags += " --rule coupled --ties plain --num-draft-tokens 3 --budget 7 --texts 9000"
    assert cli.main(["check", *f"--model {folder} --prompts {prompts} {flags}".split()]) == 1
    assert check.call_args.kwargs == {
        "drafter": sd.NGramDrafter(max_order=3),
        "sampler": sd.Sampling(0.7, 0.9, 0.1, top_k=5),
        "rule": "coupled",
        "ties": "plain",
        "num_draft_tokens": 3,
        "prompts": ["Hello."],
        "budget": 7.0,
        "texts": 9000,
        "seed": 2,
        "progress": True,
    }


@in_one_test(
    ("flags", "words"),
    [
        ("--drafter none", "nothing to check without a drafter"),
        ("--drafter model", "needs --draft-model MODEL"),
        ("--budget 0", "budget=0"),
        ("--num-draft-tokens 0", "num_draft_tokens=0"),
        ("--prompts /nowhere", "/nowhere"),
    ],
)
def test_bad_input_is_refused_with_status_2(
    flags: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names it."""
    status: object
    try:
        status = cli.main(["check", "--model", str(folder), *flags.split()])
    except SystemExit as ended:
        status = ended.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_without_time_nothing_is_passed() -> None:
    """Every part says so; a sampler without a distribution is refused at once."""
    options: dict[str, Any] = {"prompts": PROMPTS, "progress": False}
    report = lab.check(model(), None, draft_model=model(0.3), budget=1e-9, **options)
    assert not report.passed
    assert {part.status for part in report.parts} <= {"not run", "not applicable"}
    assert "--budget" in report["greedy text"].verdict
    with pytest.raises(ValueError, match="The distribution of this sampler is not known"):
        lab.check(model(), None, drafter="ngram", sampler=lambda x: x, **options)


def test_the_power_against_a_small_bias_is_stated_and_bought_with_texts() -> None:
    """1% of a place's chance that is moved: hardly seen with few texts, and found with as many as
    the part says.
    """
    right = np.array([400.0, 300.0, 200.0, 100.0])
    wrong = right + np.array([-10.0, 10.0, 0.0, 0.0])
    growth = growth_for(wrong, right, 0.9)
    assert power(wrong, right) < 0.01
    assert power(growth * wrong, growth * right) >= 0.9
    assert power(0.97 * growth * wrong, 0.97 * growth * right) < 0.9
    rng = np.random.default_rng(0)
    draws = rng.multinomial(int(growth * 1000), wrong / 1000, 200)
    found = [ChiSquare.of(seen, growth * right).p_value < FALSE_ALARM for seen in draws * 1.0]
    assert 0.8 < np.mean(found) < 1.0
    given, steps = replace(subject(), prompts=PROMPTS[:1]), list[Place]()
    check_one_step(given, WORK, steps)
    numbers = check_joint(given, WORK, steps, Draws(), 30).numbers
    assert numbers["texts"] == 30
    assert numbers["power_against_bias"] < 0.1
    assert numbers["texts_to_find_bias"] > 20 * 30
