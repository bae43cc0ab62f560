"""Rules on trees: what is emitted is distributed as the target's own, by enumeration."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import strategies
from exact import COIN_RULES, Given, decide, rolled, to_mlx
from exact_trees import (
    TREE_RULES,
    WRONG_TREE_RULES,
    TreeDrawn,
    TriedLikeliestFirst,
    depth,
    rounds,
    shapes,
)
from selection import FULL, in_one_test
from specdec_mlx.contracts import ROOT, Draft, Outcome, chain, first_path
from specdec_mlx.lab.papers.lossy import Typical
from specdec_mlx.lab.proof.enumeration import sources
from specdec_mlx.trees.shape import path_to
from specdec_mlx.trees.tree_rules import MultiRound, OwnTokens, remaining_laws

EXACT = 1e-12
SMALL = [shape for size in range(1, 5) for shape in shapes(size)]
SEVEN = [
    (ROOT, ROOT, 0, 0, 1, 1, 2),
    (ROOT, 0, 0, ROOT, 3, 3, ROOT),
    (ROOT, 0, 1, 2, ROOT, 4, 4),
    (ROOT,) * 7,
    tuple(chain(7)),
]
WAYS = {
    "independent": {},
    "without replacement": {"replace": False},
    "point masses": {"fixed": True},
}
CHAIN_RULES = {"multi-round": "rejection", "k-sequential": "rejection", "traversal": "block"}
PARENTS = st.integers(1, 7).flatmap(lambda size: st.sampled_from(shapes(size)))


def distance(vocab: int, parents: tuple[int, ...], way: str, name: str, num_rounds: int = 1):
    """How far the tokens of some rounds are from the target's own."""
    target, draft = sources(vocab, len(parents))
    drawn = TreeDrawn(draft, parents, **WAYS[way])
    length = num_rounds * (depth(parents) + 1)
    rule = None if name == "match" else TREE_RULES[name]
    return rounds(target, drawn, rule).total_variation(num_rounds, min(length, 6))


@in_one_test("way", WAYS)
@pytest.mark.parametrize("name", [*TREE_RULES, "match"])
def test_every_small_tree_leaves_the_distribution_alone(name, way):
    """All 22 shapes of up to 4 tokens, V = 3 or 2, and some of 7, V = 2: to 1e-12. So do two
    rounds, each after whatever the first emitted."""
    for parents in SMALL if name == "match" else SMALL + SEVEN:
        assert distance(3 if len(parents) < 4 else 2, parents, way, name) < EXACT, parents
    assert distance(2, (ROOT, 0, 0, ROOT), way, name, num_rounds=2) < EXACT


@FULL
@pytest.mark.parametrize("name", TREE_RULES)
def test_every_tree_leaves_the_distribution_alone(name):
    """All 174 shapes of 5 and 6 tokens, V = 2, drawn independently: to 1e-12."""
    for parents in (shape for size in (5, 6) for shape in shapes(size)):
        assert distance(2, parents, "independent", name) < EXACT, parents


@in_one_test("name", TREE_RULES)
def test_excluded_tokens_leave_the_distribution_alone(name):
    """Target and draft exclude tokens, other ones, and p = q: to 1e-12."""
    p, q = rolled([0.7, 0.3, 0.0]), rolled([0.0, 0.5, 0.5])
    for (target, draft), replace in product([(p, q), (q, p), (p, p)], (True, False)):
        drawn = TreeDrawn(draft, (ROOT, 0, 0, ROOT, 3), replace)
        assert rounds(target, drawn, TREE_RULES[name]).total_variation(1, 3) < EXACT


def test_wrong_rules_are_found():
    """Each named fault, and an order that depends on the target: of two independent draws the one
    that it likes better is tried first; by more than 0.001.
    """
    target, draft = sources(4, 4)
    for rule, way in WRONG_TREE_RULES.values():
        drawn = TreeDrawn(draft, (ROOT, 0, 0, ROOT), **way)
        assert rounds(target, drawn, rule).total_variation(1, 3) > 1e-3, rule
    target, draft = sources(3, 4)
    for rule in TREE_RULES.values():
        drawn = TriedLikeliestFirst(draft, (ROOT, ROOT), target=target)
        assert rounds(target, drawn, rule).total_variation(1, 2) > 1e-3, rule


