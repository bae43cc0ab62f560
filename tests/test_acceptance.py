"""Acceptance rules: their functions one by one, and the exact law of whole rounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import chisquare

import strategies
from exact import (
    COIN_RULES,
    DRAFT,
    NUM_STATES,
    TARGET,
    WRONG_RULES,
    ByCoupling,
    ByMatch,
    ByRule,
    Copied,
    Deciding,
    Drafting,
    Drawn,
    Given,
    OnMLX,
    Rounds,
    RoundsOfLength,
    Source,
    TakingTurns,
    at_temperature,
    by_state,
    coupled_joint,
    decide,
    longest_joint,
    match,
    to_mlx,
    up_to,
)
from selection import in_one_test
from specdec_mlx.contracts import (
    AcceptanceRule,
    Agreement,
    Draft,
    RoundRecord,
    Verdict,
    needs_distribution,
    shares_noise,
)
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.parts import REST
from specdec_mlx.draft_length.policy import DraftLength, Heuristic
from specdec_mlx.errors import UnknownNameError
from specdec_mlx.rules.arithmetic import acceptance_probability, leading_run, point_mass, residual
from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.rules.lossy import Lenient, Typical
from specdec_mlx.rules.registry import LOSSLESS, LOSSY, make_rule, rule_names
from specdec_mlx.rules.rejection import Rejection

EXACT = 1e-12
FLOAT32 = 2e-6

EVERY_WAY: list[Deciding] = [ByMatch(), ByCoupling(), *map(ByRule, COIN_RULES.values())]
"""All that leave the target's law alone."""

every_way = pytest.mark.parametrize("deciding", EVERY_WAY, ids=str)
every_rule = pytest.mark.parametrize("name", list(COIN_RULES))


# The functions ------------------------------------------------------------------------------------


@given(strategies.blocks())
def test_acceptance_probability_is_the_capped_ratio(block):
    """min(1, p(x)/q(x)), and 1 wherever p >= q > 0."""
    target_probs, tokens, draft_probs = block
    rows = range(len(tokens))
    p, q = target_probs[rows, tokens], draft_probs[rows, tokens]
    chances = acceptance_probability(target_probs[:-1], draft_probs, tokens)
    np.testing.assert_allclose(chances, np.minimum(1, p / q), rtol=1e-15)
    assert np.all(chances[p >= q] == 1)


@in_one_test("array", [np.array, mx.array])
def test_acceptance_probability_without_mass(array):
    """A token that q excludes: p/0 is 1 and 0/0 is 0, no NaN."""
    target_probs = array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    draft_probs = array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    chances = acceptance_probability(target_probs, draft_probs, array([0, 2]))
    assert chances.tolist() == [1.0, 0.0]


@given(st.integers(1, 5).flatmap(strategies.law_pairs))
def test_residual_makes_up_what_acceptance_leaves(pair):
    """min(p, q) + (1 - sum min(p, q)) * residual = p: accepted and replaced mass make up p."""
    p, q = pair
    accepted = np.minimum(p, q)
    law = residual(p, q)
    assert np.all(law >= 0)
    assert law.sum() == pytest.approx(1, abs=EXACT)
    np.testing.assert_allclose(accepted + (1 - accepted.sum()) * law, p, atol=EXACT)


@given(st.integers(1, 5).flatmap(strategies.laws))
def test_residual_of_equal_laws_is_the_law_itself(p):
    """p = q leaves no excess; p comes back bit for bit, in float64 and in float32."""
    assert np.array_equal(residual(p, p), p)
    p32 = to_mlx(p)
    assert mx.array_equal(residual(p32, p32), p32)


def test_residual_takes_any_batch():
    """Rows [..., V] are laws of their own."""
    p = np.array([[[0.5, 0.5], [1.0, 0.0]]])
    q = np.array([[[1.0, 0.0], [1.0, 0.0]]])
    assert residual(p, q).tolist() == [[[0.0, 1.0], [1.0, 0.0]]]


