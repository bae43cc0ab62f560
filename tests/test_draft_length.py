"""How many tokens to draft: policies in a simulated world, where time is a table of costs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import scripted
import specdec_mlx as sd
import tiny
from simulated import (
    WRONG,
    alone,
    always,
    at_random,
    drafted,
    emitted,
    know,
    line,
    never,
    seconds,
)
from specdec_mlx.contracts import Draft, Evidence, RoundRecord
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.draft_length.costs import CURVES, WIDTHS, Curve
from specdec_mlx.draft_length.parts import LENGTHS, LONGEST
from specdec_mlx.draft_length.policy import (
    Fixed,
    Heuristic,
    make_draft_length,
    parse_draft_length,
)
from specdec_mlx.draft_length.store import BUDGET, EXPLORATION, Learned, Tuning
from specdec_mlx.drafters.model import ModelSession
from specdec_mlx.errors import UnknownNameError

KINDS: dict[str, dict[str, Any]] = {
    "look-up": {"cheap": True, "evidence": 3},
    "look-up without evidence": {"cheap": True, "evidence": None},
    "model": {"cheap": False, "evidence": None},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def learned_of(policy: Auto, cheap: bool = True) -> Learned:
    """What a policy knows of a drafter that is alone."""
    return policy.tuning.of("it", look_up=cheap)


# The value rule -----------------------------------------------------------------------------------


class _Given(Chances):
    """Chances by place, whatever speaks for the tokens."""

    def __init__(self, chances: Sequence[float]) -> None:
        super().__init__([])
        self.known = chances

    def of_draft(
        self, evidence: Iterable[Any], tokens: Any = (), before: int = -2, first: int = 0
    ) -> list[float]:
        return [self.known[i % len(self.known)] for i, _ in enumerate(evidence, first)]


def at_rate(rate: float, costs: Curve, chances: Sequence[float], cheap: bool = True) -> Auto:
    """The automatic length at a given going rate, with costs and chances given."""
    policy = Auto(Tuning(costs))
    policy.prices.rate, policy.prices.most = rate, LENGTHS[-1]
    learned = learned_of(policy, cheap)
    learned.chances = learned.unseen = _Given(chances)
    return policy


def curve(steps: Sequence[float]) -> Curve:
    """A curve that rises by a step to each width in turn."""
    costs = list(accumulate([1.0, *steps]))
    return Curve(tuple(zip((1, *WIDTHS), costs, strict=True)))


def values(
    lengths: Iterable[int],
    chances: Sequence[float],
    costs: Curve,
    rate: float,
    step: float = 0.0,
) -> dict[int, float]:
    """Expected tokens of each length, beyond plain decoding, less what it costs at the rate."""
    reach = list(accumulate((chances[i % len(chances)] for i in range(99)), mul))
    return {k: sum(reach[:k]) - rate * (costs(1 + k) - 1 + step * k) for k in lengths}


chance = st.floats(0.01, 1.0)
some_chances = st.lists(chance, min_size=1, max_size=16)
some_curves = st.lists(st.floats(0.01, 2), min_size=len(WIDTHS), max_size=len(WIDTHS)).map(curve)
some_curves |= st.sampled_from(list(CURVES.values()))


@given(some_chances, some_curves, st.floats(1, 5), st.integers(1, 70))
def test_a_look_up_keeps_the_length_of_the_largest_value(
    chances: list[float], costs: Curve, rate: float, whole: int
) -> None:
    """Expected tokens less cost at the going rate, by brute force over all lengths and 0."""
    policy = at_rate(rate, costs, chances)
    policy.limit("it", cheap=True)
    kept = policy.cut("it", Draft([1] * whole))
    valued = values({0, *LENGTHS, whole}, chances, costs, rate)
    allowed = {k: v for k, v in valued.items() if k <= min(whole, LENGTHS[-1])}
    assert kept in allowed
    assert allowed[kept] == pytest.approx(max(allowed.values()), abs=1e-9)


@given(some_chances, some_curves, st.floats(1, 5), st.floats(0, 0.9))
def test_a_model_is_asked_for_the_length_of_the_largest_value(
    chances: list[float], costs: Curve, rate: float, step: float
) -> None:
    """By brute force; for one token where none pays, to find out."""
    policy = at_rate(rate, costs, chances, cheap=False)
    learned = learned_of(policy, cheap=False)
    learned.account.budget = 99.0
    know(learned, step)
    valued = values((k for k in LENGTHS if k <= LONGEST), chances, costs, rate, step)
    wanted, best = policy.limit("it", cheap=False), max(valued.values())
    assert valued[wanted] == pytest.approx(best, abs=1e-9) if best > 0 else wanted == 1


@pytest.mark.parametrize("name", CURVES)
def test_the_widths_that_are_chosen_from_suit_every_machine(name: str) -> None:
    """Their best is worth 0.9 of the best of all lengths, on every curve; none begins a tile."""
    costs = CURVES[name]
    assert not {14, 33, 65} & set(WIDTHS)
    for sure in (0.5, 0.8, 0.9, 0.97, 1.0):
        for rate in (1.0, 2.0):
            policy = at_rate(rate, costs, [sure])
            policy.limit("it", cheap=True)
            kept = policy.cut("it", Draft([1] * 63))
            valued = values(range(64), [sure], costs, rate)
            assert valued[kept] >= 0.9 * max(valued.values()) - 0.01


def test_the_going_rate_is_what_a_plain_rounds_time_has_lately_brought() -> None:
    """Five tokens for the price of 1.25 make 4; waste makes no rate below plain decoding's 1."""
    tuning = Tuning()
    policy = Auto(tuning)
    assert policy.prices.rate == 1
    policy.limit("it", cheap=True)

    def rounds(drafted: int, accepted: int, time: float, num: int = 200) -> float:
        part = "it" if drafted else ""
        for _ in range(num):
            record = RoundRecord(drafted, accepted, accepted + 1, drafted + 1, part=part)
            policy.record(replace(record, seconds=time))
            policy.limit("it", cheap=True)
        return policy.prices.rate

    assert rounds(0, 0, 1.0) == pytest.approx(1)
    assert rounds(4, 4, 1.25) == pytest.approx(4, rel=0.01)
    policy = Auto(tuning)
    assert policy.prices.rate == pytest.approx(4, rel=0.01)
    assert rounds(0, 0, 1.0, num=20) < 2
    assert rounds(4, 0, 1.25) == 1


