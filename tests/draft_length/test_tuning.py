"""Costs, chances and accounts, learned from rounds: robust, bounded, forgetting, and kept."""

from __future__ import annotations

import gc
import json
import random
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec_mlx as sd
import tiny
from selection import in_one_test
from simulated import know
from specdec_mlx.contracts import Evidence
from specdec_mlx.draft_length import chances as chances_module
from specdec_mlx.draft_length import costs, store
from specdec_mlx.draft_length.chances import EDGES, PRIORS, Chances
from specdec_mlx.draft_length.costs import (
    CURVES,
    NUM_PLAIN,
    PLAIN_EVERY,
    WIDTHS,
    CostModel,
    Curve,
)
from specdec_mlx.draft_length.store import SHORT_CONTEXT, Tuning, tuning_for
from specdec_mlx.kernels import JoinedKernels, MlxDspark, SplitAttention

# Costs of passes: a staircase ---------------------------------------------------------------------

rows_and_seconds = st.tuples(st.integers(1, 70), st.floats(1e-6, 1e3))
some_priors = st.sampled_from(list(CURVES.values()))


def add(cost_model: CostModel, rows: int, seconds: float, times: int = 7) -> CostModel:
    for _ in range(times):
        cost_model.add(rows, seconds)
    return cost_model


def measured(ratios: dict[int, float] | None = None, prior: Curve = costs.MILDEST) -> CostModel:
    """`measured({5: 1.2})` saw seven passes over 5 rows take 1.2 plain ones, of 0.01 s."""
    cost_model = add(CostModel(prior), 1, 0.01, NUM_PLAIN)
    for rows, ratio in (ratios or {}).items():
        add(cost_model, rows, 0.01 * ratio)
    return cost_model


@given(some_priors, st.lists(rows_and_seconds, max_size=40))
def test_a_staircase_begins_at_one_and_never_falls(prior, rounds):
    """Whatever was believed and measured; and one row costs one by definition."""
    cost_model = CostModel(prior)
    for rows, time in rounds:
        cost_model.add(rows, time)
    found = [cost_model(rows) for rows in range(1, 80)]
    assert found[0] == 1
    assert found == sorted(found)
    assert found[-1] < float("inf")


@in_one_test("name", CURVES)
def test_nothing_measured_is_the_prior_and_its_tiles(name: str) -> None:
    """On the widths that are chosen from; a curve that falls, as somebody's may, is evened out."""
    curve, tile = CURVES[name], 64 if name.startswith("m5") else 32
    for rows in (*WIDTHS, 33, 65):
        assert CostModel(curve)(rows) == pytest.approx(curve(rows), rel=0.05)
    is_tiled = curve.points[-1][0] == 4 * tile
    assert is_tiled == (name not in ("mildest", "amd-epyc-float-0.5gb"))
    assert not is_tiled or curve(tile + 1) == curve(2 * tile) == 2 * curve(tile)


def test_what_was_measured_outweighs_the_prior_within_bounds() -> None:
    """A step that the prior does not know is seen, and where it does not know of a flat one. A
    pass brings as many tokens as rows: beyond one more, it is no worse. Nor is it free.
    """
    cost_model = measured({4: 1.05, 5: 1.05, 6: 2.0, 9: 2.0})
    assert cost_model(5) < 1.15
    assert cost_model(6) > 1.8
    assert cost_model(9) - cost_model(6) < 0.1
    assert measured({5: 1000.0})(5) <= 6
    assert measured({5: 0.001})(5) == 1
    assert add(measured(), 5, 0.0)(5) == measured()(5)  # a round of no time tells nothing
    assert add(measured({5: 1.1}), 5, 0.03, NUM_PLAIN + 5)(5) < 1.2  # others may use the machine
    slower = add(measured({5: 1.1}), 5, 0.03, NUM_PLAIN + 6)
    assert slower(5) > 2.5