@in_one_test("array", [np.array, mx.array])
def test_point_mass_is_one_hot(array):
    """[K, V], all mass on the token; [0, V] for no tokens."""
    like = array([[0.2, 0.3, 0.5]])
    assert point_mass(array([2, 0]), like).tolist() == [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    assert point_mass(array([2, 0])[:0], like).shape == (0, 3)


@given(hnp.arrays(bool, st.integers(0, 6)))
def test_leading_run_stops_at_the_first_tails(coins):
    """How often `coins` begins with heads."""
    run = [*coins.tolist(), False].index(False)
    assert int(leading_run(coins)) == run
    if len(coins):
        assert leading_run(mx.array(coins)).item() == run


@given(hnp.arrays(bool, st.integers(1, 6)))
def test_block_keeps_up_to_the_last_heads(coins):
    """n is 1 + the index of the last heads, 0 without any."""
    last = max([i + 1 for i, heads in enumerate(coins) if heads], default=0)
    assert int(COIN_RULES["block"].num_accepted(coins)) == last
    assert COIN_RULES["block"].num_accepted(mx.array(coins)).item() == last


@in_one_test("array", [np.array, mx.array])
def test_block_keeps_nothing_that_the_target_excludes_after_an_overflow(array):
    """Two ratios of 1e30, whose product no float32 holds, and then a token without mass: no NaN."""
    target_probs = array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    draft_probs = array([[1e-30, 1.0], [1e-30, 1.0], [0.5, 0.5]])
    block = target_probs, array([0, 0, 0]), draft_probs
    assert COIN_RULES["block"].accept_probs(*block).tolist() == [1, 1, 0]
    assert COIN_RULES["block"].next_probs(*block, 2).tolist() == [0, 1]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.data())
def test_match_keeps_what_the_target_says_too(own, data):
    """n = length of the common prefix; the next token is the target's own at n."""
    drafted = data.draw(st.lists(st.integers(0, 2), min_size=len(own) - 1, max_size=len(own) - 1))
    n = next(
        (i for i, (a, b) in enumerate(zip(own, drafted, strict=False)) if a != b), len(own) - 1
    )
    assert match(own, drafted) == (n, own[n])


@every_rule
@given(block=strategies.blocks())
def test_mlx_agrees_with_numpy(name, block):
    """One body of code: float32 on MLX is float64 on NumPy, but for rounding."""
    rule, wrapped = COIN_RULES[name], OnMLX(COIN_RULES[name])
    target_probs, tokens, draft_probs = block
    chances = rule.accept_probs(*block)
    assert np.all((chances >= 0) & (chances <= 1))
    if name == "rejection":
        np.testing.assert_allclose(wrapped.accept_probs(*block), chances, atol=FLOAT32)
    for n in range(len(tokens) + 1):
        law = rule.next_probs(target_probs, tokens, draft_probs, n)
        law32 = wrapped.next_probs(target_probs, tokens, draft_probs, n)
        assert law.sum() == pytest.approx(1, abs=EXACT)
        assert law32.sum() == pytest.approx(1, abs=FLOAT32)
        if name == "rejection" and n < len(tokens):
            mass = np.maximum(target_probs[n] - draft_probs[n], 0).sum()
            np.testing.assert_allclose(law32 * mass, law * mass, atol=FLOAT32)


@every_rule
@given(block=strategies.blocks(), data=st.data())
def test_decide_is_coins_then_a_token(name, block, data):
    """n from uniform < accept_probs, and the argmax of log next_probs + Gumbel noise."""
    target_probs, tokens, draft_probs = (to_mlx(x) for x in block)
    num_draft, vocab_size = draft_probs.shape
    numbers = st.floats(0, 1, exclude_max=True, width=32)
    uniform = mx.array(data.draw(st.lists(numbers, min_size=num_draft, max_size=num_draft)))
    gumbel = mx.random.gumbel((vocab_size,), key=mx.random.key(data.draw(st.integers(0, 1000))))
    if data.draw(st.booleans()):
        verdict = decide(COIN_RULES[name], target_probs, tokens, draft_probs, uniform, gumbel)
    else:
        verdict = decide(COIN_RULES[name], target_probs, tokens, None, uniform, gumbel)
        draft_probs = point_mass(tokens, target_probs)
    coins = uniform < COIN_RULES[name].accept_probs(target_probs, tokens, draft_probs)
    n = COIN_RULES[name].num_accepted(coins).item()
    law = COIN_RULES[name].next_probs(target_probs, tokens, draft_probs, mx.array(n))
    scores = np.log(np.array(law), where=np.array(law) > 0, out=np.full(vocab_size, -np.inf))
    assert verdict.num_accepted.item() == n
    assert verdict.next_token.item() == np.argmax(scores + np.array(gumbel))


