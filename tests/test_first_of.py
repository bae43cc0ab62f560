"""Several drafters: each within a limit of its own, the first that has a draft or the best."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

import specdec_mlx as sd
import tiny
import tiny_text
from specdec_mlx.bench.cost import linear_cost
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.bench.recorded import replay_text
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Evidence,
    RoundRecord,
    models_of,
    session_groups,
)
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.store import BUDGET, EXPLORATION, Tuning
from specdec_mlx.mlx_lm_plugin.conversation import Continued

PROMPT = [5, 17, 99, 3]
NUM_TOKENS = 40
LONG = [n * n % 97 for n in range(400)]
VOCAB = tiny.CONFIGS["qwen2"]["vocab_size"]


@dataclass(frozen=True, eq=False)
class Told:
    """Proposes what it is told: (tokens so far, limit) -> tokens. asked: the limits."""

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


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    """More than is ever asked for."""
    return [t.token for t in sd.speculate(model, PROMPT, None, max_tokens=NUM_TOKENS + 10)]


def right(text: Sequence[int], name: str = "right", **options: Any) -> Told:
    return Told(name, lambda start, limit: text[start : start + limit], **options)


def wrong(text: Sequence[int], name: str = "wrong", **options: Any) -> Told:
    return Told(name, lambda start, limit: [t ^ 1 for t in text[start : start + limit]], **options)


def nothing(name: str = "nothing", **options: Any) -> Told:
    return Told(name, lambda start, limit: [], **options)


def run(model: Any, drafter: Any, length: Any) -> tuple[list[int], sd.stats.SpeculationStats]:
    items = list(
        sd.speculate(
            model, PROMPT, drafter, max_tokens=NUM_TOKENS, draft_length=length, probe=False
        )
    )
    return [item.token for item in items], items[-1].stats


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


# The first that has a draft ---------------------------------------------------------------------

NUM_WAITED = 16  # rounds that a text waits for its first draft before it runs ahead, and some


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Continued(d, [1, 2]), sd.FirstOf])
def test_cheap_ones_go_on_where_expensive_ones_do_not_pay(
    wrap: Any, model: Any, text: list[int]
) -> None:
    """An expensive one with a limit of 0 is not asked, and the cheap one drafts as it would."""
    for order in (0, 1):
        cheap, expensive = right(text, "cheap"), right(text, "costly", cheap=False)
        drafter = wrap(sd.FirstOf(*[(expensive, cheap), (cheap, expensive)][order]))
        length = Limits(cheap=6, expensive=0)
        assert run(model, drafter, length)[0] == text[:NUM_TOKENS]
        assert expensive.asked == []
        assert max(cheap.asked) == 6
        assert sum(record.accepted for record in length.records) > NUM_TOKENS / 2


def test_each_is_asked_within_its_own_limit(model: Any, text: list[int]) -> None:
    """The cheap one may draft further than the expensive one, whichever comes first."""
    cheap, expensive = right(text[:12], "cheap"), right(text, "costly", cheap=False)
    tokens, _ = run(model, sd.FirstOf(cheap, expensive), Limits(cheap=9, expensive=2))
    assert tokens == text[:NUM_TOKENS]
    assert max(cheap.asked) == 9
    assert set(expensive.asked) <= {2, 1}  # 1 where no more are wanted
    assert 2 in expensive.asked


def test_a_draft_that_is_not_worth_verifying_leaves_the_turn_to_the_next(
    model: Any, text: list[int]
) -> None:
    """Else a look-up that nearly always finds something weak would shut a draft model out."""
    cheap, expensive = wrong(text, "cheap"), right(text, "costly", cheap=False)
    length = Limits(cheap=9, expensive=3, keep=0)
    assert run(model, sd.FirstOf(cheap, expensive), length)[0] == text[:NUM_TOKENS]
    assert all(record.accepted == record.drafted for record in length.records)
    assert sum(record.drafted for record in length.records) > NUM_TOKENS / 2


def test_an_expensive_one_that_does_not_pay_leaves_passes_pipelined(
    model: Any, text: list[int]
) -> None:
    """Passes overlap as in plain decoding while the cheap one has nothing."""
    length = Limits(cheap=6, expensive=0)
    run(model, sd.FirstOf(nothing(), right(text, "costly", cheap=False)), length)
    assert sum(record.ahead for record in length.records) >= NUM_TOKENS - NUM_WAITED
    waiting = Limits(cheap=6, expensive=1)
    run(model, sd.FirstOf(nothing(), right(text, "costly", cheap=False)), waiting)
    assert not any(record.ahead for record in waiting.records)


class Billed(Auto):
    """The automatic draft length, told what its rounds would cost; sums it up."""

    def bill(self, token_cost: float) -> Billed:
        self.token_cost, self.seconds, self.num_expensive = token_cost, 0.0, 0
        return self

    def record(self, round_: RoundRecord) -> None:
        is_expensive = round_.part == "useless"
        seconds = 1 + (0.02 + self.token_cost * is_expensive) * round_.drafted
        self.seconds += seconds
        self.num_expensive += is_expensive
        super().record(replace(round_, seconds=seconds, steady=True))


@pytest.mark.parametrize("token_cost", [0.15, 0.3])
@pytest.mark.parametrize("every", [6, 12, 20])
def test_a_useless_model_behind_a_look_up_costs_no_more_than_its_account_in_the_loop(
    every: int, token_cost: float
) -> None:
    """As in simulation, with what the loop asks, and tells, when it runs ahead and when not."""
    recorded = RecordedText("text", "kind", PROMPT, [i % 97 for i in range(2000)])

    def look_up(start: int, limit: int) -> list[int]:
        return recorded.generated[start : start + max(0, 4 - start % every)]

    def billed(*drafters: sd.Drafter) -> Billed:
        length, chosen = Billed().bill(token_cost), sd.FirstOf(*drafters)
        replay_text(recorded, chosen, length, linear_cost(0), max_tokens=2000, vocab_size=VOCAB)
        return length

    cheap = Told("look-up", look_up)
    useless = Told("useless", lambda start, limit: [100] * limit, cheap=False)
    alone, both = billed(cheap), billed(cheap, useless)
    assert alone.seconds < 1900
    assert both.num_expensive > 5
    account = BUDGET + EXPLORATION * both.seconds
    assert both.seconds <= alone.seconds + 2 * account


def test_models_inside_are_found(model: Any) -> None:
    """For the memory limit: inside others, behind earlier turns, and each once."""
    other = tiny.build("llama")
    one, two = sd.ModelDrafter(model), sd.ModelDrafter(other)
    assert models_of(None) == models_of(sd.PromptLookupDrafter(min_ngram=1)) == []
    nested = sd.FirstOf(sd.NGramDrafter(), sd.FirstOf(one, two), Continued(two, [1]))
    found = models_of(nested)
    assert [id(m) for m in found] == [id(model), id(other)]


def test_the_memory_limit_counts_models_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stream_generate holds in memory, by the arrays that it tells mlx-lm of."""
    from contextlib import nullcontext

    module = importlib.import_module("specdec_mlx.responses")
    wired: list[Any] = []
    monkeypatch.setattr(
        module, "wired_limit", lambda models, streams: wired.append(models) or nullcontext()
    )
    target, small = tiny_text.model(), tiny.build("qwen2", vocab_size=64)
    drafter = sd.FirstOf(sd.PromptLookupDrafter(min_ngram=1), sd.ModelDrafter(small))
    list(sd.stream_generate(target, tiny_text.tokenizer(), [5, 17], 3, drafter=drafter))
    assert [id(m) for m in wired[0]] == [id(target), id(small)]


