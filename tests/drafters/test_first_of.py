"""Several drafters: each within a limit of its own, the first that has a draft or the best."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generation_stream

import specdec_mlx as sd
import tiny
import tiny_text
from selection import in_one_test
from specdec_mlx import lab
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Evidence,
    RoundRecord,
    models_of,
)
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import Auto
from specdec_mlx.lab.beams.search import BeamDrafting
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.replay import replay_text
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.lab.proof.drafter import DrafterConformance
from specdec_mlx.lab.proof.subject import Alone
from specdec_mlx.lab.proposing import proposing
from specdec_mlx.mlx_lm_plugin.drafter_wrappers import Wrapper
from specdec_mlx.token_ids import to_list

PROMPT = [5, 17, 99, 3]
NUM_TOKENS = 40
LONG = [n * n % 97 for n in range(400)]
VOCAB = tiny.CONFIGS["qwen2"]["vocab_size"]


@dataclass(frozen=True, eq=False)
class Told:
    """Proposes what it is told: (tokens so far, limit) -> tokens. asked: the limits."""

    key: str
    tokens: Callable[[int, int], Sequence[int]]
    cheap: bool = True
    evidence: int | None = None
    drawn: bool = False
    asked: list[int] = field(default_factory=list)

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


def right(text: Sequence[int], key: str = "right", **options: Any) -> Told:
    return Told(key, lambda start, limit: text[start : start + limit], **options)


def wrong(text: Sequence[int], key: str = "wrong", **options: Any) -> Told:
    return right([token ^ 1 for token in text], key, **options)


def nothing() -> Told:
    return right([], "nothing")


def costly(text: Sequence[int], **options: Any) -> Told:
    return right(text, "costly", cheap=False, **options)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("qwen2")


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    """More than is ever asked for."""
    return [t.token for t in sd.speculate(model, PROMPT, None, max_tokens=NUM_TOKENS + 10)]


def run(model: Any, text: list[int], drafter: Any, length: Any) -> sd.stats.SpeculationStats:
    """What became of a generation's drafts; its text is that of plain decoding."""
    how = {"max_tokens": NUM_TOKENS, "num_draft_tokens": length, "probe": False}
    items = list(sd.speculate(model, PROMPT, drafter, **how))
    assert [item.token for item in items] == text[:NUM_TOKENS]
    return items[-1].stats


@dataclass
class Limits:
    """A draft length that gives cheap drafters one limit and expensive ones another."""

    cheap: int
    expensive: int
    keep: int = 99
    records: list[RoundRecord] = field(default_factory=list)
    cheap_parts: set[str] = field(default_factory=set)

    def limit(self, part: str, cheap: bool) -> int:
        if cheap:
            self.cheap_parts.add(part)
        return self.cheap if cheap else self.expensive

    def cut(self, part: str, draft: sd.Draft) -> int:
        return min(self.keep, len(draft)) if part in self.cheap_parts else len(draft)

    def record(self, round_: RoundRecord) -> None:
        self.records.append(round_)


@dataclass(frozen=True)
class Wrapped(Wrapper):
    """What `mlx_lm_plugin.drafter_wrappers` puts around drafters."""

    drafter: Any

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        return self.drafter.begin(prompt, context)


@in_one_test("wrap", [lambda d: d, Wrapped, sd.drafters.FirstOf])
@in_one_test("order", [1, -1])
def test_each_is_asked_within_its_own_limit(
    order: int, wrap: Any, model: Any, text: list[int]
) -> None:
    """The cheap one may draft further than the expensive one, whichever comes first; an expensive
    one with a limit of 0 is not asked; and a draft that is not worth verifying leaves the turn to
    the next, or a look-up that nearly always finds something weak would shut a draft model out.
    """
    for cheap, limit, keep in (
        (right(text), 0, 99),
        (right(text[:12]), 2, 99),
        (wrong(text), 3, 0),
    ):
        pair, length = [cheap, costly(text)], Limits(cheap=9, expensive=limit, keep=keep)
        run(model, text, wrap(sd.drafters.FirstOf(*pair[::order])), length)
        assert max([0, *pair[1].asked]) == limit
        assert (order == -1 and limit) or max(cheap.asked) == 9
        assert sum(record.accepted for record in length.records) > NUM_TOKENS / 2
        assert keep or all(record.accepted == record.drafted for record in length.records)


def test_an_expensive_one_that_does_not_pay_leaves_the_pipeline(
    model: Any, text: list[int]
) -> None:
    """Passes overlap as in plain decoding while the cheap one has nothing, but for the rounds that
    a text waits for its first draft.
    """
    for expensive, least in ((0, NUM_TOKENS - 16), (1, 0)):
        length = Limits(cheap=6, expensive=expensive)
        run(model, text, sd.drafters.FirstOf(nothing(), costly(text)), length)
        num_ahead = sum(record.ahead for record in length.records)
        assert num_ahead >= least if least else num_ahead == 0