@every_rule
@given(block=strategies.blocks(), seed=st.integers(0, 1000))
def test_no_token_without_mass(name, block, seed):
    """What p excludes is never emitted: not kept from a draft, and not drawn after it."""
    target_probs, tokens, draft_probs = (to_mlx(x) for x in block)
    key_coins, key_next = mx.random.split(mx.random.key(seed))
    verdict = decide(
        COIN_RULES[name],
        target_probs,
        tokens,
        draft_probs,
        mx.random.uniform(shape=tokens.shape, key=key_coins),
        mx.random.gumbel(shape=target_probs.shape[-1:], key=key_next),
    )
    n = verdict.num_accepted.item()
    emitted = [*tokens.tolist()[:n], verdict.next_token.item()]
    assert all(target_probs[i, token].item() > 0 for i, token in enumerate(emitted))


def test_rule_names_are_checked():
    """Unknown names are refused, with the list of known ones; a rule is taken as it is."""
    for name in rule_names():
        rule = make_rule(name)
        assert rule == name if isinstance(rule, str) else rule.name == name
    assert {"auto", "match", "coupled", "rejection", "block"} <= set(rule_names())
    assert make_rule("block") == COIN_RULES["block"]
    assert make_rule(COIN_RULES["block"]) is COIN_RULES["block"]
    with pytest.raises(UnknownNameError, match=", ".join(rule_names())) as error:
        make_rule("linient")
    assert "'linient'" in str(error.value)
    for choice in ("block:lenience=1", "coupled:x=1", "lenient:lenience", 3, None, Rejection):
        with pytest.raises(ValueError, match=r"takes no options|key=value|AcceptanceRule"):
            make_rule(choice)


def test_a_rule_is_known_by_its_own_name():
    """Which is nothing to be chosen: no argument of the rule is its name."""
    for name, rule in COIN_RULES.items():
        assert rule.name == name
        with pytest.raises(TypeError):
            type(rule)(*["another name"])
    assert Lenient(0.25) == Lenient(lenience=0.25)
    assert Typical(0.2, 0.4) == Typical(epsilon=0.2, delta=0.4)


@in_one_test("make", [*LOSSLESS.values(), *LOSSY.values()])
def test_a_rule_does_not_change(make: Callable[..., AcceptanceRule]) -> None:
    """It can be shared and kept in sets, and equals another with the same arguments."""
    rule = make()
    with pytest.raises(FrozenInstanceError):
        rule.name = "another"  # type: ignore[misc]
    assert {rule, make()} == {rule}


def test_rules_say_what_they_need() -> None:
    """Auto and match take samplers that can only be called; coupled alone shares its noise."""
    rules = [make() for make in (*LOSSLESS.values(), *LOSSY.values())]
    assert [rule.name for rule in rules if not needs_distribution(rule)] == ["auto", "match"]
    assert [rule.name for rule in rules if shares_noise(rule)] == ["coupled"]


@in_one_test("name", [name for name in (*LOSSLESS, "typical") if name != "auto"])
def test_with_a_greedy_target_tokens_are_compared(name: str) -> None:
    """No chance is worked out and no noise is drawn: the verdict is agreement with the argmax."""
    target: Any = SimpleNamespace(greedy=True, tokens=mx.array([1, 2]))
    no_randomness: Any = None
    verdict = make_rule(name).decide(target, Draft([1], to_mlx(np.eye(3)[:1])), no_randomness)
    assert isinstance(verdict, Agreement)
    assert verdict.target_tokens.tolist() == [1, 2]


class Seeing(CoinRule):
    """Keeps what it is given; does not say that it comes down to match."""

    name = "seeing"

    def accept_probs(self, *given: Any) -> mx.array:
        self.given = given
        return mx.ones(given[1].shape)

    def next_probs(self, target_probs: Any, tokens: Any, draft_probs: Any, n: Any) -> mx.array:
        return target_probs[n]


@in_one_test("greedy", [True, False])
def test_a_rule_by_coins_is_given_both_distributions(greedy: bool) -> None:
    """The draft's is what it declares, else a point mass; greedy targets are a one-hot like any."""
    target_probs, tokens = to_mlx(np.array([[0.5, 0.5], [0.25, 0.75]])), mx.array([1])
    draft_probs = to_mlx(np.array([[0.25, 0.75]]))
    target: Any = SimpleNamespace(greedy=greedy, probs=target_probs)
    for logprobs, expected in (
        (mx.log(draft_probs), draft_probs),
        (None, point_mass(tokens, target_probs)),
    ):
        rule = Seeing()
        verdict = rule.decide(target, Draft([1], logprobs), Given(mx.zeros(1), mx.zeros(2)))
        assert isinstance(verdict, Verdict)
        assert rule.given[0] is target_probs
        assert mx.allclose(rule.given[2], expected, rtol=1e-6).item()


