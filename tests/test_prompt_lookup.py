"""Laws of drafting by prompt lookup, against a reference that scans the whole text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selection import in_one_test
from specdec_mlx.drafters.prompt_lookup import MAX_MATCH, PromptLookupDrafter, PromptLookupSession
from specdec_mlx.types import Draft, DraftContext

CONTEXT = DraftContext()

texts = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
drafters = st.builds(
    lambda sizes, occurrence: PromptLookupDrafter(max(sizes), min(sizes), occurrence=occurrence),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.sampled_from(["recent", "earliest"]),
)


def scan(text: list[int], drafter: PromptLookupDrafter, limit: int) -> tuple[list[int], int]:
    """Draft and match length by definition: look at every position, copy token by token."""
    for n in range(min(drafter.max_ngram, len(text)), drafter.min_ngram - 1, -1):
        ends = [e for e in range(n, len(text)) if text[e - n : e] == text[-n:]]
        if ends and limit > 0:
            end = ends[-1] if drafter.occurrence == "recent" else ends[0]
            grown = list(text)
            for i in range(limit):
                grown.append(grown[end + i])
            pairs = zip(reversed(text[:end]), reversed(text), strict=False)
            length = 0
            for a, b in pairs:
                if a != b or length == MAX_MATCH:
                    break
                length += 1
            return grown[len(text) :], length
    return [], 0


def begin(text: list[int], **options: Any) -> PromptLookupSession:
    return PromptLookupDrafter(**options).begin(text, CONTEXT)


def tokens(draft: Draft) -> list[int]:
    return list(draft.tokens)


@given(texts, drafters, st.integers(0, 12))
@example([1, 2, 3, 1, 2, 4, 1, 2], PromptLookupDrafter(2, 1, occurrence="earliest"), 3)
def test_index_equals_a_scan_of_the_text(
    text: list[int], drafter: PromptLookupDrafter, limit: int
) -> None:
    """For every text, draft and match length are those of the scan; the length is the evidence."""
    session = drafter.begin(text, CONTEXT)
    draft = session.propose(limit)
    assert (tokens(draft), session.match_length) == scan(text, drafter, limit)
    assert draft.logprobs is None
    assert [e.match for e in draft.evidence or []] == [session.match_length] * len(draft)


@given(texts, drafters, st.data())
def test_incremental_equals_all_at_once(
    text: list[int], drafter: PromptLookupDrafter, data: st.DataObject
) -> None:
    """A text observed in any chunks gives the draft of the same text as a prompt, at each cut."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), min_size=1, max_size=5)))
    session = drafter.begin(text[: cuts[0]], CONTEXT)
    for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
        session.propose(3)
        session.observe(text[start:end])
        assert tokens(session.propose(5)) == tokens(drafter.begin(text[:end], CONTEXT).propose(5))


@in_one_test(("repeated", "length"), [(3, 3), (20, 20), (200, MAX_MATCH)])
def test_match_length_is_measured_beyond_max_ngram(repeated: int, length: int) -> None:
    """The whole common part counts, up to a bound, and not only the n-gram that found it."""
    passage = list(range(repeated))
    session = begin([*passage, 1000, *passage])
    assert tokens(session.propose(1)) == [1000]
    assert session.match_length == length


def test_match_length_is_that_of_the_last_proposal() -> None:
    """It goes back to 0 when nothing is proposed."""
    session = begin([1, 2, 3, 1, 2])
    session.propose(4)
    assert session.match_length == 2
    session.propose(0)
    assert session.match_length == 0
    session.propose(4)
    session.observe([77])
    session.propose(4)
    assert session.match_length == 0


def test_the_smaller_of_limit_and_num_draft_holds() -> None:
    """`num_draft` caps what the loop allows, and the loop's limit caps `num_draft`."""
    text = [7] * 10
    assert len(begin(text, num_draft=3).propose(8)) == 3
    assert len(begin(text, num_draft=3).propose(2)) == 2
    assert len(begin(text).propose(50)) == 50
    assert len(begin(text).propose(0)) == 0


class CountingDict(dict[Any, Any]):
    """A dict that counts its look-ups and holds no other way in."""

    lookups = 0

    def get(self, key: Any, default: Any = None) -> Any:
        CountingDict.lookups += 1
        return super().get(key, default)

    def __iter__(self) -> Any:
        raise AssertionError("the index is looked up, never scanned")

    items = keys = values = __iter__


@pytest.mark.parametrize("length", [100, 10_000])
def test_work_of_a_proposal_does_not_grow_with_the_text(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most one look-up per n-gram size, at any length of the text."""
    session = begin(list(range(length)), max_ngram=5, min_ngram=2)
    session._ends = {n: CountingDict(index) for n, index in session._ends.items()}
    monkeypatch.setattr(CountingDict, "lookups", 0)
    session.propose(4)
    assert CountingDict.lookups == 4


@in_one_test("count", [700, 5500])
def test_memory_stays_below_the_stated_bound(count: int) -> None:
    """At most 200 bytes a token and n-gram size, and for three counts, where no n-gram repeats.

    The lengths are just past a doubling of the dict's table, where an entry is dearest.
    """
    import tracemalloc

    tracemalloc.start()
    try:
        session = begin([10**6 + i for i in range(count)])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sizes = PromptLookupDrafter().max_ngram - PromptLookupDrafter().min_ngram + 1
    assert used <= 200 * (sizes + 3) * count
    assert len(session._ends) == sizes


@in_one_test(
    ("options", "said"),
    [
        ({"max_ngram": 0}, "max_ngram=0): expected an int from 1 to 8"),
        ({"max_ngram": 9}, "max_ngram=9): expected an int from 1 to 8"),
        ({"min_ngram": 0}, "min_ngram=0): expected an int from 1 to max_ngram = 5"),
        ({"max_ngram": 2, "min_ngram": 3}, "lower it or raise max_ngram"),
        ({"num_draft": 0}, "num_draft=0): expected an int >= 1"),
    ],
)
def test_arguments_outside_their_range_are_refused(options: dict[str, Any], said: str) -> None:
    """The error says what was given, what is expected, and what to do."""
    with pytest.raises(ValueError, match="PromptLookupDrafter") as error:
        PromptLookupDrafter(**options)
    assert said in str(error.value)


def test_an_unknown_occurrence_is_refused() -> None:
    """Also where nothing checks types, as it does around the constructor under pytest."""
    drafter = PromptLookupDrafter()
    object.__setattr__(drafter, "occurrence", "first")
    with pytest.raises(ValueError, match=r"occurrence='first'\): expected 'recent' or 'earliest'"):
        drafter.__post_init__()