class Refusing:
    """A drafter that cannot serve this target, and one that must not have begun."""

    def check(self, context: sd.DraftContext) -> None:
        raise sd.errors.TokenizerMismatchError("another tokenizer")

    def begin(self, prompt: Sequence[int], context: sd.DraftContext) -> Any:
        raise AssertionError("begun")


@pytest.mark.parametrize(
    "wrap",
    [lambda d: d, lambda d: sd.FirstOf(nothing(), d), lambda d: Continued(sd.FirstOf(d), [1])],
)
def test_a_drafter_that_cannot_serve_is_refused_before_anything_is_computed(
    wrap: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt may take minutes to read."""
    kind = type(model)

    def computed(*args: Any, **kwargs: Any) -> mx.array:
        raise AssertionError("computed")

    monkeypatch.setattr(kind, "__call__", computed)
    with pytest.raises(sd.errors.TokenizerMismatchError):
        list(sd.speculate(model, PROMPT, wrap(Refusing()), max_tokens=3))


# The best of several ------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [1, -1])
def test_with_a_fixed_length_the_longest_match_wins(
    order: int, model: Any, text: list[int]
) -> None:
    """Whichever comes first; of equal ones the first."""
    pair = [right(text, evidence=9), wrong(text, evidence=4)]
    tokens, stats = run(model, sd.BestOf(*pair[::order]), 3)
    assert tokens == text[:NUM_TOKENS]
    assert set(stats.by_drafter) == {"right"}
    assert stats.by_drafter["right"][0] == stats.by_drafter["right"][1] > NUM_TOKENS / 2
    equal = [right(text, name, evidence=4) for name in "ab"][::order]
    assert set(run(model, sd.BestOf(*equal), 3)[1].by_drafter) == {equal[0].name}


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
    assert tokens == text[:NUM_TOKENS]
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
    assert tokens == text[:NUM_TOKENS]
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
    length = Limits(cheap=3, expensive=3)
    tokens, _ = run(model, drafter, length)
    assert tokens == text[:NUM_TOKENS]
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