def test_a_width_is_dear_once_several_rounds_say_so_and_the_machine_is_as_quick_as_ever() -> None:
    """One may be of a bad moment; and all of them if the plain rounds that are due take as long: on
    a machine that stands still again and again, another measurement of the width would not come.
    """
    prior = CostModel()(5)

    def after(*ratios: float, plain: float = 1.0) -> float:
        cost_model = measured()
        for ratio in ratios:
            cost_model.add(5, 0.01 * ratio)
            if cost_model.needs_plain:
                cost_model.add(1, 0.01 * plain)
        return cost_model(5)

    assert prior < after(4.0) < prior + 1
    assert after(4.0, 4.1, 4.1) > 3.5
    assert after(8.0, 4.0, 4.0) > 3.5
    assert after(8.0, 4.0, 4.0, 1.3) < 1.5
    assert after(1.2) < prior
    assert after(20.0, 15.0, plain=20.0) == prior


def test_a_plain_round_is_measured_first_and_again_after_many_drafts() -> None:
    """A pace that is out of date would make drafts look dear or cheap: it counts no longer."""
    cost_model = CostModel()
    for seconds in 0.02, 0.01, 0.03:
        waited: list[int] = []
        while len(waited) < NUM_PLAIN + 1:
            assert cost_model.needs_plain
            cost_model.add(1, seconds)
            waited.append(0)
            while not cost_model.needs_plain:
                cost_model.add(5, 2 * seconds)
                waited[-1] += 1
            if waited[-1] > PLAIN_EVERY / 2:
                break
        assert len(waited) <= NUM_PLAIN
        assert PLAIN_EVERY <= sum(waited) <= 4 * PLAIN_EVERY
        assert 1.8 < cost_model(5) < 2.1


@in_one_test(("near", "far"), [((0, 1), (20 * SHORT_CONTEXT, 1)), ((0, 2), (0, 8))])
def test_costs_are_learned_by_the_length_of_the_context_and_the_number_of_texts(near, far):
    """A longer context, or a larger batch, starts from what the nearest cost, and learns apart."""
    tuning = Tuning()

    def learn(ratio: float, context: int, num_texts: int) -> CostModel:
        cost_model = tuning.cost_model(context, num_texts)
        return add(add(cost_model, 1, 0.01), 5, 0.01 * ratio)

    first = learn(1.8, *near)
    assert tuning.cost_model(near[0] + SHORT_CONTEXT - 1, near[1]) is first
    second = tuning.cost_model(*far)
    assert second.needs_plain
    assert second(5) == pytest.approx(first(5), rel=0.05)
    learn(1.1, *far)
    assert second(5) < 1.2
    assert first(5) > 1.6


def test_rows_that_copy_text_have_costs_of_their_own_on_a_model_with_experts() -> None:
    """The factor between the two curves also moves widths that only new rows were measured at.
    Nothing is learned apart where a model has no experts.
    """

    def learn(*, has_experts: bool, copied: float = 1.6) -> CostModel:
        cost_model = Tuning(has_experts=has_experts).cost_model()
        for _ in range(7):
            cost_model.add(1, 0.01)
            for rows, ratio in ((3, 1.85), (5, 2.44), (9, 3.4)):
                cost_model.add(rows, 0.01 * ratio)
            for rows, ratio in ((3, 1 + 0.6 * (copied - 1)), (5, copied)):
                cost_model.add(rows, 0.01 * ratio, is_copied=True)
        return cost_model

    learned = learn(has_experts=True)
    assert learned(5) == pytest.approx(2.44, rel=0.05)
    assert learned(5, is_copied=True) == pytest.approx(1.6, rel=0.05)
    assert learned(9) == pytest.approx(3.4, rel=0.05)
    assert 1.8 < learned(9, is_copied=True) < 2.5
    alike = learn(has_experts=True, copied=2.44)
    assert alike(9, is_copied=True) == pytest.approx(alike(9), rel=0.1)
    common = learn(has_experts=False)
    assert [common(rows, is_copied=True) for rows in WIDTHS] == [*map(common, WIDTHS)]


def test_costs_at_a_context_that_is_new_follow_the_slope_of_shorter_ones() -> None:
    """Rows that grew dearer from 1,000 to 3,000 positions are dearer still at 20,000."""
    tuning = Tuning()

    def learn(context: int, ratio: float) -> CostModel:
        return add(add(tuning.cost_model(context), 1, 0.01), 5, 0.01 * ratio)

    first, second = learn(0, 1.3), learn(2 * SHORT_CONTEXT, 1.6)
    assert first(5) == pytest.approx(1.3, rel=0.05)
    assert second(5) == pytest.approx(1.6, rel=0.05)
    assert 1.65 < tuning.cost_model(8 * SHORT_CONTEXT)(5) < 2.0
    assert first(9) < second(9) < tuning.cost_model(8 * SHORT_CONTEXT)(9)


