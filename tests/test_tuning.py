"""Costs and acceptance, learned from rounds: robust, bounded, forgetting, and kept with a model."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

import specdec_mlx as sd
import tiny
from specdec_mlx.draft_length import token_effects
from specdec_mlx.draft_length.acceptance import POSITION, SIZES, START, UNKNOWN, AcceptanceHistory
from specdec_mlx.draft_length.agreement import (
    ALONE,
    DISPUTED,
    NUM_CLASSES,
    PARTED,
    SHARED,
    compared,
    pooled,
)
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.costs import RoundCosts
from specdec_mlx.draft_length.fork_history import ForkHistory
from specdec_mlx.draft_length.token_effects import TOKEN_VARIANCE
from specdec_mlx.draft_length.store import Tuning, short_name, tuning_for
from specdec_mlx.drafters.evidence import (
    WHOLE,
    distance_class,
    places_class,
    surroundings_class,
    vote_class,
)
from specdec_mlx.types import Draft, Evidence, key_of

seconds = st.floats(1e-6, 1e3)
lengths = st.integers(1, 20)


def measured(plain: float = 0.01, **ratios: float) -> RoundCosts:
    """Costs that saw each length twice: once does not count.

    `measured(k4=1.2)` saw 4 drafts take 1.2 plain rounds.
    """
    costs = RoundCosts()
    for _ in range(3):
        costs.add(0, plain)
    for name, ratio in ratios.items():
        for _ in range(2):
            costs.add(int(name[1:]), plain * ratio)
    return costs


def test_nothing_measured_lies_on_the_prior_line() -> None:
    """1 + step + slope K; a plain round costs 1 by definition."""
    costs = RoundCosts(step=0.1, slope=0.02)
    assert costs.ratio(0) == 1
    for length in (1, 4, 14):
        assert costs.ratio(length) == pytest.approx(1.1 + 0.02 * length)


def test_a_measured_length_speaks_for_itself() -> None:
    """Whatever the line says; steps of the machine are kept."""
    costs = measured(k1=1.1, k4=1.1, k6=1.9, k9=1.9)
    assert [costs.ratio(k) for k in (1, 4, 6, 9)] == pytest.approx([1.1, 1.1, 1.9, 1.9])


def test_lengths_not_measured_lie_near_the_line_through_those_that_were() -> None:
    """The prior counts for one round in all, beside fourteen that were measured."""
    costs = measured()
    for _ in range(7):
        for length in (3, 9):
            costs.add(length, 0.01 * (1.1 + 0.15 * length))
    for length in (4, 6, 14):
        assert costs.ratio(length) == pytest.approx(1.1 + 0.15 * length, rel=0.1)


def test_one_measured_length_is_joined_to_the_prior() -> None:
    """A line needs two points: a dear first measurement raises the lengths beside it."""
    cheap, dear = measured(k1=1.0), measured(k1=3.0)
    assert cheap.ratio(2) < dear.ratio(2)
    assert dear.ratio(2) > RoundCosts().ratio(2)


def test_the_worst_case_grows_in_proportion_to_the_dearest_token_measured() -> None:
    """With nothing measured a draft token may cost as much as a plain round."""
    assert [RoundCosts().worst_ratio(k) for k in (1, 4)] == [2, 5]
    costs = measured(k1=1.2, k2=1.5)
    assert costs.worst_ratio(4) == pytest.approx(2.0)
    assert costs.worst_ratio(2) == costs.ratio(2) == pytest.approx(1.5)


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_three_rounds_in_seven_may_be_disturbed(factor: float) -> None:
    """Medians: another program that takes the machine for a moment changes nothing."""
    costs = RoundCosts()
    for i in range(7):
        costs.add(0, 0.01 * (factor if i % 2 else 1.0))
    for i in range(7):
        costs.add(4, 0.013 * (factor if i % 2 else 1.0))
    assert costs.ratio(4) == pytest.approx(1.3)


def test_a_single_round_at_a_new_width_does_not_count() -> None:
    """It may compile kernels, which says nothing of the next; of two the quicker counts."""
    costs = measured()
    before = costs.ratio(4)
    costs.add(4, 5.0)
    assert costs.ratio(4) == before
    assert not costs.is_measured(4)
    costs.add(4, 0.012)
    assert costs.ratio(4) == pytest.approx(1.2)


@pytest.mark.parametrize(("seconds", "is_known"), [(2.5, True), (3.5, False)])
def test_a_single_round_counts_where_it_is_no_dearer_than_others(
    seconds: float, is_known: bool
) -> None:
    """Nothing was compiled in it: a token of the draft cost what it does at another length."""
    costs = RoundCosts()
    for num_drafted, cost in [(0, 1.0), (2, 2.2), (2, 2.0), (3, seconds)]:
        costs.add(num_drafted, cost)
    assert costs.is_measured(3) is is_known
    if is_known:
        assert costs.ratio(3) == seconds


def test_a_round_is_never_dearer_than_can_matter() -> None:
    """It brings K + 1 tokens at most: beyond K + 2 plain rounds, more is no worse."""
    assert measured(k1=1000.0).ratio(1) == 3
    assert measured(k4=1000.0).ratio(4) == 6


def test_a_dear_draft_is_tried_again_after_long_as_if_it_were_cheaper() -> None:
    """So that one bad moment of the machine does not count for ever."""
    costs = measured(k1=3.0)
    for _ in range(255):
        costs.add(0, 0.01)
    assert costs.optimistic_ratio(1) == costs.ratio(1) == pytest.approx(3.0)
    costs.add(0, 0.01)
    prior = RoundCosts().ratio(1)
    assert costs.optimistic_ratio(1) == pytest.approx((3.0 + prior) / 2)
    costs.add(1, 0.03)
    assert costs.optimistic_ratio(1) == costs.ratio(1) == pytest.approx(3.0)


def test_a_retry_that_was_cheaper_is_believed_at_once() -> None:
    """The bad moment is over."""
    costs = measured(k1=3.0)
    for _ in range(256):
        costs.add(0, 0.01)
    costs.add(1, 0.012)
    assert costs.ratio(1) == pytest.approx(1.2)


def test_what_is_cheaper_than_the_prior_stays_so() -> None:
    """The prior may be dearer than the machine."""
    costs = measured(k4=1.0)
    for _ in range(300):
        costs.add(0, 0.01)
    assert costs.optimistic_ratio(4) == 1


def test_old_rounds_fade() -> None:
    """A machine that got slower at wide passes is believed after some rounds."""
    costs = measured(k4=1.1)
    for _ in range(20):
        costs.add(4, 0.02)
    assert costs.ratio(4) == pytest.approx(2.0)


def test_plain_rounds_are_measured_first_and_again_after_many_drafts() -> None:
    """A pace that is out of date would make drafts look dear or cheap: it counts no longer."""
    costs = RoundCosts()
    for seconds in 0.02, 0.01, 0.03:
        for _ in range(3):
            assert costs.needs_plain
            costs.add(0, seconds)
        for _ in range(128):
            assert not costs.needs_plain
            costs.add(4, 0.012)
            assert costs.relative(4, 0.06) == pytest.approx(0.06 / seconds)
    assert costs.needs_plain


def test_nothing_is_learned_of_drafts_before_a_plain_round_was_measured() -> None:
    """There is nothing to compare with; nor of rounds that took no time."""
    costs = RoundCosts()
    before = costs.ratio(4)
    costs.add(4, 99.0)
    assert costs.ratio(4) == before
    costs = measured(k1=1.1)
    before = costs.ratio(4)
    costs.add(4, 0.0)
    assert costs.ratio(4) == before


@given(st.lists(st.tuples(st.integers(0, 20), seconds), max_size=30), lengths)
def test_a_round_never_costs_less_than_a_plain_one(
    rounds: list[tuple[int, float]], length: int
) -> None:
    """Whatever was measured, every length's ratio is finite and at least 1."""
    costs = RoundCosts()
    for num_drafted, time in rounds:
        costs.add(num_drafted, time)
    assert 1 <= costs.ratio(length) < float("inf")
    assert 1 <= costs.worst_ratio(length) < float("inf")
    assert costs.ratio(0) == 1