# In a simulated world -----------------------------------------------------------------------------

STAIRS = Curve(((1, 1), (5, 1), (6, 2), (10, 2), (11, 3), (64, 3)))
COSTS: dict[str, Callable[[int], float]] = {
    "flat": line(0.02),
    "steep": line(0.2),
    "a dear start": line(0.1, step=0.6),
    "stairs": lambda length: STAIRS(1 + length),
    "m times one": line(1.0),
}


@every_kind
@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
def test_it_is_never_slower_than_plain_decoding(kind: str, cost: str, share: float) -> None:
    """By 2% over 1,500 tokens, with a model 2.5%, at any acceptance; where rows are dear, too."""
    for seed in (0, 1):
        records = alone(at_random(share, seed), COSTS[cost], **KINDS[kind]).run(Auto(), 1500)
        assert seconds(records) <= (1.025 if kind == "model" else 1.02) * emitted(records)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
def test_it_comes_near_the_best_fixed_length(share: float, slope: float) -> None:
    """Without looking at the tokens it would be within 12%; those repeat, so that it is ahead."""

    def time(policy: Any) -> float:
        records = alone(at_random(share), line(slope)).run(policy, 4000)
        return seconds(records) / emitted(records)

    assert time(Auto()) < min(time(Fixed(length)) for length in (0, *LENGTHS))