# The law of whole rounds --------------------------------------------------------------------------


def distance(
    target: Source, drafting: Drafting, deciding: Deciding, rounds: int, num_draft: int
) -> float:
    """Total variation between the text of some rounds, K at most num_draft, and the target's."""
    length = longest_joint(target.vocab_size, rounds, num_draft)
    return Rounds(target, drafting, deciding).total_variation(rounds, length)


@pytest.mark.parametrize("rounds", [1, 3])
@every_rule
@given(shape=strategies.shapes, data=st.data())
@settings(max_examples=25)
def test_drawn_drafts_leave_the_law_alone(name, rounds, shape, data):
    """Rejection and block verification: the joint law of 1, 2 and 3 rounds is the target's."""
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    drafting = Drawn(draft, up_to(num_draft))
    assert distance(target, drafting, ByRule(COIN_RULES[name]), rounds, num_draft) < EXACT


@pytest.mark.parametrize("shape", [(4, 3), (5, 2)])
@every_rule
def test_drawn_drafts_leave_the_law_alone_at_larger_sizes(name, shape):
    """The same for sizes too slow to try often; laws from a fixed seed."""
    vocab_size, num_draft = shape
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(vocab_size), (2, NUM_STATES))
    drafting = Drawn(Source(q), up_to(num_draft))
    assert distance(Source(p), drafting, ByRule(COIN_RULES[name]), 2, num_draft) < EXACT


@pytest.mark.parametrize("deciding", [ByMatch(), ByCoupling()], ids=str)
@given(shape=strategies.shapes.filter(lambda shape: shape != (3, 3)), data=st.data())
@settings(max_examples=25)
def test_match_leaves_the_law_alone(deciding, shape, data):
    """Accept-iff-equal, with noise of its own or shared: the joint law of 3 rounds."""
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    assert distance(target, Drawn(draft, up_to(num_draft)), deciding, 3, num_draft) < EXACT


@given(st.integers(1, 5).flatmap(strategies.law_pairs))
def test_shared_noise_draws_from_both_laws(pair):
    """The tokens of target and draft, drawn from one noise, have the law p and the law q."""
    p, q = pair
    joint = coupled_joint(p, q)
    assert np.all(joint >= 0)
    np.testing.assert_allclose(joint.sum(axis=1), p, atol=EXACT)
    np.testing.assert_allclose(joint.sum(axis=0), q, atol=EXACT)


def test_shared_noise_is_what_the_loop_has():
    """20,000 pairs of draws from MLX's Gumbel noise follow the joint law; false alarms 1e-6."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    noise = np.array(mx.random.gumbel((20_000, 3), key=mx.random.key(0)))
    pairs = 3 * np.argmax(np.log(p) + noise, axis=1) + np.argmax(np.log(q) + noise, axis=1)
    expected = 20_000 * coupled_joint(p, q).ravel()
    seen = np.bincount(pairs, minlength=9)
    assert seen[expected == 0].sum() == 0
    assert chisquare(seen[expected > 0], expected[expected > 0]).pvalue > 1e-6


@every_way
@given(shape=st.tuples(st.integers(2, 5), st.integers(1, 3)), data=st.data())
@settings(max_examples=25)
def test_copied_drafts_leave_the_law_alone(deciding, shape, data):
    """Point masses of 0 to K tokens, empty ones among them: the law of 3 rounds is the target's."""
    vocab_size, num_draft = shape
    target, _ = data.draw(strategies.source_pairs(vocab_size))
    drafting = Copied(data.draw(strategies.copies(vocab_size, num_draft)), vocab_size)
    assert distance(target, drafting, deciding, 3, num_draft) < EXACT


@every_way
@given(shape=strategies.shapes.filter(lambda shape: shape != (3, 3)), data=st.data())
@settings(max_examples=25)
def test_draft_lengths_decided_beforehand_leave_the_law_alone(deciding, shape, data):
    """Whether to draft one more may depend on all before it, what was just drafted included."""
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    drafting = Drawn(draft, by_state(data.draw(strategies.draft_lengths(num_draft))))
    assert distance(target, drafting, deciding, 2, num_draft) < EXACT