@given(st.dictionaries(lengths, st.floats(0.5, 9), min_size=1, max_size=6))
def test_of_lengths_not_measured_the_longer_never_costs_less(ratios: dict[int, float]) -> None:
    """The line does not fall, however noisy the points are."""
    costs = measured(**{f"k{k}": ratio for k, ratio in ratios.items()})
    unknown = [costs.ratio(k) for k in range(1, 30) if k not in ratios]
    assert unknown == sorted(unknown)


def test_the_prior_grows_with_the_evidence() -> None:
    """A longer match is trusted more before anything was learned."""
    history = AcceptanceHistory()
    chances = [history.chance(evidence, 0) for evidence in (1, 2, 3, 4, 5, 7, 10, 16, 500)]
    assert chances == sorted(chances)
    assert 0 < chances[0] < chances[-1] < 1


def test_the_usual_acceptance_is_kept_and_may_be_missing() -> None:
    """A file of an earlier version does not have it."""
    history = AcceptanceHistory(settling=0.1)
    for _ in range(50):
        history.learn(0, 0, True)
    saved = history.as_dict()
    other, earlier = AcceptanceHistory(), AcceptanceHistory()
    other.restore(saved)
    assert other.usual == history.usual > 0.9
    earlier.restore({name: saved[name] for name in ("log-odds", "variances")})
    assert earlier.usual == UNKNOWN


