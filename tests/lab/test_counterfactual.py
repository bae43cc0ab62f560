"""What every rule would have accepted: unbiased by enumeration, and it changes nothing."""

from __future__ import annotations

import json
from functools import cache, partial
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import specdec_mlx as sd
import strategies
import tiny
from exact import (
    COIN_RULES,
    NUM_STATES,
    ByCoupling,
    ByMatch,
    ByRule,
    Copied,
    Deciding,
    Drawn,
    Rounds,
    Source,
    coupled_joint,
    to_mlx,
    up_to,
)
from lossless import noisy_copy
from selection import cases, in_one_test
from specdec_mlx.lab.counterfactual import (
    BY_ROUND,
    BY_TOKEN,
    COLUMNS,
    Counterfactual,
    chances,
    coupled_probs,
    kept_by_token,
)

EXACT = 1e-12
COUNT = len(BY_TOKEN)


# The numbers --------------------------------------------------------------------------------------


@given(st.integers(1, 6).flatmap(strategies.law_pairs))
def test_coupled_by_sorting_is_the_formula(pair):
    """Two running sums give what the definition gives for each token; float32 on MLX too."""
    p, q = pair
    expected = np.diag(coupled_joint(p, q))
    np.testing.assert_allclose(coupled_probs(p, q), expected, atol=EXACT)
    np.testing.assert_allclose(np.array(coupled_probs(to_mlx(p), to_mlx(q))), expected, atol=2e-6)


@given(st.integers(1, 5).flatmap(strategies.law_pairs))
def test_a_positions_chance_is_the_mean_over_its_tokens(pair):
    """Chance at a position = sum over x of q(x) times the chance to accept that very x."""
    p, q = pair
    mean = np.zeros(COUNT)
    for token in np.flatnonzero(q):
        row = chances(np.stack([p, p]), np.array([token]), q[None])[0]
        mean += q[token] * row[COUNT : 2 * COUNT]
    np.testing.assert_allclose(mean, row[:COUNT], atol=EXACT)
    expected = [np.minimum(p, q).sum(), np.trace(coupled_joint(p, q)), p @ q, p[np.argmax(q)]]
    np.testing.assert_allclose(row[:COUNT], expected, atol=EXACT)


def likeliest(draft: Source, num_draft: int) -> Copied:
    """The draft's likeliest tokens in each state, K of them."""
    copies = []
    for state in range(NUM_STATES):
        tokens: tuple[int, ...] = ()
        for _ in range(num_draft):
            tokens += (int(np.argmax(draft.after(state, tokens))),)
        copies.append(tokens)
    return Copied(copies, draft.vocab_size)


@given(shape=strategies.small_shapes, data=st.data())
@settings(max_examples=30)
def test_estimates_of_a_round_are_unbiased(shape, data):
    """Mean over all drafts, of each rule's estimate = what that rule keeps, by enumeration."""
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    drafting = Drawn(draft, up_to(num_draft))
    mean = np.zeros(len(BY_ROUND))
    for weight, tokens, laws in drafting.drafts(0):
        table = chances(target.along(0, tokens), np.array(tokens), laws)
        mean += weight * np.array([table[:, -1].sum(), *kept_by_token(table)])
    ways: list[Deciding] = [ByRule(COIN_RULES["block"]), ByRule(COIN_RULES["rejection"])]
    ways += [ByCoupling(), ByMatch()]
    rounds = [Rounds(target, drafting, way) for way in ways]
    rounds.append(Rounds(target, likeliest(draft, num_draft), ByMatch()))
    expected = [each.expected_accepted() for each in rounds]
    np.testing.assert_allclose(mean, expected, atol=1e-10)


@given(strategies.blocks())
def test_rules_are_in_order_draft_by_draft_and_alike_for_point_masses(block):
    """Block verification keeps at least what rejection keeps; for a one-hot q all keep alike."""
    table = chances(*block)
    assert table[:, -1].sum() >= kept_by_token(table)[0] - EXACT
    target_probs, tokens, _ = block
    hits = (np.arange(target_probs.shape[-1]) == tokens[:, None]).astype(float)
    table = chances(target_probs, tokens, hits)
    own = np.take_along_axis(target_probs[:-1], tokens[:, None], axis=-1)
    np.testing.assert_allclose(table[:, :-1], np.tile(own, 2 * COUNT), atol=EXACT)
    np.testing.assert_allclose(kept_by_token(table), table[:, -1].sum(), atol=EXACT)


@given(strategies.blocks())
def test_mlx_agrees_with_numpy(block):
    """One body of code; float32 rounds, and ratios of tiny chances magnify that."""
    table = np.array(chances(*(to_mlx(x) for x in block)))
    own_q = np.take_along_axis(block[2], block[1][:, None], axis=-1)
    sure = (own_q > 1e-3) & (np.arange(COLUMNS) != COLUMNS - 1)
    nearly = np.sum(block[2] > block[2].max(axis=-1, keepdims=True) - 1e-6, axis=-1) > 1
    sure[np.ix_(nearly, [3, 7])] = False  # which of them is the likeliest
    np.testing.assert_allclose(table[sure], chances(*block)[sure], atol=1e-3)