def test_a_draft_costs_its_first_step_and_the_further_ones() -> None:
    """Medians: one slow draft is no verdict, not even the first; none counts for more than can
    matter, and no step for more than a first one.
    """
    steps = costs.Steps()
    assert steps(0) == 0 < steps(1) < steps(2) < 1
    unknown = steps(1)
    steps.first.append(9.0)
    steps.further.append(9.0)
    assert steps(4) == pytest.approx(4 * unknown)
    steps.further.append(9.0)
    assert steps(4) == pytest.approx(4 * unknown)
    steps.first.append(9.0)
    assert steps(1) == steps.step == costs.MOST_EXPENSIVE
    for first, further in ((0.3, 0.01), (0.3, 0.0), (0.3, 0.0), (0.3, -1.0)):
        steps.first.append(first)
        steps.further.append(further)
    assert [steps(1), steps(4)] == pytest.approx([0.3, 0.33])


def test_the_prior_knows_the_machine_and_the_kind_of_model(monkeypatch):
    """By chip, bits and experts; the mildest curve where nothing is known."""
    model, quantized = tiny.build("qwen2"), tiny.build("qwen2")
    experts = tiny.build("qwen3_moe", moe_intermediate_size=64)
    nn.quantize(quantized, group_size=32, bits=4)
    chosen = set()
    for chip in ("M1", "M3 Max", "M4 Pro", "M5 Max", "M9", "arm"):
        monkeypatch.setattr(mx, "device_info", lambda chip=chip: {"device_name": f"Apple {chip}"})
        tuning = Tuning.for_model(quantized)
        assert tuning.prior == tuning.cost_model(0).prior
        chosen.add(tuning.prior)
        known = chip not in ("M9", "arm")
        assert (Tuning.for_model(experts).prior != costs.MILDEST) == known
        assert Tuning.for_model(experts).has_experts
        costs_of_experts = Tuning.for_model(experts).cost_model()
        # copied rows take the experts of their neighbours
        is_cheaper = costs_of_experts(5, is_copied=True) < costs_of_experts(5)
        assert is_cheaper == known
        with_kernels = Tuning.for_model(
            quantized, JoinedKernels([SplitAttention(), MlxDspark()])
        ).prior
        assert (with_kernels(8) < tuning.prior(8)) == (chip == "M4 Pro")
        assert Tuning.for_model(quantized, SplitAttention()).prior == tuning.prior
        assert not tuning.has_experts
        assert Tuning.for_model(model).prior == costs.MILDEST
    assert len(chosen) == 5  # two are not known


# Chances of tokens --------------------------------------------------------------------------------


def chance(chances: Chances, evidence: Evidence | int = 0, place: int = 0) -> float:
    return chances.of_draft([evidence], first=place)[0]


def look_up() -> Chances:
    return Chances.of("look-up")


some_evidence = st.integers(0, 100) | st.builds(
    Evidence,
    match=st.integers(0, 100),
    share=st.integers(0, len(EDGES["share"])),
    places=st.integers(0, len(EDGES["places"])),
    rank=st.integers(0, 9),
    confidence=st.none() | st.floats(0, 1),
    is_drawn=st.booleans(),
)


@given(st.sampled_from(list(PRIORS)), st.lists(st.tuples(some_evidence, st.booleans())))
def test_chances_are_never_certain_and_alike_for_a_token_and_a_draft(kind, trials):
    """Strictly between 0 and 1, whatever was seen; a draft is weighed, and learned from, as its
    tokens one by one.
    """
    chances, one_by_one = Chances.of(kind), Chances.of(kind)
    evidence = [told for told, _ in trials]
    chances.learn(evidence, [right for _, right in trials])
    for place, (told, right) in enumerate(trials):
        one_by_one.learn([told], [right], first=place)
        assert max(chances_module.classes_of(told)) < chances_module.NUM_WEIGHTS
    assert chances == one_by_one
    draft = [told for told in evidence for _ in range(2)]
    found = chances.of_draft(draft)
    assert found == pytest.approx([chance(chances, e, i) for i, e in enumerate(draft)])
    assert all(0 < a < 1 for a in found)