@pytest.mark.parametrize("evidence", [0, 1, 4, 40])
def test_what_was_seen_outweighs_the_prior(evidence: int) -> None:
    """After 400 trials in random order the chance is within 0.15 of the share accepted."""
    for share in (0, 0.25, 0.5, 0.75, 1):
        history, coins = AcceptanceHistory(), random.Random(1)
        for _ in range(400):
            history.learn(evidence, 0, coins.random() < share)
        history.recent = share
        assert history.chance(evidence, 0) == pytest.approx(share, abs=0.15)


def test_a_few_trials_do_not() -> None:
    """One rejection is no proof: the chance stays well above 0."""
    history = AcceptanceHistory()
    prior = history.chance(10, 0)
    history.learn(10, 0, False)
    assert 0.5 * prior < history.chance(10, 0) < prior


def test_old_trials_are_forgotten() -> None:
    """After 150 trials of another text, what 10,000 said before hardly counts."""
    history = AcceptanceHistory()
    for _ in range(10_000):
        history.learn(3, 0, True)
    assert history.chance(3, 0) > 0.95
    for _ in range(150):
        history.learn(3, 0, False)
    assert history.chance(3, 0) < 0.1


def test_a_position_never_tried_takes_the_estimate_over_all_positions() -> None:
    """Back-off: learned at the first position, used at the tenth."""
    history = AcceptanceHistory()
    prior = history.chance(4, 9)
    for _ in range(60):
        history.learn(4, 0, False)
    assert history.chance(4, 9) < 0.5 * prior


def test_a_position_of_its_own_record_is_not_the_average() -> None:
    """Right at first and wrong later is told apart."""
    history = AcceptanceHistory()
    for _ in range(400):
        history.learn(4, 0, True)
        history.learn(4, 9, False)
    history.recent = 0.5
    assert history.chance(4, 0) > 0.85
    assert history.chance(4, 9) < 0.15


def test_the_same_evidence_means_more_in_a_predictable_text() -> None:
    """In a text where all was right lately, the chance is what it was in such texts."""
    history = AcceptanceHistory()
    for _ in range(20):
        for right in (True, False):
            for _ in range(10):
                history.learn(4, 0, right)
    history.recent = 0.9
    good = history.chance(4, 0)
    history.recent = 0.05
    assert good > history.chance(4, 0) + 0.3


def test_form_tells_predictable_texts_from_others() -> None:
    """The same evidence means more where drafts have lately been right."""
    history = AcceptanceHistory()
    for _ in range(10):  # texts in turn: one predictable, one not
        for right in [True] * 10 + [False] * 10:
            history.learn(3, 0, right)
    in_bad_form = history.chance(3, 0)
    for _ in range(5):
        history.learn(20, 0, True)  # other evidence, the same text
    assert history.chance(3, 0) > in_bad_form + 0.1


def test_form_is_forgotten_while_nothing_is_tried() -> None:
    """What was wrong a dozen rounds ago says little: a draft model that is not asked for that must
    not stay unasked for it.
    """
    history = AcceptanceHistory()
    for right in [True] * 20 + [False] * 10:
        history.learn(3, 0, right)
    in_bad_form, before = history.chance(3, 0), history.recent
    history.pass_by()
    assert before < history.recent < 0.5
    for _ in range(20):
        history.pass_by()
    assert history.recent == pytest.approx(0.5, abs=0.01)
    assert history.chance(3, 0) > in_bad_form


