"""A draft model costs time to ask: it drafts on account, and never loses more than it may.

Simulated, with the automatic draft length itself and no clock: costs are a table.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from simulated import (
    Part,
    World,
    alone,
    always,
    at_random,
    drafted,
    emitted,
    line,
    never,
    seconds,
)
from specdec_mlx.draft_length.accounts import (
    EXPENSIVE_BUDGET,
    EXPLORATION_SHARE,
    LARGEST_BUDGET,
    LENGTHS,
)
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.types import Draft, Evidence, RoundRecord

PASS = line(0.02)
"""What a pass costs where reading the weights limits it."""


def model(is_right: Callable[[int], bool], token_cost: float) -> Part:
    return Part(is_right, cheap=False, evidence=None, token_cost=token_cost)


def look_up(every: int, run: int = 1) -> Part:
    """Has a draft in the first `run` of `every` tokens, right to the end of those."""
    return Part(lambda i: i % every < run, has_draft=lambda i: i % every < run)


LOOK_UPS = [(n, 1) for n in (2, 3, 4, 5, 6, 8, 10, 12, 15, 20)]
LOOK_UPS += [(20, 4), (40, 8), (60, 10), (100, 20)]
"""How often a look-up has a draft, and for how many tokens."""


def pace(parts: dict[str, Part], num_generations: int, length: int) -> float:
    """Plain rounds a token, over generations that share what was learned."""
    tuning, world = Tuning(), World(PASS, parts)
    for _ in range(num_generations):
        world.run(Auto(tuning), length)
    return seconds(world.records) / emitted(world.records)


@cache
def pace_of_look_up(every: int, run: int, num_generations: int, length: int) -> float:
    return pace({"look-up": look_up(every, run)}, num_generations, length)


@pytest.mark.parametrize(("num_generations", "length"), [(1, 2000), (8, 96)])
@pytest.mark.parametrize("token_cost", [0.15, 0.3])
@pytest.mark.parametrize(("every", "run"), LOOK_UPS)
def test_a_useless_model_behind_a_look_up_costs_less_than_one_percent(
    every: int, run: int, token_cost: float, num_generations: int, length: int
) -> None:
    """However often the look-up drafts between: the model is not asked anew after each."""
    parts = {"look-up": look_up(every, run), "model": model(never, token_cost)}
    both = pace(parts, num_generations, length)
    assert both <= 1.01 * pace_of_look_up(every, run, num_generations, length)
    assert both != pace_of_look_up(every, run, num_generations, length)  # it was tried


@pytest.mark.parametrize("token_cost", [0.15, 0.3])
def test_a_good_model_behind_a_look_up_is_used(token_cost: float) -> None:
    """Where the look-up has nothing, at the pace of the model alone."""
    good = model(at_random(0.8), token_cost)
    together = pace({"look-up": look_up(60, 10), "model": good}, 1, 3000)
    assert together < pace({"model": good}, 1, 3000)
    assert together < 0.8 * pace_of_look_up(60, 10, 1, 3000)


def turning(bad: float, good: float, at: int, seed: int) -> Callable[[int], bool]:
    """Right at one share of the positions up to a place, and at another from there."""
    before, after = at_random(bad, seed), at_random(good, seed + 1)
    return lambda position: before(position) if position < at else after(position)


def tokens_until_back(
    world: World, tuning: Tuning, lengths: Callable[[], int], num_tokens: int
) -> float:
    """Tokens until ten rounds begin of which eight draft; infinite if that does not come."""
    start = world.position
    first = len(world.records)
    while world.position < start + num_tokens:
        world.run(Auto(tuning), lengths())
    records, position = world.records[first:], 0
    for i, record in enumerate(records[:-10]):
        if record.drafted and sum(map(bool, drafted(records[i : i + 10]))) >= 8:
            return position
        position += record.emitted
    return float("inf")


@pytest.mark.parametrize("begins_well", [False, True])
@pytest.mark.parametrize("lengths", [(50, 50), (40, 150)])
@pytest.mark.parametrize(("token_cost", "share"), [(0.15, 0.6), (0.3, 0.7), (0.45, 0.86)])
def test_a_good_model_is_back_soon_after_a_bad_text(
    begins_well: bool, lengths: tuple[int, int], token_cost: float, share: float
) -> None:
    """Within 100 tokens, and then at the best pace, however short the generations are.

    What a paused model waited for belongs to its history; no generation begins to wait anew. A
    model that never paid before may take 400.
    """
    times, late = [], []
    for seed in range(9):
        start = 400 if begins_well else 0
        end = start + 600 + 13 * seed  # of the bad text; anywhere between two retries
        at_first, later = at_random(share, seed), turning(0.0, share, end, seed)
        part = model(_either(at_first, later, start), token_cost)
        tuning, world = Tuning(), World(line(0.0), {"model": part})
        world.run(Auto(tuning), start)
        world.run(Auto(tuning), end - world.position)
        coins = random.Random(seed)
        times.append(tokens_until_back(world, tuning, lambda: coins.randint(*lengths), 1200))  # noqa: B023
        late += world.records[-200:]
    assert max(times) <= (100 if begins_well else 400)
    reach = [share**k for k in range(LENGTHS[-1] + 1)]
    best = min((1 + token_cost * k) / sum(reach[: k + 1]) for k in LENGTHS)
    assert seconds(late) / emitted(late) < 1.04 * best


def _either(
    first: Callable[[int], bool], then: Callable[[int], bool], at: int
) -> Callable[[int], bool]:
    """The one before a place in the text, the other from there."""
    return lambda position: first(position) if position < at else then(position)


@pytest.mark.parametrize(("token_cost", "share"), [(0.15, 0.8), (0.3, 0.7), (0.45, 0.86)])
def test_a_text_that_turns_costs_what_was_earned_and_no_more(
    token_cost: float, share: float
) -> None:
    """However well the model did for a thousand tokens: the most that gains add up to."""
    for seed in range(5):
        world = World(line(0.0), {"model": model(turning(share, 0.0, 1000, seed), token_cost)})
        policy = Auto()
        world.run(policy, 1000)
        after = world.run(policy, 300)
        assert sum(map(bool, drafted(after))) > 3
        assert seconds(after) - emitted(after) < LARGEST_BUDGET + 0.01 * 300


def test_what_was_lost_and_waited_for_is_carried_on_and_saved(tmp_path: Path) -> None:
    """A process for each generation of 40 tokens loses no more than one for all of them."""
    world = World(line(0.0), {"model": model(never, 0.45)})
    tuning = Tuning()
    for _ in range(40):
        world.run(Auto(tuning), 40)
        tuning.save(tmp_path / "tuning.json")
        tuning = Tuning.load(tmp_path / "tuning.json")
    records = world.records
    assert sum(map(bool, drafted(records[800:]))) > 3  # retried all the same
    first = 2 * 0.45  # a draft whose cost is not known yet
    assert seconds(records) - emitted(records) < EXPENSIVE_BUDGET + 0.005 * 1600 + first


def test_a_model_proven_once_is_retried_twice_as_often() -> None:
    """It is likely to pay again when the text turns."""
    retries = {}
    for begin in (never, always):
        world = World(line(0.0), {"model": model(_either(begin, never, 200), 0.3)})
        policy = Auto()
        world.run(policy, 400)
        retries[begin] = sum(map(bool, drafted(world.run(policy, 1000))))
    assert retries[never] == pytest.approx(1000 * EXPLORATION_SHARE / 0.3, abs=1.5)
    assert retries[always] == pytest.approx(2 * retries[never], abs=2)


def test_plain_rounds_that_a_look_up_waits_for_are_not_taken_by_a_model() -> None:
    """The look-up measures its pace anew after many drafts; each plain round taken delays it."""
    parts = {"look-up": look_up(2), "model": model(at_random(0.8), 0.15)}
    world, policy = World(PASS, parts), Auto()
    world.run(policy, 100)
    look_ups = policy.tuning.of("look-up").costs
    while not look_ups.needs_plain:
        world.run(policy, 1)
    assert drafted(world.run(policy, 3)) == [0, 0, 0]
    assert not look_ups.needs_plain


def test_costs_are_known_of_a_model_that_drafts_only_between_look_ups() -> None:
    """A few tokens of others are read in passing; only a pause's worth says nothing of a draft."""
    parts = {"look-up": look_up(4), "model": model(at_random(0.5), 0.3)}
    policy = Auto()
    World(line(0.0), parts).run(policy, 300)
    costs = policy.tuning.of("model").costs
    assert costs.is_measured(1)
    assert costs.ratio(1) == pytest.approx(1.3)


