"""Laws of drafting by prompt lookup, against a reference that scans the whole text."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selection import in_one_test
from specdec_mlx.contracts import DraftContext, Evidence
from specdec_mlx.drafters.prompt_lookup import MAX_MATCH, PromptLookupDrafter

CONTEXT = DraftContext()

texts = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
drafters = st.builds(
    lambda sizes, cap, occurrence: PromptLookupDrafter(max(sizes), min(sizes), cap, occurrence),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.sampled_from([None, 3]),
    st.sampled_from(["recent", "earliest"]),
)


def scan(
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
        expected, length = scan(text, tokens, drafter, limit)
        assert list(draft.tokens) == expected
        assert list(draft.evidence or []) == [Evidence(length)] * len(expected)
        assert draft.logprobs is None


@in_one_test("count", [700, 5500])
def test_memory_stays_below_the_stated_bound(count: int) -> None:
    """At most 200 bytes a token and n-gram size, and for three counts, where no n-gram repeats."""
    tracemalloc.start()
    try:
        index = PromptLookupDrafter().begin([10**6 + i for i in range(count)], CONTEXT)
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(index._ends) == 4
    assert used <= 200 * (4 + 3) * count


def test_an_unknown_occurrence_is_refused() -> None:
    """Past what checks types under pytest."""
    drafter = PromptLookupDrafter()
    object.__setattr__(drafter, "occurrence", "first")
    with pytest.raises(ValueError, match=r"occurrence='first'\): expected 'recent' or 'earliest'"):
        drafter.__post_init__()
