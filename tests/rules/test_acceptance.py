"""Acceptance rules: their functions one by one, and the exact law of whole rounds.

Of those that change the target's law: what still holds, and that nobody gets them unasked.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

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
    Drafting,
    Drawn,
    Given,
    Rounds,
    Source,
    by_state,
    continued,
    coupled_joint,
    decide,
    longest_joint,
    to_mlx,
    up_to,
)
from lossless import noisy_copy
from selection import in_one_test
from specdec_mlx.contracts import Agreement, Draft, Verdict, needs_distribution, shares_noise
from specdec_mlx.lab.papers.lossy import LOSSY, Lenient, Typical
from specdec_mlx.lab.proof.enumeration import sources, total_variation
from specdec_mlx.mlx_lm_plugin.flags import add_arguments, check_values
from specdec_mlx.rules import (
    RULES,
    CoinRule,
    Rejection,
    acceptance_probability,
    make_rule,
    point_mass,
    residual,
    rule_names,
    running_weights,
)
from specdec_mlx.sampling import Noise

EXACT = 1e-12
FLOAT32 = 2e-6
AT_ONE = sd.Sampling(temp=1.0)

EVERY_WAY: list[Deciding] = [ByMatch(), ByCoupling(), *map(ByRule, COIN_RULES.values())]
"""All that leave the target's law alone."""

every_way = pytest.mark.parametrize("deciding", EVERY_WAY, ids=str)
every_rule = pytest.mark.parametrize("name", list(COIN_RULES))


# The functions ------------------------------------------------------------------------------------


@in_one_test("array", [np.array, mx.array])
def test_what_has_no_mass_is_kept_and_drawn_as_the_limit_says(array):
    """p/0 is 1 and 0/0 is 0, no NaN; also after two ratios whose product no float32 holds."""
    target_probs = array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    draft_probs = array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    chances = acceptance_probability(target_probs, draft_probs, array([0, 2]))
    assert chances.tolist() == [1.0, 0.0]
    target_probs = array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    draft_probs = array([[1e-30, 1.0], [1e-30, 1.0], [0.5, 0.5]])
    block = target_probs, array([0, 0, 0]), draft_probs
    assert COIN_RULES["block"].accept_probs(*block).tolist() == [1, 1, 0]
    assert COIN_RULES["block"].next_probs(*block, 2).tolist() == [0, 1]


@in_one_test("array", [np.array, mx.array])
def test_a_last_row_that_is_no_distribution_changes_no_coin(array):
    """Block's coin of the last draft token is its weight, whatever comes after it."""
    p, q = [[0.5, 0.5], [0.2, 0.8], [0.3, 0.7]], array([[0.9, 0.1], [0.6, 0.4]])
    without = [*p[:2], [np.nan, np.nan]]
    chances, as_before = (
        np.array(COIN_RULES["block"].accept_probs(array(rows), array([0, 0]), q))
        for rows in (without, p)
    )
    np.testing.assert_allclose(chances, as_before, atol=FLOAT32)


@every_rule
@given(block=strategies.blocks())
def test_mlx_agrees_with_numpy(name, block):
    """One body of code: float32 on MLX is float64 on NumPy, but for rounding."""
    rule: Any = COIN_RULES[name]
    block32 = tuple(map(to_mlx, block))
    target_probs, tokens, draft_probs = block
    chances = rule.accept_probs(*block)
    assert np.all((chances >= 0) & (chances <= 1))
    if name == "rejection":
        np.testing.assert_allclose(rule.accept_probs(*block32), chances, atol=FLOAT32)
    for n in range(len(tokens) + 1):
        law, law32 = rule.next_probs(*block, n), rule.next_probs(*block32, mx.array(n))
        assert law.sum() == pytest.approx(1, abs=EXACT)
        assert law32.sum().item() == pytest.approx(1, abs=FLOAT32)
        if name == "rejection" and n < len(tokens):
            mass = np.maximum(target_probs[n] - draft_probs[n], 0).sum()
            np.testing.assert_allclose(np.array(law32) * mass, law * mass, atol=FLOAT32)