@every_way
def test_empty_drafts_are_plain_decoding(deciding):
    """K = 0: one token a round, drawn from the target."""
    rounds = Rounds(TARGET, Drawn(DRAFT, up_to(0)), deciding)
    assert rounds.expected_accepted() == 0
    assert {len(tokens) for outcomes in rounds.outcomes for tokens, _ in outcomes} == {1}
    assert rounds.total_variation(3, 3) < EXACT


@every_way
@given(data=st.data())
@settings(max_examples=10)
def test_drafters_taking_turns_leave_the_law_alone(deciding, data):
    """Two models and a copy, in an order that the text decides."""
    target, draft = data.draw(strategies.source_pairs(3))
    _, other = data.draw(strategies.source_pairs(3))
    copies = data.draw(strategies.copies(3, 2))
    drafting = TakingTurns([Drawn(draft, up_to(2)), Copied(copies, 3), Drawn(other, up_to(1))])
    assert distance(target, drafting, deciding, 3, 2) < EXACT


def trained(policy: DraftLength, seconds: Callable[[int], float]) -> DraftLength:
    """A policy after rounds of every length, half of whose drafts were kept, and plain ones."""
    for i in range(202 + REST):
        num_draft = i % 4 if i < 202 else 0
        accepted = num_draft if i % 8 < 4 else 0
        tokens = [0] * (accepted + 1)
        policy.limit("it", cheap=False)
        policy.record(
            RoundRecord(
                drafted=num_draft,
                accepted=accepted,
                emitted=accepted + 1,
                fed=num_draft + 1,
                tokens=tokens,
                seconds=seconds(num_draft),
                part="it" if num_draft else "",
            )
        )
    return policy


def affine(num_draft: int) -> float:
    """Seconds of a round: where a verdict is enough to change the choice."""
    return 1.0 + 0.45 * num_draft


@pytest.mark.parametrize("shape", [(2, 3), (3, 2)])
@pytest.mark.parametrize(
    "policy", [Heuristic(1), trained(Auto(), affine)], ids=["heuristic", "auto"]
)
@every_way
def test_lengths_that_follow_the_verdicts_leave_the_law_alone(deciding, policy, shape):
    """The policies of the loop, "auto" among them: the joint law of 3 rounds; laws from a seed."""
    vocab_size, num_draft = shape
    p, q = np.random.default_rng(1).dirichlet(np.ones(vocab_size), (2, NUM_STATES))
    lengths = [Drawn(Source(q), up_to(k)) for k in range(num_draft + 1)]
    rounds = RoundsOfLength(Source(p), lengths[0], deciding, lengths, policy, affine, set())
    assert rounds.total_variation(3, longest_joint(vocab_size, 3, num_draft)) < EXACT
    assert len(rounds.chosen) > 1


@every_rule
@given(shape=st.sampled_from([(2, 1), (2, 2), (3, 1)]), data=st.data())
@settings(max_examples=20)
def test_float32_on_mlx_leaves_the_law_alone(name, shape, data):
    """The enumeration through MLX in float32, as in the loop: 2 rounds to 1e-5."""
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    deciding = ByRule(OnMLX(COIN_RULES[name]))
    assert distance(target, Drawn(draft, up_to(num_draft)), deciding, 2, num_draft) < 1e-5


@in_one_test(
    ("name", "one_round", "two_rounds"),
    [
        ("residual replaced by p", 0.120, 0.161),
        ("bonus at temperature 0.5", 0.089, 0.105),
        ("p and q swapped", 0.495, 0.650),
        ("lenience 1.2", 0.080, 0.111),
    ],
)
def test_wrong_rules_are_told_apart(name, one_round, two_rounds):
    """On the stated example the same test rejects every wrong variant by more than 0.01."""
    drafting, deciding = Drawn(DRAFT, up_to(2)), ByRule(WRONG_RULES[name])
    distances = [distance(TARGET, drafting, deciding, rounds, 2) for rounds in (1, 2)]
    assert min(distances) > 0.01
    assert distances == pytest.approx([one_round, two_rounds], abs=6e-4)


