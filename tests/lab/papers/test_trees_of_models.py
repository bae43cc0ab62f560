"""Draft models, heads and look-ups in one tree (SpecInfer)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import distribution
import narrow
import specdec_mlx as sd
import tiny
from exact import TARGET, ByRule, Source, continued, rolled
from exact_trees import TREE_RULES
from heads import HEADS, random_head
from lossless import PROMPT
from scripted import ScriptedDrafter
from selection import cases, in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import ROOT, Draft, DraftContext, chain
from specdec_mlx.drafters.heads.drafter import HeadDrafter
from specdec_mlx.lab.papers.tree_drafts import side_by_side
from specdec_mlx.lab.proof.enumeration import Tokens
from specdec_mlx.sampling import Noise
from specdec_mlx.token_ids import to_list
from specdec_mlx.trees.shape import path_to

EXACT = 1e-12
MODELS = rolled([0.2, 0.7, 0.1]), rolled([0.5, 0.1, 0.4])
COPIED: Tokens = (1, 1, 2)


@dataclass(frozen=True)
class Part:
    """A drafter of the tree: draws of a source, or for None a look-up's copy."""

    source: Source | None
    length: int

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """Every draft with its chance, and the rows that it was drawn from."""
        if self.source is None:
            tokens = COPIED[: self.length]
            yield 1.0, tokens, np.eye(3)[list(tokens)]
            return
        for tokens in product(range(3), repeat=self.length):
            rows = self.source.along(state, tokens)[: self.length]
            yield float(np.prod(rows[range(self.length), tokens])), tokens, rows


TREES: dict[str, tuple[Sequence[Part], int]] = {
    "two models": ([Part(MODELS[0], 2), Part(MODELS[1], 2)], 9),
    "of two lengths, cut": ([Part(MODELS[0], 1), Part(MODELS[1], 3)], 3),
    "one of them twice": ([Part(MODELS[0], 2), Part(MODELS[0], 1)], 9),
    "with a look-up": ([Part(MODELS[1], 2), Part(None, 2)], 9),
    "three": ([Part(None, 1), Part(MODELS[0], 1), Part(MODELS[1], 1)], 9),
}


def law_of_a_round(rule: Any, parts: Sequence[Part], limit: int, merge: bool = False) -> float:
    """Distance of the tokens of a round from the target's own, over all drafts of all parts.

    merge: wrong, a sibling that repeats an earlier one's token is dropped.
    """
    seen: dict[Tokens, float] = {}
    for drawn in product(*(part.drafts(0) for part in parts)):
        rows = np.concatenate([rows for _, _, rows in drawn])
        drafts, first = [], 0
        for _, tokens, _ in drawn:
            # a row's number in place of its distribution, which is float32
            numbers = mx.arange(first, first + len(tokens))[:, None] + mx.zeros((1, 3))
            drafts.append(Draft(tokens, numbers))
            first += len(tokens)
        tree = side_by_side(drafts).head(limit)
        tokens = tuple(to_list(tree.tokens))
        parents = tuple(chain(len(tree)) if tree.parents is None else tree.parents)
        order = [int(row[0]) for row in np.array(tree.logprobs)]
        if merge:
            twice = [t == tokens[0] and p == ROOT for t, p in zip(tokens, parents, strict=True)]
            if sum(twice) > 1 and len(tokens) == 2:
                tokens, parents, order = tokens[:1], parents[:1], order[:1]
        paths = [path_to(row - 1, parents) for row in range(len(parents) + 1)]
        target = np.stack([TARGET.after(0, tuple(tokens[i] for i in path)) for path in paths])
        weight = float(np.prod([chance for chance, _, _ in drawn]))
        for kept, masses in ByRule(rule, parents).outcomes(target, tokens, rows[order]):
            for token, chance in enumerate(masses):
                text = (*kept, token)
                seen[text] = seen.get(text, 0.0) + weight * chance
    longest = max(map(len, seen))
    own = continued(TARGET, {(): 1.0}, longest)
    return float(np.abs(continued(TARGET, seen, longest) - own).sum() / 2)