@every_rule
@given(block=strategies.blocks(), data=st.data())
def test_decide_is_coins_then_a_token(name, block, data):
    """n from uniform < accept_probs, and the argmax of log next_probs + Gumbel noise.

    What p excludes is never emitted: not kept from a draft, and not drawn after it.
    """
    rule, (target_probs, tokens, draft_probs) = COIN_RULES[name], map(to_mlx, block)
    num_draft, vocab_size = draft_probs.shape
    numbers = st.floats(0, 1, exclude_max=True, width=32)
    uniform = mx.array(data.draw(st.lists(numbers, min_size=num_draft, max_size=num_draft)))
    gumbel = mx.random.gumbel((vocab_size,), key=mx.random.key(data.draw(st.integers(0, 1000))))
    declared = draft_probs if data.draw(st.booleans()) else None
    verdict = decide(rule, target_probs, tokens, declared, uniform, gumbel)
    given = target_probs, tokens, point_mass(tokens, target_probs) if declared is None else declared
    n = rule.num_accepted(uniform < rule.accept_probs(*given)).item()
    law = np.array(rule.next_probs(*given, mx.array(n)))
    scores = np.log(law, where=law > 0, out=np.full(vocab_size, -np.inf))
    assert verdict.num_accepted.item() == n
    assert verdict.next_token.item() == np.argmax(scores + np.array(gumbel))
    emitted = [*tokens.tolist()[:n], verdict.next_token.item()]
    assert all(target_probs[i, token].item() > 0 for i, token in enumerate(emitted))


def test_rules_say_what_they_need() -> None:
    """Auto and match take samplers that can only be called; coupled alone shares its noise."""
    rules = [make() for make in (*RULES.values(), *LOSSY.values())]
    assert {rule.name for rule in rules} == set(rule_names())
    assert [rule.name for rule in rules if not needs_distribution(rule)] == ["auto", "match"]
    assert [rule.name for rule in rules if shares_noise(rule)] == ["coupled"]


# The law of whole rounds --------------------------------------------------------------------------


@st.composite
def draftings(draw: st.DrawFn, shape: tuple[int, int]) -> tuple[Source, Drafting]:
    """A target, and drafts of up to K tokens, made in any way that leaves its law alone.

    All drawn, or copied as point masses, empty ones among them; whether to draft one more may
    depend on all before it, what was just drafted included.
    """
    vocab_size, num_draft = shape
    target, draft = draw(strategies.source_pairs(vocab_size))
    whole = Drawn(draft, up_to(num_draft))
    copied = Copied(draw(strategies.copies(vocab_size, num_draft)), vocab_size)
    by_length = Drawn(draft, by_state(draw(strategies.draft_lengths(num_draft))))
    return target, draw(st.sampled_from([whole, copied, by_length, Drawn(target, up_to(1))]))


@every_way
@given(shape=strategies.small_shapes, rounds=st.integers(1, 3), data=st.data())
def test_no_round_changes_the_law(deciding, shape, rounds, data):
    """Match, coupled, rejection, block: the joint law of 1, 2 and 3 rounds is the target's."""
    target, drafting = data.draw(draftings(shape))
    length = longest_joint(shape[0], rounds, shape[1])
    assert Rounds(target, drafting, deciding).total_variation(rounds, length) < EXACT


@every_rule
def test_no_round_changes_laws_that_give_every_token_mass(name):
    """What follows a rejection after kept tokens is as often at stake as it can be."""
    target, draft = sources(3, 1)
    rounds = Rounds(target, Drawn(draft, up_to(2)), ByRule(COIN_RULES[name]))
    assert rounds.total_variation(1, 3) < EXACT


def test_a_token_that_is_dropped_for_what_it_is_changes_the_law():
    """A control: the same enumeration finds it, under each rule by coins."""
    target, draft = sources(3, 1)
    for rule in COIN_RULES.values():
        drafting = Drawn(draft, up_to(2), dropped_below=0.2)
        assert Rounds(target, drafting, ByRule(rule)).total_variation(1, 3) > 0.01


