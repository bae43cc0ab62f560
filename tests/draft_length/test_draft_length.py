"""How many tokens to draft: policies in a simulated world, where time is a table of costs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, count
from operator import mul
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import specdec_mlx as sd
import tiny
from scripted import ScriptedDrafter
from selection import in_one_test
from simulated import WRONG, Part, World, at_random, drafted, emitted, know, line, lost, verdict
from specdec_mlx.arguments import parse_draft_length
from specdec_mlx.contracts import Draft, Evidence
from specdec_mlx.draft_length.costs import CURVES, WIDTHS, Curve
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import LENGTHS, LONGEST, Auto, Fixed, make_draft_length
from specdec_mlx.errors import UnknownNameError

KINDS: dict[str, dict[str, Any]] = {
    "look-up": {"cheap": True, "evidence": 3},
    "look-up without evidence": {"cheap": True, "evidence": None},
    "model": {"cheap": False, "evidence": None},
}
every_kind = in_one_test("kind", KINDS)
Rule = Callable[[int], bool]
Cost = Callable[[int], float]


def alone(is_right: Rule, cost: Cost, kind: str = "look-up", **options: Any) -> World:
    """A world with a single drafter, called "it"."""
    return World(cost, {"it": Part(is_right, **KINDS[kind] | options)})


# The value rule -----------------------------------------------------------------------------------


def at_rate(rate: float, costs: Curve, chances: Sequence[float], cheap: bool = True) -> Auto:
    """The automatic length at a given going rate, with costs, and chances by place, given."""

    def of_draft(evidence: Iterable[Any], *_: Any, first: int = 0) -> list[float]:
        return [chances[i % len(chances)] for i, _ in enumerate(evidence, first)]

    policy = Auto(Tuning(costs))
    policy.prices.rate, policy.prices.most = rate, LENGTHS[-1]
    learned = policy.tuning.of("it", look_up=cheap)
    for chances_of in (learned.chances, learned.unseen):
        chances_of.of_draft = of_draft  # type: ignore[method-assign, assignment]
    return policy


def cut_of_look_up(policy: Auto, draft: Draft) -> int:
    policy.limit("it", cheap=True)
    return policy.cut("it", draft)


def curve(steps: Sequence[float]) -> Curve:
    """A curve that rises by a step to each width in turn."""
    costs = list(accumulate([1.0, *steps]))
    return Curve(tuple(zip((1, *WIDTHS), costs, strict=True)))


def values(
    lengths: Iterable[int], chances: Sequence[float], costs: Curve, rate: float, step: float = 0.0
) -> dict[int, float]:
    """Expected tokens of each length, beyond plain decoding, less what it costs at the rate."""
    reach = list(accumulate((chances[i % len(chances)] for i in range(99)), mul))
    return {k: sum(reach[:k]) - rate * (costs(1 + k) - 1 + step * k) for k in lengths}


some_chances = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=16)
some_curves = st.lists(st.floats(0.01, 2), min_size=len(WIDTHS), max_size=len(WIDTHS)).map(curve)
some_curves |= st.sampled_from(list(CURVES.values()))


@given(some_chances, some_curves, st.floats(1, 5), st.integers(1, 70), st.floats(0, 0.9))
def test_the_length_of_the_largest_value_is_chosen(chances, costs, rate, whole, step):
    """By brute force: of a look-up's draft, 0 included; of a model, or one token to find out."""
    policy = at_rate(rate, costs, chances)
    allowed = {k for k in (0, *LENGTHS, whole) if k <= min(whole, LENGTHS[-1])}
    valued = values(allowed, chances, costs, rate)
    kept = cut_of_look_up(policy, Draft([1] * whole))
    assert valued[kept] == pytest.approx(max(valued.values()), abs=1e-9)

    policy = at_rate(rate, costs, chances, cheap=False)
    learned = policy.tuning.of("it")
    learned.account.budget = 99.0
    know(learned, step)
    valued = values((k for k in LENGTHS if k <= LONGEST), chances, costs, rate, step)
    wanted, best = policy.limit("it", cheap=False), max(valued.values())
    assert valued[wanted] == pytest.approx(best, abs=1e-9) if best > 0 else wanted == 1


