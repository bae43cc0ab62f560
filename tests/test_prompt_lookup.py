"""Laws of drafting by prompt lookup, against a reference that scans the whole text."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from selection import in_one_test
from specdec_mlx.drafters.prompt_lookup import MAX_MATCH, PromptLookupDrafter, PromptLookupSession
from specdec_mlx.types import Draft, DraftContext, Drafter, DraftSession

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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7, unique=True), st.integers(1, 30))
def test_periodic_text_is_drafted_past_its_end(period: list[int], limit: int) -> None:
    """After one period and one more token, all further periods are proposed."""
    text = [*period, period[0]]
    continued = (period * (limit + 2))[len(text) :]
    assert tokens(begin(text, min_ngram=1).propose(limit)) == continued[:limit]


def test_text_does_not_match_itself() -> None:
    """The n-gram at the end is no earlier occurrence: with all tokens different, no draft."""
    session = begin(list(range(50)))
    assert tokens(session.propose(4)) == []
    session.observe([50, 51])
    assert tokens(session.propose(4)) == []


def test_a_longer_match_wins_over_a_more_recent_one() -> None:
    """[1, 2] was followed by 3 long ago, [2] alone by 9 just now."""
    session = begin([1, 2, 3, 4, 5, 2, 9, 1, 2])
    assert tokens(session.propose(1)) == [3]
    assert session.match_length == 2


@pytest.mark.parametrize(("occurrence", "token"), [("recent", 9), ("earliest", 3)])
def test_of_equally_long_matches_the_asked_for_one_is_copied(occurrence: str, token: int) -> None:
    """[1, 2] was followed by 3 first and by 9 later."""
    assert tokens(begin([1, 2, 3, 1, 2, 9, 1, 2], occurrence=occurrence).propose(1)) == [token]


def test_matches_shorter_than_min_ngram_do_not_count() -> None:
    """A single repeated token is a match for min_ngram 1, not for 2."""
    text = [5, 6, 7, 5]
    assert tokens(begin(text, min_ngram=1).propose(2)) == [6, 7]
    assert tokens(begin(text, min_ngram=2).propose(2)) == []


@pytest.mark.parametrize(("repeated", "length"), [(3, 3), (20, 20), (200, MAX_MATCH)])
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


@given(texts, drafters)
def test_proposing_changes_nothing(text: list[int], drafter: PromptLookupDrafter) -> None:
    """Two proposals in a row are the same, and one with a smaller limit is a prefix."""
    session = drafter.begin(text, CONTEXT)
    first = tokens(session.propose(6))
    assert tokens(session.propose(2)) == first[:2]
    assert tokens(session.propose(6)) == first


def test_the_smaller_of_limit_and_num_draft_holds() -> None:
    """`num_draft` caps what the loop allows, and the loop's limit caps `num_draft`."""
    text = [7] * 10
    assert len(begin(text, num_draft=3).propose(8)) == 3
    assert len(begin(text, num_draft=3).propose(2)) == 2
    assert len(begin(text).propose(50)) == 50
    assert len(begin(text).propose(0)) == 0


@pytest.mark.parametrize("text", [[], [3]])
def test_too_short_a_text_gives_an_empty_draft(text: list[int]) -> None:
    """An empty prompt and one of a single token are texts like any other."""
    assert len(begin(text).propose(4)) == 0


def test_emitted_tokens_need_not_coincide_with_the_draft() -> None:
    """What counts is the text; a draft that was not taken leaves no trace."""
    session = begin([1, 2, 3, 4, 1, 2])
    assert tokens(session.propose(2)) == [3, 4]
    session.observe([9])
    session.observe([])
    session.observe([1, 2])
    assert tokens(session.propose(2)) == [9, 1]


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


@pytest.mark.parametrize("count", [700, 5500])
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


def test_sessions_are_independent() -> None:
    """One drafter serves two generations, whose texts do not mix, and leaves prompts alone."""
    drafter, prompt = PromptLookupDrafter(min_ngram=1), [1, 2, 3, 1]
    one, other = drafter.begin(prompt, CONTEXT), drafter.begin(prompt, CONTEXT)
    one.observe([8, 1])
    assert tokens(one.propose(1)) == [8]
    assert tokens(other.propose(1)) == [2]
    assert prompt == [1, 2, 3, 1]


def test_drafter_is_a_value_and_shareable_between_threads() -> None:
    """Equal arguments make equal, hashable drafters; sessions of one run side by side."""
    drafter = PromptLookupDrafter()
    assert {drafter, PromptLookupDrafter()} == {drafter}
    with pytest.raises(dataclasses.FrozenInstanceError):
        drafter.max_ngram = 3  # type: ignore[misc]

    def drafted(seed: int) -> list[int]:
        session = drafter.begin([seed, 1, 2, seed], CONTEXT)
        for _ in range(50):
            session.observe(tokens(session.propose(3)))
        return tokens(session.propose(3))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drafted, range(10, 30))) == [drafted(i) for i in range(10, 30)]


def test_contracts_hold() -> None:
    """The classes are what the loop asks for."""
    assert isinstance(PromptLookupDrafter(), Drafter)
    assert isinstance(begin([1]), DraftSession)


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
