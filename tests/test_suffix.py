"""Laws of drafting from the longest match, against a reference that looks at every place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import specdec_mlx as sd
from specdec_mlx.contracts import DraftContext, Evidence
from specdec_mlx.contracts.drafting import places_class, share_class
from specdec_mlx.drafters.election import SURROUNDINGS, elect, weigh
from specdec_mlx.drafters.suffix import SuffixSession
from specdec_mlx.memory.index import (
    KNOWN,
    MAX_MATCH,
    MOST_DEEP,
    SEPARATOR,
    Context,
    ContextIndex,
    GrowingIndex,
)
from specdec_mlx.testing import check_drafter

CONTEXT = DraftContext()
EVERYTHING = 10_000

texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), max_size=60))
several = st.lists(texts.filter(bool), min_size=1, max_size=4)


def joined(parts: Sequence[Sequence[int]]) -> list[int]:
    return [token for part in parts for token in (*part, SEPARATOR)]


def matches(ids: Sequence[int], last: Sequence[int]) -> dict[int, int]:
    """By definition: how many tokens before each place are the last ones, within its own text."""
    found = {}
    for end, token in enumerate(ids):
        if token != SEPARATOR:
            length = 0
            while length < min(end, len(last), MAX_MATCH) and ids[end - 1 - length] == last[length]:
                length += 1
            found[end] = length
    return found


def check_places(
    index: ContextIndex, context: Context, within: int, most: int = EVERYTHING
) -> None:
    """The longest match is found, every match is what it says, and nothing is left out."""
    places = [(match, end) for match, ends in index.nearest(context, most, within) for end in ends]
    true = matches(index.ids, context.last)
    deep = sorted(end for end, match in true.items() if match >= KNOWN)[-MOST_DEEP:]
    if deep:
        true = {end: true[end] for end in deep}
    longest = max(true.values(), default=0)
    assert (places[0][0] if places else 0) == longest
    wanted = {(match, end) for end, match in true.items() if match >= max(1, longest - within)}
    assert set(places) <= wanted
    if deep or most >= len(wanted):
        assert len(places) == len(wanted)
    else:
        assert 0 < len(places) <= most
    assert [match for match, _ in places] == sorted([m for m, _ in places], reverse=True)


@given(several, texts.filter(bool), st.integers(0, 3), st.sampled_from([1, 3, EVERYTHING]))
@example([[0] * 40], [0] * 40, 2, EVERYTHING)
@example([[0, 0], [0, 0, 0, 0, 0]], [0], 1, EVERYTHING)
@example([list(range(40)), [*range(40), 0]], list(range(39)), 1, 1)
def test_an_index_finds_the_longest_match(
    parts: list[list[int]], query: list[int], within: int, most: int
) -> None:
    """Of several texts: none across their ends, and all places that match nearly as long."""
    index = ContextIndex(joined(parts))
    cut = len(index) - len(parts[-1]) - 1  # a text's order does not depend on those before it
    own = [end - cut for end in index.ends if end >= cut]
    assert own == list(ContextIndex(joined(parts[-1:])).ends)
    for asked in (query, parts[0], parts[-1][: len(query)] + query):
        check_places(index, Context.of(asked), within, most)


@given(texts.filter(bool), st.lists(texts, max_size=4))
def test_a_text_that_grows_is_searched_like_one_that_was_there(
    prompt: list[int], grown: list[list[int]]
) -> None:
    """Every place is found, and the order is that of sorting the whole text."""
    text = GrowingIndex(prompt)
    for tokens in grown:
        text.append(tokens)
        assert text.context() == Context.of(text.ids)
        for within in (0, 2):
            check_places(text, text.context(), within)
    assert text.ends == ContextIndex(text.ids).ends


def test_fewer_places_match_shorter() -> None:
    """Of shorter matches so many at most, beside all of the longest."""
    index = ContextIndex([1, 2, 3, 2, 4, 2, 5, 2, 6, 1, 2])
    rings = index.nearest(Context.of([1, 2]), EVERYTHING, 1, 1, 2)
    assert [(match, len(ends)) for match, ends in rings] == [(2, 1), (1, 2)]
    assert index.nearest(Context.of([1, 2]), EVERYTHING, 1, 3) == []


def begin(prompt: Sequence[int], **options: Any) -> SuffixSession:
    return sd.SuffixDrafter(**options).begin(prompt, CONTEXT)


@given(texts, st.integers(0, 12))
def test_a_draft_begins_with_what_followed_a_match(text: list[int], limit: int) -> None:
    """It is as long as the limit, and its first token followed one of the longest matches."""
    draft = begin(text).propose(limit)
    true = matches(text, text[::-1])
    longest = max(true.values(), default=0)
    assert len(draft) == (limit if longest else 0)
    if draft:
        followers = {text[end] for end, match in true.items() if match >= max(1, longest - 1)}
        assert next(iter(draft.tokens)) in followers


@given(texts.filter(bool), st.lists(st.integers(0, 3), unique=True), st.integers(1, 8))
def test_proposing_ahead_is_proposing_afterwards(
    text: list[int], more: list[int], limit: int
) -> None:
    """Where the longest match lies in the text as it was; and nothing of the question is noted."""
    session = begin(text)
    ahead = session.propose_after(more, limit)
    assert session.propose(limit) == begin(text).propose(limit)
    true = matches([*text, *more], [*text, *more][::-1])
    longest = max(true.values())
    session.observe(more)
    if all(end < len(text) for end, match in true.items() if match >= longest - 1):
        assert list(session.propose(limit).tokens) == list(ahead.tokens)


def test_what_may_come_is_part_of_the_match_and_of_the_copy() -> None:
    """2, 3 after the text: its beginning goes on with 4, 5, then with the text's end and 2, 3."""
    session = begin([1, 2, 3, 4, 5, 1])
    assert session.propose_after([2, 3], 5).tokens == [4, 5, 1, 2, 3]


