"""How many tokens to draft: policies in a simulated world, where time is a table of costs."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scripted
import specdec_mlx as sd
import tiny
from simulated import WRONG, alone, always, at_random, drafted, emitted, line, never, seconds
from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.accounts import (
    COPY_LENGTHS,
    EXPENSIVE_BUDGET,
    LENGTHS,
    LookUpAccount,
)
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.policy import (
    Fixed,
    Heuristic,
    make_draft_length,
    parse_draft_length,
)
from specdec_mlx.draft_length.store import Learned, Tuning
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.types import Draft, DraftContext, Evidence, RoundRecord


def history(policy: Auto) -> Learned:
    """What a policy knows of a drafter that is alone."""
    return policy.tuning.of("it")


KINDS: dict[str, dict[str, Any]] = {
    "look-up": {"cheap": True, "evidence": 3},
    "look-up without evidence": {"cheap": True, "evidence": None},
    "model": {"cheap": False, "evidence": None},
}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_drafted_when_nothing_is_accepted(kind: str) -> None:
    """It stops, and what it wasted by then and wastes on looking is under 5% of the time."""
    world = alone(never, line(0.2), **KINDS[kind])
    policy = Auto()
    records = world.run(policy, 2000)
    assert seconds(records) < 1.05 * emitted(records)
    settled = records[-1000:]
    assert sum(map(bool, drafted(settled))) <= 0.05 * len(settled)
    assert max(drafted(settled)) <= 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_longest_is_drafted_when_everything_is_accepted(kind: str) -> None:
    """Step by step to the end of the table, and there it stays; a look-up copies on from there."""
    num_tokens = 2000 if KINDS[kind]["cheap"] else 1000
    records = alone(always, line(0.05), **KINDS[kind]).run(Auto(), num_tokens)
    longest = set(COPY_LENGTHS) - set(LENGTHS) if KINDS[kind]["cheap"] else {LENGTHS[-1]}
    assert set(drafted(records[-20:])) <= longest
    assert seconds(records) < emitted(records) / 4


def test_a_sure_copy_is_drafted_in_long_pieces_until_the_first_sign() -> None:
    """All is right, then nothing: of the rounds after the turn one is long, and soon none is."""
    turn = 3000
    records = alone(lambda position: position < turn, line(0.02), evidence=64).run(Auto(), turn)
    assert max(drafted(records[-20:])) >= 48
    after = alone(lambda position: position < 300, line(0.02), evidence=64).run(Auto(), 400)
    wrong = [r.drafted for r in after if r.drafted and not r.accepted]
    assert sum(length > LENGTHS[-1] for length in wrong) <= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("cost", [line(0.02), line(0.2), line(1.0), line(0.1, step=0.6)])
def test_it_is_never_much_slower_than_plain_decoding(
    kind: str, share: float, cost: Callable[[int], float]
) -> None:
    """5% is the price of finding out, over 1,500 tokens, at any acceptance and any cost."""
    records = alone(at_random(share), cost, **KINDS[kind]).run(Auto(), 1500)
    assert seconds(records) < 1.05 * emitted(records)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
def test_it_comes_near_the_best_fixed_length(share: float, slope: float) -> None:
    """Within 12% of the best of 0 to 14, found without trying them all, over 4,000 tokens."""

    def time(policy: Any) -> float:
        records = alone(at_random(share), line(slope)).run(policy, 4000)
        return seconds(records) / emitted(records)

    best = min(time(Fixed(length)) for length in (0, *LENGTHS))
    assert time(Auto()) < 1.12 * best


@pytest.mark.parametrize("kind", KINDS)
def test_it_wakes_up_when_the_text_becomes_predictable(kind: str) -> None:
    """A look-up that is not taken is scored in the shadow, a paused model retried now and then."""
    turn = 1000
    world = alone(lambda position: position >= turn, line(0.1), **KINDS[kind])
    policy = Auto()
    world.run(policy, turn)
    assert sum(drafted(world.records[-20:])) <= 2  # a retry, now and then
    after = world.run(policy, 400)
    assert min(drafted(after[-5:])) >= LENGTHS[-1]
    assert len(after) < 150


def compiling(seconds: float) -> Callable[[int], float]:
    """Cost where the first round at each width takes so much longer."""
    seen: set[int] = {0}

    def cost(length: int) -> float:
        extra = 0.0 if length in seen else seconds
        seen.add(length)
        return line(0.05)(length) + extra

    return cost


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extra", [3.0, 10.0, 50.0])
def test_kernels_that_compile_at_first_use_put_nothing_off(kind: str, extra: float) -> None:
    """The longest is reached within 60 rounds all the same."""
    records = alone(always, compiling(extra), **KINDS[kind]).run(Auto(), 500)
    assert len(records) < 60


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", range(1, 16))
def test_a_bad_moment_of_the_machine_is_got_over(kind: str, at: int) -> None:
    """One round a hundred times slower, any of the first: drafting pays again within a while."""
    rounds = iter(range(1, 100_000))

    def cost(length: int) -> float:
        return line(0.05)(length) * (100 if next(rounds) == at else 1)

    records = alone(at_random(0.6), cost, **KINDS[kind]).run(Auto(), 1500)
    assert emitted(records[-100:]) > 200


def test_a_look_up_that_does_not_pay_learns_without_spending_a_pass() -> None:
    """Nothing is drafted, and the chance of its drafts is known all the same."""
    world = alone(always, line(5.0))
    policy = Auto()
    world.run(policy, 50)
    before = history(policy).acceptance.chance(3, 0)
    assert not any(drafted(world.run(policy, 200)))
    assert history(policy).acceptance.chance(3, 0) >= before > 0.8


@pytest.mark.parametrize("slope", [0.1, 0.5, 1.0])
def test_a_useless_model_costs_half_a_percent(slope: float) -> None:
    """Of the time, for retries; and at first the budget of a new one, and an uncharged draft."""
    world = alone(never, line(slope), cheap=False, evidence=None)
    policy = Auto()
    records = world.run(policy, 500)
    first = 2 * slope
    assert 0 < seconds(records) - emitted(records) < EXPENSIVE_BUDGET + first + 0.005 * 500
    records = world.run(policy, 5000)
    assert 1.003 < seconds(records) / emitted(records) < 1.005 + 1e-9


@pytest.mark.parametrize("share", [0.8, 0.9])
def test_a_model_that_pays_only_in_long_drafts_is_found(share: float) -> None:
    """One token costs almost two plain rounds, each further one an eighth of one."""
    records = alone(at_random(share), line(0.12, step=0.8), cheap=False, evidence=None).run(
        Auto(), 600
    )
    assert statistics.median(drafted(records[-50:])) >= 3
    assert seconds(records) < 0.9 * emitted(records)


def test_what_a_draft_model_missed_is_not_charged_to_its_drafts() -> None:
    """The first round after plain ones, in which it reads them, says nothing about the others."""
    policy = Auto()
    policy.limit("it", cheap=False)

    def record(num_draft: int, seconds: float) -> None:
        part = "it" if num_draft else ""
        policy.record(RoundRecord(num_draft, 0, 1, num_draft + 1, [1], seconds, part=part))

    for num_draft, cost in [(0, 1.0)] * 3 + [(2, 9.0), (2, 1.5), (2, 1.5), (0, 1.0), (2, 9.0)]:
        record(num_draft, cost)
    costs = history(policy).costs
    assert costs.ratio(2) == 1.5
    assert list(costs.ratios[2]) == [1.5, 1.5]


class _Known(AcceptanceHistory):
    """Chances by position, given."""

    def __init__(self, chances: Sequence[float]) -> None:
        super().__init__()
        self.known = chances

    def chances(
        self,
        evidence: Iterable[Evidence | int],
        tokens: object = None,
        before: object = None,
        first: int = 0,
    ) -> Iterator[float]:
        return (
            self.known[i] if i < len(self.known) else 0.0 for i, _ in enumerate(evidence, first)
        )


class _At(Auto):
    """Auto at a given going rate, with costs and chances given."""

    going_rate: float = 1.0

    @property
    def rate(self) -> float:
        return self.going_rate


def choose(
    chances: Sequence[float], cost: Callable[[int], float], rate: float = 1.0, cheap: bool = True
) -> int:
    policy = _At(measured(cost))
    policy.going_rate = rate
    history(policy).acceptance = _Known(chances)
    limit = policy.limit("it", cheap)
    return policy.cut("it", Draft(list(range(limit)), evidence=[0] * limit)) if cheap else limit


def measured(cost: Callable[[int], float], budget: float = 99.0) -> Tuning:
    """A tuning that knows what "it" costs, and what it may lose."""
    tuning = Tuning()
    learned = tuning.of("it", budget)
    for _ in range(3):
        learned.costs.add(0, 1.0)
    for length in LENGTHS * 2:  # a single round at a width does not count
        learned.costs.add(length, cost(length))
    return tuning


STAIRS = {k: 1.0 if k <= 4 else 2.0 if k <= 9 else 3.0 for k in range(15)}
"""Cost in tiles of 5 rows."""

CASES: dict[str, tuple[Sequence[float], Callable[[int], float], float, int]] = {
    # free drafts: all of them, however unlikely
    "free": ([0.1] * 14, line(0.0), 1.0, 14),
    # a draft token that costs as much as it can bring
    "as dear as plain": ([0.99] * 14, line(1.0), 1.0, 0),
    # sure, then surely wrong: as far as it is sure
    "sure for two": ([1.0, 1.0] + [0.0] * 12, line(0.1), 1.0, 2),
    "sure for six": ([1.0] * 6 + [0.0] * 8, line(0.1), 1.0, 6),
    # 0.5^K >= 0.15 up to K = 2
    "a coin": ([0.5] * 14, line(0.15), 1.0, 2),
    # 0.9^K >= 0.3 up to K = 11, of which 9 is tried: 5.51 - 2.7 against 3.69 - 1.8 at 6
    "likely": ([0.9] * 14, line(0.3), 1.0, 9),
    # the same at twice the rate: 0.9^K >= 0.6 up to K = 4
    "likely, at a higher rate": ([0.9] * 14, line(0.3), 2.0, 4),
    # a step of cost before the first token: 0.5 + 0.25 + ... < 1 cannot pay for 1
    "a dear start": ([0.5] * 14, line(0.0, step=1.0), 1.0, 0),
    # three sure tokens can
    "a dear start, sure": ([1.0] * 3 + [0.0] * 11, line(0.0, step=1.0), 1.0, 3),
    # to the edge of a tile, not beyond: 0.6^5 + ... < 1
    "one tile": ([0.6] * 14, lambda k: STAIRS[k], 1.0, 4),
    # sure tokens fill the third tile
    "all tiles": ([1.0] * 14, lambda k: STAIRS[k], 1.0, 14),
    # nothing is right at first, so that nothing after it counts
    "first wrong": ([0.0] + [1.0] * 13, line(0.01), 1.0, 0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cheap", [True, False])
def test_a_token_is_kept_while_it_brings_more_than_it_costs(case: str, cheap: bool) -> None:
    """The marginal rule, on cases worked out by hand; a model with money to lose drafts a token."""
    chances, cost, rate, expected = CASES[case]
    chosen = choose(chances, cost, rate, cheap)
    assert chosen == expected or (chosen > 0 and not cheap and not expected)


@given(
    st.lists(st.floats(0.01, 0.99), min_size=14, max_size=14),
    st.lists(st.floats(0, 1), min_size=15, max_size=15),
    st.floats(1, 5),
)
def test_the_length_of_the_largest_value_wins(
    chances: list[float], steps: list[float], rate: float
) -> None:
    """Expected tokens less rate x cost, by brute force over the lengths."""

    def cost(length: int) -> float:
        return 1 + sum(steps[:length])

    def value(length: int) -> float:
        expected, reach = 1.0, 1.0
        for chance in chances[:length]:
            reach *= chance
            expected += reach
        return expected - rate * (cost(length) if length else 1.0)

    chosen = choose(chances, cost, rate)
    assert value(chosen) == pytest.approx(max(value(k) for k in (0, *LENGTHS)), abs=1e-9)


def test_the_going_rate_is_what_a_plain_rounds_time_has_lately_brought() -> None:
    """Five tokens for the price of 1.25 make 4; waste makes no rate below plain decoding's 1."""
    policy = Auto()
    assert policy.rate == 1
    policy.limit("it", cheap=True)

    def rounds(drafted: int, accepted: int, time: float) -> float:
        part = "it" if drafted else ""
        for _ in range(200):
            policy.record(
                RoundRecord(drafted, accepted, accepted + 1, drafted + 1, seconds=time, part=part)
            )
        return policy.rate

    assert rounds(0, 0, 1.0) == pytest.approx(1)
    assert rounds(4, 4, 1.25) == pytest.approx(4, rel=0.01)
    assert rounds(4, 0, 1.25) == 1