@every_kind
def test_a_turn_of_the_text_is_noticed(kind: str) -> None:
    """Nothing is right, then all: a look-up that is not taken is scored, a model asked at times."""
    turn = 1000
    world = alone(lambda position: position >= turn, line(0.05), **KINDS[kind])
    policy = Auto()
    before = world.run(policy, turn)
    assert seconds(before) < 1.025 * emitted(before)
    assert sum(map(bool, drafted(before[-100:]))) <= 10
    longest = LONGEST if kind == "model" else LENGTHS[-1]
    after = world.run(policy, 2000)
    assert min(drafted(after[-5:])) == longest
    assert len(after) < 2000 / longest + 60


def test_the_first_wrong_token_ends_a_long_copy() -> None:
    """All is right, then nothing: of the rounds after the turn one or two are long."""
    world = alone(lambda position: position < 3000, line(0.02), evidence=64)
    world.run(policy := Auto(), 3000)
    wrong = [r.drafted for r in world.run(policy, 300) if r.drafted and not r.accepted]
    assert sum(length > LONGEST for length in wrong) <= 2


@every_kind
@pytest.mark.parametrize("extra", [3.0, 50.0])
def test_kernels_that_compile_at_first_use_put_nothing_off(kind: str, extra: float) -> None:
    """The first round at each width takes so much longer, and long drafts come all the same."""
    seen: set[int] = {0}

    def cost(length: int) -> float:
        compiles = length not in seen
        seen.add(length)
        return line(0.05)(length) + extra * compiles

    records = alone(always, cost, **KINDS[kind]).run(Auto(), 6000)
    assert emitted(records[-50:]) >= 50 * 9


@every_kind
def test_a_bad_moment_of_the_machine_is_got_over(kind: str) -> None:
    """One round a hundred times slower, any of the first: drafting pays again within a while."""
    for at in range(1, 16):
        rounds = iter(range(1, 100_000))

        def cost(length: int, rounds: Iterator[int] = rounds, at: int = at) -> float:
            return line(0.05)(length) * (100 if next(rounds) == at else 1)

        records = alone(at_random(0.6), cost, **KINDS[kind]).run(Auto(), 1500)
        assert emitted(records[-100:]) > 200, at