@given(st.integers(1, 5).flatmap(strategies.law_pairs))
def test_shared_noise_draws_from_both_laws(pair):
    """The tokens of target and draft, drawn from one noise, have the law p and the law q."""
    p, q = pair
    joint = coupled_joint(p, q)
    assert np.all(joint >= 0)
    np.testing.assert_allclose(joint.sum(axis=1), p, atol=EXACT)
    np.testing.assert_allclose(joint.sum(axis=0), q, atol=EXACT)


# How much is accepted -----------------------------------------------------------------------------


def accepted(target: Source, drafting: Drafting, deciding: Deciding) -> np.ndarray:
    """Expected number of draft tokens kept in a round, by the state that it begins in."""
    rounds = Rounds(target, drafting, deciding)
    return np.array([rounds.expected_accepted(state) for state in range(NUM_STATES)])


@given(shape=strategies.small_shapes, data=st.data())
@settings(max_examples=15)
def test_rules_accept_in_their_order(shape, data):
    """Of drawn drafts, for any K: block >= token by token >= shared noise >= noise of their own.

    In expectation, in every state; of point masses all keep equally many.
    """
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    ways = [*map(ByRule, (COIN_RULES["block"], COIN_RULES["rejection"])), ByCoupling(), ByMatch()]
    kept = [accepted(target, Drawn(draft, up_to(num_draft)), way) for way in ways]
    assert np.all(np.diff(kept, axis=0) <= EXACT)
    copied = Copied(data.draw(strategies.copies(vocab_size, num_draft)), vocab_size)
    kept = [accepted(target, copied, way) for way in ways]
    np.testing.assert_allclose(np.diff(kept, axis=0), 0, atol=EXACT)


def coupled_formula(p: np.ndarray, q: np.ndarray) -> float:
    """Sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri et al. 2024)."""
    both = np.flatnonzero((p > 0) & (q > 0))
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in both)


@given(shape=strategies.shapes, data=st.data())
@settings(max_examples=20)
def test_one_token_is_accepted_as_the_formulas_say(shape, data):
    """At K = 1: sum of min(p, q) under rejection and block, sum of p q under match; coupled."""
    target, draft = data.draw(strategies.source_pairs(shape[0]))
    drafting = Drawn(draft, up_to(1))
    common = np.minimum(target.probs, draft.probs).sum(axis=1)
    for rule in COIN_RULES.values():
        np.testing.assert_allclose(accepted(target, drafting, ByRule(rule)), common, atol=EXACT)
    product = (target.probs * draft.probs).sum(axis=1)
    np.testing.assert_allclose(accepted(target, drafting, ByMatch()), product, atol=EXACT)
    coupled = [coupled_formula(p, q) for p, q in zip(target.probs, draft.probs, strict=True)]
    np.testing.assert_allclose(accepted(target, drafting, ByCoupling()), coupled, atol=EXACT)
    assert np.all(product <= np.array(coupled) + EXACT)
    assert np.all(coupled <= common + EXACT)
    assert np.all(coupled >= common / (2 - common) - EXACT)


@every_rule
@given(st.integers(1, 5).flatmap(strategies.laws), st.data())
def test_coins_are_sure_where_the_laws_are_equal(name, p, data):
    """p = q: heads for every draft token, bit for bit, in float64 and in float32."""
    num_draft = data.draw(st.integers(1, 4))
    token = st.sampled_from(np.flatnonzero(p.astype(np.float32)).tolist())
    tokens = np.array(data.draw(st.lists(token, min_size=num_draft, max_size=num_draft)))
    target_probs = np.tile(p, (num_draft + 1, 1))
    block = target_probs, tokens, target_probs[:-1]
    for arrays in (block, tuple(map(to_mlx, block))):
        assert COIN_RULES[name].accept_probs(*arrays).tolist() == [1.0] * num_draft


# Rules that change the law -----------------------------------------------------------------------

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
    target, draft = (Source(np.tile(law, (NUM_STATES, 1))) for law in (p, q))
    rounds = Rounds(target, Drawn(draft, up_to(1)), ByRule(rule))
    return rounds.joint(1, 1), rounds.expected_accepted()


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


