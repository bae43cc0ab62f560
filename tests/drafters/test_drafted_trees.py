"""Trees of heads and draft models: levels, shapes, distributions, and plain text with them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import distribution
import tiny
from exact import ByRule, Source
from exact_trees import TREE_RULES
from heads import HEADS, mtp, random_head
from lossless import PROMPT, TOLERANCE, plain_text, spoken
from selection import FULL, cases, in_one_test
from specdec_mlx import ModelDrafter, Sampling, speculate
from specdec_mlx.contracts import ROOT, Draft, DraftContext, Evidence, chain
from specdec_mlx.draft_length.chances import (
    EDGES,
    NUM_WEIGHTS,
    PLACES,
    PRIORS,
    VARIANCE,
    Chances,
    class_of,
)
from specdec_mlx.drafters.draft_sources import places_after
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.drafters.tree_drafts import TreeDraws
from specdec_mlx.errors import HeadError
from specdec_mlx.lab.proof.enumeration import continued, sources
from specdec_mlx.models.anatomy import StateReader
from specdec_mlx.sampling import Noise
from specdec_mlx.token_ids import to_list
from specdec_mlx.trees.shape import children_of, depths_of, path_to

BRANCHES, SIZE = 3, 10


@functools.cache
def drafter(kind: str, name: str, **options: Any) -> Any:
    """A head with random weights, or a model of the same architecture, that forks."""
    if kind == "model":
        return ModelDrafter(tiny.build(name, seed=5), branches=BRANCHES, **options)
    make = mtp(name) if kind == "mtp" else HEADS[kind]
    return HeadDrafter(random_head(make, tiny.build(name)), branches=BRANCHES, **options)


IN_SHORT = [("eagle3", "qwen2"), ("model", "mamba2"), ("mtp", "qwen3_5")]
TABLE = [
    *IN_SHORT,
    ("medusa", "qwen2"),
    ("hydra", "qwen2"),
    ("eagle3 variants", "gpt_oss"),
    ("eagle1", "gemma3_text"),
    ("dflash", "llama"),
]
TABLE += [("model", "gpt_oss"), ("model", "deepseek_v32"), ("mtp", "deepseek_v3")]
"""Every kind of head and every kind of caches: neither knows the other."""


@pytest.mark.parametrize(("kind", "name"), cases(TABLE, *IN_SHORT))
def test_text_with_a_drafted_tree_is_plain_text(kind: str, name: str) -> None:
    """Greedy, of a fixed length and of its own, and a seed's text under coupled; also where a model
    takes chains alone.
    """
    model, one = tiny.build(name), drafter(kind, name)
    plain = plain_text(model, PROMPT, 40)
    for length in ("auto", SIZE):
        items = list(speculate(model, PROMPT, one, max_tokens=40, num_draft_tokens=length))
        assert spoken(items).deviation(plain) < TOLERANCE
    assert items[-1].stats.drafted > 0
    options: dict[str, Any] = {"sampler": Sampling(temp=1.0), "seed": 5, "rule": "coupled"}
    texts = [
        [
            t.token
            for t in speculate(model, PROMPT, d, max_tokens=24, num_draft_tokens=SIZE, **options)
        ]
        for d in (None, one)
    ]
    assert texts[0] == texts[1]


def session_of(kind: str, name: str, **context: Any) -> Any:
    """A session that was shown the prompt."""
    model, one = tiny.build(name), drafter(kind, name)
    size = model(mx.array([[1]])).shape[-1]
    text = PROMPT[:5]  # with a tree within the windows of these models
    session: Any = one.begin(text, DraftContext(vocab_size=size, **context))
    if isinstance(one, HeadDrafter):
        taps = StateReader(model, one.features, lambda index: None)  # type: ignore[arg-type,return-value]
        taps.read(lambda: model(mx.array([text[:-1]]))[0])
        session.see(taps.features)
    return session


LEVELS = (([5, 9, 20], [ROOT] * 3), ([7, 8], [1, 1]), ([30, 31, 32], [0, 3, 4]), ([44], [6]))
"""Tokens of each level, and their parents among those before."""


BY_LEVELS = [("eagle3", "qwen2"), ("eagle3 variants", "qwen2"), ("eagle1", "gemma3_text")]
BY_LEVELS += [("mtp", "deepseek_v3"), *(("model", n) for n in ("llama", "gemma3_text"))]


@in_one_test(("kind", "name"), BY_LEVELS)
def test_each_node_is_drafted_from_its_own_path(kind: str, name: str) -> None:
    """A level's logits are those of the same session fed the path alone, to 1e-4."""
    session = session_of(kind, name)
    assert session.forks
    source = session.source
    source.begin_draft(SIZE)
    source.next_logits(None)
    rows = mx.concatenate([source.next_logits(mx.array(t), p) for t, p in LEVELS])
    tokens = [token for level, _ in LEVELS for token in level]
    parents = [parent for _, level in LEVELS for parent in level]
    for node in range(len(tokens)):
        alone = session_of(kind, name).source
        alone.begin_draft(SIZE)
        logits = alone.next_logits(None)
        for token in (tokens[i] for i in path_to(node, parents)):
            logits = alone.next_logits(mx.array([token]))
        np.testing.assert_allclose(np.array(rows[node]), np.array(logits[0]), atol=1e-4)