@in_one_test(
    ("name", "how", "one_round", "two_rounds"),
    [
        ("rejection", {"declared": at_temperature(DRAFT, 0.7)}, 0.050, 0.073),
        ("rejection", {"dropped_below": 0.25}, 0.120, 0.194),
        ("block", {"declared": at_temperature(DRAFT, 0.7)}, 0.045, 0.071),
        ("block", {"dropped_below": 0.25}, 0.122, 0.198),
    ],
)
def test_wrong_drafts_are_told_apart(name, how, one_round, two_rounds):
    """A declared law other than the drawn one, and dropping a drawn token whose q is small."""
    drafting, deciding = Drawn(DRAFT, up_to(2), **how), ByRule(COIN_RULES[name])
    distances = [distance(TARGET, drafting, deciding, rounds, 2) for rounds in (1, 2)]
    assert min(distances) > 0.01
    assert distances == pytest.approx([one_round, two_rounds], abs=6e-4)


# How much is accepted -----------------------------------------------------------------------------


def accepted(target: Source, drafting: Drafting, deciding: Deciding) -> np.ndarray:
    """Expected number of draft tokens kept in a round, by the state that it begins in."""
    rounds = Rounds(target, drafting, deciding)
    return np.array([rounds.expected_accepted(state) for state in range(NUM_STATES)])


@given(shape=strategies.shapes, data=st.data())
@settings(max_examples=20)
def test_block_accepts_at_least_as_much_as_token_by_token(shape, data):
    """In expectation, in every state, for any pair of laws; and as much at K = 1."""
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    drafting = Drawn(draft, up_to(num_draft))
    by_token, by_block = (
        accepted(target, drafting, ByRule(COIN_RULES[name])) for name in ("rejection", "block")
    )
    assert np.all(by_block >= by_token - EXACT)
    if num_draft == 1:
        np.testing.assert_allclose(by_block, by_token, atol=EXACT)


def test_block_accepts_more_on_the_stated_example():
    """Kept of 3 drawn tokens: by match, coupled, token by token, and as a block."""
    drafting = Drawn(DRAFT, up_to(3))
    kept = [accepted(TARGET, drafting, way)[0] for way in EVERY_WAY]
    assert kept == pytest.approx([0.515, 1.510, 1.533, 1.761], abs=5e-4)


@given(shape=strategies.shapes.filter(lambda shape: shape != (3, 3)), data=st.data())
def test_rules_accept_in_their_order(shape, data):
    """Of drawn drafts, for any K: token by token >= shared noise >= noise of their own."""
    vocab_size, num_draft = shape
    target, draft = data.draw(strategies.source_pairs(vocab_size))
    ways = [ByRule(COIN_RULES["rejection"]), ByCoupling(), ByMatch()]
    kept = [accepted(target, Drawn(draft, up_to(num_draft)), way) for way in ways]
    assert np.all(np.diff(kept, axis=0) <= EXACT)


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


@given(shape=st.tuples(st.integers(2, 4), st.integers(1, 3)), data=st.data())
@settings(max_examples=20)
def test_all_rules_accept_copies_alike(shape, data):
    """For point masses match, coupled, rejection and block keep equally many on average."""
    vocab_size, num_draft = shape
    target, _ = data.draw(strategies.source_pairs(vocab_size))
    drafting = Copied(data.draw(strategies.copies(vocab_size, num_draft)), vocab_size)
    by_match = accepted(target, drafting, ByMatch())
    for way in EVERY_WAY:
        np.testing.assert_allclose(accepted(target, drafting, way), by_match, atol=EXACT)


@every_rule
@given(st.integers(1, 5).flatmap(strategies.laws), st.data())
def test_coins_are_sure_where_the_laws_are_equal(name, p, data):
    """p = q: heads for every draft token, bit for bit, in float64 and in float32."""
    num_draft = data.draw(st.integers(1, 4))
    token = st.sampled_from(np.flatnonzero(p.astype(np.float32)).tolist())
    tokens = np.array(data.draw(st.lists(token, min_size=num_draft, max_size=num_draft)))
    target_probs = np.tile(p, (num_draft + 1, 1))
    for arrays in [
        (target_probs, tokens, target_probs[:-1]),
        [to_mlx(x) for x in (target_probs, tokens, target_probs[:-1])],
    ]:
        assert COIN_RULES[name].accept_probs(*arrays).tolist() == [1.0] * num_draft


@every_rule
@given(shape=strategies.shapes, data=st.data())
@settings(max_examples=20)
def test_a_perfect_drafter_is_accepted_whole(name, shape, data):
    """p = q: every draft token is kept, with certainty."""
    vocab_size, num_draft = shape
    target, _ = data.draw(strategies.source_pairs(vocab_size))
    kept = accepted(target, Drawn(target, up_to(num_draft)), ByRule(COIN_RULES[name]))
    np.testing.assert_allclose(kept, num_draft, atol=EXACT)
