"""Rules that change the target's law: what still holds, and that nobody gets them unasked.

By enumeration in float64, as in test_acceptance; then in the loop.
"""

from __future__ import annotations

import argparse
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

import specdec_mlx as sd
import strategies
import tiny
from exact import (
    COIN_RULES,
    ByRule,
    Copied,
    Drawn,
    Rounds,
    continued,
    longest_joint,
    up_to,
)
from lossless import noisy_copy
from selection import in_one_test
from specdec_mlx.checks.one_step import ends
from specdec_mlx.checks.subject import total_variation
from specdec_mlx.mlx_lm_plugin.flags import add_arguments
from specdec_mlx.rules import Lenient, Typical
from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.rules.registry import make_rule

EXACT = 1e-12

lenient_rules = st.sampled_from([1.0, 0.8, 0.5, 0.1, 1e-3]).map(lambda x: Lenient(lenience=x))
typical_rules = st.sampled_from([(0.09, 0.3), (0.0, 0.5), (0.9, 0.99), (0.5, 0.0), (0.3, 0.6)]).map(
    lambda x: Typical(*x)
)


def conditionals(joint: np.ndarray) -> list[np.ndarray]:
    """Law of each token given those before it, from the joint law [V, ..., V]; 0/0 is 0."""
    laws = []
    for size in range(1, joint.ndim + 1):
        begun = joint.sum(axis=tuple(range(size, joint.ndim)))
        before = begun.sum(axis=-1, keepdims=True)
        laws.append(begun / np.where(before > 0, before, 1))
    return laws


def drafted(data: st.DataObject, shape: tuple[int, int], draft) -> Drawn | Copied:
    """Drawn at random, or point masses."""
    vocab_size, num_draft = shape
    if data.draw(st.booleans()):
        return Drawn(draft, up_to(num_draft))
    return Copied(data.draw(strategies.copies(vocab_size, num_draft)), vocab_size)


@given(shape=strategies.small_shapes, rule=lenient_rules | typical_rules, data=st.data())
def test_no_token_comes_more_often_than_the_rule_allows(shape, rule, data):
    """Given any text before it, after two rounds of drafts.

    Lenient: at most p(x) / l. Typical: at most p(x) below the threshold.
    """
    target, draft = data.draw(strategies.source_pairs(shape[0]))
    length = longest_joint(shape[0], 2, shape[1])
    joint = Rounds(target, drafted(data, shape, draft), ByRule(rule)).joint(2, length)
    own = conditionals(continued(target, {(): 1.0}, length))
    for seen, law in zip(conditionals(joint), own, strict=True):
        reached = law.sum(axis=-1) > 0  # a text that p excludes is never written, nor continued
        if isinstance(rule, Lenient):
            most = law / rule.lenience
        else:
            most = np.where(law <= rule.threshold(law)[..., None], law, 1)
        assert np.all(seen[reached] <= most[reached] + EXACT)
        assert np.all(seen[~reached] == 0)


@given(pair=st.integers(1, 5).flatmap(strategies.law_pairs), rule=lenient_rules)
def test_one_lenient_token_has_the_stated_law(pair, rule):
    """At K = 1 sum min(p/l, q) is kept; nothing that q does not favour comes above p; distance."""
    p, q = pair
    law, kept = one_token(rule, p, q)
    capped = np.minimum(p / rule.lenience, q)
    assert kept == pytest.approx(capped.sum(), abs=EXACT)
    assert np.all(law <= np.where(q <= p, p, capped) + EXACT)
    distance = np.where(q > p, capped - p, 0).sum()
    assert total_variation(law, p) == pytest.approx(distance, abs=EXACT)


def one_token(rule: CoinRule, p: np.ndarray, q: np.ndarray) -> tuple[np.ndarray, float]:
    """Law [V] of the first token of a round with one draft token, and the chance to keep that."""
    law, kept = np.zeros_like(p), 0.0
    for token in np.flatnonzero(q):
        for n, chance, after in ends(rule, np.stack([p, p]), (token,), q[None]):
            law += q[token] * chance * (after if n == 0 else np.eye(len(p))[token])
            kept += q[token] * chance * n
    return law, kept


@given(block=strategies.blocks())
def test_without_lenience_it_is_rejection(block):
    """l = 1: the same chances and the same laws, bit for bit."""
    exact, lenient = COIN_RULES["rejection"], Lenient(lenience=1.0)
    p, x, q = block
    assert np.array_equal(lenient.accept_probs(*block), exact.accept_probs(*block))
    for n in range(len(block[1]) + 1):
        assert np.array_equal(lenient.next_probs(p, x, q, n), exact.next_probs(p, x, q, n))
    for laws in (q, point_mass(x, p)):  # and more of it accepts more
        chances = [Lenient(lenience).accept_probs(p, x, laws) for lenience in (1.0, 0.5, 0.2)]
        assert np.all(np.diff(chances, axis=0) >= 0)


@given(pair=st.integers(1, 5).flatmap(strategies.law_pairs), rule=typical_rules)
def test_one_typical_token_has_the_stated_law(pair, rule):
    """A draft token is kept iff p > min(epsilon, delta exp(-H)); else a token of p follows."""
    p, q = pair
    entropy = -sum(x * np.log(x) for x in p if x > 0)
    threshold = min(rule.epsilon, rule.delta * np.exp(-entropy))
    assert rule.threshold(p) == pytest.approx(threshold, abs=EXACT)
    typical = p > rule.threshold(p)
    law, kept = one_token(rule, p, q)
    assert kept == pytest.approx(q[typical].sum(), abs=EXACT)
    np.testing.assert_allclose(law, np.where(typical, q, 0) + (1 - kept) * p, atol=EXACT)
    assert np.all(law[~typical] <= p[~typical] + EXACT)
    assert np.all(law[typical] * threshold <= p[typical] + EXACT)
    assert typical[np.argmax(p)]


