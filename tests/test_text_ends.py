"""Where a text ends, and what callers are given of it: rows of their own, good tokens, the end."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
from benchmarks.host_time import Table
from exact import ByRule, Rounds
from exact_trees import TREE_RULES, ByOwnTokens, TreeDrawn
from scripted import PROMPT, OracleTrees, ScriptedDrafter, plain, target
from selection import in_one_test
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request
from specdec_mlx.contracts import ROOT, Draft
from specdec_mlx.lab import load_pair
from specdec_mlx.lab.proof.enumeration import sources
from specdec_mlx.loop import SHORT, Token
from specdec_mlx.options import Options
from specdec_mlx.rules import Block
from specdec_mlx.target import Verifier
from specdec_mlx.trees.tree_rules import Traversal

VOCAB = 128
PAIR = load_pair()
EXACT = 1e-12
TEXT = "The yield expression is used when defining a generator function"


def oracle() -> scripted.OracleDrafter:
    return scripted.OracleDrafter(plain(40), VOCAB)


def by_loop(drafter: Any, **how: Any) -> Iterator[Token]:
    yield from sd.speculate(target(), PROMPT, drafter, max_tokens=24, num_draft_tokens=4, **how)


# it goes on with "objects\nthat the same a"
STOPS = [("that",), (" the", "ct"), ("am", ""), (" az", "zzz"), ()]


@in_one_test("strings", STOPS)
def test_a_stop_string_ends_the_text_wherever_tokens_fall(strings: tuple[str, ...]) -> None:
    """The text is the whole one up to the first of them, drafted for or not; the caches hold the
    tokens that were handed out.
    """
    target_model, draft, tokenizer = PAIR
    given: dict[str, Any] = {"max_tokens": 24, "num_draft_tokens": 4}
    whole = sd.generate(target_model, tokenizer, TEXT, drafter=None, **given)
    places = [whole.find(string) for string in strings if string and string in whole]
    expected = whole[: min(places)] if places else whole
    for drafter in (None, sd.ModelDrafter(draft)):
        caches = make_prompt_cache(target_model)
        responses = list(
            sd.stream_generate(
                *(target_model, tokenizer, TEXT),
                **given,
                drafter=drafter,
                stop=strings[0] if len(strings) == 1 else strings,
                prompt_cache=caches,
            )
        )
        assert "".join(response.text for response in responses) == expected
        assert responses[-1].finish_reason == ("stop" if places else "length")
        assert all(response.finish_reason is None for response in responses[:-1])
        num_read = len(tokenizer.encode(TEXT)) + len(responses)
        assert {cache.offset for cache in caches} == {num_read}
    assert sd.generate(target_model, tokenizer, TEXT, stop=strings, **given) == expected


def by_batch(drafter: Any, **how: Any) -> Iterator[Token]:
    """The first of two rows; the other one has a text of its own."""
    batch = BatchGeneration(target(), drafter, Options(num_draft_tokens=4))
    batch.insert(Request(PROMPT, 24, logits_processors=how["logits_processors"]))
    batch.insert(Request(PROMPT[:3], 24))
    yield from (row.token for row in batch.run() if row.uid == 0)


class Wide(Table):
    """A model of many logits and next to no weights."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(8)
        self.vocab_size = vocab_size

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        super().__call__(ids % 8, cache=cache)
        return mx.cos((ids[..., None] + 1) * 0.37 * mx.arange(self.vocab_size))


# Rows of their own --------------------------------------------------------------------------------


@pytest.mark.full
@in_one_test("temp", [0.0, 1.0])
def test_a_kept_token_keeps_its_own_row_alone(temp: float) -> None:
    """As many bytes a token as one row has, where drafts of 16 are wrong: no other row stays."""
    vocab_size = 1 << 14  # below it MLX may lay a row into a buffer of up to 16 KiB more
    model, wrong = Wide(vocab_size), ScriptedDrafter(lambda start, limit: [0] * limit)
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    options: dict[str, Any] = {"sampler": sd.Sampling(temp), "seed": 1, "probe": False}
    kept = list(sd.speculate(model, [1], wrong, max_tokens=30, num_draft_tokens=16, **options))
    gc.collect()
    mx.clear_cache()
    assert kept[-1].stats.drafted > 16
    assert (mx.get_active_memory() - before) / len(kept) < 1.5 * 4 * vocab_size
    assert {token.logprobs.shape for token in kept} == {(vocab_size,)}


# Drafts behind an end token -----------------------------------------------------------------------


class CutAtEnd:
    """A rule for trees that decides about what is left of them by `Draft.until`."""

    def __init__(self, rule: Any, parents: Sequence[int], end: int) -> None:
        self.rule, self.parents, self.end = rule, parents, end

    def outcomes(self, target_probs: np.ndarray, tokens: Any, probs: np.ndarray) -> Any:
        numbered = Draft(list(tokens), evidence=range(len(tokens)), parents=self.parents)
        cut = numbered.until({self.end})
        nodes: Any = cut.evidence
        rows = target_probs[[0, *(node + 1 for node in nodes)]]
        parents: Any = cut.parents
        way = ByRule(self.rule, tuple(parents)) if self.rule else ByOwnTokens(tuple(parents))
        return way.outcomes(rows, tuple(cut.tokens), probs[list(nodes)])