def test_the_end_of_a_short_draft_may_be_kept() -> None:
    """A length outside the table is right when the drafter had no more to say."""
    policy = Auto(measured(line(0.01)))
    policy.limit("it", True)
    for length in (5, 7, 8):
        assert policy.cut("it", Draft([1] * length, evidence=[20] * length)) == length


def test_weak_evidence_is_cut_where_strong_evidence_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each draft is judged by what speaks for its tokens, whatever they are."""
    monkeypatch.setattr(LookUpAccount, "looks_at_tokens", False)

    def right(position: int) -> bool:
        return position < 400

    policy = Auto()
    for _ in range(10):
        alone(right, line(0.1), evidence=20).run(policy, 80)
        alone(never, line(0.1), evidence=1).run(policy, 80)
    policy.limit("it", True)
    history(policy).acceptance.recent = 0.5
    assert policy.cut("it", Draft([1] * 14, evidence=[20] * 14)) > 4
    assert policy.cut("it", Draft([1] * 14, evidence=[1] * 14)) == 0
    mixed = policy.cut("it", Draft([1] * 14, evidence=[20] * 3 + [1] * 11))
    assert 1 <= mixed <= 4


def test_an_empty_draft_stays_empty() -> None:
    policy = Auto()
    policy.limit("it", True)
    assert policy.cut("it", Draft()) == 0


@pytest.mark.parametrize("tokens", [(1, 2, 3, 4), (99, 98, 97, 96)])
def test_the_length_of_a_drawn_draft_does_not_depend_on_its_tokens(tokens: Sequence[int]) -> None:
    """Law 6: rounds alike but for their tokens lead to the same limits, before anything is drawn.

    The drawn draft is never shown to the policy, so that all it learns is how many were kept.
    """

    def limits(tokens: Sequence[int]) -> list[int]:
        policy = Auto()
        coins = random.Random(3)
        asked = []
        for _ in range(200):
            limit = policy.limit("it", False)
            asked.append(limit)
            accepted = sum(coins.random() < 0.8 for _ in range(limit))
            policy.record(
                RoundRecord(
                    drafted=limit,
                    accepted=accepted,
                    emitted=accepted + 1,
                    fed=limit + 1,
                    tokens=(list(tokens) * 8)[: accepted + 1],
                    seconds=1 + 0.1 * limit,
                    part="it" if limit else "",
                )
            )
        return asked

    expected = limits((5, 6, 7, 8))
    assert max(expected) > 1
    assert limits(tokens) == expected


class _Spy(Fixed):
    """Keeps two of every draft it is shown, and remembers what it was asked and shown."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(4)
        self.events = events

    def limit(self, part: str, cheap: bool) -> int:
        self.events.append("limit")
        return super().limit(part, cheap)

    def cut(self, part: str, draft: Draft) -> int:
        self.events.append("cut drawn" if draft.logprobs is not None else "cut")
        return min(2, len(draft))