@in_one_test("evidence", [0, 1, 4, 40])
@in_one_test("share", [0, 0.25, 0.5, 0.75, 1])
def test_what_was_seen_outweighs_the_prior_and_a_trial_does_not(evidence, share):
    """After 400 trials in random order the chance is within 0.15 of the share accepted."""
    prior, chances, coins = chance(look_up(), evidence), look_up(), random.Random(1)
    chances.learn([evidence], [False])
    assert 0.5 * prior < chance(chances, evidence) < prior
    for _ in range(400):
        chances.learn([evidence], [coins.random() < share])
    chances.recent = share
    assert chance(chances, evidence) == pytest.approx(share, abs=0.15)


@given(st.lists(st.tuples(st.floats(0, 30), st.floats(-30, 30)), max_size=200))
def test_an_account_bears_no_more_than_its_budget_and_what_was_earned(rounds):
    """Losses that it stands add up to no more; and whatever is booked, its next text may lose at
    most twice the budget, and waits for no more than one.
    """
    account, booked, lost = store.Account(), store.Account(), 0.0
    for i, (loss, amount) in enumerate(rounds, start=1):
        account.add()
        if loss <= account.budget:
            account.add(-loss)
            lost += loss
        assert lost <= store.BUDGET + store.EXPLORATION * i + 1e-9
        booked.add(amount)
        assert -store.BUDGET <= booked.budget <= 2 * store.BUDGET


# Kept ---------------------------------------------------------------------------------------------

PARTS = {"PromptLookupDrafter": True, "ModelDrafter": False}
CONTEXTS = (0, 3 * SHORT_CONTEXT)


def learned(*, has_experts: bool = False) -> Tuning:
    tuning = Tuning(has_experts=has_experts)
    for context in CONTEXTS:
        for rows in (1, 5, 9):
            tuning.cost_model(context).add(rows, 0.01 * (1 + 0.1 * rows), is_copied=True)
            add(tuning.cost_model(context), rows, 0.01 * (1 + 0.3 * rows), 3)
    for kind, cheap in PARTS.items():
        of = tuning.of(kind, look_up=cheap)
        for chances in (of.chances, of.unseen):
            chances.learn(range(9), [i % 3 > 0 for i in range(9)])
        know(of, 0.07)
    return tuning


def answers(tuning: Tuning) -> list[float]:
    """All that a tuning says of a new text."""
    found = []
    for context in (*CONTEXTS, 30 * SHORT_CONTEXT):
        for is_copied in (False, True):
            cost_model = tuning.cost_model(context)
            found += [cost_model(rows, is_copied=is_copied) for rows in range(1, 70)]
    for kind, cheap in {**PARTS, "NeverSeen": True}.items():
        of = tuning.of(kind, look_up=cheap)
        for chances in (of.chances, of.unseen):
            chances.recent = 0.5
            found += [chance(chances, e, p) for e in range(20) for p in range(10)]
        found += [of.steps(num) for num in range(5)]
    return found