def test_kinds_of_evidence_learn_apart_and_by_classes() -> None:
    """What is learned of a match of 20 holds for one of 30, and less for one of 2."""
    history = AcceptanceHistory()
    before = {match: history.chance(match, 0) for match in (2, 20)}
    for _ in range(100):
        history.learn(20, 0, False)
        history.recent = 0.5
    assert history.chance(30, 0) == history.chance(20, 0)
    odds = {match: chance / (1 - chance) for match, chance in before.items()}
    after = {m: history.chance(m, 0) / (1 - history.chance(m, 0)) for m in (2, 20)}
    assert after[20] / odds[20] < 0.5 * after[2] / odds[2]


@pytest.mark.parametrize(
    "feature",
    ["after_one", "after_two", "agreement", "share", "places", "distance", "surroundings"],
)
def test_each_feature_is_learned(feature: str) -> None:
    """What followed regularly is told from what seldom did, whatever the match was."""
    history = AcceptanceHistory()
    for _ in range(200):
        history.learn(Evidence(3, **{feature: 2}), 0, True)
        history.learn(Evidence(3, **{feature: 4}), 0, False)
    sure = history.chance(Evidence(8, **{feature: 2}), 0)
    assert sure > history.chance(Evidence(8, **{feature: 4}), 0) + 0.3


def test_costs_are_learned_by_the_length_of_the_context() -> None:
    """A longer context starts from what the shorter ones cost, and learns apart."""
    learned = Tuning().of("any")
    for _ in range(3):
        learned.costs.add(0, 0.01)
        learned.costs.add(4, 0.014)
    learned.context = 40_000
    assert learned.costs.needs_plain
    assert learned.costs.ratio(4) == pytest.approx(1.4)
    for _ in range(7):
        learned.costs.add(0, 0.05)
        learned.costs.add(4, 0.055)
    assert learned.costs.ratio(4) == pytest.approx(1.1)
    learned.context = 100
    assert learned.costs.ratio(4) == pytest.approx(1.4)


evidence_of_tokens = st.integers(0, 100) | st.builds(
    Evidence,
    st.integers(0, 100),
    st.integers(0, 5),
    st.integers(0, 5),
    st.none() | st.floats(0, 1),
    st.booleans(),
    st.integers(0, NUM_CLASSES - 1),
    *(st.integers(0, SIZES[name] - 1) for name in ("share", "places", "distance", "surroundings")),
)


def test_every_class_of_what_speaks_for_a_vote_has_a_weight() -> None:
    """The last class of each feature is the last weight, and 0 stays for what is not known."""
    last = {
        "share": vote_class(WHOLE),
        "places": places_class(1000),
        "distance": distance_class(None),
        "surroundings": surroundings_class(1000),
    }
    assert {name: SIZES[name] - 1 for name in last} == last
    first = vote_class(0), places_class(1), distance_class(1), surroundings_class(0)
    assert first == (1, 1, 1, 1)
    assert distance_class(100_000) < distance_class(None)


@given(st.lists(evidence_of_tokens, max_size=50), st.floats(0, 1))
def test_the_chances_of_a_draft_are_those_of_its_tokens(
    evidence: list[Evidence | int], recent: float
) -> None:
    """A whole draft is weighed as token by token, neighbours with the same evidence too."""
    evidence = [kind for kind in evidence for _ in range(2)]
    history = AcceptanceHistory(recent=recent)
    history.odds[POSITION : POSITION + 7] = [0.3 * i for i in range(7)]
    one_by_one = [history.chance(kind, i) for i, kind in enumerate(evidence)]
    assert list(history.chances(evidence)) == pytest.approx(one_by_one)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20), st.booleans()), max_size=60))
def test_a_chance_is_never_certain(trials: list[tuple[int, int, bool]]) -> None:
    """Strictly between 0 and 1, whatever was seen."""
    history = AcceptanceHistory()
    for trial in trials:
        history.learn(*trial)
    assert all(0 < history.chance(e, p) < 1 for e in (0, 1, 5, 50) for p in (0, 3, 20))