def test_a_cost_that_was_overestimated_is_put_right_by_retries() -> None:
    """A retry is charged what it took: bad moments of the machine do not keep a good model away."""
    tuning = Tuning()
    costs = tuning.of("it", EXPENSIVE_BUDGET).costs
    for length in [0] * 3 + [1, 2] * 7:
        costs.add(length, 99.0 if length else 1.0)
    assert costs.ratio(1) == 3
    world = alone(at_random(0.9), line(0.1), cheap=False, evidence=None)
    late = world.run(Auto(tuning), 1000)[-50:]
    assert costs.ratio(1) == pytest.approx(1.1)
    assert seconds(late) < 0.65 * emitted(late)


def test_a_model_whose_drafts_carry_evidence_pays_for_those_that_are_cut() -> None:
    """At least a token is verified, so that what was asked for is settled; then it is paused."""
    world = World(line(0.0), {"model": Part(never, cheap=False, evidence=1, token_cost=0.3)})
    asked: list[int] = []

    class Counting(Auto):
        def limit(self, part: str, cheap: bool) -> int:
            asked.append(super().limit(part, cheap))
            return asked[-1]

    records = world.run(Counting(), 1000)
    assert sum(map(bool, asked)) == sum(map(bool, drafted(records))) < 60


def test_a_pause_ends_when_the_budget_stands_a_token() -> None:
    """The budget is charged with what a round lost, earns its share a round, and decides."""
    tuning = Tuning()
    learned = tuning.of("it", EXPENSIVE_BUDGET)
    for length in [0] * 3 + list(LENGTHS) * 2:
        learned.costs.add(length, 1 + 0.5 * length)
    for _ in range(300):  # long drafts look as if they paid
        for position in range(LENGTHS[-1]):
            learned.acceptance.learn(0, position, True)
    policy = Auto(tuning)
    assert policy.limit("it", cheap=False) == 4
    policy.record(RoundRecord(3, 0, 1, 4, [1], 2.5, part="it"))
    assert learned.exploration_budget == pytest.approx(2.0 - 1.5 + EXPLORATION_SHARE)
    assert policy.limit("it", cheap=False) == 1
    policy.record(RoundRecord(1, 0, 1, 2, [1], 1.5, part="it"))
    assert learned.exploration_budget == pytest.approx(2 * EXPLORATION_SHARE)
    rounds = 0
    while not policy.limit("it", cheap=False):
        policy.record(RoundRecord(0, 0, 1, 1, [1], 1.0))
        rounds += 1
    assert rounds == pytest.approx(98, abs=1)  # 100 times 0.005 are half of a plain round
    policy.record(RoundRecord(1, 1, 2, 2, [1, 1], 1.5, part="it"))
    assert learned.exploration_budget == pytest.approx(1.0, abs=2 * EXPLORATION_SHARE)