def test_the_going_rate_is_what_a_plain_rounds_time_has_lately_brought() -> None:
    """Five tokens for the price of 1.25 make 4; waste makes no rate below plain decoding's 1,
    with which every text begins."""
    policy = Auto()
    for record, rate in (
        (verdict(0, 0, 1.0), 1),
        (verdict(4, 4, 1.25), 4),
        (verdict(4, 0, 1.25), 1),
    ):
        for _ in range(200):
            policy.limit("it", cheap=True)
            policy.record(record)
        assert policy.prices.rate == pytest.approx(rate, rel=0.01)
        assert Auto(policy.tuning).prices.rate == 1


# In a simulated world -----------------------------------------------------------------------------

STAIRS = Curve(((1, 1), (5, 1), (6, 2), (10, 2), (11, 3), (64, 3)))
COSTS: dict[str, Cost] = {
    "flat": line(0.02),
    "steep": line(0.2),
    "a dear start": line(0.1, step=0.6),
    "stairs": lambda length: STAIRS(1 + length),
    "m times one": line(1.0),
}


@pytest.mark.parametrize("cost", COSTS)
@every_kind
@in_one_test("share", [0.0, 0.2, 0.5, 0.8, 1.0])
@in_one_test("seed", [0, 1])
def test_it_is_never_slower_than_plain_decoding(kind, cost, share, seed):
    """By 2% over 1,500 tokens, with a model 2.5%, at any acceptance; where rows are dear, too."""
    records = alone(at_random(share, seed), COSTS[cost], kind).run(Auto(), 1500)
    assert lost(records) <= (0.025 if kind == "model" else 0.02) * emitted(records)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@in_one_test("slope", [0.02, 0.1, 0.3])
def test_it_comes_near_the_best_fixed_length(share: float, slope: float) -> None:
    """Without looking at the tokens it would be within 12%; those repeat, so that it is ahead."""

    def pace(policy: Any) -> float:
        records = alone(at_random(share), line(slope)).run(policy, 4000)
        return lost(records) / emitted(records)

    assert pace(Auto()) < min(pace(Fixed(length)) for length in (0, *LENGTHS))


@every_kind
def test_a_turn_of_the_text_is_noticed(kind: str) -> None:
    """Nothing is right, then all: a look-up that is not taken is scored, a model asked at times."""
    turn, policy = 1000, Auto()
    world = alone(lambda position: position >= turn, line(0.05), kind)
    before = world.run(policy, turn)
    assert lost(before) < 0.025 * emitted(before)
    assert sum(map(bool, drafted(before[-100:]))) <= 10
    longest = LONGEST if kind == "model" else LENGTHS[-1]
    after = world.run(policy, 2000)
    assert min(drafted(after[-5:])) == longest
    assert len(after) < 2000 / longest + 60


def test_the_first_wrong_token_ends_a_long_copy() -> None:
    """All is right, then nothing: of the rounds after the turn one or two are long."""
    world, policy = alone(lambda position: position < 3000, line(0.02), evidence=64), Auto()
    world.run(policy, 3000)
    wrong = [r.drafted for r in world.run(policy, 300) if r.drafted and not r.accepted]
    assert sum(length > LONGEST for length in wrong) <= 2


@every_kind
@in_one_test("extra", [3.0, 50.0])
def test_kernels_that_compile_at_first_use_put_nothing_off(kind: str, extra: float) -> None:
    """The first round at each width takes so much longer, and long drafts come all the same."""
    seen = {0}

    def cost(length: int) -> float:
        compiles = length not in seen
        seen.add(length)
        return line(0.05)(length) + extra * compiles

    records = alone(at_random(1.0), cost, kind).run(Auto(), 6000)
    assert emitted(records[-50:]) >= 50 * 9


@every_kind
@in_one_test("bad", range(1, 16))
def test_a_bad_moment_of_the_machine_is_got_over(kind: str, bad: int) -> None:
    """One round a hundred times slower, any of the first: drafting pays again within a while."""
    rounds = count(1)

    def cost(length: int) -> float:
        return line(0.05)(length) * (100 if next(rounds) == bad else 1)

    records = alone(at_random(0.6), cost, kind).run(Auto(), 1500)
    assert emitted(records[-100:]) > 200


@in_one_test("share", [0.8, 0.9])
def test_a_model_that_pays_only_in_long_drafts_is_found(share: float) -> None:
    """Where the machine is known: one token costs almost two plain rounds, the next little more."""
    costs = Curve(((1, 1), (2, 1.9), (64, 4.0)))
    tuning = Tuning(costs)
    know(tuning.of("it"), 0.03)
    world = alone(at_random(share), lambda k: costs(1 + k), "model", token_cost=0.03)
    records = world.run(Auto(tuning), 1500)
    assert lost(records) < -0.1 * emitted(records)