@dataclass(frozen=True, eq=False)
class _Telling:
    """Passes a drafter's proposals on, and notes when they are made."""

    drafter: Any
    events: list[str]

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.drafter.begin(prompt, context)
        propose = session.propose
        session.propose = lambda limit: self.events.append("propose") or propose(limit)
        return session


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_the_loop_cuts_point_masses_only_and_asks_for_the_limit_first(temp: float) -> None:
    """Law 6 in the loop: limit, then propose; a drawn draft is verified whole."""
    events: list[str] = []
    model = tiny.build("qwen2")
    drafter = _Telling(sd.ModelDrafter(model), events)
    options: dict[str, Any] = {"draft_length": _Spy(events), "sampler": sd.Sampling(temp=temp)}
    tokens = list(sd.speculate(model, [5, 17, 99], drafter, max_tokens=21, seed=1, **options))
    asked = [e for e in events if e != "cut"]
    assert asked == ["limit", "propose"] * (len(asked) // 2)
    stats = tokens[-1].stats
    assert ("cut" in events) == (temp == 0)
    assert len(stats.drafted_at) == (2 if temp == 0 else 4)
    mx.clear_cache()


def test_two_more_after_a_whole_draft_and_one_less_otherwise() -> None:
    """The schedule of Hugging Face's assisted generation, never below 1."""
    policy = Heuristic()

    def after(drafted: int, accepted: int) -> int:
        policy.record(RoundRecord(drafted, accepted, accepted + 1, drafted + 1))
        assert policy.limit("it", True) == policy.limit("another", False)
        return policy.limit("it", True)

    assert policy.limit("it", True) == 5
    assert [after(5, 5), after(7, 6), after(6, 0)] == [7, 6, 5]
    assert [after(0, 0), after(5, 5)] == [5, 7]
    assert [after(7, 0) for _ in range(9)] == [6, 5, 4, 3, 2, 1, 1, 1, 1]
    assert after(1, 1) == 3
    assert policy.cut("it", Draft([1, 2, 3])) == 3


def test_a_fixed_length_stays_as_it_is() -> None:
    """Whatever happens; 0 is plain decoding."""
    for length in (0, 1, 7):
        policy = make_draft_length(length)
        alone(at_random(0.5), line(0.1)).run(policy, 30)
        assert policy.limit("it", True) == policy.limit("another", False) == length
        assert policy.cut("it", Draft([1] * length)) == length


def test_a_text_begins_at_the_rate_of_the_last_one() -> None:
    """And a few plain rounds say more: what was gained elsewhere is no reason to draft less."""
    tuning = Tuning()
    last = Auto(tuning)
    alone(always, line(0.1)).run(last, 50)
    policy = Auto(tuning)
    assert policy.rate == pytest.approx(last.rate)
    assert policy.rate > 2
    assert Auto(Tuning()).rate == 1
    for _ in range(20):
        policy.record(RoundRecord(0, 0, 1, 1, [1], 1.0))
    assert policy.rate < 1 + 0.3 * (last.rate - 1)


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


@pytest.mark.parametrize("choice", [-1, True, 2.5])
def test_lengths_that_mean_nothing_are_refused(choice: Any) -> None:
    """ValueError that says what was expected."""
    with pytest.raises(ValueError, match=r"expected an int >= 0"):
        make_draft_length(choice)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match="auto, heuristic"):
        make_draft_length("automatic")


