"""Laws of drafting by n-gram counts and prompt lookup, against references that scan the text."""

from __future__ import annotations

import re
import tracemalloc
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selection import in_one_test
from specdec_mlx.contracts import DraftContext, Evidence, places_class, share_class
from specdec_mlx.drafters.choosing.registry import make_drafter
from specdec_mlx.drafters.ngram import NGramCounts, NGramDrafter, NGramIndex
from specdec_mlx.drafters.prompt_lookup import MAX_MATCH, PromptLookupDrafter
from specdec_mlx.lab.papers import stochastic_ngrams
from specdec_mlx.lab.papers.stochastic_ngrams import (
    DISCOUNT,
    StochasticNGramDrafter,
)
from specdec_mlx.sampling import Noise, Sampling

CONTEXT = DraftContext()
VOCAB = 7

texts = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
orders = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)


def continuations(text: list[int], context: list[int]) -> list[int]:
    """What followed each occurrence of the context, from the earliest to the most recent."""
    n = len(context)
    return [text[i] for i in range(n, len(text)) if text[i - n : i] == context]


def scan(text: list[int], min_order: int, max_order: int, limit: int) -> list[tuple[int, Evidence]]:
    """By definition: longest known context, most frequent, then most recent token."""
    draft: list[tuple[int, Evidence]] = []
    grown = list(text)
    for _ in range(limit):
        for n in range(min(max_order - 1, len(grown)), min_order - 2, -1):
            seen = continuations(text, grown[len(grown) - n :])
            if seen:
                recent = {token: i for i, token in enumerate(seen)}
                best = max(seen, key=lambda t: (seen.count(t), recent[t]))
                count = seen.count(best)
                told = Evidence(max(1, n), share_class(count / len(seen)), places_class(count))
                draft.append((best, told))
                grown.append(best)
                break
        else:
            break
    return draft


def smoothed(text: list[int], context: list[int], min_order: int) -> list[float] | None:
    """Distribution of the token after `context`, by the formula of the docstring, recursively."""
    if len(context) < min_order - 1:
        return None
    shorter = smoothed(text, context[1:], min_order) if context else None
    seen = Counter(continuations(text, context))
    if not seen:
        return shorter
    if shorter is None:
        return [seen[x] / seen.total() for x in range(VOCAB)]
    return [
        (max(seen[x] - DISCOUNT, 0) + DISCOUNT * len(seen) * shorter[x]) / seen.total()
        for x in range(VOCAB)
    ]


def sampled(seed: int = 0, temp: float = 1.0, vocab_size: int | None = VOCAB) -> DraftContext:
    return DraftContext(sampling=Sampling(temp=temp), noise=Noise(seed), vocab_size=vocab_size)


@given(st.lists(texts, min_size=1, max_size=4), orders, st.integers(1, 8), st.integers(0, 8))
def test_drafts_equal_a_count_over_the_text(
    parts: list[list[int]], orders: list[int], num_draft: int, limit: int
) -> None:
    """In whatever parts the text comes, after each: tokens and evidence, a point mass."""
    drafter = NGramDrafter(orders[1], orders[0], num_draft)
    session, text = drafter.begin(parts[0], CONTEXT), list(parts[0])
    for part in [[], *parts[1:]]:
        session.observe(part)
        text += part
        draft = session.propose(limit)
        expected = scan(text, orders[0], orders[1], min(limit, num_draft))
        assert list(zip(draft.tokens, draft.evidence or [], strict=True)) == expected
        assert draft.logprobs is None


@given(texts, st.integers(1, 6), st.integers(1, 4))
def test_tables_hold_no_more_than_allowed(text: list[int], max_entries: int, order: int) -> None:
    """The cap holds at every moment, and the number held is the number counted."""
    index = NGramIndex(NGramDrafter(order, 1, max_entries=max_entries), [])
    for token in text:
        index.append([token])
        for width, table in index.counts._tables.items():
            assert all(len(context) == width for context in table)
            held = sum(len(index.counts.counts(context)) for context in table)
            assert index.counts._num_entries[width] == held <= max_entries


def test_the_contexts_not_seen_for_longest_are_forgotten() -> None:
    """One seen again stays; the unigram cannot be forgotten in favour of itself. Tables forget on
    their own: what another order knows still gives a distribution and a best continuation.
    """
    counts = NGramCounts(2, 2, 3)
    for token in (1, 2, 3, 1, 4):
        counts.add((token,), 7)
    assert [counts.counts((i,)) for i in range(1, 5)] == [{7: 2}, {}, {7: 1}, {7: 1}]
    unigrams = NGramCounts(1, 1, 2)
    for token in [5, 6, 7, 6, 7]:
        unigrams.add((), token)
    assert unigrams.counts(()) == {5: 1, 6: 2}
    assert unigrams.continuation(()) == (6, 0, 2, 3)
    counts = NGramCounts(min_order=2, max_order=3, max_entries=2)
    for context, token in (((0, 1), 2), ((5,), 6), ((5,), 4)):  # too short for order 3, but one
        counts.learn(context, token)
    law = stochastic_ngrams.smoothed(counts, (0, 1), VOCAB)
    assert law is not None
    assert law.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert counts.continuation((0, 1)) == (2, 2, 1, 1)
    assert stochastic_ngrams.smoothed(counts, (1,), VOCAB) is None