def test_a_models_drafts_are_learned_from_after_a_look_up_that_was_not_taken() -> None:
    """The look-up's draft goes on being scored, and the model's own rounds count all the same."""
    policy = Auto()
    for _ in range(3):
        policy.record(verdict(0, 0, 1.0, [3]))
    for _ in range(40):
        policy.limit("look-up", True)
        policy.cut("look-up", Draft([WRONG] * 4, evidence=[0] * 4))
        policy.limit("model", False)
        policy.record(verdict(2, 2, 1.1, [1, 2, 3], part="model"))
    assert policy.tuning.of("model").unseen.of_draft([0])[0] > 0.75
    assert policy.tuning.of("look-up").chances.of_draft([0], [WRONG])[0] < 0.2


# Nothing that was drawn decides -------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=4, max_size=4))
@settings(max_examples=20)
@example([9, 8, 7, 6])
def test_the_length_of_a_drawn_draft_does_not_depend_on_its_tokens(tokens: list[int]) -> None:
    """Rounds alike but for their tokens lead to the same limits, before anything is drawn."""

    def limits(tokens: list[int]) -> list[int]:
        policy, coins, asked = Auto(), random.Random(3), []
        know(policy.tuning.of("it"), 0.05)
        for _ in range(60):
            limit = policy.limit("it", False)
            asked.append(limit)
            accepted = sum(coins.random() < 0.8 for _ in range(limit))
            policy.record(verdict(limit, accepted, 1 + 0.1 * limit, (tokens * 8)[: accepted + 1]))
        return asked

    expected = limits([5, 6, 7, 8])
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
        learned = policy.tuning.of("it", look_up=cheap)
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


class Noting(Fixed):
    """Keeps two of every draft that it is shown, and notes what it was asked."""

    events: list[str]

    def limit(self, part: str, cheap: bool) -> int:
        self.events.append("limit")
        return super().limit(part, cheap)

    def cut(self, part: str, draft: Draft) -> int:
        self.events.append("cut")
        return 2


@in_one_test("drawn", [False, True])
def test_the_loop_cuts_point_masses_only_and_asks_for_the_limit_first(drawn: bool) -> None:
    """Limit, then propose; a drawn draft is verified whole."""
    policy, events, even = Noting(4), [], mx.full((4, 128), -math.log(128))

    def propose(start: int, limit: int) -> Draft:
        events.append("propose")
        return Draft(mx.array([7] * limit), even[:limit] if drawn else None)

    policy.events = events
    options: dict[str, Any] = {"num_draft_tokens": policy, "sampler": sd.Sampling(temp=1.0)}
    drafter = ScriptedDrafter(propose)
    *_, last = sd.speculate(tiny.build("qwen2"), [5, 17, 99], drafter, max_tokens=21, **options)
    asked = [["limit", "propose"], ["limit", "propose", "cut"]][not drawn]
    assert events == (asked * len(events))[: len(events)]
    assert len(last.stats.drafted_at) == (4 if drawn else 2)


# Fixed lengths, and what callers pass ------------------------------------------------------------


def test_a_fixed_length_stays() -> None:
    """Whatever was accepted, and whichever drafter asks."""
    for length in (0, 7):
        policy = Fixed(length)
        for num, accepted in ((7, 7), (7, 0), (0, 0)):
            policy.record(verdict(num, accepted, 1.0))
            assert policy.limit("it", True) == policy.limit("another", False) == length
        assert policy.cut("it", Draft([1, 2, 3])) == 3


def test_what_a_caller_passes_or_types_makes_a_policy_or_is_refused_in_one_sentence() -> None:
    """ "auto" learns on in the tuning that it is given, under the key of the part."""
    tuning = Tuning()
    policy = make_draft_length("auto", tuning)
    world = alone(at_random(1.0), line(0.1))
    world.run(policy, 100)
    assert set(tuning.drafters) == {"it"}
    assert world.run(make_draft_length("auto", tuning), 1)[0].drafted > 3
    assert make_draft_length(policy) is policy
    for choice in (0, 4, "auto"):
        assert parse_draft_length(str(choice)) == choice
    for wrong in (-1, True, 2.5, "automatic"):
        with pytest.raises((ValueError, UnknownNameError), match=r"an int >= 0.*auto|plain decod"):
            make_draft_length(wrong)
    for text in ("", "-1", "2.5", "automatic", "4 5", "True", "Auto"):
        with pytest.raises(ValueError, match=r"^'.*': expected an int >= 0, or auto$"):
            parse_draft_length(text)
