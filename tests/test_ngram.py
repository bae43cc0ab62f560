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
from scipy.stats import chi2

from selection import FULL, cases, in_one_test
from specdec_mlx.drafters.evidence import places_class, share_class
from specdec_mlx.drafters.ngram import (
    NGramDrafter,
    NGramSession,
    StochasticNGramSession,
)
from specdec_mlx.drafters.ngram_counts import Continuations, ContinuationTable, NGramCounts
from specdec_mlx.errors import DraftError, PromptError
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.types import Draft, DraftContext, Evidence

CONTEXT = DraftContext()
VOCAB = 7

texts = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
orders = st.tuples(st.integers(1, 8), st.integers(1, 8)).map(sorted)


def continuations(text: list[int], context: list[int]) -> list[int]:
    """What followed each occurrence of the context, from the earliest to the most recent."""
    n = len(context)
    return [text[i] for i in range(n, len(text)) if text[i - n : i] == context]


def scan(text: list[int], min_order: int, max_order: int, limit: int) -> list[int]:
    """Draft by definition: longest known context, most frequent, then most recent token."""
    draft: list[int] = []
    for _ in range(limit):
        grown = text + draft
        for n in range(min(max_order - 1, len(grown)), min_order - 2, -1):
            seen = continuations(text, grown[len(grown) - n :])
            if seen:
                recent = {token: i for i, token in enumerate(seen)}
                draft.append(max(seen, key=lambda t: (seen.count(t), recent[t])))
                break
        else:
            break
    return draft


