"""A draft model costs time to ask: it drafts on account, and never loses more than it may.

Simulated, with the automatic draft length itself and no clock: costs are a table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from selection import in_one_test
from simulated import Part, World, at_random, drafted, emitted, line, seconds
from specdec_mlx.draft_length.store import BUDGET, EXPLORATION, Tuning
from specdec_mlx.draft_length.value import Auto

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
    parts = {"look-up": look_up(*look_ups), "model": model(at_random(0.0), token_cost)}
    both = pace(parts, *texts)
    alone, tokens = pace_of_look_up(*look_ups, *texts), math.prod(texts)
    assert both != alone  # it was tried
    assert (both - alone) * tokens <= 1.25 * (BUDGET + EXPLORATION * tokens) + 8 * token_cost


def test_between_look_ups_a_model_drafts_and_its_price_is_known() -> None:
    """The plain round that a look-up waits for, to measure the pace anew, is one, and not taken;
    where it has nothing, a good model drafts at its own pace.
    """
    parts = {"look-up": look_up(2), "model": model(at_random(0.8), 0.15)}
    world, policy = World(PASS, parts), Auto()
    world.run(policy, 300)
    assert policy.tuning.of("model").steps.step == pytest.approx(0.15, abs=0.03)
    while not policy.prices.cost_model.needs_plain:
        world.run(policy, 1)
    assert drafted(world.run(policy, 1)) == [0]
    assert not policy.prices.cost_model.needs_plain
    for token_cost in (0.15, 0.3):
        good = model(at_random(0.8), token_cost)
        together = pace({"look-up": look_up(60, 10), "model": good}, 1, 3000)
        assert together < pace({"model": good}, 1, 3000)
        assert together < 0.8 * pace_of_look_up(60, 10, 1, 3000)


@in_one_test("wrong", [0.0, 1.4])
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