@pytest.mark.parametrize("slope", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("price", [0.0, 0.3, 1.0])
def test_a_useless_drafter_loses_no_more_than_its_account(slope: float, price: float) -> None:
    """Its budget, a hundredth of the time, and two drafts of four tokens of unknown cost."""
    world = alone(never, line(slope), cheap=False, evidence=None, token_cost=price)
    records = world.run(Auto(), 3000)
    lost = seconds(records) - emitted(records)
    assert 0 < lost <= 1.1 * (BUDGET + EXPLORATION * len(records)) + 8 * (slope + price)
    records = alone(never, line(slope)).run(Auto(), 3000)
    assert seconds(records) - emitted(records) <= 3 * (1 + slope)


@pytest.mark.parametrize("share", [0.8, 0.9])
def test_a_model_that_pays_only_in_long_drafts_is_found(share: float) -> None:
    """Where the machine is known: one token costs almost two plain rounds, the next little more."""
    costs = Curve(((1, 1), (2, 1.9), (64, 4.0)))
    world = alone(at_random(share), lambda k: costs(1 + k), False, None, token_cost=0.03)
    tuning = Tuning(costs)
    know(tuning.of("it"), 0.03)
    records = world.run(Auto(tuning), 1500)
    assert seconds(records) < 0.9 * emitted(records)


def test_drafts_that_are_not_taken_are_scored() -> None:
    """Where no draft pays none is verified, and the chance of what was proposed is known."""
    for right in (True, False):
        policy = at_rate(1.0, curve([50.0] * len(WIDTHS)), [0.5])
        learned = learned_of(policy)
        learned.chances = Chances.of("look-up")
        policy.limit("it", cheap=True)
        [before] = learned.chances.of_draft([3], [1])
        for _ in range(40):
            assert policy.cut("it", Draft([1] * 3, evidence=[3] * 3)) == 0
            policy.record(RoundRecord(0, 0, 1, 1, [1 if right else 9], seconds=1.0))
        [after] = learned.chances.of_draft([3], [1])
        assert after > before if right else after < before / 2


def test_a_models_drafts_are_learned_from_after_a_look_up_that_was_not_taken() -> None:
    """The look-up's draft goes on being scored, and the model's own rounds count all the same."""
    policy = Auto()
    for _ in range(3):
        policy.record(RoundRecord(0, 0, 1, 1, [3], seconds=1.0))
    for _ in range(40):
        policy.limit("look-up", True)
        policy.cut("look-up", Draft([WRONG] * 4, evidence=[0] * 4))
        policy.limit("model", False)
        policy.record(RoundRecord(2, 2, 3, 3, tokens=[1, 2, 3], seconds=1.1, part="model"))
    assert policy.tuning.of("model").unseen.of_draft([0])[0] > 0.75
    assert policy.tuning.of("look-up").chances.of_draft([0], [WRONG])[0] < 0.2


def test_what_a_draft_model_missed_is_not_charged_to_its_drafts() -> None:
    """The first draft after many plain rounds, which it reads first, tells no cost of a step."""
    policy = Auto()
    steps = learned_of(policy, cheap=False).steps

    def rounds(num: int, drafted: int, seconds: float) -> None:
        part = "it" if drafted else ""
        for _ in range(num):
            policy.limit("it", cheap=False)
            policy.record(RoundRecord(drafted, 0, 1, drafted + 1, [1], seconds, part=part))

    rounds(3, 0, 1.0)
    rounds(1, 2, 9.0)
    assert not steps.first
    rounds(6, 2, 1.5)
    known = steps.step
    assert 0 < known < 0.25
    rounds(30, 0, 1.0)
    rounds(1, 2, 99.0)
    assert steps.step == known


# Nothing that was drawn decides -------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4))
@settings(max_examples=20)
@example([9, 8, 7, 6])
def test_the_length_of_a_drawn_draft_does_not_depend_on_its_tokens(tokens: list[int]) -> None:
    """Rounds alike but for their tokens lead to the same limits, before anything is drawn."""

    def limits(tokens: Sequence[int]) -> list[int]:
        policy, coins, asked = Auto(), random.Random(3), []
        know(learned_of(policy, cheap=False), 0.05)
        for _ in range(60):
            limit = policy.limit("it", False)
            asked.append(limit)
            accepted = sum(coins.random() < 0.8 for _ in range(limit))
            emitted = (list(tokens) * 8)[: accepted + 1]
            time, part = 1 + 0.1 * limit, "it" if limit else ""
            policy.record(
                RoundRecord(limit, accepted, accepted + 1, limit + 1, emitted, time, part=part)
            )
        return asked

    expected = limits((5, 6, 7, 8))
    assert max(expected) > 1
    assert limits(tokens) == expected


def test_a_draft_is_cut_for_its_tokens_only_where_they_were_copied() -> None:
    """A look-up's token that was always wrong is left out; a draft model's may be drawn, and stays.

    Whether a position of a drawn draft is verified must not depend on what was drawn there.
    """
    lengths = {}
    for cheap in (True, False):
        policy = Auto(Tuning(curve([0.3] * len(WIDTHS))))
        policy.prices.most = LENGTHS[-1]
        learned = learned_of(policy, cheap)
        know(learned, 0.01)
        limit = policy.limit("it", cheap)
        for _ in range(60):
            for token, right in ((7, True), (8, False)):
                learned.chances.learn([5], [right], [token])
        learned.chances.recent = 0.5
        evidence = [Evidence(5, confidence=None if cheap else 0.6)] * limit
        drafts = [Draft([token] + [9] * (limit - 1), evidence=evidence) for token in (7, 8)]
        lengths[cheap] = [policy.cut("it", draft) for draft in drafts]
    assert lengths[True][0] > lengths[True][1] == 0
    assert lengths[False][0] == lengths[False][1] > 0


class _Spy(Fixed):
    """Keeps two of every draft it is shown, and notes what it was asked and shown."""

    events: list[str]

    def limit(self, part: str, cheap: bool) -> int:
        self.events.append("limit")
        return super().limit(part, cheap)

    def cut(self, part: str, draft: Draft) -> int:
        self.events.append("cut drawn" if draft.logprobs is not None else "cut")
        return min(2, len(draft))


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_the_loop_cuts_point_masses_only_and_asks_for_the_limit_first(
    temp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit, then propose; a drawn draft is verified whole."""
    policy = _Spy(4)
    policy.events = events = []
    model, propose = tiny.build("qwen2"), ModelSession.propose

    def noted(session: ModelSession, limit: int) -> Draft:
        events.append("propose")
        return propose(session, limit)

    monkeypatch.setattr(ModelSession, "propose", noted)
    options: dict[str, Any] = {"draft_length": policy, "sampler": sd.Sampling(temp=temp)}
    drafter = sd.ModelDrafter(model)
    *_, last = sd.speculate(model, [5, 17, 99], drafter, max_tokens=21, seed=1, **options)
    asked = [e for e in events if e != "cut"]
    assert asked == ["limit", "propose"] * (len(asked) // 2)
    assert ("cut" in events) == (temp == 0)
    assert len(last.stats.drafted_at) == (2 if temp == 0 else 4)


def test_auto_does_not_change_the_text() -> None:
    """Whatever is believed of costs and the clock says meanwhile, the text is the target's own."""
    model = tiny.build("qwen2")
    prompt = [5, 17, 99, 3]
    expected = [t.token for t in sd.speculate(model, prompt, max_tokens=60)]
    for wrong in (0.0, 0.4, 1.1):
        for tuning in (Tuning(curve([0.01] * 11)), Tuning(curve([9.0] * 11))):
            drafter = scripted.OracleDrafter(expected, 128, wrong=wrong)
            got = sd.speculate(model, prompt, drafter, max_tokens=60, tuning=tuning)
            assert [t.token for t in got] == expected


# Fixed and heuristic lengths, and what callers pass ----------------------------------------------


def test_two_more_after_a_whole_draft_and_one_less_otherwise() -> None:
    """The schedule of Hugging Face's assisted generation, never below 1; fixed lengths stay."""
    for policy in (Heuristic(5), Fixed(0), Fixed(7)):
        lengths = [policy.limit("it", True)]
        for num, accepted in [(5, 5), (7, 6), (6, 0), (0, 0), (5, 5), *[(7, 0)] * 8, (1, 1)]:
            policy.record(RoundRecord(num, accepted, accepted + 1, num + 1))
            lengths.append(policy.limit("it", True))
            assert policy.limit("another", False) == lengths[-1]
        expected = [5, 7, 6, 5, 5, 7, 6, 5, 4, 3, 2, 1, 1, 1, 3]
        assert lengths == expected if type(policy) is Heuristic else len(set(lengths)) == 1
        assert policy.cut("it", Draft([1, 2, 3])) == 3


def test_names_make_policies_and_policies_are_taken_as_they_are() -> None:
    """ "auto" learns on in the tuning that it is given, under the key of the part."""
    tuning = Tuning()
    policy = make_draft_length("auto", tuning)
    alone(always, line(0.1)).run(policy, 100)
    assert set(tuning.drafters) == {"it"}
    draft, _ = alone(always, line(0.1)).propose(make_draft_length("auto", tuning))
    assert len(draft) > 3
    assert isinstance(make_draft_length("heuristic"), Heuristic)
    assert make_draft_length(policy) is policy


@pytest.mark.parametrize("choice", [-1, True, 2.5, "automatic"])
def test_lengths_that_mean_nothing_are_refused_with_what_was_expected(choice: Any) -> None:
    with pytest.raises((ValueError, UnknownNameError), match=r"an int >= 0.*auto|plain decoding"):
        make_draft_length(choice)


def test_what_was_typed_makes_a_policy_or_is_refused_in_one_sentence() -> None:
    """One parser for the command line, the server and the benchmark."""
    for choice in (0, 4, "auto", "heuristic"):
        assert parse_draft_length(str(choice)) == choice
    for text in ("", "-1", "2.5", "automatic", "4 5", "True", "Auto"):
        with pytest.raises(ValueError, match=r"^'.*': expected an int >= 0, auto or heuristic$"):
            parse_draft_length(text)