def test_an_account_by_hand():
    """Two rounds of two tokens; what was not reached is not in its position's mean."""
    account = Counterfactual()
    assert account.as_dict()["observed"] is None
    tables = [np.random.default_rng(seed).random((2, COLUMNS)) for seed in range(2)]
    for table, accepted in zip(tables, (0, 2), strict=True):
        account.record(table, accepted)
    assert (account.rounds, account.observed.mean) == (2, 1.0)
    kept = np.mean([[table[:, -1].sum(), *kept_by_token(table)] for table in tables], axis=0)
    assert [e.mean for e in account.accepted_per_round.values()] == pytest.approx(kept.tolist())
    one, two = account.positions
    assert (one.reached, two.reached) == (2, 1)
    assert (one.observed.mean, two.observed.mean) == (0.5, 1.0)
    column = BY_TOKEN.index("match")
    first = [table[0, column] for table in tables]
    assert two.expected["match"].mean == tables[1][1, column]
    spread = norm.ppf(0.975) * np.std(first, ddof=1) / np.sqrt(2)
    assert one.expected["match"].high == pytest.approx(np.mean(first) + spread)


# In the loop --------------------------------------------------------------------------------------


target = cache(partial(tiny.build, "llama"))
draft = cache(partial(noisy_copy, "llama", 0.4))


def run(
    account: Counterfactual | None, drafter: str = "model", **options: Any
) -> tuple[list[int], Any]:
    drafters = {
        "model": sd.ModelDrafter(draft()),
        "sharper model": sd.ModelDrafter(draft(), draft_temp=0.6),
        "n-gram": sd.NGramDrafter(min_order=1),
    }
    how: Any = {
        "sampler": sd.Sampling(temp=1.0),
        "seed": 1,
        "num_draft_tokens": 3,
        "max_tokens": 40,
    }
    how |= options
    if account is not None:
        how["rule"] = account.counting(how.get("rule", "auto"), is_seeded=True)
    items = list(sd.speculate(target(), [3, 1, 2], drafters[drafter], **how))
    return [item.token for item in items], items[-1].stats


@pytest.mark.full
@in_one_test("drafter", ["model", "n-gram"])
@in_one_test("rule", ["auto", "coupled", "lenient"])
def test_the_text_stays_the_same(drafter, rule):
    """Token by token, as do all counts."""
    account = Counterfactual()
    text, stats = run(account, drafter, rule=rule, max_tokens=20)
    plain, others = run(None, drafter, rule=rule, max_tokens=20)
    assert text == plain
    assert stats.rounds == others.rounds
    json.dumps(account.as_dict())
    assert account.observed.mean == pytest.approx(stats.accepted / account.rounds)
    for i, position in enumerate(account.positions):
        assert position.reached == sum(d > i and a >= i for d, a in stats.rounds)
        assert position.observed.mean == stats.accepted_at[i] / position.reached


def test_it_costs_no_synchronisation(monkeypatch):
    """What it needs is read with the round's other numbers: one wait a round."""
    waits = Mock(side_effect=mx.eval)
    monkeypatch.setattr(mx, "eval", waits)
    others = []  # waits besides those of rounds
    for account in (None, None, Counterfactual()):  # the first time, the model is measured
        _, stats = run(account, sampler=sd.Sampling(temp=0.8, top_p=0.9))
        others.append(waits.call_count - stats.target_passes)
        waits.reset_mock()
    assert others[1] == others[2]
    with pytest.raises(ValueError, match=r"with a counterfactual account.* needs"):
        run(Counterfactual(), sampler=lambda x: mx.argmax(x, axis=-1))


AS_EXPECTED = [("rejection", "sharper model"), ("coupled", "model")]


@pytest.mark.parametrize(("rule", "drafter"), cases(AS_EXPECTED, AS_EXPECTED[0]))
def test_what_was_observed_is_what_was_expected(rule, drafter):
    """At the first position and by round: within 4 standard errors on 200 tokens, K = 2."""
    account = Counterfactual()
    run(account, drafter, rule=rule, max_tokens=200, num_draft_tokens=2)
    first = account.positions[0]
    error = np.sqrt(first.observed.mean * (1 - first.observed.mean) / first.reached)
    assert abs(first.observed.mean - first.expected[rule].mean) < 4 * error
    expected = account.accepted_per_round
    width = sum(e.high - e.mean for e in (account.observed, expected[rule]))
    assert abs(account.observed.mean - expected[rule].mean) < 2 * width
    assert expected["rejection"] > expected["coupled"] > expected["match"]