def test_a_memory_is_drafted_from_and_written_to() -> None:
    """What a generation wrote, up to what its caller has, helps the next; no prompts."""
    memory = sd.Memory()
    session = begin([1, 2, 3], memory=memory)
    session.observe([4, 5, 6, 7, 8])
    assert not begin([4, 5], memory=memory).propose(4)
    session.close(3 + 4)
    session.close(3 + 5)  # only once
    assert [text.tolist() for text in memory.texts()] == [[4, 5, 6, 7]]
    assert begin([9, 4, 5], memory=memory).propose(4).tokens == [6, 7]
    assert not begin([2], memory=memory).propose(4)
    remembering = sd.Memory(remember_prompts=True)
    session = begin([1, 2, 3], memory=remembering)
    session.observe([4])
    session.close(4)
    assert begin([1], memory=remembering).propose(4).tokens == [2, 3, 4]


def test_a_session_keeps_the_memory_it_began_with() -> None:
    """What others write meanwhile does not change its drafts."""
    memory = sd.Memory()
    memory.add([1, 2, 3, 4])
    session = begin([1, 2], memory=memory)
    for _ in range(100):
        memory.add([1, 2, 7, 7])
    assert session.propose(2).tokens == [3, 4]
    assert begin([1, 2], memory=memory).propose(2).tokens == [7, 7]


def test_the_place_whose_surroundings_agree_wins() -> None:
    """Of equal matches: a name of another length stands between, the sentence is the same."""
    one = [10, 11, 12, 13, 14, 50, 51, 1, 2, 100]
    other = [20, 21, 22, 23, 24, 60, 61, 1, 2, 200]
    for said, follows in ((one, 100), (other, 200)):
        prompt = [*one, 0, *other, 0, *said[:5], 70, 71, 72, 1, 2]
        assert begin(prompt).propose(1).tokens == [follows]


