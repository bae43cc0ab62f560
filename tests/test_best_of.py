"""`BestOf`: the draft that is worth most is verified; nothing that was drawn is compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import pytest

import specdec_mlx as sd
import tiny
from specdec_mlx.bench.cost import linear_cost
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.bench.recorded import replay_text
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.policy import Fixed
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.types import Draft, DraftContext, Evidence, RoundRecord, session_groups

PROMPT = [5, 17, 99, 3]
NUM_TOKENS = 40
LONG = [n * n % 97 for n in range(400)]


@dataclass(frozen=True, eq=False)
class Told:
    """Proposes what it is told: (tokens so far, limit) -> tokens. asked: the limits.

    drawn: whether it declares a distribution, as if it had drawn them.
    """

    name: str
    tokens: Callable[[int, int], Sequence[int]]
    cheap: bool = True
    evidence: int | None = None
    drawn: bool = False
    asked: list[int] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self.name

    def begin(self, prompt: Sequence[int], context: DraftContext) -> ToldSession:
        return ToldSession(self)


class ToldSession:
    def __init__(self, drafter: Told) -> None:
        self.drafter, self.cheap, self.start = drafter, drafter.cheap, 0

    def propose(self, limit: int) -> Draft:
        told = self.drafter
        told.asked.append(limit)
        tokens = list(told.tokens(self.start, limit))
        if told.drawn and tokens:
            return Draft(tokens, mx.log(mx.eye(VOCAB)[mx.array(tokens)]))
        evidence = None if told.evidence is None else [Evidence(told.evidence)] * len(tokens)
        return Draft(tokens, evidence=evidence)

    def observe(self, tokens: Sequence[int]) -> None:
        self.start += len(tokens)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("qwen2")


VOCAB = tiny.CONFIGS["qwen2"]["vocab_size"]


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    return [t.token for t in sd.speculate(model, PROMPT, None, max_tokens=NUM_TOKENS)]


def right(text: Sequence[int], name: str = "right", **options: Any) -> Told:
    return Told(name, lambda start, limit: text[start : start + limit], **options)


def wrong(text: Sequence[int], name: str = "wrong", **options: Any) -> Told:
    return Told(name, lambda start, limit: [t ^ 1 for t in text[start : start + limit]], **options)


def nothing(name: str = "nothing", **options: Any) -> Told:
    return Told(name, lambda start, limit: [], **options)


@dataclass
class Noting(Fixed):
    """A fixed length that keeps the records."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.records: list[RoundRecord] = []

    def record(self, round_: RoundRecord) -> None:
        self.records.append(round_)


def run(model: Any, drafter: Any, length: Any) -> tuple[list[int], sd.stats.SpeculationStats]:
    items = list(
        sd.speculate(
            model, PROMPT, drafter, max_tokens=NUM_TOKENS, draft_length=length, probe=False
        )
    )
    return [item.token for item in items], items[-1].stats


@pytest.mark.parametrize("order", [1, -1])
def test_with_a_fixed_length_the_longest_match_wins(
    order: int, model: Any, text: list[int]
) -> None:
    """Whichever comes first; of equal ones the first."""
    pair = [right(text, evidence=9), wrong(text, evidence=4)]
    tokens, stats = run(model, sd.BestOf(*pair[::order]), 3)
    assert tokens == text
    assert set(stats.by_drafter) == {"right"}
    assert stats.by_drafter["right"][0] == stats.by_drafter["right"][1] > NUM_TOKENS / 2
    equal = [right(text, name, evidence=4) for name in "ab"][::order]
    assert set(run(model, sd.BestOf(*equal), 3)[1].by_drafter) == {equal[0].name}


def test_first_of_would_have_stayed_with_the_wrong_one(model: Any, text: list[int]) -> None:
    """The test above says something: first come, first served drafts nothing of use."""
    _, stats = run(model, sd.FirstOf(wrong(text), right(text)), 3)
    assert set(stats.by_drafter) == {"wrong"}
    assert stats.accepted == 0


def test_one_that_costs_time_is_asked_where_the_others_have_nothing(
    model: Any, text: list[int]
) -> None:
    """And it is hardly asked where free drafts are always right: at most to find out its price."""
    costly = right(text, "costly", cheap=False)
    run(model, sd.BestOf(nothing(), costly), 3)
    assert costly.asked
    again, tuning = right(LONG, "costly", cheap=False), Tuning()
    for _ in range(3):  # costs and acceptance are learned from text to text
        again.asked.clear()
        replay_text(
            RecordedText("", "", PROMPT, LONG),
            sd.BestOf(right(LONG, evidence=16), again),
            Auto(tuning),
            linear_cost(0.05),
            max_tokens=len(LONG),
            vocab_size=VOCAB,
            draft_seconds=linear_cost(0.05)(1) / 5,
        )
    assert len(again.asked) < 3


def test_one_that_costs_time_is_asked_where_it_promises_more(model: Any, text: list[int]) -> None:
    """Free drafts that are always wrong do not shut it out."""
    costly = right(text, "costly", cheap=False)
    tokens, stats = run(model, sd.BestOf(wrong(text), costly), 3)
    assert tokens == text
    assert stats.by_drafter["costly"][1] > NUM_TOKENS / 2


class Ranking(Auto):
    """The last draft wins, of which a token is kept. seen: the keys compared. records: rounds."""

    def __init__(self, length: int, outbid: bool) -> None:
        super().__init__()
        self.length, self.outbid = length, outbid
        self.seen: list[list[str]] = []
        self.records: list[RoundRecord] = []

    def limit(self, part: str, cheap: bool) -> int:
        return self.length

    def cut(self, part: str, draft: Draft) -> int:
        assert draft.logprobs is None
        return len(draft)

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        assert all(draft.logprobs is None for _, draft in drafts)
        self.seen.append([key for key, _ in drafts])
        return drafts[-1][0], drafts[-1][1].head(1)

    def record(self, round_: RoundRecord) -> None:
        self.records.append(round_)

    def outbids(self, part: str) -> bool:
        return self.outbid


