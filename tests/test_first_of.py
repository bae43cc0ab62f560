"""Several drafters in turn: each within a limit of its own, each heard before anything runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

import scripted
import specdec_mlx as sd
import tiny
import tiny_text
from specdec_mlx.bench.cost import linear_cost
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.bench.recorded import replay_text
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.store import BUDGET, EXPLORATION
from specdec_mlx.mlx_lm_plugin.conversation import Continued
from specdec_mlx.types import RoundRecord, models_of

PROMPT = [5, 17, 99, 3]
NUM_TOKENS = 30


@dataclass
class Limits:
    """A draft length that gives cheap drafters one limit and expensive ones another.

    keep: longest part of a cheap draft that is worth verifying. records: the rounds.
    """

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


@dataclass(frozen=True, eq=False)
class Known:
    """Proposes the text that is coming; notes what it was asked for."""

    text: Sequence[int]
    cheap: bool
    limits: list[int] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: sd.DraftContext) -> KnownSession:
        return KnownSession(self)


class KnownSession:
    def __init__(self, drafter: Known) -> None:
        self.drafter, self.cheap, self.start = drafter, drafter.cheap, 0

    def propose(self, limit: int) -> sd.Draft:
        self.drafter.limits.append(limit)
        return sd.Draft(list(self.drafter.text[self.start : self.start + limit]))

    def observe(self, tokens: Sequence[int]) -> None:
        self.start += len(tokens)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.build("qwen2")


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    return [t.token for t in sd.speculate(model, PROMPT, None, max_tokens=NUM_TOKENS + 10)]


def emitted(model: Any, drafter: Any, length: Any) -> list[int]:
    tokens = sd.speculate(model, PROMPT, drafter, max_tokens=NUM_TOKENS, draft_length=length)
    return [token.token for token in tokens]


NUM_WAITED = 16
"""Rounds that a text waits for its first draft before it runs ahead, and some."""


def nothing() -> scripted.ScriptedDrafter:
    return scripted.ScriptedDrafter(lambda start, limit: [])


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Continued(d, [1, 2]), sd.FirstOf])
def test_cheap_ones_go_on_where_expensive_ones_do_not_pay(
    wrap: Any, model: Any, text: list[int]
) -> None:
    """An expensive one with a limit of 0 is not asked, and the cheap one drafts as it would."""
    for order in (0, 1):
        cheap, expensive = Known(text, cheap=True), Known(text, cheap=False)
        drafter = wrap(sd.FirstOf(*[(expensive, cheap), (cheap, expensive)][order]))
        length = Limits(cheap=6, expensive=0)
        assert emitted(model, drafter, length) == text[:NUM_TOKENS]
        assert expensive.limits == []
        assert max(cheap.limits) == 6
        assert sum(record.accepted for record in length.records) > NUM_TOKENS / 2


def test_each_is_asked_within_its_own_limit(model: Any, text: list[int]) -> None:
    """The cheap one may draft further than the expensive one, whichever comes first."""
    cheap, expensive = Known(text[:12], cheap=True), Known(text, cheap=False)
    assert (
        emitted(model, sd.FirstOf(cheap, expensive), Limits(cheap=9, expensive=2))
        == text[:NUM_TOKENS]
    )
    assert max(cheap.limits) == 9
    assert set(expensive.limits) <= {2, 1}  # 1 where no more are wanted
    assert 2 in expensive.limits


def test_a_draft_that_is_not_worth_verifying_leaves_the_turn_to_the_next(
    model: Any, text: list[int]
) -> None:
    """Else a look-up that nearly always finds something weak would shut a draft model out."""
    cheap, expensive = Known([7] * 99, cheap=True), Known(text, cheap=False)
    length = Limits(cheap=9, expensive=3, keep=0)
    assert emitted(model, sd.FirstOf(cheap, expensive), length) == text[:NUM_TOKENS]
    assert all(record.accepted == record.drafted for record in length.records)
    assert sum(record.drafted for record in length.records) > NUM_TOKENS / 2


def test_an_expensive_one_that_does_not_pay_leaves_passes_pipelined(
    model: Any, text: list[int]
) -> None:
    """Passes overlap as in plain decoding while the cheap one has nothing."""
    length = Limits(cheap=6, expensive=0)
    emitted(model, sd.FirstOf(Known([], cheap=True), Known(text, cheap=False)), length)
    assert sum(record.ahead for record in length.records) >= NUM_TOKENS - NUM_WAITED
    waiting = Limits(cheap=6, expensive=1)
    emitted(model, sd.FirstOf(Known([], cheap=True), Known(text, cheap=False)), waiting)
    assert not any(record.ahead for record in waiting.records)


class Billed:
    """The automatic draft length, told what its rounds would cost; sums it up.

    token_cost: of a draft token of parts that are not cheap, in plain rounds. num_expensive: rounds
    with such a draft.
    """

    def __init__(self, token_cost: float) -> None:
        self.auto, self.token_cost, self.seconds = Auto(), token_cost, 0.0
        self.num_expensive = 0
        self.expensive: set[str] = set()
        self.cut = self.auto.cut

    def limit(self, part: str, cheap: bool) -> int:
        self.expensive |= set() if cheap else {part}
        return self.auto.limit(part, cheap)

    def record(self, round_: RoundRecord) -> None:
        is_expensive = round_.part in self.expensive
        seconds = 1 + (0.02 + self.token_cost * is_expensive) * round_.drafted
        self.seconds += seconds
        self.num_expensive += is_expensive
        self.auto.record(replace(round_, seconds=seconds, steady=True))


@pytest.mark.parametrize("token_cost", [0.15, 0.3])
@pytest.mark.parametrize("every", [6, 12, 20])
def test_a_useless_model_behind_a_look_up_costs_no_more_than_its_account_in_the_loop(
    every: int, token_cost: float
) -> None:
    """As in simulation, with what the loop asks, and tells, when it runs ahead and when not.

    Twice the account at most: what a draft is expected to bring is booked in part.
    """
    text = RecordedText("text", "kind", PROMPT, [i % 97 for i in range(2000)])

    def look_up(start: int, limit: int) -> list[int]:
        return text.generated[start : start + max(0, 4 - start % every)]

    def billed(*drafters: sd.Drafter) -> Billed:
        length = Billed(token_cost)
        replay_text(
            text, sd.FirstOf(*drafters), length, linear_cost(0), max_tokens=2000, vocab_size=128
        )
        return length

    cheap = Scripted(look_up, cheap=True)
    useless = Scripted(lambda start, limit: [100] * limit, cheap=False)
    alone, both = billed(cheap), billed(cheap, useless)
    assert alone.seconds < 1900
    assert both.num_expensive > 2
    account = BUDGET + EXPLORATION * both.seconds
    assert both.seconds <= alone.seconds + 2 * account


@dataclass(frozen=True, eq=False)
class Scripted:
    """A scripted drafter that says whether it is cheap."""

    script: Callable[[int, int], list[int]]
    cheap: bool

    def begin(self, prompt: Sequence[int], context: sd.DraftContext) -> Any:
        session: Any = scripted.ScriptedSession(self.script)
        session.cheap = self.cheap
        return session


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


def test_a_draft_model_with_another_tokenizer_is_refused_before_prefill(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself, through every call that takes a draft model with its tokenizer."""
    from tiny_model_folder import make_tokenizer

    class Wrapped:
        def __init__(self, swapped: bool) -> None:
            self.inner = make_tokenizer(swapped)
            self.bos_token_id, self.eos_token_id = 0, 1

        def get_vocab(self) -> dict[str, int]:
            return dict(self.inner.get_vocab())

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return list(self.inner.encode(text, add_special_tokens=add_special_tokens).ids)

    drafter = sd.ModelDrafter(model, tokenizer=Wrapped(swapped=True))
    same = sd.ModelDrafter(model, tokenizer=Wrapped(swapped=False))
    target = Wrapped(swapped=False)
    assert len(list(sd.speculate(model, PROMPT, same, max_tokens=3, tokenizer=target))) == 3
    monkeypatch.setattr(type(model), "__call__", None)
    with pytest.raises(sd.errors.TokenizerMismatchError, match="token 'x' has id"):
        sd.speculate(model, PROMPT, drafter, max_tokens=3, tokenizer=target)