@in_one_test("library", [np, mx])
def test_near_matches_by_hand(library: Any) -> None:
    """p(x) >= l max p of its own row; what p excludes never is one."""
    probs = library.array([[0.5, 0.25, 0.2, 0.05], [0.1, 0.6, 0.3, 0.0], [0.2, 0.2, 0.6, 0.0]])
    for lenience, tokens, kept in (
        (0.49, [1, 2], [True, True]),
        (0.51, [1, 1], [False, True]),
        (1.0, [0, 1], [True, True]),
        (1e-9, [3, 3], [True, False]),
    ):
        near = Lenient(lenience).nearly_matches(library.log(probs), library.array(tokens))
        assert np.array(near).tolist() == kept


def test_each_position_has_a_threshold_of_its_own():
    """A flat law has a low one, a sharp law a high one: 0.3 of 1/4, and 0.09."""
    flat, sharp = np.full(4, 0.25), np.array([0.88, 0.08, 0.02, 0.02])
    tokens = np.array([1, 1])
    for laws, kept in (([flat, sharp, flat], [1, 0]), ([sharp, flat, flat], [0, 1])):
        chances = Typical().accept_probs(np.array(laws), tokens, np.full((2, 4), 0.25))
        assert chances.tolist() == kept


@in_one_test(
    ("spec", "rule"),
    [
        ("lenient", Lenient(lenience=0.5)),
        ("lenient:lenience=0.25", Lenient(lenience=0.25)),
        ("typical", Typical(epsilon=0.09, delta=0.3)),
        ("typical:delta=0.5,epsilon=0.2", Typical(epsilon=0.2, delta=0.5)),
        ("lenient:lenience=0", r"\(0, 1\]"),
        ("lenient:lenience=1.5", r"\(0, 1\]"),
        ("lenient:lenience=much", "lenience"),
        ("lenient:leniency=0.5", "leniency"),
        ("typical:epsilon=1", r"Typical\(epsilon=1.0\)"),
        ("typical:delta=-0.1", r"Typical\(delta=-0.1\)"),
        ("typical:delta", "key=value"),
    ],
)
def test_options_stand_behind_the_name(spec, rule, capsys):
    """In Python and on the command line; what gives no guarantee is refused, there by status 2."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    if isinstance(rule, CoinRule):
        assert make_rule(spec) == rule
        assert parser.parse_args(["--rule", spec]).rule == spec
        return
    with pytest.raises(ValueError, match=rule):
        make_rule(spec)
    with pytest.raises(SystemExit):
        parser.parse_args(["--rule", spec])
    assert "--rule" in capsys.readouterr().err


# In the loop --------------------------------------------------------------------------------------

PROMPT = [3, 1, 2]
NUM_TOKENS = 60


target = cache(partial(tiny.build, "qwen2"))
draft = cache(partial(noisy_copy, "qwen2", 0.2))


def run(rule, sampling=None, **options):
    """Tokens of a generation with the noisy copy as the drafter, and its stats."""
    options = {"seed": 3, "draft_length": 3, "max_tokens": NUM_TOKENS} | options
    drafter = options.pop("drafter", sd.ModelDrafter(draft()))
    tokens = list(sd.speculate(target(), PROMPT, drafter, sampler=sampling, rule=rule, **options))
    return [t.token for t in tokens], tokens[-1].stats


def test_a_lenient_greedy_text_has_no_unlikely_token():
    """Each token is at least l times as likely as the likeliest there; more is accepted.

    At l = 1 that is the plain text, and a tiny l keeps every draft token.
    """
    plain, strict = run("auto")
    text, stats = run("lenient:lenience=0.6")
    logits = target()(mx.array([[*PROMPT, *text]]), cache=make_prompt_cache(target()))[0]
    probs = mx.softmax(logits[len(PROMPT) - 1 : -1], axis=-1)
    own = mx.take_along_axis(probs, mx.array(text)[:, None], axis=-1)[:, 0]
    assert mx.all(own >= (0.6 - 1e-5) * probs.max(axis=-1)).item()
    assert text != plain
    assert strict.accepted_share < min(stats.accepted_share, 0.95)
    assert run("lenient:lenience=1.0")[0] == plain
    assert run("lenient:lenience=1e-30")[1].acceptance_rate == 1.0
    assert run("typical")[0] == run("auto", drafter=None)[0] == plain  # a one-hot: exact match


def test_auto_takes_a_lossless_rule(monkeypatch):
    """Greedy, drawn or point mass, nothing lossy is computed unless it is asked for by name."""
    unasked = Mock(side_effect=AssertionError("a lossy rule was used"))
    for kind, name in product((Lenient, Typical), ("accept_probs", "nearly_matches")):
        monkeypatch.setattr(kind, name, unasked, raising=False)
    drafters = [sd.ModelDrafter(draft()), sd.PromptLookupDrafter(min_ngram=1)]
    for sampling, drafter in product([None, sd.Sampling(temp=1.0)], drafters):
        run("auto", sampling, drafter=drafter, max_tokens=20)
    for rule in ("lenient", "typical"):
        with pytest.raises(AssertionError, match="lossy"):
            run(rule, sd.Sampling(temp=1.0))
    with pytest.raises(ValueError, match="needs the target's distribution"):
        run("lenient", lambda x: mx.argmax(x, axis=-1))