@in_one_test("tree", TREES)
@in_one_test("name", TREE_RULES)
def test_trees_of_several_leave_the_distribution_alone(name: str, tree: str) -> None:
    """Of independent draws from several distributions, and copies: to 1e-12."""
    assert law_of_a_round(TREE_RULES[name], *TREES[tree]) < EXACT


def test_dropping_what_repeats_a_sibling_is_found() -> None:
    """What is merged because it was drawn equal changes the distribution."""
    parts = [Part(rolled([0.3, 0.65, 0.05]), 1), Part(rolled([0.3, 0.5, 0.2]), 1)]
    for rule in TREE_RULES.values():
        assert law_of_a_round(rule, parts, 9, merge=True) > 1e-3


def test_each_draft_is_a_branch_with_its_own_rows() -> None:
    """At each depth in the drafters' order; a look-up's token has all mass; a cut is a tree."""
    first, second = mx.log(mx.array([[0.25, 0.75], [0.5, 0.5]])), mx.log(mx.array([[0.1, 0.9]]))
    forked = Draft(mx.array([0, 1, 1]), mx.concatenate([first, second]), parents=[ROOT, ROOT, 0])
    tree = side_by_side([Draft(mx.array([1, 0]), first), Draft([1]), forked])
    assert to_list(tree.tokens) == [1, 1, 0, 1, 0, 1]
    assert tree.parents == [ROOT, ROOT, ROOT, ROOT, 0, 2]
    rows = np.exp(np.array(tree.logprobs))
    expected = [[0.25, 0.75], [0, 1], [0.25, 0.75], [0.5, 0.5], [0.5, 0.5], [0.1, 0.9]]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert to_list(tree.head(5).first_chain().tokens) == [1, 0]
    assert side_by_side([Draft(mx.array([1, 0]), first)]).parents is None


def trees(name: str) -> dict[str, Any]:
    """Trees of which the second part is right: the target itself."""
    target, other = tiny.build(name), sd.ModelDrafter(tiny.build(name, seed=6))
    return {
        "models": lab.TreeOf(other, sd.ModelDrafter(target), sd.SuffixDrafter()),
        "a tree in it": lab.TreeOf(sd.ModelDrafter(target, branches=2), other),
        "a cascade in it": lab.TreeOf(other, lab.GuessedDrafter(target, drafter="suffix")),
    }


IN_SHORT = [("llama", "models"), ("gemma3_text", "a cascade in it"), ("qwen3_5", "models")]
TABLE = [*IN_SHORT, ("gemma3_text", "a tree in it"), ("mamba2", "a tree in it")]


@pytest.mark.filterwarnings("ignore:.*verifies no tree of drafts")
@pytest.mark.parametrize(("name", "kind"), cases(TABLE, *IN_SHORT))
def test_texts_are_plain_texts(name: str, kind: str) -> None:
    """Greedy, and a seed's text under coupled; models that take trees are right in the branch of
    the second drafter, which goes on from what was kept of its own.
    """
    model, tree = tiny.build(name), trees(name)[kind]
    for options in ({}, {"sampler": sd.Sampling(temp=1.0), "seed": 5, "rule": "coupled"}):
        how: Any = {"max_tokens": 40, "num_draft_tokens": 8} | options
        plain, both = (list(sd.speculate(model, PROMPT, one, **how)) for one in (None, tree))
        assert [t.token for t in both] == [t.token for t in plain]
        if name in ("llama", "gemma3_text") or kind == "a tree in it":
            assert both[-1].stats.accepted > 20


def test_heads_take_part() -> None:
    """A head reads the target's states of whatever was kept, also of the draft model's branch."""
    model = tiny.build("qwen2")
    head = HeadDrafter(random_head(HEADS["eagle3"], model))
    alone = lab.TreeOf(head, sd.SuffixDrafter())
    for tree in (lab.TreeOf(head, sd.ModelDrafter(model)), alone):
        for length in (6, "auto"):
            how: Any = {"max_tokens": 30, "num_draft_tokens": length}
            plain, both = (list(sd.speculate(model, PROMPT, one, **how)) for one in (None, tree))
            assert [t.token for t in both] == [t.token for t in plain]
            assert length == "auto" or tree is alone or both[-1].stats.accepted > 10