def test_nothing_is_drafted_before_plain_rounds_were_measured() -> None:
    """By no drafter, however sure it is: there is nothing to compare a cost with."""
    for cheap in (True, False):
        policy = Auto()
        asked = []
        for _ in range(4):
            limit = policy.limit("it", cheap)
            draft = Draft([1] * limit, evidence=[64] * limit if cheap else None)
            asked.append(policy.cut("it", draft))
            policy.record(RoundRecord(0, 0, 1, 1, [1], 1.0))
        assert asked[:3] == [0, 0, 0]
        assert asked[3] > 0


def test_trials_of_a_look_up_are_charged() -> None:
    """By what they cost beyond what the draft was worth; its bad luck says nothing of costs."""
    policy = Auto()
    policy.limit("it", True)
    learned = policy.tuning.of("it")
    for _ in range(3):
        policy.record(RoundRecord(0, 0, 1, 1, [1], 1.0))
    draft = Draft([7] * 14, evidence=[Evidence(20, 2, 2)] * 14)
    before = learned.exploration_budget
    kept = policy.cut("it", draft)
    assert kept > 0
    policy.record(RoundRecord(kept, 0, 1, kept + 1, [1], 1.0 + kept, part="it"))
    assert learned.exploration_budget == pytest.approx(before + 0.002)  # one round says nothing yet
    policy.record(RoundRecord(kept, 0, 1, kept + 1, [1], 1.0 + kept, part="it"))
    lost = learned.costs.ratio(kept) - policy._parts["it"].expected
    assert learned.exploration_budget == pytest.approx(before - lost + 2 * 0.002)
    assert 0 < lost < kept


def test_fixtures() -> None:
    """The look-ups of these simulations are right where they draft, and to the end of the run."""
    part = look_up(20, 4)
    assert [part.has_draft(i) for i in range(5)] == [True] * 4 + [False]
    assert list(part.propose(1, 5).tokens) == [1, 2, 3, -1, -1]
    assert statistics.mean(map(at_random(0.5), range(1000))) == pytest.approx(0.5, abs=0.05)