def marginals(logits: mx.array) -> Any:
    """Logits [n, V] by place alone, as of heads that draft at once."""
    known = [0]
    return lambda tokens, parents: logits[mx.array(places_after(known, tokens, parents))]


def point_masses(logits: mx.array, limit: int, branches: int = BRANCHES) -> tuple[Draft, TreeDraws]:
    """A tree of marginals, greedy."""
    context = DraftContext(vocab_size=logits.shape[-1])
    draws = TreeDraws(context, Sampling(), PROMPT, len(PROMPT), branches, Chances.of("model"))
    return draws.write(marginals(logits), limit, len(logits)), draws


@in_one_test("limit", [1, 2, 5, 12, 99])
def test_a_tree_of_marginals_is_the_product_of_the_likeliest_guesses(limit: int) -> None:
    """Of all texts out of each place's three best, those of the greatest chances; none twice."""
    logits = 3 * mx.random.normal((3, 9), key=mx.random.key(1))
    draft, _ = point_masses(logits, limit)
    probs, known = np.array(mx.softmax(logits, axis=-1)), Chances.of("model")
    reach: dict[tuple[int, ...], float] = {(): 1.0}
    for depth, row in enumerate(probs):
        best = np.argsort(-row)[:BRANCHES]
        told = [Evidence(confidence=float(row[t]), rank=rank) for rank, t in enumerate(best)]
        chances = [known.of_draft([one], first=depth)[0] for one in told]
        chances = [chance / max(1.0, sum(chances)) for chance in chances]
        for text in [text for text in reach if len(text) == depth]:
            reach |= {(*text, int(t)): reach[text] * c for t, c in zip(best, chances, strict=True)}
    del reach[()]
    parents = chain(len(draft)) if draft.parents is None else list(draft.parents)
    tokens = to_list(draft.tokens)
    texts = [tuple(tokens[i] for i in path_to(node, parents)) for node in range(len(draft))]
    assert len(set(texts)) == len(texts) == min(limit, len(reach))
    likeliest = sorted(reach.values(), reverse=True)[: len(texts)]
    np.testing.assert_allclose(sorted((reach[t] for t in texts), reverse=True), likeliest)


def test_a_head_that_drafts_chains_has_no_branches() -> None:
    """It is refused; of others the key says how many."""
    with pytest.raises(HeadError, match="draft chains"):
        HeadDrafter(random_head(HEADS["assistant"], tiny.build("gemma4_text")), branches=2)
    assert all("branches=3" in drafter(kind, "qwen2").key for kind in ("medusa", "model"))


def test_what_was_right_is_learned() -> None:
    """Of the nodes at the places that the text came through, until it left the tree."""
    logits = mx.log(mx.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]]))
    before = PRIORS["model"]
    for text, deeper in (([1], False), ([1, 0], True), ([2, 1], False)):
        _, draws = point_masses(logits, 99, branches=2)
        draws.learn(text)
        odds = [weight[0] for weight in draws.known.weights]
        likeliest, second = class_of("confidence", 0.5), class_of("rank", 1)
        assert odds[likeliest] < before[likeliest]
        assert (odds[second] > before[second]) == (text[0] == 1)
        assert (odds[PLACES[1]] != before[PLACES[1]]) == deeper
        assert odds[PLACES[1]] <= before[PLACES[1]]