def test_weight_is_match_and_surroundings() -> None:
    """5 doublings for a token of the match, one for each token in common before it."""
    ids = [*range(100, 100 + SURROUNDINGS), 1, 2, 3]
    index = GrowingIndex(ids)
    last = [2, 1, *range(100, 103), 7, 8]
    voters = [(2, [len(ids) - 1], index, 1.0), (1, [1], index, 0.5)]
    assert weigh(voters, last) == [2.0**3, 0.5 * 2.0**-5]


def voted_for(
    followed: Sequence[tuple[int, ...]], weights: Sequence[float], length: int
) -> Iterator[tuple[int, float, int]]:
    """By definition: each token of a draft, its share of the vote, and the places that give it."""
    alive = list(zip(followed, weights, strict=True))
    for position in range(length):
        alive = [one for one in alive if position < len(one[0])]
        if not alive:
            return
        votes: dict[int, float] = defaultdict(float)
        for tokens, weight in alive:
            votes[tokens[position]] += weight
        best = max(votes, key=votes.__getitem__)
        share = votes[best] / sum(votes.values())
        alive = [one for one in alive if one[0][position] == best]
        yield best, share, len(alive)


pools = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=5)
ballots = pools.flatmap(  # some of the continuations are alike
    lambda pool: st.lists(
        st.tuples(st.sampled_from(pool), st.sampled_from([1.0, 0.5, 0.25])), min_size=1, max_size=9
    )
)


@given(ballots, st.integers(1, 6))
@example([([0, 1], 0.5), ([0, 1], 0.5), ([0, 2], 1.0)], 2)
def test_a_draft_is_what_wins_every_vote(
    ballots: list[tuple[list[int], float]], length: int
) -> None:
    """Token, share and places are those of a count over all continuations, one by one."""
    followed, counts = [tokens for tokens, _ in ballots], [count for _, count in ballots]
    sources = [ContextIndex([3, *tokens, SEPARATOR]) for tokens in followed]
    voters = [(1, [1], source, count) for source, count in zip(sources, counts, strict=True)]
    draft = elect(voters, [3], length)
    wanted = list(voted_for([tuple(tokens[:length]) for tokens in followed], counts, length))
    assert list(draft.tokens) == [token for token, _, _ in wanted]
    assert draft.evidence is not None
    for told, (_, share, places) in zip(draft.evidence, wanted, strict=True):
        assert isinstance(told, Evidence)
        assert told.share == share_class(share)
        assert told.places == places_class(places)


def test_a_draft_ends_with_the_text_it_is_copied_from() -> None:
    """A remembered text ends; one that is written goes on with itself, as periodic texts do."""
    memory = sd.Memory()
    memory.add([1, 2, 3])
    assert begin([1], memory=memory).propose(8).tokens == [2, 3]
    assert begin([1, 2, 1, 2]).propose(5).tokens == [1, 2, 1, 2, 1]


def test_options_bound_the_draft() -> None:
    """Its own cap, and the shortest match; numbers without meaning are refused by name."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert begin(text).propose(4).tokens == [3, 4, 5, 6]
    assert begin(text, num_draft=2).propose(4).tokens == [3, 4]
    assert not begin(text, min_match=3).propose(4)
    for name, wrong in (("num_draft", 0), ("min_match", 0), ("min_match", 65)):
        with pytest.raises(ValueError, match=name):
            sd.SuffixDrafter(**{name: wrong})  # type: ignore[arg-type]


def test_it_has_a_name_and_a_key() -> None:
    """The key says whether it remembers, and not what."""
    assert isinstance(sd.make_drafter("suffix:min_match=2"), sd.SuffixDrafter)
    without, first, second = (sd.SuffixDrafter(m) for m in (None, sd.Memory(), sd.Memory()))
    second.memory.add([1, 2, 3])  # type: ignore[union-attr]
    assert first.key == second.key != without.key


def test_it_keeps_the_contract_with_a_memory() -> None:
    """One that holds what is asked for and much else."""
    memory = sd.Memory()
    memory.add(list(range(32)) * 3)
    check_drafter(sd.SuffixDrafter(memory), remembers=True, learns=True)