@in_one_test(
    ("spec", "rule"),
    [
        *((name, make_rule(name)) for name in rule_names()),
        ("lenient:lenience=0.25", Lenient(lenience=0.25)),
        ("typical:delta=0.5,epsilon=0.2", Typical(epsilon=0.2, delta=0.5)),
        (COIN_RULES["block"], COIN_RULES["block"]),
        ("linient", f"'linient'.*{', '.join(rule_names())}"),
        ("lenient:lenience=0", r"\(0, 1\]"),
        ("lenient:lenience=much", "lenience"),
        ("lenient:leniency=0.5", "leniency"),
        ("typical:epsilon=1", r"Typical\(epsilon=1.0\)"),
        ("typical:delta", "key=value"),
        ("block:lenience=1", "takes no options"),
        (3, "AcceptanceRule"),
        (Rejection, "AcceptanceRule"),
    ],
)
def test_a_rule_is_a_name_with_options_or_an_object(spec, rule, capsys):
    """In Python and on the command line; what gives no guarantee is refused, there by status 2."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    typed = partial(parser.parse_args, ["--rule", str(spec)])
    if not isinstance(rule, str) or rule == spec:
        assert make_rule(spec) == rule
        assert not isinstance(spec, str) or typed().rule == spec
        return
    with pytest.raises(ValueError, match=rule):
        make_rule(spec)
    if isinstance(spec, str) and spec.partition(":")[0] in rule_names():
        with pytest.raises(ValueError, match=f"argument --rule: .*{rule}"):
            check_values(typed())
    elif isinstance(spec, str):
        with pytest.raises(SystemExit):
            typed()
        assert "--rule" in capsys.readouterr().err


# In the loop --------------------------------------------------------------------------------------

PROMPT = [3, 1, 2]
FILTERED = sd.Sampling(temp=0.8, top_p=0.9, top_k=40)

target = cache(partial(tiny.build, "qwen2"))
draft = cache(partial(noisy_copy, "qwen2", 0.2))


def run(rule: Any, sampling: Any = None, **options: Any) -> tuple[list[int], Any]:
    """Tokens of a generation with the noisy copy as the drafter, and its stats."""
    options = {"seed": 3, "num_draft_tokens": 3, "max_tokens": 30} | options
    drafter = options.pop("drafter", sd.ModelDrafter(draft()))
    tokens = list(sd.speculate(target(), PROMPT, drafter, sampler=sampling, rule=rule, **options))
    return [t.token for t in tokens], tokens[-1].stats


@pytest.mark.parametrize("sampling", [AT_ONE, FILTERED])
def test_a_model_that_drafts_for_itself_is_always_right(sampling: sd.Sampling) -> None:
    """p = q, after temperature and filters, the same for both: all drafts are kept."""
    for rule in COIN_RULES:
        _, stats = run(rule, sampling, drafter=sd.ModelDrafter(target()), max_tokens=40)
        assert stats.acceptance_rate == 1.0


def test_a_draft_temperature_is_the_drafts_alone() -> None:
    """The filters are the target's; at 0, or with a greedy target, drafts are greedy ones."""

    def drafted(sampling: sd.Sampling, **options: Any) -> Draft:
        context = sd.drafters.DraftContext(
            sampling=sampling, noise=Noise(0), vocab_size=tiny.CONFIGS["qwen2"]["vocab_size"]
        )
        return sd.ModelDrafter(draft(), **options).begin(PROMPT, context).propose(2)

    logits = draft()(mx.array([PROMPT]), cache=make_prompt_cache(draft()))[0, -1]
    own = replace(FILTERED, temp=0.6).log_distribution(logits)
    declared = drafted(FILTERED, draft_temp=0.6).logprobs
    np.testing.assert_allclose(mx.exp(declared[0]), mx.exp(own), atol=1e-6)
    for sampling, draft_temp in [(FILTERED, 0.0), (sd.Sampling(), 1.5)]:
        certain, greedy = (drafted(sampling, draft_temp=draft_temp), drafted(sampling, greedy=True))
        assert certain.logprobs is None
        assert certain.tokens.tolist() == greedy.tokens.tolist()
    for wrong in (-0.5, float("nan")):
        with pytest.raises(ValueError, match="draft_temp="):
            sd.ModelDrafter(draft(), draft_temp=wrong)