class Scripted(TreeDraws):
    """Draws that are given in advance by node and rank; the likeliest token wherever none is."""

    def begin(self, script: dict[tuple[int, int], int]) -> None:
        self.script, self.laws = script, dict[tuple[int, int], np.ndarray]()

    def _without_replacement(
        self, q: mx.array, nodes: Sequence[int], count: int
    ) -> tuple[mx.array, list[mx.array]]:
        drawn = np.zeros((len(nodes), count), np.int32)
        for i, (node, row) in enumerate(zip(nodes, np.array(mx.exp(q)), strict=True)):
            for rank in range(count):
                left = row.copy()
                left[drawn[i, :rank]] = 0
                self.laws[node, rank] = left / left.sum()
                drawn[i, rank] = self.script.get((node, rank), int(left.argmax()))
        laws = [np.stack([self.laws[node, rank] for node in nodes]) for rank in range(count)]
        return mx.array(drawn), [mx.array(np.log(law + 1e-30)) for law in laws]


class Known:
    """Levels of a source."""

    def __init__(self, source: Source, state: int) -> None:
        self.source, self.state, self.texts = source, state, list[tuple[int, ...]]()

    def row(self, text: tuple[int, ...]) -> mx.array:
        return mx.array(np.log(self.source.after(self.state, text) + 1e-30))[None]

    def next_logits(self, tokens: mx.array | None, parents: Sequence[int]) -> mx.array:
        if tokens is None:
            return self.row(())
        new = [
            (*(() if parent == ROOT else self.texts[parent]), token)
            for token, parent in zip(to_list(tokens), parents, strict=True)
        ]
        self.texts += new
        return mx.concatenate([self.row(text) for text in new])


def decided() -> Chances:
    """Chances that differ enough with the draft's confidence for shapes to differ."""
    odds = [0.0] * NUM_WEIGHTS
    for confidence in EDGES["of a draw"][1:]:
        odds[class_of("of a draw", confidence)] = 2 * np.log(confidence / (1 - confidence))
    odds[class_of("rank", 1)] = -0.5
    return Chances([[one, VARIANCE] for one in odds])


def drawn_trees(source: Source, limit: int) -> Iterator[tuple[float, Draft]]:
    """Every tree that may be drawn, each with its chance: one draw after the other."""
    waiting: list[tuple[float, dict[tuple[int, int], int]]] = [(1.0, {})]
    context = DraftContext(vocab_size=source.after(0, ()).shape[-1])
    while waiting:
        weight, script = waiting.pop()
        draws = Scripted(context, Sampling(temp=1.0), [0], 1, 2, decided())
        draws.begin(script)
        levels = Known(source, 0)
        draft = draws.write(levels.next_logits, limit, limit)
        kept = [
            (node, rank)
            for node, place in draws.siblings.items()
            for rank in range(len(place.children))
        ]
        following = next((key for key in kept if key not in script), None)
        if following is None:
            yield weight, draft
        else:
            law = draws.laws[following]
            for token in np.flatnonzero(law > 1e-20):
                waiting.append((weight * law[token], {**script, following: int(token)}))


def law_of_a_round(rule: Any, limit: int, cut: Any = lambda draft: draft) -> tuple[Any, Any]:
    """The first tokens of a round with drawn trees, and the target's own; each by text."""
    target, source = sources(4, 3)
    seen: dict[tuple[int, ...], float] = {}
    shapes = set()
    for weight, whole in drawn_trees(source, limit):
        draft = cut(whole)
        tokens = to_list(draft.tokens)
        parents = tuple(chain(len(draft)) if draft.parents is None else draft.parents)
        shapes.add(parents)
        paths = [path_to(row - 1, parents) for row in range(len(parents) + 1)]
        rows = np.stack([target.after(0, tuple(tokens[i] for i in path)) for path in paths])
        q = np.exp(np.array(draft.logprobs, np.float64))
        decided = ByRule(rule, parents).outcomes(rows, tuple(tokens), q / q.sum(-1)[:, None])
        for kept, masses in decided:
            for token, chance in enumerate(masses):
                text = (*kept, token)
                seen[text] = seen.get(text, 0.0) + weight * chance
    assert len(shapes) > 1
    got = continued(target, {text: c for text, c in seen.items() if c}, limit + 1)
    return got, continued(target, {(): 1.0}, limit + 1)


