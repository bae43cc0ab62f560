"""Laws of drafting from n-gram counts, against a reference that counts by scanning the text."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from selection import cases, in_one_test
from specdec_mlx.contracts import Draft, DraftContext, Evidence
from specdec_mlx.contracts.drafting import places_class, share_class
from specdec_mlx.drafters.ngram import NGramDrafter, NGramSession, StochasticNGramSession
from specdec_mlx.drafters.ngram_table import DISCOUNT, NGramCounts
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise

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


def begin(text: list[int], **options: Any) -> NGramSession:
    return NGramDrafter(**options).begin(text, CONTEXT)


def sampled(seed: int = 0, temp: float = 1.0, vocab_size: int | None = VOCAB) -> DraftContext:
    return DraftContext(sampling=Sampling(temp=temp), noise=Noise(seed), vocab_size=vocab_size)


def tokens(draft: Draft) -> list[int]:
    return list(draft.tokens)


# --- deterministic drafts -----------------------------------------------------------------------


@given(texts, orders, st.integers(0, 8))
def test_tables_equal_a_count_over_the_text(text: list[int], orders: list[int], limit: int) -> None:
    """For every text and orders 1 to 8: draft and evidence are those of the scan, a point mass."""
    draft = begin(text, min_order=orders[0], max_order=orders[1], num_draft=8).propose(limit)
    expected = scan(text, orders[0], orders[1], limit)
    assert tokens(draft) == [token for token, _ in expected]
    assert list(draft.evidence or []) == [evidence for _, evidence in expected]
    assert draft.logprobs is None


@given(texts, orders, st.data())
def test_incremental_equals_all_at_once(
    text: list[int], orders: list[int], data: st.DataObject
) -> None:
    """A text observed in any chunks gives the draft of the same text as a prompt, at each cut."""
    drafter = NGramDrafter(min_order=orders[0], max_order=orders[1])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=5)))
    session = drafter.begin(text[: cuts[0]], CONTEXT)
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        session.propose(3)
        session.observe(text[start:end])
        assert tokens(session.propose(4)) == tokens(drafter.begin(text[:end], CONTEXT).propose(4))


def test_defaults_are_akunu_s() -> None:
    assert NGramDrafter() == NGramDrafter(4, 2, 4, stochastic=False)


@in_one_test("stochastic", [False, True])
def test_the_smaller_of_limit_and_num_draft_holds(stochastic: bool) -> None:
    """`num_draft` caps what the loop allows, and the loop's limit caps `num_draft`."""
    session = NGramDrafter(num_draft=3, stochastic=stochastic).begin([6] * 10, sampled())
    assert [len(session.propose(limit)) for limit in (8, 3, 2, 0)] == [3, 3, 2, 0]


# --- bounded memory -----------------------------------------------------------------------------


@given(texts, st.integers(1, 6), st.integers(1, 4))
def test_tables_hold_no_more_pairs_than_allowed(
    text: list[int], max_entries: int, order: int
) -> None:
    """The cap holds at every moment, and the number held is the number counted."""
    session = begin([], min_order=1, max_order=order, max_entries=max_entries)
    for token in text:
        session.observe([token])
        for width, table in session._counts._tables.items():
            assert all(len(context) == width for context in table)
            held = sum(len(session._counts.counts(context)) for context in table)
            assert session._counts._num_entries[width] == held <= max_entries


def test_the_contexts_not_seen_for_longest_are_forgotten() -> None:
    """With room for three contexts, the one seen again stays and the oldest other one goes."""
    counts = NGramCounts(2, 2, 3)
    for token in (1, 2, 3, 1, 4):
        counts.add((token,), 7)
    assert [counts.counts((i,)) for i in range(1, 5)] == [{7: 2}, {}, {7: 1}, {7: 1}]


def test_a_context_that_fills_its_table_keeps_counting_what_it_holds() -> None:
    """The unigram cannot be forgotten in favour of itself; new tokens find no room."""
    counts = NGramCounts(1, 1, 2)
    for token in [5, 6, 7, 6, 7]:
        counts.add((), token)
    assert counts.counts(()) == {5: 1, 6: 2}
    assert counts.continuation(()) == (6, 0, 2, 3)


@pytest.mark.parametrize("max_order", cases([1, 4, 8], 4))
@pytest.mark.parametrize("repeats", [1, 2])
def test_memory_stays_below_the_stated_bound(max_order: int, repeats: int) -> None:
    """At most 640 bytes a pair, in texts that make pairs dear: all different, and all twice."""
    entries = 700  # just past a doubling of the dict's table
    drafter = NGramDrafter(min_order=1, max_order=max_order, max_entries=entries)
    tracemalloc.start()
    try:
        session = drafter.begin([10**6 + i for i in range(entries)], CONTEXT)
        for start in range(10**6, 10**6 + 2 * entries, entries):
            for _ in range(repeats):
                session.observe([start + i for i in range(entries)])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= 640 * entries * max_order