@pytest.mark.parametrize("outbid", [True, False])
def test_only_point_masses_compete(outbid: bool, model: Any, text: list[int]) -> None:
    """The draft length is never shown a drawn draft: free or not, it is taken or never asked."""
    free = [right(text, "one"), right(text, "two"), nothing()]
    drawn = right(text, "drawn", drawn=True)
    costly = right(text, "costly", cheap=False, drawn=True)
    length = Ranking(3, outbid)
    tokens, stats = run(model, sd.BestOf(*free, drawn, costly), length)
    assert tokens == text
    assert {tuple(keys) for keys in length.seen} == {("one", "two")}
    assert set(stats.by_drafter) == ({"costly"} if outbid else {"two"})
    assert bool(costly.asked) == outbid
    kept = {r.drafted for r in length.records if r.part == "two"}
    assert kept == (set() if outbid else {1})


def test_a_free_drawn_draft_is_taken_where_there_is_no_other(model: Any, text: list[int]) -> None:
    """Nothing that was drawn decides about it."""
    _, stats = run(model, sd.BestOf(nothing(), right(text, "drawn", drawn=True)), 3)
    assert set(stats.by_drafter) == {"drawn"}


def test_groups_are_asked_in_order(model: Any, text: list[int]) -> None:
    """`FirstOf` around it keeps its order: what stands before is asked alone."""
    first, rest = right(text[:12], "first"), sd.BestOf(right(text, "a"), wrong(text, "b"))
    drafter = sd.FirstOf(first, rest)
    session = drafter.begin(PROMPT, DraftContext())
    groups = session_groups(session, drafter.key)
    assert [[key for key, _ in group] for group in groups] == [["first"], ["a", "b"]]
    length = Noting(3)
    tokens, _ = run(model, drafter, length)
    assert tokens == text
    drafting = [r.part for r in length.records if r.drafted]
    assert drafting.index("a") == drafting.count("first") > 0


@pytest.mark.parametrize("order", [1, -1])
def test_the_draft_that_is_worth_most_wins_and_of_equal_ones_the_first(order: int) -> None:
    """Whichever comes first; one that costs time is asked where it promises more than the best."""
    policy = Auto()
    policy.prices.most = 12
    for part in ("weak", "strong"):
        policy.limit(part, cheap=True)
    weak, strong = (Draft([i] * 4, evidence=[Evidence(i)] * 4) for i in (2, 64))
    chosen, kept = policy.choose([("weak", weak), ("strong", strong)][::order])
    assert (chosen, len(kept), kept.tokens[0]) == ("strong", 4, 64)
    pair = [("weak", strong), ("strong", strong)][::order]
    assert policy.choose(pair)[0] == pair[0][0]
    steps = policy.tuning.of("model").steps
    steps.first.extend([0.5] * 2)
    steps.further.extend([0.5] * 2)
    policy.limit("model", cheap=False)
    assert not policy.outbids("model")
    steps.first.extend([0.01] * 7)
    wrong = Draft([3] * 4, evidence=[Evidence(1, share=1)] * 4)
    for _ in range(15):
        policy.tuning.of("weak").chances.learn([Evidence(1, share=1)] * 4, [False] * 4)
        policy.tuning.of("model").unseen.learn([0] * 4, [True] * 4)
    policy.choose([("weak", wrong)])
    policy._parts["model"].rest = 0  # type: ignore[attr-defined]
    policy.limit("model", cheap=False)
    assert policy.outbids("model")


def test_drafts_that_were_not_chosen_are_scored() -> None:
    """Two drafts at once: after a few rounds the one that would have been right is preferred."""
    policy = Auto()
    policy.prices.most = 12
    for part in ("a", "b"):
        policy.limit(part, cheap=True)
    drafts = [("a", Draft([1, 2], evidence=[4, 4])), ("b", Draft([3, 4], evidence=[4, 4]))]
    assert policy.choose(drafts)[0] == "a"
    for _ in range(40):
        policy.choose(drafts)
        policy.record(RoundRecord(0, 0, 3, 1, tokens=[3, 4, 5], steady=False))
        policy.prices.most = 12
    key, draft = policy.choose(drafts)
    assert (key, draft.tokens) == ("b", [3, 4])


def test_it_is_made_of_its_parts() -> None:
    """Its key and its parts are theirs; nothing cannot be tried."""
    drafter = sd.BestOf(sd.NGramDrafter(), sd.SuffixDrafter())
    assert drafter.key.startswith("BestOf(")
    assert drafter.key != sd.FirstOf(*drafter.drafters).key
    with pytest.raises(ValueError, match=r"BestOf\(\) has nothing"):
        sd.BestOf()


def test_on_its_own_it_proposes_the_longest_match() -> None:
    """Outside of the loop, too: costly ones come last."""
    text = [1, 2, 3, 4, 5, 6, 7, 8] * 4
    drafter = sd.BestOf(wrong(text, evidence=2), right(text, evidence=3))
    session = drafter.begin([], DraftContext())
    for start in range(0, 24, 2):
        assert list(session.propose(2).tokens) == text[start : start + 2]
        session.observe(text[start : start + 2])
    costly = sd.BestOf(nothing(), right(text, cheap=False)).begin([], DraftContext())
    assert list(costly.propose(2).tokens) == [1, 2]
