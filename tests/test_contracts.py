"""Drafts, trees and readers that the contracts admit, with scripted targets, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step, generation_stream
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
import strategies
import tiny
from scripted import (
    ChainCache,
    RecurrentTokenCache,
    ScriptedTarget,
    TappedTarget,
    TokenCache,
)
from selection import in_one_test
from specdec_mlx.contracts import (
    ROOT,
    Agreement,
    Draft,
    DraftContext,
    FeatureRows,
    Features,
    Target,
    Verdict,
)
from specdec_mlx.draft_length.policy import Fixed
from specdec_mlx.loop import Generation, Token
from specdec_mlx.rounds.drafting import Drafting
from specdec_mlx.rounds.sequence import SequenceState
from specdec_mlx.stats.account import SpeculationStats

PROMPT = [900, 901, 902, 903, 904, 905, 906]
TEXT = list(range(9, 60))
WRONG = 999

TREE = Draft([10, WRONG, 11, 11, WRONG, 12], parents=[ROOT, ROOT, 1, 0, 0, 3])
"""The text goes on with 10, 11, 12 after its first token: nodes 0, 3 and 5. Node 2 is an 11 on a
wrong branch."""


class Given(scripted.ScriptedSession):
    """A drafter, and its session, that proposes what is given, one a round from the second on."""

    def __init__(self, *drafts: Any) -> None:
        super().__init__(lambda emitted, limit: [])
        self.drafts = chain(drafts, repeat(Draft()))

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Given:
        self.prompt = list(prompt)
        return self

    def propose(self, limit: int) -> Draft:
        return next(self.drafts)


def generation(
    target: Target, drafter: Any, *, max_tokens: int = 12, most: int = 6
) -> tuple[Generation, list[Any]]:
    """The loop over a target of one's own, and the caller's list of caches."""
    sequence = SequenceState(list(PROMPT), len(PROMPT), max_tokens)
    caches: list[Any] = []
    stream: Any = generation_stream
    drafting = Drafting(drafter, Fixed(most), target, sequence, keeps_cache=True, stream=stream)
    parts = (target, sequence, drafting, SpeculationStats(), stream)
    return Generation(*parts, prefill_step_size=3, callers_cache=caches), caches


def run(target: Target, drafter: Any, **options: Any) -> list[Token]:
    loop, _ = generation(target, drafter, **options)
    return list(loop.run(DraftContext(vocab_size=1000)))


def test_a_tree_reaches_the_target_as_it_was_proposed() -> None:
    """Of its nodes those of the text are emitted and stay in the cache, each with its own row."""
    target = ScriptedTarget(TEXT)
    loop, caches = generation(target, Given(TREE))
    items, held = [], []
    for item in loop.run(DraftContext()):
        items.append(item)
        held.append(list(target.cache.tokens))
    assert target.drafts == [TREE]
    assert [item.token for item in items] == TEXT[:12]
    origins = [item.origin for item in items[:6]]
    assert origins == ["plain", "draft", "draft", "draft", "correction", "plain"]
    # row 0 follows the text, row i + 1 node i: of nodes 0, 3 and 5
    assert [item.logprobs.item() for item in items[1:5]] == [0, 1, 4, 6]
    assert (items[-1].stats.drafted, items[-1].stats.accepted) == (6, 3)
    assert caches == [target.cache]
    assert held[0] == PROMPT  # nothing is under way while the first token is emitted
    # the next pass, over the pending 13, is under way while 10, 11, 12 and 13 are emitted
    assert held[1:5] == [[*PROMPT, 9, 10, 11, 12, 13]] * 4


def test_a_tree_is_cut_from_its_end() -> None:
    """A drafter that ignores the limit: the first nodes are a tree, since parents come first."""
    target = ScriptedTarget(TEXT)
    items = run(target, Given(TREE), most=4)
    assert target.drafts == [TREE.head(4)]
    assert [item.origin for item in items[:4]] == ["plain", "draft", "draft", "correction"]
    assert [item.token for item in items] == TEXT[:12]


@given(draft=strategies.tree_drafts())
def test_the_head_of_a_tree_is_a_tree(draft: Draft) -> None:
    """Tokens, parents, evidence and distributions stay together; no parent is cut off."""
    for n in range(len(draft) + 2):
        head = draft.head(n)
        for name in ("tokens", "logprobs", "evidence", "parents"):
            part, whole = (getattr(one, name) for one in (head, draft))
            assert np.array_equal(part, whole[:n])


def test_a_cache_that_cannot_gather_is_named() -> None:
    """A path that skips nodes; one that does not is as good as a chain."""
    target = ScriptedTarget(TEXT, ChainCache())
    assert len(run(target, Given(Draft([10, 11, WRONG], parents=[ROOT, 0, 0])))) == 12
    target = ScriptedTarget(TEXT, ChainCache())
    with pytest.raises(sd.errors.CacheRollbackError, match=r"ChainCache\) cannot keep rows \[1\]"):
        run(target, Given(Draft([WRONG, 10], parents=[ROOT, ROOT])))
    assert target.cache.tokens == [*PROMPT, 9]


class Reader(Given):
    """Reads the target, and proposes drafts of given shapes: (parent, is right) of each node."""

    features = Features(layers=(2, 5), head_input=True, top=3)

    def __init__(self, shapes: Sequence[Sequence[tuple[int, bool]]] = ()) -> None:
        super().__init__()
        self.shapes = iter(shapes)
        self.seen: list[int] = []
        self.sizes: list[int] = []

    def propose(self, limit: int) -> Draft:
        shape = next(self.shapes, ())[:limit]
        parents, depths = [min(parent, i - 1) for i, (parent, _) in enumerate(shape)], []
        for parent in parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        right = TEXT[len(self.observed) :]
        pairs = zip(depths, shape, strict=True)
        return Draft([right[d] if ok else WRONG for d, (_, ok) in pairs], parents=parents)

    def see(self, features: FeatureRows) -> None:
        tokens = features.layers[2][:, 0] - 2000
        assert features.layers.keys() == {2, 5}
        assert features.layers[5][:, 0].tolist() == (tokens + 5000).tolist()
        assert features.head_input[:, 0].tolist() == (-tokens).tolist()
        assert features.top_tokens.tolist() == [[token] * 3 for token in tokens.tolist()]
        self.seen += tokens.tolist()
        self.sizes.append(len(tokens))

    def observe(self, tokens: Sequence[int]) -> None:
        # all but the last token observed have been fed, and so have been seen
        self.observed += tokens
        assert self.seen == [*self.prompt, *self.observed][:-1]


nodes = st.tuples(st.integers(ROOT, 5), st.sampled_from([True, True, False]))


@given(
    shapes=st.lists(st.lists(nodes, max_size=6), max_size=10),
    max_tokens=st.integers(0, 26),
    num_taken=st.integers(1, 26),
    can_gather=st.booleans(),
)
def test_whatever_is_drafted_the_text_the_cache_and_what_is_seen_are_the_targets(
    shapes: list[Any], max_tokens: int, num_taken: int, can_gather: bool
) -> None:
    """Chains and trees in turn; each position is seen once, before its token is observed.

    Those of the prompt chunk by chunk, three at a time; its last one comes with the first round.
    """
    if not can_gather:
        shapes = [[(i - 1, ok) for i, (_, ok) in enumerate(shape)] for shape in shapes]
    target = TappedTarget(TEXT, TokenCache() if can_gather else RecurrentTokenCache())
    reader = Reader(shapes)
    loop, _ = generation(target, reader, max_tokens=max_tokens)
    items = loop.run(DraftContext(vocab_size=1000))
    taken = list(islice(items, num_taken))
    items.close()
    assert [item.token for item in taken] == TEXT[: min(num_taken, max_tokens)]
    assert target.wanted == Reader.features
    assert not taken or reader.sizes[:2] == [3, 3]
    text = [*PROMPT, *TEXT[: len(taken)]]
    if taken:
        assert target.cache.tokens == text
    if num_taken > max_tokens:
        assert reader.seen == text[:-1]
        if taken:
            assert taken[-1].stats.accepted == sum(item.from_draft for item in taken)


class Blind(Given):
    """Says what it wants, and has no way to take it."""

    features = Features(layers=(0,))


def test_a_reader_that_cannot_read_is_refused() -> None:
    """Before the prompt is read, in words that say what to do."""
    target = ScriptedTarget(TEXT)
    with pytest.raises(sd.errors.DraftError, match=r"Reader reads the target's.*prompt-lookup"):
        run(target, Reader())
    assert target.cache.tokens == []
    with pytest.raises(sd.errors.DraftError, match=r"Blind wants features.*no see\(features\)"):
        run(TappedTarget(TEXT), Blind())


VOCAB = 128
MODEL_PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]


@cache
def model() -> nn.Module:
    return tiny.build("qwen2")


@cache
def plain(num_tokens: int = 16, prompt: tuple[int, ...] = tuple(MODEL_PROMPT)) -> list[int]:
    steps = generate_step(mx.array(prompt), model(), max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


def after_two(draft: Any) -> Given:
    """Two right tokens after the first one, and then what is given."""
    return Given(Draft(plain()[1:3]), draft)


def assert_refused(
    drafter: Any, words: str, error: type = sd.errors.DraftError, **options: Any
) -> None:
    """In the round where it happens; what was emitted before can be continued."""
    caches, got = make_prompt_cache(model()), []
    options |= {"max_tokens": 16, "prompt_cache": caches, "draft_length": 4}
    with pytest.raises(error, match=words):
        for item in sd.speculate(model(), MODEL_PROMPT, drafter, **options):
            got.append(item.token)
    assert {c.offset for c in caches} == {len(MODEL_PROMPT) + len(got)}
    if error is sd.errors.DraftError:
        assert got == plain()[:4]
        again = sd.speculate(model(), [9], max_tokens=4, prompt_cache=caches)
        assert [item.token for item in again] == plain(4, (*MODEL_PROMPT, *got, 9))


NO_TREES = [[ROOT], [ROOT, 0, 1, 2], [ROOT, 1, 0], [ROOT, 2, ROOT], [0, ROOT, ROOT], [-2, 0, 0], []]


@in_one_test("parents", NO_TREES)
def test_parents_that_are_no_tree_are_refused(parents: list[int]) -> None:
    """Too few, too many, a token before its parent or its own, below the root."""
    assert_refused(
        after_two(Draft([1, 2, 3], parents=parents)), "parents are .*; expected 3 indices"
    )


@in_one_test("parents", [[ROOT, ROOT, 0], [ROOT, 0, 1]])
@in_one_test("rule", ["auto", "lenient"])
def test_parents_leave_the_text_alone(parents: list[int], rule: str) -> None:
    """A tree, and a chain that says its parents; under a rule for chains alone a chain of it."""
    drafter = after_two(Draft([1, 2, 3], parents=parents))
    options: dict[str, Any] = {"max_tokens": 16, "draft_length": 4, "rule": rule}
    items = list(sd.speculate(model(), MODEL_PROMPT, drafter, **options))
    assert [item.token for item in items] == plain()


IMPOSSIBLE: dict[str, tuple[Callable[[], Any], str]] = {
    "too large by one": (lambda: mx.array([1, VOCAB]), "token 128; the target has 0 to 127"),
    "largest": (lambda: mx.array([2**32 - 1], mx.uint32), "token 4294967295; the target has"),
    "beyond 32 bits": (lambda: mx.array([2**32 + 5], mx.int64), "token 4294967301; the target has"),
    "negative": (lambda: mx.array([1, -1, 2]), "token -1; the target has"),
    "not computed yet": (lambda: mx.array([1, 2]) + VOCAB, "token 129; the target has"),
    "two dimensions": (lambda: mx.array([[1, 2]]), r"array of shape \(1, 2\)"),
    "array of floats": (lambda: mx.array([1.0, 2.0]), "type mlx.core.float32"),
    "array of bools": (lambda: mx.array([True, False]), "type mlx.core.bool"),
    "no dimension": (lambda: mx.array(3), r"array of shape \(\)"),
    "NumPy": (lambda: np.array([1, 2]), r"proposed a ndarray.*\.tolist\(\)"),
    "NumPy numbers": (lambda: list(np.array([1, 2])), "sequence of ints"),
    "floats": (lambda: [1.0, 2.0], "sequence of ints"),
    "bools": (lambda: [True, False], "sequence of ints"),
    "text": (lambda: "ab", "sequence of ints"),
    "too large, a list": (lambda: [1, VOCAB], "token 128; the target has"),
    "negative, a list": (lambda: [-1], "token -1; the target has"),
}


def pure_sampler(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


pure_sampler.pure = True  # type: ignore[attr-defined]

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "penalised": {"logits_processors": [lambda tokens, logits: logits]},
    "opaque": {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)},
    "pure": {"sampler": pure_sampler},
}


@in_one_test("kind", IMPOSSIBLE)
def test_tokens_that_are_no_ids_are_refused(kind: str) -> None:
    """Before anything is emitted that was computed with them, whichever way tokens are drawn."""
    make, words = IMPOSSIBLE[kind]
    for options in SAMPLERS.values():
        assert_refused(after_two(Draft(make())), words, **options)


@in_one_test("tokens", [[1, VOCAB], [-1], [2**30]])
@in_one_test("rule", ["rejection", "block", "match", "coupled"])
def test_drawn_tokens_that_are_no_ids_are_refused(rule: str, tokens: list[int]) -> None:
    """Distributions are not read past their end either."""
    even = mx.log(mx.full((len(tokens), VOCAB), 1 / VOCAB))
    drafter = after_two(Draft(mx.array(tokens), even))
    options: dict[str, Any] = {"sampler": sd.Sampling(temp=1.0), "rule": rule, "draft_length": 4}
    with pytest.raises(sd.errors.DraftError, match=f"token {tokens[-1]}; the target has"):
        list(sd.speculate(model(), MODEL_PROMPT, drafter, **options))


@in_one_test("answer", [None, [1, 2], mx.array([1, 2])])
def test_what_is_no_draft_is_refused(answer: Any) -> None:
    assert_refused(
        after_two(answer), "proposed a (NoneType|list|array); expected a specdec_mlx.Draft"
    )


def kept(n: int, token: int, nodes: list[int] | None = None) -> Verdict:
    return Verdict(mx.array(n), mx.array(token), None if nodes is None else mx.array(nodes))


VERDICTS = [
    (kept(3, 5), "kept 3 tokens of a draft of 2"),
    (kept(-1, 5), "kept -1 tokens of a draft of 2"),
    (kept(1, 5, [2, 0]), "kept 1 tokens, \\[2\\], of a draft of 2"),
    (kept(1, VOCAB), "next token is 128; the target has 0 to 127"),
    (kept(1, -1), "next token is -1"),
    (kept(0, 2**30), "next token is 1073741824"),
    (Agreement(mx.array([VOCAB, 1, 1])), "next token is 128"),
    (Agreement(mx.array([1, 1])), "answered with 2 tokens for a draft of 2"),
]


@in_one_test("temp", [0.0, 1.0])
@in_one_test(("answer", "words"), VERDICTS)
def test_a_verdict_that_cannot_be_is_refused(answer: Any, words: str, temp: float) -> None:
    """By name, before a wrong token is fed or emitted; the caches can be continued from."""
    rule: Any = SimpleNamespace(name="fixed", decide=lambda *given: answer)
    drafter = scripted.ScriptedDrafter(lambda n, k: [1, 2][:k])
    options: Any = {"sampler": sd.Sampling(temp=temp), "rule": rule}
    assert_refused(drafter, words, sd.errors.VerdictError, **options)
