"""Drafts, trees and readers that the contracts admit, and refusals of all others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain, islice, repeat
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
from scripted import PROMPT, plain, target
from selection import in_one_test
from specdec_mlx.contracts import (
    ROOT,
    Agreement,
    Draft,
    DraftContext,
    Evidence,
    FeatureRows,
    Features,
    Verdict,
)
from specdec_mlx.models.anatomy import StateReader

VOCAB = 128
WRONG = next(token for token in range(VOCAB) if token not in plain(40))


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


def tree() -> Draft:
    """The text goes on with nodes 0, 3 and 5; node 2 is right but for its parent."""
    first, second, third = plain()[1:4]
    tokens = [first, WRONG, second, second, WRONG, third]
    return Draft(tokens, parents=[ROOT, ROOT, 1, 0, 0, 3])


def test_of_a_tree_the_nodes_of_the_text_are_emitted_and_stay_in_the_cache() -> None:
    """Each with its own row; the next pass is under way meanwhile."""
    caches, items, held = make_prompt_cache(target()), [], []
    options: dict[str, Any] = {"max_tokens": 12, "num_draft_tokens": 6, "prompt_cache": caches}
    for item in sd.speculate(target(), PROMPT, Given(tree()), **options):
        items.append(item)
        held.append(caches[0].offset - len(PROMPT))
    assert [item.token for item in items] == plain(12)
    assert [int(item.logprobs.argmax()) for item in items] == plain(12)
    origins = [item.origin for item in items[:6]]
    assert origins == ["plain", "draft", "draft", "draft", "correction", "plain"]
    assert (items[-1].stats.drafted, items[-1].stats.accepted) == (6, 3)
    assert held[0] == 0, "nothing is under way while the first token is emitted"
    assert held[1:5] == [5] * 4, "the pass over the fifth is, while the second to fifth are"


def test_the_head_of_a_tree_is_a_tree() -> None:
    """A drafter that ignores the limit: the first nodes with all that belongs to them."""
    rows, evidence = mx.arange(30.0).reshape(6, 5), [Evidence(i) for i in range(6)]
    whole = Draft(tree().tokens, rows, evidence, tree().parents)
    for n in range(8):
        head = whole.head(n)
        for name in ("tokens", "logprobs", "evidence", "parents"):
            assert np.array_equal(getattr(head, name), getattr(whole, name)[:n])
    items = list(sd.speculate(target(), PROMPT, Given(tree()), max_tokens=12, num_draft_tokens=4))
    assert [item.origin for item in items[:4]] == ["plain", "draft", "draft", "correction"]
    assert [item.token for item in items] == plain(12)


class Reader(Given):
    """Reads the target, and proposes drafts of given shapes: (parent, is right) of each node."""

    features = Features(layers=(0, 1), head_input=True, top=3)

    def __init__(self, text: Sequence[int], shapes: Sequence[Any] = ()) -> None:
        super().__init__()
        self.text, self.shapes = text, iter(shapes)
        self.seen: list[FeatureRows] = []

    def propose(self, limit: int) -> Draft:
        shape = next(self.shapes, ())[:limit]
        parents, depths = [min(parent, i - 1) for i, (parent, _) in enumerate(shape)], []
        for parent in parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        right = self.text[len(self.observed) :]
        pairs = zip(depths, shape, strict=True)
        return Draft([right[d] if ok else WRONG for d, (_, ok) in pairs], parents=parents)

    def see(self, features: FeatureRows) -> None:
        self.seen.append(features)

    def observe(self, tokens: Sequence[int]) -> None:
        # all but the last token observed have been fed, and so have been seen
        self.observed += tokens
        assert self.num_seen == len(self.prompt) + len(self.observed) - 1

    @property
    def num_seen(self) -> int:
        return sum(len(rows.layers[0]) for rows in self.seen)


@cache
def read_whole(name: str) -> FeatureRows:
    """Rows of the prompt and the text that follows it, in one pass."""
    model = target(name)
    taps, text = StateReader(model, Reader.features), [*PROMPT, *plain(40, model=model)]
    taps.read(lambda: model(mx.array([text]), cache=make_prompt_cache(model))[0])
    assert taps.features is not None
    return taps.features


nodes = st.tuples(st.integers(ROOT, 5), st.sampled_from([True, True, False]))


@example(shapes=[[(ROOT, False), (ROOT, True)]], max_tokens=9, num_taken=10, name="qwen2")
@given(
    shapes=st.lists(st.lists(nodes, max_size=6), max_size=10),
    max_tokens=st.integers(0, 26),
    num_taken=st.integers(1, 26),
    name=st.sampled_from(["qwen2", "mamba", "qwen3_next"]),
)
@settings(max_examples=25)
def test_whatever_is_drafted_the_text_the_cache_and_what_is_seen_are_the_targets(
    shapes: list[Any], max_tokens: int, num_taken: int, name: str
) -> None:
    """Chains and trees in turn; each position is seen once, before its token is observed.

    Those of the prompt chunk by chunk, three at a time; its last one comes with the first round.
    Of recurrent models one feeds again what was kept, and of the other a state is chosen.
    """
    model, text = target(name), plain(40, model=target(name))
    if name != "qwen2":
        shapes = [[(i - 1, ok) for i, (_, ok) in enumerate(shape)] for shape in shapes]
    reader, caches = Reader(text, shapes), make_prompt_cache(model)
    options: dict[str, Any] = {
        "num_draft_tokens": 6,
        "prefill_step_size": 3,
        "prompt_cache": caches,
    }
    items = sd.speculate(model, PROMPT, reader, max_tokens=max_tokens, **options)
    taken = list(islice(items, num_taken))
    items.close()
    assert [item.token for item in taken] == text[: min(num_taken, max_tokens)]
    if taken:
        assert [len(rows.layers[0]) for rows in reader.seen[:2]] == [3, 3]
        assert name != "qwen2" or caches[0].offset == len(PROMPT) + len(taken)
        assert name != "qwen3_next" or taken[-1].stats.replayed == 0
        seen, whole = FeatureRows.joined(reader.seen), read_whole(name).rows(range(reader.num_seen))
        for i in (0, 1):
            assert mx.allclose(seen.layers[i], whole.layers[i], atol=1e-3)
        assert mx.allclose(seen.head_input, whole.head_input, atol=1e-3)
        assert mx.array_equal(seen.top_tokens, whole.top_tokens)
    if taken and num_taken > max_tokens:
        # The last token comes too, because the caller goes on from the caches.
        assert reader.num_seen == len(PROMPT) + len(taken)
        assert taken[-1].stats.accepted == sum(item.from_draft for item in taken)


class Blind(Given):
    """Says what it wants, and has no way to take it."""

    features = Features(layers=(0,))


def test_a_reader_that_cannot_read_is_refused() -> None:
    with pytest.raises(sd.errors.DraftError, match=r"Blind wants features.*no see\(features\)"):
        list(sd.speculate(target(), PROMPT, Blind()))


def after_two(draft: Any) -> Given:
    """Two right tokens after the first one, and then what is given."""
    return Given(Draft(plain()[1:3]), draft)


def assert_refused(
    drafter: Any, words: str, error: type = sd.errors.DraftError, **options: Any
) -> None:
    """In the round where it happens; what was emitted before can be continued."""
    caches, got = make_prompt_cache(target()), []
    options |= {"max_tokens": 16, "prompt_cache": caches, "num_draft_tokens": 4}
    with pytest.raises(error, match=words):
        for item in sd.speculate(target(), PROMPT, drafter, **options):
            got.append(item.token)
    assert {c.offset for c in caches} == {len(PROMPT) + len(got)}
    if not isinstance(options.get("sampler"), sd.Sampling):
        assert got == plain()[: len(got)] != []
        again = sd.speculate(target(), [9], max_tokens=4, prompt_cache=caches)
        assert [item.token for item in again] == plain(4, (*PROMPT, *got, 9))


NO_TREES = [[ROOT], [ROOT, 0, 1, 2], [ROOT, 1, 0], [ROOT, 2, ROOT], [0, ROOT, ROOT], [-2, 0, 0], []]
"""Too few, too many, a token before its parent or its own, below the root."""


def no_drafts() -> list[tuple[Any, str]]:
    """What a session may answer that is no draft for the target, and words of the refusal."""
    tokens = [
        (mx.array([1, VOCAB]), "token 128; the target has 0 to 127"),
        (mx.array([2**32 - 1], mx.uint32), "token 4294967295; the target has"),
        (mx.array([2**32 + 5], mx.int64), "token 4294967301; the target has"),
        (mx.array([1, -1, 2]), "token -1; the target has"),
        (mx.array([1, 2]) + VOCAB, "token 129; the target has"),  # not computed yet
        (mx.array([[1, 2]]), r"array of shape \(1, 2\)"),
        (mx.array([1.0, 2.0]), "type mlx.core.float32"),
        (mx.array([True, False]), "type mlx.core.bool"),
        (mx.array(3), r"array of shape \(\)"),
        (np.array([1, 2]), r"proposed a ndarray.*\.tolist\(\)"),
        (list(np.array([1, 2])), "sequence of ints"),
        ([1.0, 2.0], "sequence of ints"),
        ([True, False], "sequence of ints"),
        ("ab", "sequence of ints"),
        ([1, VOCAB], "token 128; the target has"),
        ([-1], "token -1; the target has"),
    ]
    return [
        *((Draft(ids), words) for ids, words in tokens),
        *((Draft([1, 2, 3], parents=p), "are .*; expected 3 indices") for p in NO_TREES),
        *((no_draft, r"expected a specdec_mlx\.Draft") for no_draft in (None, [1, 2])),
    ]


def drawn_drafts() -> list[tuple[Any, str]]:
    """The same of drafts with a distribution, which is not read past its end either."""
    even = mx.log(mx.full((2, VOCAB), 1 / VOCAB))
    one_hot = mx.where(mx.arange(VOCAB) == 5, 0.0, -mx.inf)[None]
    return [
        *((Draft(mx.array([1, wrong]), even), f"token {wrong}; the") for wrong in (VOCAB, -1)),
        (Draft(mx.array([4, 4]), even + 1), "sum to 1"),
        (Draft(mx.array([4]), one_hot), "mass to"),
        (Draft(mx.array([4]), mx.zeros((1, 3))), "shape"),
    ]


def pure_sampler(logprobs: mx.array) -> mx.array:
    return mx.argmax(logprobs, axis=-1)


pure_sampler.pure = True  # type: ignore[attr-defined]

WAYS: list[dict[str, Any]] = [
    *({}, {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}, {"sampler": pure_sampler}),
    {"logits_processors": [lambda tokens, logits: logits]},
    *(
        {"sampler": sd.Sampling(temp=1.0), "rule": rule}
        for rule in ("rejection", "block", "match", "coupled")
    ),
]


@in_one_test("options", WAYS)
def test_what_is_no_draft_for_the_target_is_refused(options: dict[str, Any]) -> None:
    """Before anything is emitted that was computed with it, whichever way tokens are drawn. Ids in
    arrays, the first five, are known with the target's answer only."""
    drafts = drawn_drafts() if "rule" in options else no_drafts()
    for answer, words in drafts[:5] if options else drafts:
        assert_refused(after_two(answer), words, **options)


def kept(n: int, token: int) -> Verdict:
    return Verdict(mx.array(n), mx.array(token))


VERDICTS = [
    (kept(3, 5), "kept 3 tokens of a draft of 2"),
    (kept(-1, 5), "kept -1 tokens of a draft of 2"),
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