@pytest.mark.full
@in_one_test(
    ("drafter", "most"),
    [
        (NGramDrafter(min_order=1, max_entries=700), 640 * 700 * 4),
        (PromptLookupDrafter(), 200 * (4 + 3) * 2800),
    ],
)
def test_memory_stays_below_the_stated_bound(drafter: Any, most: int) -> None:
    """640 bytes a pair, just past a doubling of the table, and 200 a token and size of n-gram, in a
    text that makes them dear: all different, and for counts all twice.
    """
    repeats = 2 if isinstance(drafter, NGramDrafter) else 1
    tracemalloc.start()
    try:
        session = drafter.begin([], CONTEXT)
        for start in range(10**6, 10**6 + 2800, 700):
            for _ in range(repeats):
                session.observe([start + i for i in range(700)])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= most


drafters = st.builds(
    lambda sizes, cap, occurrence: PromptLookupDrafter(max(sizes), min(sizes), cap, occurrence),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.sampled_from([None, 3]),
    st.sampled_from(["recent", "earliest"]),
)


def scan_for_copies(
    text: list[int], more: list[int], drafter: PromptLookupDrafter, limit: int
) -> tuple[list[int], int]:
    """Draft and match length by definition: look at every position, copy token by token."""
    grown = [*text, *more]
    for n in range(min(drafter.max_ngram, len(grown)), drafter.min_ngram - 1, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == grown[-n:]]
        if ends and limit > 0:
            end = ends[-1] if drafter.occurrence == "recent" else ends[0]
            length = 0
            for a, b in zip(reversed(text[:end]), reversed(grown), strict=False):
                if a != b or length == MAX_MATCH:
                    break
                length += 1
            size = len(grown)
            for i in range(min(limit, drafter.num_draft or limit)):
                grown.append(grown[end + i])
            return grown[size:], length
    return [], 0


@given(texts, texts, st.lists(st.integers(0, 3), max_size=4), drafters, st.integers(0, 12))
@example([1, 2, 3, 1, 2, 4, 1, 2], [], [], PromptLookupDrafter(2, 1, occurrence="earliest"), 3)
@example([*range(20), 1000, *range(20)], [], [], PromptLookupDrafter(), 1)
@example([*range(200), 1000, *range(200)], [], [], PromptLookupDrafter(), 1)
def test_index_equals_a_scan_of_the_text(
    prompt: list[int],
    observed: list[int],
    more: list[int],
    drafter: PromptLookupDrafter,
    limit: int,
) -> None:
    """Draft and match length, of a text that grew, and of what may come; a point mass."""
    session = drafter.begin(prompt, CONTEXT)
    session.propose(limit)
    session.observe(observed)
    text = prompt + observed
    for tokens, draft in ((more, session.propose_after(more, limit)), ([], session.propose(limit))):
        expected, length = scan_for_copies(text, tokens, drafter, limit)
        assert list(draft.tokens) == expected
        assert list(draft.evidence or []) == [Evidence(length)] * len(expected)
        assert draft.logprobs is None


@given(texts, orders, st.integers(1, 4), st.integers(0, 99), st.lists(st.integers(0, 3)))
def test_draws_are_of_the_smoothed_counts(
    text: list[int], orders: list[int], num_draft: int, seed: int, emitted: list[int]
) -> None:
    """Each row is the formula's law after the tokens so far, and its token is drawn from it with
    the noise of the tokens emitted and its index; asked again, the draft is the same.
    """
    min_order, max_order = orders
    context = sampled(seed)
    drafter = StochasticNGramDrafter(max_order, min_order, num_draft)
    session, text = drafter.begin(text, context), [*text, *emitted]
    session.observe(emitted)
    draft = session.propose(3)
    drawn, logprobs = list(draft.tokens), draft.logprobs
    assert list(session.propose(3).tokens) == drawn
    for i in range(min(3, num_draft)):
        grown = text + drawn[:i]
        law = smoothed(text, grown[max(0, len(grown) - max_order + 1) :], min_order)
        if i == len(drawn):
            assert law is None
            break
        assert logprobs is not None
        assert np.allclose(np.exp(np.array(logprobs[i], np.float64)), law, rtol=1e-6, atol=1e-9)
        assert drawn[i] == mx.argmax(logprobs[i] + context.draft_gumbel(len(emitted), i)).item()
    if drawn:
        assert logprobs is not None
        assert (logprobs.shape, logprobs.dtype) == ((len(drawn), VOCAB), mx.float32)


@in_one_test(
    "context",
    [CONTEXT, sampled(temp=0.0, vocab_size=None), DraftContext(Sampling(1.0), vocab_size=VOCAB)],
)
def test_nothing_is_drawn_without_temperature_or_noise(context: DraftContext) -> None:
    session = StochasticNGramDrafter().begin([0, 1, 2, 0, 1, 3, 0, 1], context)
    assert session.propose(2).logprobs is None
    assert session.cheap


REFUSED = {
    "prompt-lookup": "max_ngram=0 max_ngram=9 min_ngram=0 min_ngram=6 num_draft=0",
    "ngram": "max_order=0 max_order=9 min_order=0 min_order=5 num_draft=0 max_entries=0",
    "suffix": "num_draft=0 min_match=0 min_match=65",
    "lookahead": "window=0 ngram=1 num_candidates=0 worth=-1.0",
    "recycling": "num_draft=0 context=0 context=3",
}


@in_one_test("name", REFUSED)
def test_options_of_look_ups_outside_their_range_are_refused(name: str) -> None:
    """The error says what was given, and what is expected."""
    for option in REFUSED[name].split():
        with pytest.raises(ValueError, match=rf"{re.escape(option)}\): expected .*\d"):
            make_drafter(f"{name}:{option}")