def smoothed(
    text: list[int], context: list[int], min_order: int, discount: float
) -> list[float] | None:
    """Law of the token after `context`, by the formula of the docstring, recursively."""
    if len(context) < min_order - 1:
        return None
    shorter = smoothed(text, context[1:], min_order, discount) if context else None
    seen = Counter(continuations(text, context))
    if not seen:
        return shorter
    if shorter is None:
        return [seen[x] / seen.total() for x in range(VOCAB)]
    return [
        max(seen[x] - discount, 0) / seen.total() + discount * len(seen) / seen.total() * shorter[x]
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
    """For every text and orders 1 to 8, the draft is that of the scan, a point mass."""
    draft = begin(text, min_order=orders[0], max_order=orders[1], num_draft=8).propose(limit)
    assert tokens(draft) == scan(text, orders[0], orders[1], limit)
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
    """Orders 2 to 4, four tokens, a window of 512, deterministic."""
    drafter = NGramDrafter()
    assert (drafter.min_order, drafter.max_order, drafter.num_draft) == (2, 4, 4)
    assert (drafter.window, drafter.stochastic) == (512, False)


def test_counts_from_before_the_window_still_count() -> None:
    """The window bounds the text that contexts are read from, not the counts."""
    session = begin([1, 2, 3, 4, *range(1000, 11_000), 1, 2, 3], window=512)
    assert tokens(session.propose(1)) == [4]


@given(texts, st.integers(3, 100))
def test_every_allowed_window_gives_the_same_draft(text: list[int], window: int) -> None:
    """A context fits in the window."""
    session = begin(text, window=window)
    assert tokens(session.propose(4)) == scan(text, 2, 4, 4)


@in_one_test("stochastic", [False, True])
def test_the_smaller_of_limit_and_num_draft_holds(stochastic: bool) -> None:
    """`num_draft` caps what the loop allows, and the loop's limit caps `num_draft`."""
    session = NGramDrafter(num_draft=3, stochastic=stochastic).begin([6] * 10, sampled())
    assert [len(session.propose(limit)) for limit in (8, 3, 2, 0)] == [3, 3, 2, 0]


@given(texts, orders)
def test_evidence_is_the_context_and_how_often_the_token_followed_it(
    text: list[int], orders: list[int]
) -> None:
    """Per token: length of the context that gave it (the unigram's counts as 1), share, count."""
    min_order, max_order = orders
    draft = begin(text, min_order=min_order, max_order=max_order).propose(4)
    grown, expected = list(text), []
    for token in tokens(draft):
        widths = range(min_order - 1, min(max_order - 1, len(grown)) + 1)
        known = [n for n in widths if continuations(text, grown[len(grown) - n :])]
        seen = continuations(text, grown[len(grown) - known[-1] :])
        count = seen.count(token)
        share = share_class(count / len(seen))
        expected.append(Evidence(max(1, known[-1]), share, places_class(count)))
        grown.append(token)
    assert list(draft.evidence or []) == expected


def test_match_length_is_that_of_the_last_proposal() -> None:
    """It is the length of the context that gave the first token, 0 when nothing is proposed."""
    session = begin([1, 2, 3, 9, 2, 3])
    session.propose(4)
    assert session.match_length == 2
    session.propose(0)
    assert session.match_length == 0


class CountingTable(ContinuationTable):
    """A table that counts its look-ups."""

    lookups = 0

    def entry(self, context: tuple[int, ...]) -> int | Continuations | None:
        CountingTable.lookups += 1
        return super().entry(context)


@pytest.mark.parametrize("length", [100, 10_000])
def test_work_of_a_proposal_does_not_grow_with_the_text(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look-up per order and token at most."""
    text = [*range(length), 0, 1, 2, 3, 4, 5, 500_000, 2]
    monkeypatch.setattr("specdec_mlx.drafters.ngram_counts.ContinuationTable", CountingTable)
    session = begin(text)
    monkeypatch.setattr(CountingTable, "lookups", 0)
    assert tokens(session.propose(4)) == [3, 4, 5, 500_000]
    assert 0 < CountingTable.lookups <= 4 * 3


# --- bounded memory -----------------------------------------------------------------------------


@given(texts, st.integers(1, 6), st.integers(1, 4))
def test_tables_hold_no_more_pairs_than_allowed(
    text: list[int], max_entries: int, order: int
) -> None:
    """The cap holds at every moment, and the number held is the number counted."""
    session = begin([], min_order=1, max_order=order, max_entries=max_entries)
    for token in text:
        session.observe([token])
        for width, table in session._counts._tables:
            assert all(len(context) == width for context in table._by_context)
            held = sum(len(table.counts(context)) for context in table._by_context)
            assert len(table) == held <= max_entries


def test_the_contexts_not_seen_for_longest_are_forgotten() -> None:
    """With room for three contexts, the one seen again stays and the oldest other one goes."""
    table = ContinuationTable(3)
    for context in [(1,), (2,), (3,), (1,), (4,)]:
        table.add(context, 7)
    assert [table.counts((i,)) for i in range(1, 5)] == [{7: 2}, {}, {7: 1}, {7: 1}]
    assert table.counts((1,)) == {7: 2}


def test_a_context_that_fills_its_table_keeps_counting_what_it_holds() -> None:
    """The unigram cannot be forgotten in favour of itself; new tokens find no room."""
    table = ContinuationTable(2)
    for token in [5, 6, 7, 6, 7]:
        table.add((), token)
    assert table.counts(()) == {5: 1, 6: 2}
    entry = table.entry(())
    assert isinstance(entry, Continuations)
    assert entry.best == 6


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


@given(texts, orders, st.sampled_from([0.0, 0.3, 0.75, 1.0]), st.integers(0, 99))
def test_declared_law_is_the_smoothed_count(
    text: list[int], orders: list[int], discount: float, seed: int
) -> None:
    """Each row is the formula's law after the tokens drawn so far; it sums to 1.

    The token drawn from a row has mass in it, and the draft ends where no context is known.
    """
    min_order, max_order = orders
    drafter = NGramDrafter(max_order, min_order, stochastic=True, discount=discount)
    draft = drafter.begin(text, sampled(seed)).propose(4)
    drawn = tokens(draft)
    for i in range(4):
        grown = text + drawn[:i]
        law = smoothed(text, grown[max(0, len(grown) - max_order + 1) :], min_order, discount)
        if i == len(drawn):
            assert law is None
            break
        assert draft.logprobs is not None
        row = np.exp(np.array(draft.logprobs[i], np.float64))
        assert np.allclose(row, law, rtol=1e-6, atol=1e-9)
        assert row.sum() == pytest.approx(1, abs=1e-6)
        assert row[drawn[i]] > 0
    if drawn:
        assert draft.logprobs is not None
        assert draft.logprobs.shape == (len(drawn), VOCAB)
        assert draft.logprobs.dtype == mx.float32


TEXT = [0, 1, 2, 0, 1, 3, 0, 1, 2, 4, 1, 5, 0, 2, 1, 0, 1]


def two_draws(seeds: int) -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], float]]:
    """How often each pair of draft tokens came up over many seeds, and the declared joint law."""
    drafter = NGramDrafter(max_order=3, min_order=1, stochastic=True)
    drawn: Counter[tuple[int, ...]] = Counter()
    declared: dict[tuple[int, ...], float] = {}
    for seed in range(seeds):
        draft = drafter.begin(TEXT, sampled(seed)).propose(2)
        first, second = tokens(draft)
        drawn[first, second] += 1
        assert draft.logprobs is not None
        rows = np.exp(np.array(draft.logprobs, np.float64))
        for token in range(VOCAB):
            declared[first, token] = float(rows[0, first] * rows[1, token])
    return drawn, declared


def chi_square_rejects(drawn: Counter[Any], law: dict[Any, float], false_alarm: float) -> bool:
    """Whether the counts are further from the law than chance allows; rare cells are pooled."""
    total = drawn.total()
    cells = [(drawn[x], total * p) for x, p in law.items() if total * p >= 5]
    rest = (total - sum(c for c, _ in cells), total - sum(e for _, e in cells))
    cells += [rest] if rest[1] >= 5 else []
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return bool(statistic > chi2.isf(false_alarm, len(cells) - 1))


@FULL
def test_draws_follow_the_declared_law() -> None:
    """Frequencies of pairs over 2,000 seeds agree with the declared joint law.

    False-alarm rate 1e-3, seeds fixed. The same test rejects what could be declared by mistake:
    the law without discounting, the one with everything discounted, and the bigram's.
    """
    drawn, declared = two_draws(2000)
    assert drawn.total() == 2000
    assert set(drawn) <= {pair for pair, p in declared.items() if p > 0}
    assert not chi_square_rejects(drawn, declared, 1e-3)
    for width, discount in [(2, 0.0), (2, 1.0), (1, 0.75)]:
        wrong = {
            (a, b): p * q
            for a, p in enumerate(smoothed(TEXT, TEXT[-width:], 1, discount) or [])
            for b, q in enumerate(smoothed(TEXT, [*TEXT, a][-width:], 1, discount) or [])
        }
        assert sum(wrong.values()) == pytest.approx(1)
        assert chi_square_rejects(drawn, wrong, 1e-3)


class FixedNoise:
    """Noise that gives one number for all, and writes down what it was asked for."""

    def __init__(self, number: float) -> None:
        self.number = number
        self.asked: list[tuple[str, int]] = []

    def uniform(self, purpose: str, position: int, n: int = 1) -> mx.array:
        self.asked.append((purpose, position))
        return mx.full((n,), self.number)


@in_one_test("number", [0.0, 1 - 2**-24])
def test_extreme_draws_have_mass(number: float) -> None:
    """The smallest and the largest random number give the ends of the law's support."""
    noise: Any = FixedNoise(number)
    context = DraftContext(Sampling(temp=1.0), noise, vocab_size=1000)
    text = [400, 500, 400, 300, 400, 500, 400]
    drafter = NGramDrafter(max_order=2, stochastic=True, num_draft=1)
    assert tokens(drafter.begin(text, context).propose(1)) == [300 if number == 0 else 500]


def test_draws_are_keyed_by_the_start_of_the_draft_and_the_index_in_it() -> None:
    """No two drafts share a draw, none is the target's; positions count from the prompt's end."""
    noise: Any = FixedNoise(0.5)
    context = DraftContext(Sampling(temp=1.0), noise, vocab_size=VOCAB)
    session = NGramDrafter(stochastic=True).begin([1, 2, 1, 2, 1], context)
    session.propose(2)
    assert noise.asked == [("draft 0", 0), ("draft 1", 0)]
    session.observe([2, 1, 2])
    noise.asked.clear()
    session.propose(3)
    assert noise.asked == [("draft 0", 3), ("draft 1", 3), ("draft 2", 3)]


def test_without_noise_the_draws_are_those_of_seed_0() -> None:
    """A drafter on its own needs no noise, and draws the same every time."""
    drafter = NGramDrafter(min_order=1, stochastic=True)
    alone = DraftContext(Sampling(temp=1.0), vocab_size=VOCAB)
    assert tokens(drafter.begin(TEXT, alone).propose(4)) == tokens(
        drafter.begin(TEXT, sampled(seed=0)).propose(4)
    )
    drafts = {tuple(drafter.begin(TEXT, sampled(seed)).propose(4).tokens) for seed in range(20)}
    assert len(drafts) > 1


@in_one_test("context", [CONTEXT, sampled(temp=0.0, vocab_size=None)])
def test_without_temperature_stochastic_drafts_are_deterministic(context: DraftContext) -> None:
    """A greedy or unknown law is met best by the most frequent token, a point mass."""
    session = NGramDrafter(stochastic=True).begin(TEXT, context)
    draft = session.propose(4)
    assert tokens(draft) == scan(TEXT, 2, 4, 4)
    assert draft.logprobs is None
    assert not isinstance(session, StochasticNGramSession)


def test_a_context_forgotten_at_one_order_is_still_known_at_another() -> None:
    """Tables forget on their own; what is left still gives a law and a best continuation."""
    counts = NGramCounts(min_order=2, max_order=3, max_entries=2)
    counts.add((0, 1), 2)
    counts.add((5,), 6)  # too short a context for order 3, which therefore keeps (0, 1)
    counts.add((5,), 4)
    assert [len(table.counts((1,))) for _, table in counts._tables] == [0, 0]
    law = counts.law((0, 1), VOCAB, discount=0.75)
    assert law is not None
    assert law.tolist() == [0, 0, 1, 0, 0, 0, 0]
    assert counts.continuation((0, 1)) == (2, 2, 1, 1)
    assert counts.law((1,), VOCAB, discount=0.75) is None


def test_match_length_of_a_stochastic_draft_is_that_of_its_first_token() -> None:
    """It is the longest known context, whatever shorter ones the law mixes in."""
    session = NGramDrafter(stochastic=True).begin([1, 2, 3, 6, 2, 3], sampled())
    session.propose(4)
    assert session.match_length == 2
    session.propose(0)
    assert session.match_length == 0


def test_stochastic_draft_without_a_vocabulary_size_is_refused() -> None:
    """The error names the missing size and the way out."""
    with pytest.raises(DraftError, match=r"vocab_size None.*stochastic=False"):
        NGramDrafter(stochastic=True).begin([1, 2], sampled(vocab_size=None))


@in_one_test("stranger", [-1, VOCAB])
def test_prompt_outside_the_vocabulary_is_refused(stranger: int) -> None:
    """Its tokens have no place in a row of V probabilities; without rows they do no harm."""
    with pytest.raises(PromptError, match=f"token {stranger}, expected ids from 0 to 6"):
        NGramDrafter(stochastic=True).begin([1, stranger], sampled())
    assert tokens(NGramDrafter().begin([stranger] * 2, sampled()).propose(1)) == [stranger]


# --- contracts ----------------------------------------------------------------------------------


@in_one_test(
    ("options", "said"),
    [
        ({"max_order": 0}, "max_order=0): expected an int from 1 (unigram) to 8"),
        ({"max_order": 9}, "max_order=9): expected an int from 1 (unigram) to 8"),
        ({"min_order": 0}, "min_order=0): expected an int from 1 to max_order = 4"),
        ({"max_order": 2, "min_order": 3}, "lower it or raise max_order"),
        ({"num_draft": 0}, "num_draft=0): expected an int >= 1"),
        ({"window": 2}, "window=2): expected at least a whole context, max_order - 1 = 3"),
        ({"max_order": 1, "min_order": 1, "window": 0}, "window=0)"),
        ({"discount": 1.5}, "discount=1.5): expected a number in [0, 1]"),
        ({"max_entries": 0}, "max_entries=0): expected an int >= 1"),
    ],
)
def test_arguments_outside_their_range_are_refused(options: dict[str, Any], said: str) -> None:
    """The error says what was given, what is expected, and what to do."""
    with pytest.raises(ValueError, match="NGramDrafter") as error:
        NGramDrafter(**options)
    assert said in str(error.value)