@in_one_test("replace", [True, False])
@pytest.mark.parametrize("name", [*TREE_RULES, "match"])
def test_what_follows_an_end_token_may_be_left_out_of_drawn_trees(name: str, replace: bool) -> None:
    """The joint distribution of a round is the target's, with any token for the end."""
    target_source, draft = sources(2, 3)
    rule = TREE_RULES.get(name)
    for parents, end in (((-1, 0, -1, 2, 2), 1), ((-1, 0, 0, 1), 0)):
        drawn = TreeDrawn(draft, parents, replace=replace)
        way: Any = CutAtEnd(rule, parents, end)
        rounds = Rounds(target_source, drawn, way)
        assert rounds.total_variation(1, 4) < EXACT


def test_what_follows_an_end_token_is_no_part_of_a_draft() -> None:
    """Of a chain the rest, of a tree the children; siblings stay, and the end token itself."""
    chain = Draft([5, 9, 5, 5], evidence=[4, 3, 2, 1])
    assert chain.until({9}) == Draft([5, 9], evidence=[4, 3])
    assert chain.until({7}) == chain
    tree = Draft([9, 5, 5, 9, 6, 7], mx.eye(6), parents=[ROOT, ROOT, 0, 1, 3, 1])
    cut = tree.until({9})
    assert (cut.tokens, cut.parents) == ([9, 5, 9, 7], [ROOT, ROOT, 1, 1])
    assert np.array_equal(np.array(cut.logprobs), np.eye(6)[[0, 1, 3, 5]])


@in_one_test("is_tree", [False, True])
def test_nothing_behind_an_end_token_is_verified(
    is_tree: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the tokenizer is known; and the text is the same, also beyond it."""
    text = plain(40)
    drafter = OracleTrees(text, VOCAB) if is_tree else oracle()
    options: dict[str, Any] = {"max_tokens": 24, "num_draft_tokens": 8}
    judge, drafts = Verifier.judge, []

    def noting(self: Verifier, logits: mx.array, draft: Draft, *more: Any) -> Any:
        drafts.append(draft)
        return judge(self, logits, draft, *more)

    monkeypatch.setattr(Verifier, "judge", noting)
    for ends in (set(), {text[6], text[9]}):
        drafts.clear()
        tokenizer = SimpleNamespace(eos_token_ids=ends)
        got = list(sd.speculate(target(), PROMPT, drafter, tokenizer=tokenizer, **options))
        assert [token.token for token in got] == text[:24]
        behind = [draft for draft in drafts if len(draft.until({text[6], text[9]})) < len(draft)]
        assert bool(behind) == (not ends)


# What processors see ------------------------------------------------------------------------------


def watched(stream: Callable[..., Any], **options: Any) -> tuple[Any, ...]:
    """Tokens, what a processor was shown in each call, and how much of it before each token."""
    seen: list[list[int]] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(tokens.tolist())
        return logits

    tokens, shown = [], []
    for response in stream(logits_processors=[processor], **options):
        tokens.append(response.token)
        shown.append(len(seen[-1]) if seen else 0)
    return tokens, seen, shown


def ours(prompt: Any = TEXT, **how: Any) -> Callable[..., Any]:
    return functools.partial(sd.stream_generate, PAIR.target, PAIR.tokenizer, prompt, **how)


def mlx_lms(**options: Any) -> Any:
    return mlx_lm.stream_generate(PAIR.target, PAIR.tokenizer, TEXT, **options)


def installed(**options: Any) -> Any:
    with sd.patched("prompt-lookup", num_draft_tokens=4, tokenizer=PAIR.tokenizer):
        yield from mlx_lms(**options)


WAYS: dict[str, Callable[..., Any]] = {
    "no drafter": ours(drafter=None),
    "look-up": ours(drafter="prompt-lookup", num_draft_tokens=4),
    "draft model": ours(drafter=None, draft_model=PAIR.draft, num_draft_tokens=3),
    "batch": lambda **o: sd.batch_stream_generate(PAIR.target, PAIR.tokenizer, [TEXT], **o),
    "installed": installed,
}


@pytest.mark.full
@in_one_test("name", WAYS)
def test_a_processor_that_remembers_sees_what_mlx_lms_loop_shows_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same calls, the last token's included; each token before it is handed out."""
    text = [token.token for token in mlx_lms(max_tokens=6)]
    for length, end in ((1, None), (20, None), (20, text[5]), (20, text[0])):
        with monkeypatch.context() as patch:
            ends = {end} if end is not None else PAIR.tokenizer.eos_token_ids
            patch.setattr(PAIR.tokenizer, "_eos_token_ids", ends)
            expected = watched(mlx_lms, max_tokens=length)
            got = watched(WAYS[name], max_tokens=length)
        assert got[:2] == expected[:2], (length, end)
        assert all(ours >= theirs for ours, theirs in zip(got[2], expected[2], strict=True))


def test_a_prompt_of_embeddings_alone_is_not_shown_to_processors() -> None:
    """As in mlx-lm: without tokens there is no call for the first one, and no made-up token."""
    embeddings = PAIR.target.model.embed_tokens(mx.array(PAIR.tokenizer.encode(TEXT)))
    options: dict[str, Any] = {"max_tokens": 6, "input_embeddings": embeddings}

    def theirs(**options: Any) -> Any:
        return mlx_lm.stream_generate(PAIR.target, PAIR.tokenizer, [], **options)

    assert watched(ours([], drafter=None), **options) == watched(theirs, **options)


# Logits that are not finite -----------------------------------------------------------------------


def failing(*, pure: bool) -> Any:
    """A processor that makes one logit infinite after five tokens of the text."""

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        calls.append(len(tokens))
        return logits + mx.inf * (mx.arange(VOCAB) == 3) if len(tokens) == at else logits

    at, calls = len(PROMPT) + 5, processor.__dict__.setdefault("calls", [])
    processor.pure = pure  # type: ignore[attr-defined]
    return processor


DRAFTERS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "chain": oracle,
    "tree": lambda: OracleTrees(plain(40), VOCAB),
    "itself": lambda: sd.ModelDrafter(target()),
}