def test_each_is_told_what_was_kept_of_its_own_draft() -> None:
    """And then what came after that, so that its caches go back to where it left the text."""
    told: dict[str, list[list[int]]] = {"a": [], "b": []}

    def drafter(name: str, *tokens: int) -> Any:
        begun = ScriptedDrafter(lambda start, limit: list(tokens)).begin([], DraftContext())
        begun.observe = lambda new: told[name].append(list(new))  # type: ignore
        return type("Begun", (), {"begin": lambda self, prompt, context: begun, "key": name})()

    tree = lab.TreeOf(drafter("a", 1, 2, 3), drafter("b", 1, 7, 8))
    session: Any = tree.begin([0], DraftContext())
    draft = session.propose(6)
    assert (to_list(draft.tokens), draft.parents) == ([1, 2, 7, 3, 8], [ROOT, 0, 0, 1, 2])
    session.observe([1, 7, 8, 9])
    session.observe([4, 5])
    assert told == {"a": [[1, 7], [8, 9], [4], [5]], "b": [[1, 7, 8, 9], [4], [5]]}


@pytest.mark.full
def test_siblings_are_independent_draws() -> None:
    """The same model twice, 800 drafts: chi-square of the joint of both first tokens, false alarms
    1e-6, and of the second one and the first of a text with the next seed, as texts of a batch
    have; with the noise of coupling they are one.
    """
    model = distribution.tiny_llama(distribution.DRAFT)
    tree: Any = lab.TreeOf(sd.ModelDrafter(model), sd.ModelDrafter(model))
    sampling, vocab_size = sd.Sampling(temp=1.0), 6
    seen, of_texts = np.zeros((vocab_size,) * 2), np.zeros((vocab_size,) * 2)
    latest = None
    for seed in range(800):
        context = DraftContext(sampling, Noise(seed), vocab_size=vocab_size)
        draft = tree.begin(distribution.PROMPT, context).propose(2)
        first, second = to_list(draft.tokens)
        seen[first, second] += 1
        if latest is not None:
            of_texts[latest, first] += 1
        latest = second
        assert draft.parents == [ROOT, ROOT]
    law = np.exp(np.array(draft.logprobs[0], np.float64))
    independent = np.outer(law, law) / law.sum() ** 2
    assert distribution.p_value(seen, independent) > 1e-6
    assert distribution.p_value(of_texts, independent) > 1e-6
    coupled = replace(context, coupled=True)
    assert len(tree.begin(distribution.PROMPT, coupled).propose(2)) == 1


@pytest.mark.full
@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_texts_with_drawn_trees_follow_the_targets_law(rule: str) -> None:
    """Chi-square of the joint of three tokens of a model with six; false alarms 1e-6."""
    model = distribution.tiny_llama(distribution.TARGET)
    draft = sd.ModelDrafter(distribution.tiny_llama(distribution.DRAFT))
    tree, seen, kept = lab.TreeOf(draft, sd.ModelDrafter(model)), np.zeros((6,) * 3), 0
    sampling = sd.Sampling(temp=1.0)
    for seed in range(150):
        how: Any = {"max_tokens": 5, "seed": seed, "rule": rule, "num_draft_tokens": 4}
        items = list(sd.speculate(model, distribution.PROMPT, tree, sampler=sampling, **how))
        seen[tuple(item.token for item in items[:3])] += 1
        kept += any(item.from_draft and item.row in (2, 4) for item in items)
    assert distribution.p_value(seen, distribution.joint_law(sampling)) > 1e-6
    assert kept > 10  # of the second one's branch


def test_a_drafter_on_every_rank_is_refused() -> None:
    """Ranks would have to agree on the trees of all."""
    drafter = sd.ModelDrafter(narrow.model(), on_every_rank=True)
    with pytest.raises(ValueError, match="on every rank"):
        lab.TreeOf(drafter, sd.SuffixDrafter()).begin(PROMPT, DraftContext())