def test_the_memory_limit_counts_models_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside others, behind earlier turns, and each once: what mlx-lm is told to keep wired."""
    assert models_of(None) == models_of(sd.PromptLookupDrafter(min_ngram=1)) == []
    wired: list[Any] = []
    monkeypatch.setattr(
        importlib.import_module("specdec_mlx.generation"),
        "wired_limit",
        lambda models, streams: wired.append(models) or nullcontext(),
    )
    target, one, two = (
        tiny_text.model(),
        *(tiny.build(n, vocab_size=64) for n in ("qwen2", "llama")),
    )
    last = sd.ModelDrafter(two)
    inner = sd.drafters.FirstOf(sd.ModelDrafter(one), last)
    drafter = sd.drafters.FirstOf(sd.PromptLookupDrafter(min_ngram=1), inner, Wrapped(last))
    list(sd.stream_generate(target, tiny_text.tokenizer(), [5, 17], 3, drafter=drafter))
    assert [id(m) for m in wired[0]] == [id(target), id(one), id(two)]


class FreeSteps(Auto):
    """The automatic draft length where each pass takes a second and drafting no time, but nothing
    that is free is asked.
    """

    def __init__(self) -> None:
        super().__init__()
        self.prices.clock = lambda: 0.0

    def limit(self, part: str, cheap: bool) -> int:
        most = super().limit(part, cheap)
        return 0 if cheap else most

    def record(self, round_: RoundRecord) -> None:
        super().record(replace(round_, seconds=1.0, draft_seconds=0.0, steady=True))


def test_a_drafter_that_stands_in_two_places_learns_from_each_of_its_drafts(
    model: Any, text: list[int]
) -> None:
    """Two sessions with one key: whichever drafts, its confidence is there when its round ends."""
    draft = sd.ModelDrafter(model)
    auto = FreeSteps()
    run(model, text, sd.drafters.FirstOf(wrong(text), draft, sd.drafters.FirstOf(draft)), auto)
    assert auto.tuning.of(draft.key).chances.recent > 0.5


class Refusing:
    """A drafter that cannot serve this target, and one that must not have begun."""

    def check(self, context: sd.drafters.DraftContext) -> None:
        raise sd.errors.TokenizerMismatchError("another tokenizer")

    def begin(self, prompt: Sequence[int], context: sd.drafters.DraftContext) -> Any:
        raise AssertionError("begun")


@in_one_test(
    "wrap",
    [
        lambda d: d,
        lambda d: sd.drafters.FirstOf(nothing(), d),
        lambda d: Wrapped(sd.drafters.FirstOf(d)),
    ],
)
def test_a_drafter_that_cannot_serve_is_refused_before_any_pass(wrap: Any, model: Any) -> None:
    """A prompt may take minutes to read."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(sd.errors.TokenizerMismatchError):
        patch.setattr(type(model), "__call__", pytest.fail)
        list(sd.speculate(model, PROMPT, wrap(Refusing()), max_tokens=3))


@in_one_test("order", [1, -1])
def test_of_a_fixed_length_the_longest_match_wins(order: int, model: Any, text: list[int]) -> None:
    """Whichever comes first; of equal ones the first; outside of the loop, too. Of the automatic
    length it is the one that is worth most.
    """
    pair = [right(text, evidence=9), wrong(text, evidence=4)][::order]
    by_drafter = run(model, text, sd.BestOf(*pair), 3).by_drafter
    assert set(by_drafter) == {"right"}
    assert by_drafter["right"][0] == by_drafter["right"][1] > NUM_TOKENS / 2
    equal = [right(text, name, evidence=4) for name in "ab"][::order]
    assert set(run(model, text, sd.BestOf(*equal), 3).by_drafter) == {equal[0].key}
    for several in (pair, [nothing(), costly(text)]):
        session = sd.BestOf(*several).begin([], DraftContext())
        for start in range(0, 24, 2):
            draft = proposing(session, "")(2)
            assert list(draft.tokens) == text[start : start + 2]
            session.observe(text[start : start + 2])
    policy = Auto()
    policy.prices.most = 12
    drafts = [("a", Draft([n] * 4, evidence=[Evidence(n)] * 4)) for n in (2, 64)][::order]
    for key in "ab":
        policy.limit(key, cheap=True)
    assert policy.choose(drafts)[1].tokens[0] == 64
    assert policy.choose([drafts[0], ("b", drafts[0][1])])[0] == "a"


def test_one_that_costs_time_is_asked_where_it_promises_more(model: Any, text: list[int]) -> None:
    """Where the others have nothing, or are always wrong; hardly where free drafts are always
    right: at most to find out its price.
    """
    for other in (nothing(), wrong(text)):
        stats = run(model, text, sd.BestOf(other, costly(text)), 3)
        assert stats.by_drafter["costly"][1] > NUM_TOKENS / 2
    again, tuning = costly(LONG), Tuning()
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


@in_one_test("is_right", [True, False])
def test_at_a_fixed_length_the_same_value_decides_who_drafts(
    is_right: bool, model: Any, text: list[int]
) -> None:
    """Beside a drafter that costs time: look-up where it is right, and else that one."""
    look_up = (right if is_right else wrong)(text, "look-up", evidence=16)
    by_drafter = run(model, text, sd.BestOf(look_up, costly(text)), 3).by_drafter
    drafted = {key: by_drafter.get(key, (0, 0))[0] for key in ("look-up", "costly")}
    ahead, behind = ("look-up", "costly")[:: 1 if is_right else -1]
    assert drafted[ahead] > 2 * drafted[behind], drafted