@in_one_test("drafter", DRAFTERS)
@pytest.mark.parametrize("stream", [by_loop, by_batch])
@pytest.mark.parametrize("pure", [True, False], ids=["at once", "row by row"])
def test_tokens_before_infinite_logits_are_handed_out(
    stream: Callable[..., Iterator[Token]], pure: bool, drafter: str
) -> None:
    """As plain decoding hands them out: five tokens, then the error, and one call for each row."""
    processor, got = failing(pure=pure), []
    with pytest.raises(sd.errors.LogitsError, match="not finite"):
        for token in stream(DRAFTERS[drafter](), logits_processors=[processor]):
            got.append(token.token)
    assert got == plain(5)
    assert pure or processor.calls == [len(PROMPT) + n for n in range(6)]


@in_one_test("rule", ["rejection", "block"])
def test_tokens_before_infinite_logits_are_handed_out_of_drawn_drafts(rule: str) -> None:
    """The model itself drafts, so that all of it is accepted."""
    how: dict[str, Any] = {"sampler": sd.Sampling(1.0), "seed": 2, "rule": rule}
    got = []
    with pytest.raises(sd.errors.LogitsError):
        for token in by_loop(DRAFTERS["itself"](), logits_processors=[failing(pure=True)], **how):
            got.append(token)
    assert len(got) == 5


def test_a_row_that_is_no_distribution_ends_the_draft_before_it() -> None:
    """The coins of the tokens before it are those of the draft that ends there; then all tails."""
    target_source, draft = sources(3, 4)
    tokens = np.array([0, 2, 1])
    p, q = np.array(target_source.probs[[0, 1, 2, 0]]), np.array(draft.probs[[0, 1, 2]])
    for bad in (1, 2):
        broken = p.copy()
        broken[bad] = np.nan
        expected = Block().accept_probs(p[: bad + 1], tokens[:bad], q[:bad])
        parents = (-1, 0, 1)
        of_chain = Block().accept_probs(broken, tokens, q)
        of_tree = Traversal().judge(broken, tokens, q, parents)[0]
        for coins in (of_chain, of_tree):
            np.testing.assert_allclose(np.array(coins)[:bad], expected, atol=1e-12)
            assert not (np.array(coins)[bad:] > 0).any()


# Short texts --------------------------------------------------------------------------------------


@in_one_test("length", [SHORT, SHORT + 1])
def test_the_first_pass_of_a_short_text_verifies_a_draft(length: int) -> None:
    """Up to 8 tokens; of a longer text the first token is handed out before any drafting."""
    for stream in (
        sd.speculate(target(), PROMPT, oracle(), max_tokens=length, num_draft_tokens=4),
        (row.token for row in short_batch(length)),
    ):
        tokens = list(stream)
        assert [token.token for token in tokens] == plain(length)
        assert (tokens[0].origin == "draft") == (length <= SHORT)
        assert tokens[-1].stats.rounds[0] == ((4, 4) if length <= SHORT else (0, 0))


def short_batch(length: int) -> Any:
    batch = BatchGeneration(target(), oracle(), Options(num_draft_tokens=4))
    batch.insert(Request(PROMPT, length))
    return batch.run()


def test_a_draft_model_takes_no_more_passes_than_in_mlx_lms_own_test() -> None:
    """`test_stream_generate_speculative`: five tokens with drafts of two, the target's own, in two
    passes. mlx-lm drafts the last token as well, where ours is what the pass brings in any case."""
    how: dict[str, Any] = {"max_tokens": 5, "draft_model": PAIR.target, "num_draft_tokens": 2}
    responses = list(sd.stream_generate(PAIR.target, PAIR.tokenizer, "hello", drafter=None, **how))
    assert [response.from_draft for response in responses] == [True, True, False, True, False]
    assert responses[-1].stats.target_passes == 2