def without_unlikely(draft: Draft) -> Draft:
    """Wrong: a last token that was drawn by a chance below 0.4 is dropped."""
    assert draft.logprobs is not None
    own = draft.logprobs[len(draft) - 1, to_list(draft.tokens)[-1]].item()
    return draft.head(len(draft) - 1) if own < np.log(0.4) else draft


@in_one_test("name", TREE_RULES)
def test_shapes_that_follow_from_what_was_drawn_leave_the_distribution_alone(name: str) -> None:
    """Every tree of three draws at V = 4, to the precision of float32; dropping what was drawn is
    found.
    """
    got, own = law_of_a_round(TREE_RULES[name], 3)
    assert np.abs(got - own).sum() < 1e-5
    got, own = law_of_a_round(TREE_RULES[name], 3, without_unlikely)
    assert np.abs(got - own).sum() > 1e-3


@in_one_test("sampling", [Sampling(temp=1.0), Sampling(temp=0.7, top_k=2)])
def test_siblings_say_what_they_were_drawn_from(sampling: Sampling) -> None:
    """Each row is the draft's distribution without its earlier siblings, and allows its token."""
    session = session_of("model", "llama", sampling=sampling, noise=Noise(3))
    draft = session.propose(SIZE)
    tokens, parents = to_list(draft.tokens), list(draft.parents)
    probs = np.exp(np.array(draft.logprobs))
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    for siblings in children_of(parents):
        for earlier, node in itertools.pairwise(siblings):
            left = probs[earlier].copy()
            left[tokens[earlier]] = 0
            np.testing.assert_allclose(probs[node], left / left.sum(), atol=1e-4)
        assert all(probs[node, tokens[node]] > 0 for node in siblings)
        assert len(siblings) <= (2 if sampling.top_k else BRANCHES)
    assert max(depths_of(parents)) > 0


def test_two_draws_of_a_place_follow_the_law_that_they_declare() -> None:
    """800 trees: chi-square of the first two siblings' joint, false alarms 1e-6."""
    logits, count = mx.log(mx.array([[0.5, 0.3, 0.15, 0.05]])), 800
    seen, sampling = np.zeros((4, 4)), Sampling(temp=1.0)
    for seed in range(count):
        context = DraftContext(sampling=sampling, noise=Noise(seed), vocab_size=4)
        draws = TreeDraws(context, sampling, PROMPT, len(PROMPT), 2, Chances.of("model"))
        first, second = to_list(draws.write(marginals(logits), 2, 1).tokens)
        seen[first, second] += 1
    p = np.array([0.5, 0.3, 0.15, 0.05])
    joint = np.outer(p, p) / (1 - p)[:, None]
    np.fill_diagonal(joint, 0)
    assert distribution.p_value(seen, joint) > 1e-6


LAWS = [
    ("model", "rejection", "top-k"),
    ("eagle3", "block", "temperature 1"),
    ("medusa", "rejection", "temperature 1"),
]


@FULL
@pytest.mark.parametrize(("kind", "rule", "setting"), LAWS)
def test_texts_with_drawn_trees_follow_the_targets_law(kind: str, rule: str, setting: str) -> None:
    """Chi-square of the joint of three tokens of a model with six; false alarms 1e-6."""
    sampling, seen, kept = distribution.SETTINGS[setting], np.zeros((6,) * 3), 0
    model = distribution.tiny_llama(distribution.TARGET)
    if kind == "model":
        one: Any = ModelDrafter(distribution.tiny_llama(distribution.DRAFT), branches=3)
    else:
        one = HeadDrafter(random_head(HEADS[kind], model), branches=3)
    for seed in range(150):
        how: Any = {"max_tokens": 9, "seed": seed, "rule": rule, "num_draft_tokens": 8}
        tokens = speculate(model, distribution.PROMPT, one, sampler=sampling, **how)
        with closing(tokens):
            items = list(itertools.islice(tokens, 5))
        seen[tuple(item.token for item in items[:3])] += 1
        kept += sum(b.row > a.row + 1 for a, b in itertools.pairwise(items))
    assert distribution.p_value(seen, distribution.joint_law(sampling)) > 1e-6
    assert kept > 10  # of later branches
