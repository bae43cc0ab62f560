"""Laws of drafting from the longest match, against a reference that looks at every place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from mlx_lm.sample_utils import make_logits_processors

import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Evidence,
    Session,
    places_class,
    share_class,
)
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.drafters.suffix import SURROUNDINGS, paths_of, vote, weigh
from specdec_mlx.lab import check_drafter
from specdec_mlx.lab.papers.suffix_trees import trie
from specdec_mlx.lab.papers.tree_drafts import texts_of
from specdec_mlx.memory.index import (
    KNOWN,
    MAX_MATCH,
    MOST_DEEP,
    SEPARATOR,
    Context,
    ContextIndex,
    GrowingIndex,
)

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
    own = [end - cut for end in index.places if end >= cut]
    assert own == list(ContextIndex(joined(parts[-1:])).places)
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
    assert text.places == ContextIndex(text.ids).places


def begin(prompt: Sequence[int], **options: Any) -> Session:
    return sd.SuffixDrafter(**options).begin(prompt, CONTEXT)


@given(texts.filter(bool), st.lists(st.integers(0, 3), unique=True), st.integers(0, 12))
def test_a_draft_followed_one_of_the_longest_matches(
    text: list[int], more: list[int], limit: int
) -> None:
    """As long as the limit; of what may come ahead as afterwards, where all matches stand in the
    text as it was; and nothing of the question is noted.
    """
    session = begin(text)
    ahead = session.propose_after(more, limit)
    draft = session.propose(limit)
    true = matches(text, text[::-1])
    longest = max(true.values())
    assert len(draft) == (limit if longest else 0)
    followers = {text[end] for end, match in true.items() if match >= max(1, longest - 1)}
    assert followers.issuperset(draft.tokens[:1])
    session.observe(more)
    true = matches([*text, *more], [*text, *more][::-1])
    longest = max(true.values())
    if all(end < len(text) for end, match in true.items() if match >= longest - 1):
        assert list(session.propose(limit).tokens) == list(ahead.tokens)


def test_where_a_copy_ends() -> None:
    """A remembered text ends; one that is written goes on with itself, and with what may come, up
    to the drafter's own cap; a match that is too short is not copied.
    """
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert begin(text, num_draft=2).propose(4).tokens == [3, 4]
    assert not begin(text, min_match=3).propose(4)
    memory = sd.Memory()
    memory.add([1, 2, 3])
    assert begin([1], memory=memory).propose(8).tokens == [2, 3]
    assert begin([1, 2, 1, 2]).propose(5).tokens == [1, 2, 1, 2, 1]
    assert begin([1, 2, 3, 4, 5, 1]).propose_after([2, 3], 5).tokens == [4, 5, 1, 2, 3]


@in_one_test("prompts", [False, True])
def test_a_memory_is_drafted_from_and_written_to(prompts: bool) -> None:
    """What a generation wrote, up to what its caller has, helps the next; prompts if asked; a
    session keeps the memory that it began with, and a key says that there is one, not what.
    """
    memory = sd.Memory(remember_prompts=prompts)
    session, early = begin([1, 2, 3], memory=memory), begin([4, 5], memory=memory)
    key = sd.SuffixDrafter(memory).key
    session.observe([4, 5, 6, 7, 8])
    session.close(3 + 4)
    session.close(3 + 5)  # only once
    written = [1, 2, 3, 4, 5, 6, 7] if prompts else [4, 5, 6, 7]
    assert [text.tolist() for text in memory.texts()] == [written]
    assert begin([9, 4, 5], memory=memory).propose(4).tokens == [6, 7]
    assert bool(begin([2], memory=memory).propose(4)) == prompts
    assert not early.propose(4)
    assert key == sd.SuffixDrafter(memory).key != sd.SuffixDrafter().key


def test_the_contract_is_kept_with_a_memory() -> None:
    """One that holds what is asked for and much else."""
    memory = sd.Memory()
    memory.add(list(range(32)) * 3)
    check_drafter(sd.SuffixDrafter(memory), remembers=True, learns=True)


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
def test_a_draft_is_what_wins_each_vote(
    ballots: list[tuple[list[int], float]], length: int
) -> None:
    """Token, share and places are those of a count over all continuations, one by one."""
    followed, counts = [tokens for tokens, _ in ballots], [count for _, count in ballots]
    sources = [ContextIndex([3, *tokens, SEPARATOR]) for tokens in followed]
    voters = [(1, [1], source, count) for source, count in zip(sources, counts, strict=True)]
    draft = vote(paths_of(voters, [3], length), length)
    wanted = list(voted_for([tuple(tokens[:length]) for tokens in followed], counts, length))
    assert list(draft.tokens) == [token for token, _, _ in wanted]
    assert draft.evidence is not None
    for told, (_, share, places) in zip(draft.evidence, wanted, strict=True):
        assert isinstance(told, Evidence)
        assert told.share == share_class(share)
        assert told.places == places_class(places)


def reached(
    ballots: Sequence[tuple[list[int], float]], known: Chances
) -> dict[tuple[int, ...], tuple[float, Evidence]]:
    """By definition: of every text that a place votes for, the chance that it comes, and what
    speaks for its last token.
    """
    texts = {tuple(tokens[: n + 1]) for tokens, _ in ballots for n in range(len(tokens))}
    found: dict[tuple[int, ...], tuple[float, Evidence]] = {(): (1.0, Evidence())}
    for text in sorted(texts, key=len):
        *before, token = text
        votes: dict[int, list[float]] = defaultdict(list)
        for tokens, weight in ballots:
            if tokens[: len(before)] == before and len(tokens) > len(before):
                votes[tokens[len(before)]].append(weight)
        total = sum(map(sum, votes.values()))
        rank = sorted(votes, key=lambda one: -sum(votes[one])).index(token)
        share, places = share_class(sum(votes[token]) / total), places_class(len(votes[token]))
        evidence = Evidence(1, share, places, rank)
        (chance,) = known.of_draft([evidence], first=len(before))
        found[text] = found[tuple(before)][0] * chance, evidence
    del found[()]
    return found


@given(ballots, st.integers(1, 12))
@example([([0, 1], 0.5), ([0, 1], 0.5), ([0, 2], 1.0)], 2)
def test_a_trie_holds_the_likeliest_of_all_that_is_voted_for(
    ballots: list[tuple[list[int], float]], limit: int
) -> None:
    """As many as there is room for, parents first, each with the evidence of its own votes."""
    known = Chances.of("look-up")
    paths = [(weight, 1, tuple(tokens)) for tokens, weight in ballots]
    found, wanted = trie(paths, limit, known), reached(ballots, known)
    assert len(found) == min(limit, len(wanted))
    chances = [wanted[text][0] for text in found]
    assert chances == sorted(chances, reverse=True)
    assert min(chances) >= sorted([chance for chance, _ in wanted.values()])[-len(found)] - 1e-12
    assert all(found[text] == wanted[text][1] for text in found)
    assert all(len(text) == 1 or text[:-1] in found for text in found)


def test_what_was_outvoted_is_offered_and_drafted_as_a_tree() -> None:
    """The winner's chain is what is drafted alone; a tree and the chains hold the same tokens."""
    text = [1, 5, 6, 1, 5, 8, 1]
    drafters = sd.SuffixDrafter(), lab.SuffixTreeDrafter()
    session, tree = (drafter.begin(text, CONTEXT) for drafter in drafters)
    first, *others = tree.candidates(16)
    assert first == session.propose(16)
    draft = tree.propose(16)
    assert draft.parents is not None
    offered = {each for one in others for each in texts_of(one)}
    assert {(5, 6), (5, 8)} <= set(texts_of(draft)) == offered
    assert len(tree.propose(3)) == 3
    assert not tree.candidates(0)
    assert not lab.SuffixTreeDrafter().begin([1, 2], CONTEXT).candidates(4)
    short = lab.SuffixTreeDrafter(num_draft=2).begin(text, CONTEXT)
    assert short.propose(8).tokens == [5, 8]
    assert lab.SuffixTreeDrafter().key != sd.SuffixDrafter().key
    assert sd.SuffixDrafter().begin([1, 2], CONTEXT).propose(4) == Draft()


@pytest.mark.filterwarnings("ignore:.*verifies no tree of drafts")
@in_one_test("length", [8, "auto"])
@in_one_test("name", ["llama", "gemma3_text", "mamba2"])
def test_text_with_a_tree_of_places_is_plain_text(name: str, length: int | str) -> None:
    """Of few tokens, so that places disagree; a target that takes no trees is given chains."""
    model, few = tiny.build(name), dict.fromkeys(range(4), 1e4)
    how: Any = {"logits_processors": make_logits_processors(logit_bias=few), "max_tokens": 60}
    plain, text = (
        list(sd.speculate(model, [1, 2, 3, 1, 2], one, num_draft_tokens=length, **how))
        for one in (None, lab.SuffixTreeDrafter())
    )
    assert [token.token for token in text] == [token.token for token in plain]
    assert length == "auto" or text[-1].stats.accepted > 10