@pytest.mark.parametrize(
    ("text", "choice"), [("0", 0), ("4", 4), ("auto", "auto"), ("heuristic", "heuristic")]
)
def test_what_was_typed_is_read(text: str, choice: int | str) -> None:
    """And makes a policy."""
    assert parse_draft_length(text) == choice
    make_draft_length(parse_draft_length(text))


@pytest.mark.parametrize("text", ["", "-1", "2.5", "automatic", "4 5", "True", "Auto"])
def test_what_means_nothing_is_refused_in_one_sentence(text: str) -> None:
    """One parser for the command line, the server and the benchmark."""
    with pytest.raises(ValueError, match=r"^'.*': expected an int >= 0, auto or heuristic$"):
        parse_draft_length(text)


@pytest.mark.parametrize("wrong", [0.0, 0.4, 1.1])
def test_auto_does_not_change_the_text(wrong: float) -> None:
    """Whatever the clock says meanwhile, the text is the target's own."""
    model = tiny.build("qwen2")
    prompt = [5, 17, 99, 3]
    expected = [t.token for t in sd.speculate(model, prompt, max_tokens=60)]
    for tuning in (Tuning(), Tuning(step=0, slope=0), Tuning(step=9, slope=9)):
        drafter = scripted.OracleDrafter(expected, 128, wrong=wrong)
        got = sd.speculate(model, prompt, drafter, max_tokens=60, tuning=tuning)
        assert [t.token for t in got] == expected