# --- stochastic drafts --------------------------------------------------------------------------


@given(texts, orders, st.integers(0, 99))
def test_draws_are_of_the_smoothed_counts(text: list[int], orders: list[int], seed: int) -> None:
    """Each row is the formula's law after the tokens so far, and its token is drawn from it."""
    min_order, max_order = orders
    context = sampled(seed)
    draft = NGramDrafter(max_order, min_order, stochastic=True).begin(text, context).propose(4)
    drawn, logprobs = tokens(draft), draft.logprobs
    for i in range(4):
        grown = text + drawn[:i]
        law = smoothed(text, grown[max(0, len(grown) - max_order + 1) :], min_order)
        if i == len(drawn):
            assert law is None
            break
        assert logprobs is not None
        assert np.allclose(np.exp(np.array(logprobs[i], np.float64)), law, rtol=1e-6, atol=1e-9)
        assert drawn[i] == mx.argmax(logprobs[i] + context.draft_gumbel(0, i)).item()
    if drawn:
        assert logprobs is not None
        assert (logprobs.shape, logprobs.dtype) == ((len(drawn), VOCAB), mx.float32)


TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2, 4, 1, 5, 0, 2, 1, 0, 1]


def test_draws_are_keyed_by_the_start_of_the_draft_and_the_index_in_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No two drafts share a draw; positions count from the prompt's end; asked again, the same."""
    asked: list[tuple[str, int]] = []
    draw = Noise.gumbel

    def gumbel(self: Noise, purpose: str, position: int, n: int) -> mx.array:
        asked.append((purpose, position))
        return draw(self, purpose, position, n)

    monkeypatch.setattr(Noise, "gumbel", gumbel)
    session = NGramDrafter(stochastic=True).begin([1, 2, 1, 2, 1], sampled())
    assert tokens(session.propose(2)) == tokens(session.propose(2))
    assert asked == [("draft 0", 0), ("draft 1", 0)] * 2
    session.observe([2, 1, 2])
    session.propose(3)
    assert asked[4:] == [("draft 0", 3), ("draft 1", 3), ("draft 2", 3)]


@in_one_test(
    "context",
    [CONTEXT, sampled(temp=0.0, vocab_size=None), DraftContext(Sampling(1.0), vocab_size=VOCAB)],
)
def test_without_temperature_or_noise_stochastic_drafts_are_deterministic(
    context: DraftContext,
) -> None:
    session = NGramDrafter(stochastic=True).begin(TEXT, context)
    draft = session.propose(4)
    assert tokens(draft) == [token for token, _ in scan(TEXT, 2, 4, 4)]
    assert draft.logprobs is None
    assert not isinstance(session, StochasticNGramSession)


def test_a_context_forgotten_at_one_order_is_still_known_at_another() -> None:
    """Tables forget on their own; what is left still gives a law and a best continuation."""
    counts = NGramCounts(min_order=2, max_order=3, max_entries=2)
    counts.learn((0, 1), 2)
    counts.learn((5,), 6)  # too short a context for order 3, which therefore keeps (0, 1)
    counts.learn((5,), 4)
    assert counts.counts((1,)) == {}
    law = counts.distribution((0, 1), VOCAB)
    assert law is not None
    assert law.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert counts.continuation((0, 1)) == (2, 2, 1, 1)
    assert counts.distribution((1,), VOCAB) is None


# --- contracts ----------------------------------------------------------------------------------


@in_one_test(
    ("options", "said"),
    [
        ({"max_order": 0}, "max_order=0): expected an int from 1 (unigram) to 8"),
        ({"max_order": 9}, "max_order=9): expected an int from 1 (unigram) to 8"),
        ({"min_order": 0}, "min_order=0): expected an int from 1 to max_order = 4"),
        ({"max_order": 2, "min_order": 3}, "lower it or raise max_order"),
        ({"num_draft": 0}, "num_draft=0): expected an int >= 1"),
        ({"max_entries": 0}, "max_entries=0): expected an int >= 1"),
    ],
)
def test_arguments_outside_their_range_are_refused(options: dict[str, Any], said: str) -> None:
    """The error says what was given, what is expected, and what to do."""
    with pytest.raises(ValueError, match="NGramDrafter") as error:
        NGramDrafter(**options)
    assert said in str(error.value)