def learned() -> Tuning:
    tuning = Tuning(step=0.2, slope=0.03)
    for kind in ("PromptLookupDrafter", "ModelDrafter"):
        costs, history = tuning.of(kind).costs, tuning.of(kind).acceptance
        for i in range(9):
            costs.add(0, 0.01 + 0.001 * i)
            costs.add(4, 0.02)
            history.learn(i, i, i % 3 > 0)
        tuning.drafters[
            kind
        ].acceptance.recent = AcceptanceHistory().recent  # of the text, not saved
    tuning.of("ModelDrafter").costs.add(9, 0.05)
    return tuning


def answers(tuning: Tuning) -> Any:
    """All that a tuning says of a new text."""
    for kind in ("PromptLookupDrafter", "ModelDrafter", "NeverSeen"):
        tuning.of(kind).acceptance.recent = 0.5
    return [
        (
            [tuning.of(kind).costs.ratio(k) for k in range(20)],
            [tuning.of(kind).costs.worst_ratio(k) for k in range(1, 15)],
            [tuning.of(kind).acceptance.chance(e, p) for e in range(20) for p in range(10)],
        )
        for kind in ("PromptLookupDrafter", "ModelDrafter", "NeverSeen")
    ]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    """The loaded one gives the same answers, and goes on learning in the same way."""
    path = tmp_path / "new folder" / "tuning.json"
    original = learned()
    original.save(path)
    loaded = Tuning.load(path)
    assert answers(loaded) == answers(original)
    for tuning in (loaded, original):
        for _ in range(5):
            tuning.of("ModelDrafter").costs.add(4, 0.09)
            tuning.of("ModelDrafter").acceptance.learn(3, 1, False)
    assert answers(loaded) == answers(original)
    assert answers(loaded) != answers(learned())
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]