def test_a_lenient_greedy_text_has_no_unlikely_token() -> None:
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


def test_auto_is_block_for_drawn_drafts_of_a_known_distribution_alone() -> None:
    """Else match: of point masses, of a greedy target, and of one that can only be called."""
    rule, p = make_rule("auto"), mx.full((2, 2), 0.5)
    drafts = Draft([1]), Draft([1], mx.log(p[:1]))
    assert [rule.for_draft(each).name for each in drafts] == ["match", "block"]  # type: ignore[attr-defined]
    noise: Any = Given(mx.array([0.5]), mx.zeros(2))
    for is_drawn, greedy, known in product((False, True), repeat=3):
        target: Any = SimpleNamespace(
            greedy=greedy, has_distribution=known, probs=p, tokens=mx.array([0, 1])
        )
        by_block = is_drawn and known and not greedy
        kind = Verdict if by_block else Agreement
        assert type(rule.decide(target, drafts[is_drawn], noise)) is kind


def test_auto_takes_a_lossless_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """For drawn drafts coupled with a seed, block without; nothing lossy unless it is named."""
    unseeded = make_rule("auto")
    assert run("auto", AT_ONE)[0] == run("coupled", AT_ONE)[0] != run("block", AT_ONE)[0]
    assert run(unseeded, AT_ONE)[0] == run("block", AT_ONE)[0] != run("rejection", AT_ONE)[0]
    unasked = Mock(side_effect=AssertionError("a lossy rule was used"))
    for kind, name in product((Lenient, Typical), ("accept_probs", "nearly_matches")):
        monkeypatch.setattr(kind, name, unasked, raising=False)
    drafters = [sd.ModelDrafter(draft()), sd.PromptLookupDrafter(min_ngram=1)]
    for sampling, drafter, rule in product([None, AT_ONE], drafters, ["auto", unseeded]):
        run(rule, sampling, drafter=drafter, max_tokens=20)
    for rule in ("lenient", "typical"):
        with pytest.raises(AssertionError, match="lossy"):
            run(rule, AT_ONE)
    with pytest.raises(ValueError, match="needs the target's distribution"):
        run("lenient", lambda x: mx.argmax(x, axis=-1))


def test_a_product_in_a_block_that_overflows_before_a_zero_is_zero() -> None:
    """In float32: after two tokens that were all but impossible to the drafter, p rules one out."""
    p = np.array([[1, 0], [1, 0], [0, 1], [1, 0]], np.float32)
    q = np.array([[1e-30, 1], [1e-30, 1], [0.5, 0.5]], np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        assert running_weights(p, np.array([0, 0, 0]), q).tolist() == [1, 1, 1, 0]
    assert running_weights(mx.array(p), mx.array([0, 0, 0]), mx.array(q)).tolist() == [1, 1, 1, 0]


def test_a_residual_is_by_row() -> None:
    p, q = np.random.default_rng(0).dirichlet([1.0] * 3, (2, 4))
    by_row = [residual(*pair) for pair in zip(p, q, strict=True)]
    assert residual(p, q) == pytest.approx(np.array(by_row))


def test_lossy_rules_judge_each_row_by_itself_and_within_bounds() -> None:
    for wrong in (0.0, 1.5):
        with pytest.raises(ValueError, match="expected a number in"):
            Lenient(lenience=wrong)
    flat, steep = np.full(16, 1 / 16), np.array([0.05, 0.95, *[0.0] * 14])
    p = np.stack([flat, steep, flat])
    assert Typical().accept_probs(p, np.array([0, 0]), p[:2]).tolist() == [1, 0]
    likeliest = mx.array([3, 1])
    assert Lenient(1.0).nearly_matches(mx.log(mx.array(p)), likeliest).tolist() == [True, True]
