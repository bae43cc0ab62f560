"""Noise: a pure function of seed, purpose and position, and good enough to draw from.

The statistical tests have fixed seeds. Each raises a false alarm with a chance of 1e-6, were the
seeds chosen afresh.
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import or_
from unittest.mock import patch

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, gumbel_r, kstest

from selection import in_one_test
from specdec_mlx.contracts import DraftContext
from specdec_mlx.sampling import MOST_NUMBERS, GumbelRows, Noise

FALSE_ALARM = 1e-6
COUNT = 4000

seeds = st.integers(-(2**70), 2**70)
purposes = st.sampled_from(["target", "accept", "next", "draft", "draft 0", "draft 1"])
positions = st.integers(0, 2**40)


@given(seed=seeds, purpose=purposes, position=positions)
def test_noise_is_a_function_of_its_arguments(seed, purpose, position):
    """Equal arguments give equal numbers, whatever was drawn before, from here or elsewhere."""
    first = Noise(seed).uniform(purpose, position, 4)
    gumbel = Noise(seed).gumbel(purpose, position, 5)
    mx.random.normal((3,))
    Noise(seed).uniform(purpose, position + 1)
    assert mx.array_equal(Noise(seed).uniform(purpose, position, 4), first)
    assert mx.array_equal(Noise(seed).gumbel(purpose, position, 5), gumbel)


def test_global_state_is_left_alone_and_governs_unseeded_noise_alone():
    """`mx.random.seed` makes generations without a seed repeatable; two in a row differ."""
    mx.random.seed(0)
    before = mx.random.state[0].tolist()
    mx.eval(Noise(1).uniform("accept", 0, 3), Noise(1).gumbels([("target", 0)], 9))
    assert mx.random.state[0].tolist() == before
    first, second = Noise.from_global_state(), Noise.from_global_state()
    mx.random.seed(0)
    assert Noise.from_global_state() == first != second
    seeds = [Noise.from_global_state().seed for _ in range(200)]
    assert len(set(seeds)) == 200
    assert reduce(or_, seeds) == 2**72 - 1, "some bits of the seed are never drawn"


def test_no_two_arguments_share_a_key():
    """18,000 neighbouring (seed, purpose, position) have as many keys.

    So a token drafted again at a place, in a later round, is drawn from other numbers.
    """
    purposes = ["target", "next", "accept", "draft", "draft 0", "draft 1"]
    places = product(range(-5, 5), purposes, range(300))
    keys = {tuple(Noise(seed).key(*place).tolist()) for seed, *place in places}
    assert len(keys) == 18_000


steps = st.lists(st.tuples(st.integers(-3, 9), st.integers(1, 7)), min_size=1, max_size=12)


@given(steps=steps, vocab=st.sampled_from([1, 11, 257]))
def test_rows_drawn_ahead_are_the_positions_own(steps, vocab):
    """However many were asked for before, and if it goes back: `Noise.gumbel` of each position."""
    noise, start = Noise(4), 3
    rows = GumbelRows(noise, "target")
    for step, n in steps:
        start = max(0, start + step)
        own = [noise.gumbel("target", start + i, vocab) for i in range(n)]
        assert mx.array_equal(rows.at(start, n, vocab), mx.stack(own))


@in_one_test(
    ("lengths", "vocab", "drawn"),
    [
        ([1] * 95, 257, [1, 2, 4, 8, 16, 32, 32]),
        ([5, 5, 5], 257, [5, 10]),
        ([40, 1], 257, [40, 32]),
        ([3, 3], MOST_NUMBERS, [3, 3]),
        ([1] * 7, MOST_NUMBERS // 3, [1, 2, 3, 3]),
    ],
)
def test_noise_is_drawn_for_many_positions_at_a_time(lengths, vocab, drawn):
    """Twice as many each time, 32 at most, and the first time none that was not asked for."""
    noise = Noise(0)
    rows, start = GumbelRows(noise, "target"), 0
    with patch.object(Noise, "gumbels", side_effect=noise.gumbels) as gumbels:
        for n in lengths:
            rows.at(start, n, vocab)
            start += n
    seen = [len(call.args[0]) for call in gumbels.call_args_list]
    assert seen == drawn


def uniforms(seed: int, purpose: str, start: int = 0) -> np.ndarray:
    """The first number of each of COUNT positions, and of those alone."""
    numbers = [Noise(seed).uniform(purpose, start + i) for i in range(COUNT)]
    return np.array(mx.concatenate(numbers), np.float64)


def test_numbers_have_the_law_they_should():
    """Over positions, and over the numbers of one position: Kolmogorov and Smirnov's test."""
    noise = Noise(0)
    for numbers in (uniforms(0, "accept"), np.array(noise.uniform("accept", 0, COUNT))):
        assert kstest(numbers, "uniform").pvalue > FALSE_ALARM
        assert np.all((numbers >= 0) & (numbers < 1))
    over_positions = np.array(noise.gumbels([("target", i) for i in range(COUNT)], 2))[:, 1]
    for numbers in (np.array(noise.gumbel("target", 0, COUNT)), over_positions):
        assert kstest(numbers, gumbel_r.cdf).pvalue > FALSE_ALARM


@in_one_test("other", [(0, "accept", 1), (0, "next", 0)])
def test_neighbours_are_independent(other):
    """Other purposes and next positions: chi-square on an 8 by 8 table of 4,000 pairs."""
    pair = uniforms(0, "accept", 0), uniforms(*other)
    table, *_ = np.histogram2d(*pair, bins=8, range=[[0, 1]] * 2)
    assert chi2_contingency(table).pvalue > FALSE_ALARM


@in_one_test("coupled", [False, True])
@in_one_test("n", [1, 4])
def test_a_whole_drafts_noise_is_that_of_its_tokens(coupled, n):
    """Coupled it is the target's own, by absolute position, whatever round the draft is of."""
    context = DraftContext(noise=Noise(0), vocab_size=6, coupled=coupled)
    rows = mx.stack([context.draft_gumbel(3, index) for index in range(n)])
    assert mx.array_equal(context.draft_gumbels(3, n), rows)
    own = mx.stack([Noise(0).gumbel("target", 3 + index, 6) for index in range(n)])
    assert mx.array_equal(rows, own) == coupled