def test_an_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file appears whole or not at all."""
    path = tmp_path / "tuning.json"
    learned().save(path)
    before = path.read_text()

    def half(self: Path, text: str) -> None:
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="disk full"):
        Tuning().save(path)
    assert path.read_text() == before


def with_forks(shares: Any) -> str:
    """A file of one drafter whose shares are these; None: from before they were kept."""
    saved = learned().as_dict()
    for drafter in saved["drafters"].values():
        drafter["forks"] = shares
        if shares is None:
            del drafter["forks"]
    return json.dumps(saved)


def test_what_trees_bring_is_kept(tmp_path: Path) -> None:
    """By drafter; and a drafter of which nothing was learned begins as ever."""
    tuning, path = learned(), tmp_path / "tuning.json"
    for _ in range(20):
        tuning.of("ModelDrafter").forks.learn(4, 4)
    tuning.save(path)
    loaded = Tuning.load(path)
    assert loaded.of("ModelDrafter").forks == tuning.of("ModelDrafter").forks != ForkHistory()
    assert loaded.of("PromptLookupDrafter").forks == ForkHistory()


def test_a_file_from_before_trees_were_kept_is_read(tmp_path: Path) -> None:
    """All that it knows counts, and trees begin as with a new drafter."""
    (tmp_path / "old.json").write_text(with_forks(None))
    loaded = Tuning.load(tmp_path / "old.json")
    assert loaded.of("ModelDrafter").forks == ForkHistory()
    assert answers(loaded) == answers(learned())


GARBAGE = {
    "empty": "",
    "text": "not json",
    "half": '{"step": 0.05, "slo',
    "a list": "[1, 2]",
    "a number": "3",
    "nothing in it": "{}",
    "drafters as a list": '{"step": 0, "slope": 0, "drafters": [1]}',
    "a word for a number": '{"step": "x", "slope": 0, "drafters": {}}',
    "half a drafter": '{"step": 0, "slope": 0, "drafters": {"a": {"plain": []}}}',
    "a cell without position": json.dumps(
        {
            "step": 0,
            "slope": 0,
            "drafters": {"a": {"plain": [], "ratios": {}, "acceptance": {"1": [0, 0]}}},
        }
    ),
    "too few shares": with_forks([0.5, 0.4]),
    "shares that rise": with_forks([0.5] * 13 + [0.6]),
    "shares above 1": with_forks([1.1] * 14),
    "no share": with_forks([0.5] * 13 + [0.0]),
    "shares that are no numbers": with_forks([0.5] * 13 + [float("nan")]),
    "words for shares": with_forks(["many"] * 14),
    "a number for shares": with_forks(7),
    "bytes": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_another_kind_of_file_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    """ValueError with the path and what to do, whatever is wrong with the file."""
    path = tmp_path / "garbage.json"
    content: Any = GARBAGE[kind]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"garbage\.json is not a saved Tuning.*Delete it"):
        Tuning.load(path)


def test_the_prior_knows_the_kind_of_model() -> None:
    """Further rows cost more with quantized weights, and more still with experts."""

    def slope(name: str, bits: int | None = None) -> float:
        model = tiny.build(name, moe_intermediate_size=64)
        if bits:
            nn.quantize(model, group_size=32, bits=bits)
        return Tuning.for_model(model).of("any").costs.ratio(9)

    assert slope("qwen2") < slope("qwen2", bits=4) < slope("qwen3_moe", bits=4)
    assert slope("qwen2") < slope("qwen3_moe")


def test_a_models_tuning_lives_as_long_as_the_model() -> None:
    """The same object for the same model, another for another, and none for one that is gone."""
    first, second = tiny.build("qwen2"), tiny.build("qwen2")
    assert tuning_for(first) is tuning_for(first)
    assert tuning_for(first) is not tuning_for(second)
    kept = weakref.ref(tuning_for(first))
    model = weakref.ref(first)
    del first
    gc.collect()
    assert model() is None, "the tuning holds on to its model"
    assert kept() is None, "the tuning outlives its model"
    assert tuning_for(second) is tuning_for(second)


def test_a_new_model_in_an_old_ones_place_starts_afresh() -> None:
    """Identities are reused by Python; what was learned is not."""
    for _ in range(20):
        model = nn.Linear(2, 2)
        tuning = tuning_for(model)
        assert not tuning.drafters
        tuning.of("x").costs.add(0, 1.0)
        del model, tuning


def test_generations_go_on_learning_where_the_last_one_stopped() -> None:
    """Without tuning= it is the model's own; with it, only the one that was given."""
    model = tiny.build("qwen2")
    own = tuning_for(model)
    prompt = [5, 17, 99, 3] * 3

    def run(**kwargs: Any) -> None:
        list(
            sd.speculate(
                model, prompt, sd.PromptLookupDrafter(min_ngram=1), max_tokens=30, **kwargs
            )
        )

    given_one = sd.Tuning()
    run(tuning=given_one)
    key = key_of(sd.PromptLookupDrafter(min_ngram=1))
    assert set(given_one.drafters) == {short_name(key)}
    assert not own.drafters
    run()
    run()
    assert set(own.drafters) == {short_name(key)}
    assert own.of(key).costs.plain
    assert tuning_for(model) is own
    mx.clear_cache()


# What is known of tokens, and what drafts say about each other ------------------------------------


def chance_of(history: AcceptanceHistory, token: int, before: int | None) -> float:
    return next(history.chances([4], [token], before))


def test_a_token_that_was_wrong_is_believed_less_wherever_it_is_drafted() -> None:
    """Most behind the same token, less behind another, and others hardly suffer for it."""
    history = AcceptanceHistory()
    for _ in range(20):
        history.learn(4, 0, False, 7, 1)
        history.learn(4, 0, True, 8, 2)
    unknown = chance_of(history, 50, 51)
    assert chance_of(history, 7, 1) < chance_of(history, 7, 51) < unknown
    assert chance_of(history, 50, 1) < unknown < chance_of(history, 50, 2)
    assert chance_of(history, 8, None) > unknown


def test_trials_of_a_kind_tell_less_and_less() -> None:
    """The thousandth moves the log-odds by less than 0.6 of what the first one did."""
    history = AcceptanceHistory()
    moves = []
    for i in range(1000):
        before = history.odds[START["match"] + 4]
        history.learn(4, 0, i % 2 == 0)
        history.recent = 0.5
        moves.append(abs(history.odds[START["match"] + 4] - before))
    assert moves[-1] < 0.6 * moves[0]


def test_what_was_learned_of_tokens_goes_to_no_file(tmp_path: Path) -> None:
    """They are of what users wrote; a loaded tuning knows nothing of them, and all else."""
    tuning = learned()
    history = tuning.of("PromptLookupDrafter").acceptance
    for _ in range(20):
        history.learn(4, 0, False, 123_456_789, 987_654_321)
    tuning.save(tmp_path / "tuning")
    content = (tmp_path / "tuning").read_text()
    assert "123456789" not in content
    assert "987654321" not in content
    loaded = Tuning.load(tmp_path / "tuning").of("PromptLookupDrafter").acceptance
    assert not loaded.tokens.effects
    assert loaded.as_dict() == history.as_dict()


