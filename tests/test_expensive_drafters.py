"""A draft model costs time to ask: it drafts on account, and never loses more than it may.

Simulated, with the automatic draft length itself and no clock: costs are a table.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import Part, World, always, at_random, drafted, emitted, line, never, seconds
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.parts import LENGTHS, LONGEST
from specdec_mlx.draft_length.store import BUDGET, EXPLORATION, Tuning

PASS = line(0.02)  # what a pass costs where reading the weights limits it


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


@given(
    st.sampled_from(LOOK_UPS), st.floats(0.05, 0.6), st.sampled_from([(1, 2000), (8, 96), (20, 40)])
)
@settings(max_examples=25, deadline=None)
def test_a_useless_model_behind_a_look_up_costs_no_more_than_its_account(
    look_ups: tuple[int, int], token_cost: float, texts: tuple[int, int]
) -> None:
    """However often the look-up drafts between: the model is not asked anew after each, nor in
    each text.
    """
    parts = {"look-up": look_up(*look_ups), "model": model(never, token_cost)}
    both = pace(parts, *texts)
    alone, tokens = pace_of_look_up(*look_ups, *texts), math.prod(texts)
    assert both != alone  # it was tried
    assert (both - alone) * tokens <= 1.25 * (BUDGET + EXPLORATION * tokens) + 8 * token_cost


@pytest.mark.parametrize("token_cost", [0.15, 0.3])
def test_a_good_model_behind_a_look_up_is_used(token_cost: float) -> None:
    """Where the look-up has nothing, at the pace of the model alone."""
    good = model(at_random(0.8), token_cost)
    together = pace({"look-up": look_up(60, 10), "model": good}, 1, 3000)
    assert together < pace({"model": good}, 1, 3000)
    assert together < 0.8 * pace_of_look_up(60, 10, 1, 3000)


def in_turn(seed: int, *pieces: tuple[float, int]) -> Callable[[int], bool]:
    """Right at one share of the positions up to a place, at another up to the next, and so on."""
    tables = [(at_random(share, seed + i), end) for i, (share, end) in enumerate(pieces)]
    return lambda position: next(right for right, end in tables if position < end)(position)


FOREVER = 10**9


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
    """Within 300 tokens, and then at the best pace, however short the generations are."""
    times, late = [], []
    for seed in range(9):
        start = 400 if begins_well else 0
        end = start + 600 + 13 * seed  # of the bad text; anywhere between two retries
        shares = in_turn(seed, (share, start), (0.0, end), (share, FOREVER))
        part = model(shares, token_cost)
        tuning, world = Tuning(), World(line(0.0), {"model": part})
        world.run(Auto(tuning), start)
        world.run(Auto(tuning), end - world.position)
        coins = random.Random(seed)
        times.append(tokens_until_back(world, tuning, lambda: coins.randint(*lengths), 1200))  # noqa: B023
        late += world.records[-200:]
    assert max(times) <= (300 if begins_well else 400)
    reach = [share**k for k in range(LONGEST + 1)]
    best = min((1 + token_cost * k) / sum(reach[: k + 1]) for k in LENGTHS if k <= LONGEST)
    assert seconds(late) / emitted(late) < 1.04 * best


@pytest.mark.parametrize(("token_cost", "share"), [(0.15, 0.8), (0.3, 0.7), (0.45, 0.86)])
def test_a_text_that_turns_costs_what_was_earned_and_no_more(
    token_cost: float, share: float
) -> None:
    """However well the model did for a thousand tokens: the most that gains add up to, and what the
    last round lost beyond what was expected.
    """
    for seed in range(5):
        shares = in_turn(seed, (share, 1000), (0.0, FOREVER))
        world = World(line(0.0), {"model": model(shares, token_cost)})
        policy = Auto()
        world.run(policy, 1000)
        after = world.run(policy, 300)
        assert sum(map(bool, drafted(after))) > 1
        assert seconds(after) - emitted(after) < 2 * BUDGET + EXPLORATION * 300 + 2


def test_what_was_lost_is_carried_on() -> None:
    """Forty texts of 40 tokens lose no more than one that is as long."""
    world = World(line(0.0), {"model": model(never, 0.45)})
    tuning = Tuning()
    for _ in range(40):
        world.run(Auto(tuning), 40)
    records = world.records
    assert sum(map(bool, drafted(records[800:]))) > 3  # retried all the same
    lost = seconds(records) - emitted(records)
    assert lost < BUDGET + EXPLORATION * 1600 + 8 * 0.45


def test_plain_rounds_that_a_look_up_waits_for_are_not_taken_by_a_model() -> None:
    """The pace is measured anew after many drafts; each plain round taken delays it."""
    parts = {"look-up": look_up(2), "model": model(at_random(0.8), 0.15)}
    world, policy = World(PASS, parts), Auto()
    world.run(policy, 100)
    while not policy.prices.stairs.needs_plain:
        world.run(policy, 1)
    assert drafted(world.run(policy, 3)) == [0, 0, 0]
    assert not policy.prices.stairs.needs_plain


def test_prices_are_known_of_a_model_that_drafts_only_between_look_ups() -> None:
    """A few tokens of others are read in passing; only a pause's worth says nothing of a draft."""
    parts = {"look-up": look_up(4), "model": model(at_random(0.5), 0.3)}
    policy = Auto()
    World(line(0.0), parts).run(policy, 300)
    assert policy.tuning.of("model").steps.step == pytest.approx(0.3, abs=0.03)


@pytest.mark.parametrize("wrong", [0.0, 1.4])
def test_a_price_that_was_wrong_is_put_right(wrong: float) -> None:
    """What the machine's bad moments said of a good model, or too low a guess of a useless one:
    within a dozen texts.
    """
    for share in (0.9, 0.0):
        tuning = Tuning()
        tuning.of("it").steps.first.extend([wrong] * 7)
        world = World(line(0.05), {"it": model(at_random(share), 0.1)})
        records = [record for _ in range(20) for record in world.run(Auto(tuning), 100)]
        if share or not wrong:  # of a useless one that looks too expensive nothing need be known
            assert tuning.of("it").steps.step == pytest.approx(0.1, abs=0.051)
        if share:
            assert seconds(records[-50:]) < 0.65 * emitted(records[-50:])
        else:
            assert seconds(records) - emitted(records) <= 2 * (BUDGET + EXPLORATION * 2000)


def test_nothing_is_drafted_before_plain_rounds_were_measured() -> None:
    """By no drafter, however sure it is: there is nothing to compare a cost with."""
    for cheap in (True, False):
        part = Part(always, cheap, evidence=64 if cheap else None)
        found = drafted(World(PASS, {"it": part}).run(Auto(), 30))
        assert found[:3] == [0, 0, 0]
        assert found[3] > 0