@pytest.mark.parametrize("name", TREE_RULES)
@given(block=strategies.blocks(), seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_a_tree_that_does_not_fork_is_its_chain_rule(name, block, seed):
    """Chances and what follows, bit for bit in float64; kept and emitted on MLX."""
    target_probs, tokens, draft_probs = block
    chain_rule, parents = COIN_RULES[CHAIN_RULES[name]], chain(len(tokens))
    chances, after = TREE_RULES[name].judge(target_probs, tokens, draft_probs, parents)
    assert np.array_equal(chances, chain_rule.accept_probs(*block))
    for n in range(len(tokens) + 1):
        last = n - 1 if name == "traversal" else 0
        coins = [last <= i < n for i in range(len(tokens))]
        assert chain_rule.num_accepted(np.array(coins)) == n
        assert TREE_RULES[name].find_path(coins, parents) == list(range(n))
        assert np.array_equal(after[n], chain_rule.next_probs(target_probs, tokens, draft_probs, n))
    keys = mx.random.split(mx.random.key(seed), 2)
    uniform = mx.random.uniform(shape=(len(tokens),), key=keys[0])
    gumbel = mx.random.gumbel(shape=target_probs.shape[1:], key=keys[1])
    p, ids, q = to_mlx(target_probs), to_mlx(tokens), to_mlx(draft_probs)
    verdict = decide(chain_rule, p, ids, q, uniform, gumbel)
    given_noise, draft = Given(uniform, gumbel), Draft(ids, mx.log(q))
    on_tree = TREE_RULES[name].decide_tree(Known(p, ids), draft, given_noise)
    assert (
        outcome_of(verdict, tokens.tolist()).tokens == outcome_of(on_tree, tokens.tolist()).tokens
    )


def outcome_of(verdict: Any, drafted: list[int]) -> Outcome:
    """What the loop reads."""
    numbers = {name: array.tolist() for name, array in verdict.arrays().items()}
    return verdict.outcome(numbers, drafted)


@dataclass(frozen=True, eq=False)
class Known:
    """A target whose distribution and own tokens are given."""

    probs: mx.array
    tokens: mx.array
    greedy: bool = False


@given(laws=strategies.blocks(), parents=PARENTS)
@settings(max_examples=10)
def test_numpy_and_mlx_agree(laws, parents):
    """Chances and what follows in float32, to 1e-4, for trees with point masses and drawn rows."""
    p, tokens, q = laws
    size = len(parents)
    tokens = np.resize(tokens, size)
    p, q = (
        np.round(np.resize(x, (rows, x.shape[1])) * 64 + 0.5) + 1
        for x, rows in ((p, size + 1), (q, size))
    )
    p, q = (x / x.sum(axis=-1, keepdims=True) for x in (p, q))
    for rule in TREE_RULES.values():
        chances, after = rule.judge(p, tokens, q, parents)
        on_mlx = rule.judge(to_mlx(p), to_mlx(tokens), to_mlx(q), parents)
        np.testing.assert_allclose(chances, np.array(on_mlx[0]), atol=1e-3)
        np.testing.assert_allclose(np.array(on_mlx[1]).sum(axis=-1), 1, atol=1e-4)
        assert after.shape == on_mlx[1].shape


def test_own_tokens_lead_through_the_tree():
    """Match goes down where a child carries the row's own token, the first of two alike; with all
    mass on one token every rule is match, and reads no distribution.
    """
    parents = [ROOT, ROOT, 1, 1, 2, 3]
    own = mx.array([7, 0, 5, 6, 0, 9, 0])
    draft = Draft([4, 7, 5, 5, 6, 6], parents=parents)
    rules: list[Any] = [OwnTokens(), *TREE_RULES.values()]
    for rule in rules:
        verdict = rule.decide_tree(Known(own, own, greedy=True), draft, Given(own, own))
        outcome = outcome_of(verdict, draft.tokens)
        assert (list(outcome.accepted), outcome.tokens) == ([1, 2, 4], [7, 5, 6, 9])


def over_all_draws(p: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, float]:
    """Law [V] of the token, and the chance that one of the candidates, each of its row, is kept."""
    law, kept = np.zeros_like(p), 0.0
    for candidates in product(*[np.flatnonzero(row).tolist() for row in rows]):
        left = np.prod(rows[range(len(rows)), candidates])
        chances = MultiRound().at_node(p, np.array(candidates), rows)[0]
        for token, chance in zip(candidates, chances, strict=True):
            law[token] += left * chance
            kept += left * chance
            left *= 1 - chance
        law += left * remaining_laws(p, rows)[-1]
    return law, kept


@st.composite
def candidate_laws(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Target's law [V], and laws [C, V] of the candidates, of one law or of several."""
    vocab_size, count = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    p, first = draw(strategies.law_pairs(vocab_size))
    more = [st.just(first), strategies.laws(vocab_size)]
    return p, np.stack([first, *[draw(st.one_of(more)) for _ in range(count - 1)]])


@given(candidate_laws())
@example((np.array([1.0]), np.array([[1.0]] * 2)))
@example((np.array([0.75, 0.25, 0]), np.array([[0.75, 0.25, 0]] * 2)))
@example((np.array([0.75, 0.25, 0]), np.array([[1.0, 0, 0]] * 2)))
@example((np.array([0.75, 0.25, 0]), np.array([[0, 0, 1.0]])))
@example((np.array([0.5, 0.3, 0.2]), np.array([[0.2, 0.7, 0.1], [0.6, 0.1, 0.3]])))
def test_independent_candidates_leave_the_law_alone(laws):
    """One from each of several laws: the token's law is p to 1e-12, and more of them keep more."""
    p, rows = laws
    kept = []
    for count in range(1, len(rows) + 1):
        law, chance = over_all_draws(p, rows[:count])
        np.testing.assert_allclose(law, p, atol=EXACT)
        kept.append(chance)
    assert np.all(np.diff(kept) >= -EXACT)
    assert kept[0] == pytest.approx(np.minimum(p, rows[0]).sum(), abs=EXACT)


# Typical acceptance -------------------------------------------------------------------------------

TYPICAL = [Typical(), Typical(0.3, 0.6), Typical(0.9, 0.99), Typical(0.0, 0.5)]


def typical_path(
    rule: Typical, p: np.ndarray, tokens: Sequence[int], parents: Sequence[int]
) -> list[int]:
    """Of all paths whose tokens pass min(epsilon, delta exp(-H)) the longest, the first of several:
    Cai et al. 2024, 2.3.1, by trying them all.
    """

    def passes(node: int) -> bool:
        law = p[parents[node] + 1]
        entropy = -sum(x * math.log(x) for x in law if x > 0)
        return law[tokens[node]] > min(rule.epsilon, rule.delta * math.exp(-entropy))

    paths = [[], *(path_to(node, parents) for node in range(len(tokens)))]
    return max((path for path in paths if all(map(passes, path))), key=len)


grown = st.lists(st.integers(0, 99), min_size=1, max_size=12).map(
    lambda ways: [way % (node + 1) - 1 for node, way in enumerate(ways)]
)


@given(parents=grown, rule=st.sampled_from(TYPICAL), seed=st.integers(0, 9999))
@settings(max_examples=200)
def test_typical_keeps_the_longest_path_of_typical_tokens(parents, rule, seed):
    """On trees of any order, its siblings alike or not; also on MLX, where the
    token after is the likeliest to p and the noise at the path's end. A greedy target's is match.
    """
    made, size = np.random.default_rng(seed), len(parents)
    p = made.dirichlet(np.full(4, 0.5), size + 1).astype(np.float32)
    tokens, noise = made.integers(0, 4, size), mx.array(made.gumbel(size=4), mx.float32)
    path = typical_path(rule, p, tokens.tolist(), parents)
    chances, after = rule.judge(p, tokens, np.zeros((size, 4)), parents)
    assert rule.find_path((chances > 0).tolist(), parents) == path
    assert after is p
    draft = Draft(tokens.tolist(), parents=parents)
    verdict = rule.decide_tree(Known(mx.array(p), noise), draft, Given(mx.zeros(size), noise))
    outcome = outcome_of(verdict, draft.tokens)
    last = p[path[-1] + 1 if path else 0]
    own = int(np.argmax(np.log(np.maximum(last, 1e-30)) + np.array(noise)))
    assert (list(outcome.accepted), outcome.tokens[-1]) == (path, own)
    likeliest = mx.argmax(mx.array(p), axis=-1)
    certain = Known(mx.array(p), likeliest, greedy=True)
    matched = OwnTokens().decide_tree(certain, draft, Given(noise, noise))
    verdict = rule.decide_tree(certain, draft, Given(noise, noise))
    assert outcome_of(verdict, draft.tokens) == outcome_of(matched, draft.tokens)


@in_one_test("way", WAYS)
def test_a_round_of_typical_trees_has_the_stated_distribution(way):
    """The longest typical path of whatever is drafted, then a token of p: to 1e-12. It keeps no
    less than the chain of first children.
    """
    for parents, rule in product((*SMALL, *SEVEN[:2]), TYPICAL[:2]):
        target, source = sources(3 if len(parents) < 4 else 2, len(parents))
        drawn = TreeDrawn(source, parents, **WAYS[way])
        found, stated = rounds(target, drawn, rule), defaultdict[Any, float](float)
        for weight, tokens, _ in drawn.drafts(0):
            rows = found.rows(0, tokens)
            path = typical_path(rule, rows, tokens, parents)
            first = first_path(parents)
            chances = rule.accept_probs(
                rows[[0, *(i + 1 for i in first)]], np.array(tokens)[first], rows[first]
            )
            assert len(path) >= rule.num_accepted(chances > 0)
            stated[tuple(tokens[i] for i in path)] += weight * rows[path[-1] + 1 if path else 0]
        got = found.outcomes_from(0)
        assert {*got} == {*stated}
        for kept, masses in stated.items():
            np.testing.assert_allclose(got[kept], masses, atol=EXACT)