def test_parts_of_one_drafter_learn_apart() -> None:
    """A look-up's rounds cost a pass, a model's its drafting too: K alone does not tell."""
    policy = Auto()
    for i in range(60):
        part = ["look-up", "model"][i % 2]
        policy.limit("look-up", True)
        policy.limit("model", False)
        drafted = 0 if i % 6 > 3 else 4
        seconds = 1.0 if not drafted else 1.2 if part == "look-up" else 2.5
        policy.record(
            RoundRecord(
                drafted,
                drafted,
                drafted + 1,
                drafted + 1,
                seconds=seconds,
                part=part if drafted else "",
            )
        )
    ratios = {name: learned.costs.ratio(4) for name, learned in policy.tuning.drafters.items()}
    assert ratios == pytest.approx({"look-up": 1.2, "model": 2.5})


def test_a_models_drafts_are_learned_from_after_a_look_up_that_was_not_taken() -> None:
    """The look-up's draft goes on being scored, and the model's own rounds count all the same."""
    policy = Auto()
    for _ in range(40):
        policy.limit("look-up", True)
        policy.cut("look-up", Draft([WRONG] * 4, evidence=[0] * 4))
        policy.limit("model", False)
        policy.record(RoundRecord(2, 2, 3, 3, tokens=[1, 2, 3], seconds=1.1, part="model"))
    assert policy.tuning.of("model").acceptance.chance(0, 0) > 0.75
    assert next(policy.tuning.of("look-up").acceptance.chances([0], [WRONG], 3)) < 0.2


def test_a_draft_is_cut_for_its_tokens_only_where_they_were_copied() -> None:
    """A look-up's token that was always wrong is left out; a draft model's may be drawn, and stays.

    Whether a position of a drawn draft is verified must not depend on what was drawn there.
    """
    lengths = {}
    for cheap in (True, False):
        policy = Auto(measured(lambda length: 1.0 + 0.3 * length))
        limit = policy.limit("it", cheap)
        learned = history(policy)
        for _ in range(60):
            for token, right in ((7, True), (8, False)):
                learned.acceptance.learn(5, 0, right, token, 1)
        learned.acceptance.recent = 0.5
        evidence = [Evidence(5, confidence=None if cheap else 0.6)] * limit
        lengths[cheap] = [
            policy.cut("it", Draft([token] + [9] * (limit - 1), evidence=evidence))
            for token in (7, 8)
        ]
    assert lengths[True][0] > lengths[True][1] == 0
    assert lengths[False][0] == lengths[False][1] > 0