def test_no_more_tokens_are_remembered_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those not seen for longest go first."""
    monkeypatch.setattr(token_effects, "MOST_EFFECTS", 6)
    history = AcceptanceHistory()
    history.learn(4, 0, False, 7, 1)
    for token in range(100, 120):
        history.learn(4, 0, True, token)
        history.learn(4, 0, False, 7, 1)
    tokens = history.tokens
    assert len(tokens.effects) == 6
    assert {7, ~1, 119} <= tokens.effects.keys()
    assert tokens.effects[7][1] < 0.5 * TOKEN_VARIANCE  # of all trials since the first


few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=5)


@given(st.lists(few_tokens, min_size=1, max_size=4))
def test_agreement_is_what_it_says(drafts: list[list[int]]) -> None:
    """By definition, for every token of every draft; drafter's own evidence stays as it was."""
    given_evidence = [[Evidence(i, 1, 2) for i in range(len(tokens))] for tokens in drafts]
    found = compared([Draft(t, evidence=e) for t, e in zip(drafts, given_evidence, strict=True)])
    for i, (found_tokens, found_evidence) in enumerate(found):
        tokens, others = drafts[i], [other for j, other in enumerate(drafts) if j != i]
        assert found_tokens == tokens
        parted = False
        assert [found_evidence[at] for at in range(len(tokens))] == list(found_evidence)
        for at, evidence in enumerate(found_evidence):
            assert evidence._replace(agreement=0) == given_evidence[i][at]
            alike = [other for other in others if other[:at] == tokens[:at] and len(other) > at]
            if any(other[at] == tokens[at] for other in alike):
                expected = SHARED
            elif alike and not parted:
                expected, parted = DISPUTED, True
            else:
                expected = PARTED if parted else ALONE
            assert evidence.agreement == expected


@given(st.lists(few_tokens, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_what_drafts_have_in_common_has_one_chance(
    drafts: list[list[int]], dice: random.Random
) -> None:
    """The mean of those that begin alike, this token included; read in any order, once each."""
    own = [[dice.random() for _ in tokens] for tokens in drafts]
    reads: list[tuple[int, int]] = []

    def read(draft: int) -> Iterator[float]:
        for position, chance in enumerate(own[draft]):
            reads.append((draft, position))
            yield chance

    found = pooled([read(draft) for draft in range(len(drafts))], drafts)
    order = list(range(len(drafts)))
    dice.shuffle(order)
    for draft in order:
        expected = []
        for end in range(1, len(drafts[draft]) + 1):
            alike = [
                chances[end - 1]
                for tokens, chances in zip(drafts, own, strict=True)
                if tokens[:end] == drafts[draft][:end] and len(tokens) >= end
            ]
            expected.append(sum(alike) / len(alike))
        assert list(found[draft]) == pytest.approx(expected)
    assert len(reads) == len(set(reads))


def test_a_draft_is_not_chosen_for_what_its_drafter_alone_believes() -> None:
    """Two that say the same are worth the same, between what each would make of it."""
    parts = ["a.SuffixDrafter", "a.NGramDrafter"]
    policy = Auto(Tuning())
    spoken_for, together = Evidence(8), Evidence(8, agreement=SHARED)
    for part in parts:
        policy.limit(part, cheap=True)
        policy.tuning.of(part).exploration_budget = 10.0
        for _ in range(8):
            policy.tuning.of(part).costs.add(0, 1.0)
    policy.tuning.of(parts[1]).acceptance.odds[START["agreement"] + SHARED] += 2.0
    alone = []
    for part in parts:
        assert policy.cut(part, Draft([1, 2, 3], evidence=[together] * 3))
        alone.append(policy._parts[part].gain)
    drafts = [(part, Draft([1, 2, 3], evidence=[spoken_for] * 3)) for part in parts]
    assert policy.choose(drafts) == (0, 3)
    both = [policy._parts[part].gain for part in parts]
    assert both[0] == both[1]
    assert alone[0] < both[0] < alone[1]