@in_one_test("has_experts", [False, True])
def test_what_was_saved_is_loaded_but_for_the_tokens(has_experts: bool, tmp_path: Path) -> None:
    """The loaded one gives the same answers, and goes on learning in the same way. Tokens are of
    what users wrote: they go to no file.
    """
    path = tmp_path / "new folder" / "tuning.json"
    original = learned(has_experts=has_experts)
    chances = original.of("PromptLookupDrafter").chances
    for _ in range(20):
        chances.learn([4], [False], [123_456_789], 987_654_321)
    original.save(path)
    assert not re.search("123456789|987654321", path.read_text())
    loaded = Tuning.load(path)
    assert not loaded.of("PromptLookupDrafter").chances.tokens
    assert answers(loaded) == answers(original) != answers(Tuning())
    before = answers(loaded)
    for tuning in (loaded, original):
        tuning.of("ModelDrafter").chances.learn([3], [False], first=1)
        tuning.of("ModelDrafter").steps.first.extend([0.9] * 3)
    assert answers(loaded) == answers(original) != before
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    """The file appears whole or not at all."""
    path = tmp_path / "tuning.json"
    learned().save(path)
    before = path.read_text()
    monkeypatch.setattr("os.replace", Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        Tuning().save(path)
    assert path.read_text() == before


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON tree with its keys; of a list with its first three."""
    for key in list(tree) if isinstance(tree, dict) else range(min(3, len(tree))):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def damaged(text: str) -> Iterator[bytes]:
    """Cut off, or with nonsense in any place."""
    yield from (text[:end].encode() for end in range(0, len(text), 97))
    saved = json.loads(text)
    for tree, key in list(places(saved)):
        right = tree[key]
        for tree[key] in ("x", float("nan"), float("inf"), 10**400, [], {}, [[]], None):
            yield json.dumps(saved).encode()
        tree[key] = right


@in_one_test(
    ("where", "wrong", "said"),
    [
        (("budget",), 4.5, r"drafters['model'].budget is 4.5: Expected `float` <= 4"),
        (("weights", 1, 3, 0), "x", r"drafters['model'].weights[1][3][0] is 'x': Expected `float`"),
        (("steps",), [[]], r"drafters['model'].steps is [[]]: Expected `array` of length 2"),
        (("colour",), "red", r"drafters['model'].colour is 'red': Object contains unknown field"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_what_is_expected(
    where: tuple[Any, ...], wrong: Any, said: str, tmp_path: Path
) -> None:
    """Of several drafters the one that is wrong is named."""
    path, tuning = tmp_path / "tuning.json", Tuning()
    for name in ("first", "model", "last"):
        tuning.of(name)
    tuning.save(path)
    saved = json.loads(path.read_text())
    at = saved["drafters"]["model"]
    for key in where[:-1]:
        at = at[key]
    at[where[-1]] = wrong
    path.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=re.escape(said)):
        Tuning.load(path)


def test_a_damaged_file_is_an_error_that_names_it_or_does_no_harm(tmp_path: Path) -> None:
    """As is one of another kind: ValueError, or answers that are numbers."""
    path = tmp_path / "damaged.json"
    learned().save(path)
    others = [b"", b"not json", b"[1, 2]", b"3", b"{}", b"\xff\xfe\x00", b"[" * 10**5]
    contents = [*others, *damaged(path.read_text())]
    refused = {}
    for content in contents:
        path.write_bytes(content)
        try:
            loaded = Tuning.load(path)
        except ValueError as error:
            refused[content] = str(error)
        else:
            assert all(0 <= number < 100 for number in answers(loaded)), content[:300]
    assert refused.keys() >= set(others)
    assert len(refused) > 0.9 * len(set(contents))
    for said in refused.values():
        assert "damaged.json is not a saved Tuning" in said
        assert "Delete it" in said


def test_a_models_tuning_lives_as_long_as_the_model() -> None:
    """The same object for the same model, another for another, and none for one that is gone."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    assert tuning_for(first) is tuning_for(first)
    assert tuning_for(first) is not tuning_for(second)
    kept, model = weakref.ref(tuning_for(first)), weakref.ref(first)
    del first
    gc.collect()
    assert model() is kept() is None
    for _ in range(20):
        layer = nn.Linear(2, 2)
        assert not tuning_for(layer).drafters
        tuning_for(layer).of("x")
        del layer


def test_generations_go_on_learning_where_the_last_one_stopped() -> None:
    """Without tuning= it is the model's own; with it, only the one that was given."""
    model, drafter = tiny.build("qwen2"), sd.PromptLookupDrafter(min_ngram=1)
    own, given_one = tuning_for(model), Tuning()
    for tuning, learning in ((given_one, given_one), (None, own), (None, own)):
        before = len(learning.cost_model(0).plain)
        options: dict[str, Any] = {"max_tokens": 30, "tuning": tuning}
        list(sd.speculate(model, [5, 17, 99, 3] * 3, drafter, **options))
        assert set(learning.drafters) == {drafter.key}
        assert len(learning.cost_model(0).plain) >= max(1, before)
        assert learning is own or not own.drafters
    assert tuning_for(model) is own