def test_who_asks_outside_of_the_loop_gets_the_loops_choice(model: Any, text: list[int]) -> None:
    """A look-up of hardly any evidence, beside a drafter that costs time: at a fixed length it is
    the latter that drafts, in a text, in the check, for beams and in the test of the contract.
    """
    weak, certain = wrong(text, "look-up", evidence=1), costly(text)
    drafter = sd.BestOf(weak, certain)
    length = Limits(cheap=9, expensive=9)
    run(model, text, drafter, length)
    first = next(record for record in length.records if record.drafted)
    assert first.part == "costly"
    drafted: list[list[int]] = []
    beams = BeamDrafting(drafter, PROMPT, DraftContext(vocab_size=VOCAB), generation_stream)
    beams.follow([()])
    drafted += map(list, beams.continued((), 9))
    begun = Alone(drafter, model).begin(PROMPT, DraftContext())
    drafted.append(to_list(begun.propose(9).tokens))
    conformance = DrafterConformance(drafter, VOCAB, None, [PROMPT], 1, False)
    drafted.append(to_list(conformance.begin(PROMPT).propose(9).tokens))
    assert drafted == [text[:9]] * 3


def test_combinations_leave_the_choice_to_the_loop() -> None:
    """They say who is asked; asked itself, one takes the longest match of the first group."""
    text, free = [5, 6, 7, 8, 9, 5, 6, 7, 8], (sd.NGramDrafter(), sd.SuffixDrafter())
    for kind, sizes in ((sd.drafters.FirstOf, [1, 1]), (sd.BestOf, [2])):
        session = kind(*free).begin(text, DraftContext())
        assert [len(group) for group in session.groups("")] == sizes
        best = free[len(sizes) == 1].begin(text, DraftContext())
        assert session.propose(3) == best.propose(3)


class Ranking(Auto):
    """The last draft wins, of which a token is kept. seen: the keys compared. records: rounds."""

    def __init__(self, outbid: bool) -> None:
        super().__init__()
        self.outbid = outbid
        self.seen: set[tuple[str, ...]] = set()
        self.records: list[RoundRecord] = []

    def limit(self, part: str, cheap: bool) -> int:
        return 3

    def cut(self, part: str, draft: Draft) -> int:
        assert draft.logprobs is None
        return len(draft)

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        assert all(draft.logprobs is None for _, draft in drafts)
        self.seen.add(tuple(key for key, _ in drafts))
        return drafts[-1][0], drafts[-1][1].head(1)

    def record(self, round_: RoundRecord) -> None:
        self.records.append(round_)

    def beats_chosen(self, part: str) -> bool:
        return self.outbid


@in_one_test("outbid", [True, False])
def test_only_point_masses_compete(outbid: bool, model: Any, text: list[int]) -> None:
    """The draft length is never shown a drawn draft: free or not, it is taken or never asked; a
    free one is taken where there is no other.
    """
    free = [right(text, "one"), right(text, "two"), nothing()]
    drawn, expensive = right(text, "drawn", drawn=True), costly(text, drawn=True)
    length = Ranking(outbid)
    stats = run(model, text, sd.BestOf(*free, drawn, expensive), length)
    assert length.seen == {("one", "two")}
    assert set(stats.by_drafter) == ({"costly"} if outbid else {"two"})
    assert bool(expensive.asked) == outbid
    kept = {r.drafted for r in length.records if r.part == "two"}
    assert kept == (set() if outbid else {1})
    assert set(run(model, text, sd.BestOf(nothing(), drawn), 3).by_drafter) == {"drawn"}


def test_groups_are_asked_in_order(model: Any, text: list[int]) -> None:
    """`FirstOf` around it keeps its order: what stands before is asked alone; a tree's drafters are
    asked as one.
    """
    best = sd.BestOf(right(text, "a"), wrong(text, "b"))
    drafter = sd.drafters.FirstOf(right(text[:12], "first"), best)
    groups = drafter.begin(PROMPT, DraftContext()).groups(drafter.key)
    assert [[key for key, _ in group] for group in groups] == [["first"], ["a", "b"]]
    length = Limits(cheap=3, expensive=3)
    run(model, text, drafter, length)
    drafting = [r.part for r in length.records if r.drafted]
    assert drafting.index("a") == drafting.count("first") > 0
    assert best.key not in (sd.drafters.FirstOf(*best.drafters).key, drafter.key)
    tree = lab.TreeOf(sd.SuffixDrafter(), sd.NGramDrafter())
    groups = sd.BestOf(tree, best).begin(PROMPT, DraftContext()).groups("")
    assert [key for key, _ in groups[0]] == [tree.key, "a", "b"]
    with pytest.raises(ValueError, match=r"BestOf\(\) has nothing"):
        sd.BestOf()
