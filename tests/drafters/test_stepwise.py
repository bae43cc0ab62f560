"""Draft models that stop by confidence: exact whatever they decide, and worth what they cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import specdec_mlx as sd
import tiny
from benchmarks import recorded_drafts
from benchmarks.recorded_drafts import Chain, RecordedDrafter, RecordedDrafts, record_drafts
from exact import COIN_RULES, ByCoupling, ByRule, Deciding, Source
from selection import in_one_test
from simulated import know
from specdec_mlx.contracts import Draft, Evidence, GoesOn, RoundRecord, Step
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.draft_length.costs import Curve
from specdec_mlx.draft_length.store import BUDGET, EXPLORATION, Tuning
from specdec_mlx.draft_length.value import (
    LENGTHS,
    LONGEST,
    PAUSE,
    READING,
    Auto,
    Model,
    make_draft_length,
)
from specdec_mlx.drafters.draft_sources import WritingSession
from specdec_mlx.lab.bench.cost import CostCurve, linear_cost
from specdec_mlx.lab.bench.replay import replay_text
from specdec_mlx.lab.bench.timing import Sample
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.sampling import Noise

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]


PEAKED = Source(
    np.array(
        [
            [0.90, 0.06, 0.04],
            [0.20, 0.70, 0.10],
            [0.34, 0.33, 0.33],
            [0.02, 0.01, 0.97],
            [0.45, 0.35, 0.20],
            [0.05, 0.94, 0.01],
            [0.60, 0.10, 0.30],
        ]
    )
)
"""A draft model that is sure in some places and not in others."""


class Timed(sd.Session):
    """A session that is as sure of each token, and a clock of its own."""

    can_stop = True
    now = 0.0

    def __init__(self, step: float) -> None:
        self.step = step

    def propose_while(self, limit: int, goes_on: GoesOn) -> Draft:
        evidence: list[Evidence] = []
        step = Step.GO_ON
        while step is Step.GO_ON and len(evidence) < limit:
            self.now += self.step
            evidence.append(Evidence(confidence=0.9))
            step = goes_on(evidence)
        kept = evidence[: len(evidence) - (step is Step.STOP_BEFORE)]
        return Draft([1] * len(kept), evidence=kept)

    def propose(self, limit: int) -> Draft:
        return self.propose_while(limit, lambda evidence: Step.GO_ON)

    def observe(self, tokens: Sequence[int]) -> None: ...


def stepping(
    session: Any, slope: float = 0.2, context: int = 0
) -> tuple[Auto, Model, Callable[[int], Draft]]:
    """A draft length that has measured plain rounds, its part for a session, and how to ask it."""
    auto = Auto(Tuning(Curve(((1, 1.0), (64, 1.0 + 63 * slope)))))
    auto.prices.clock = lambda: session.now
    for _ in range(3):
        auto.record(RoundRecord(0, 0, 1, 1, [1], 1.0, context=context))
    know(auto.tuning.of("it"), session.step)
    ask = auto.begin("it", session, lambda: False)
    part = auto.parts["it"]
    assert isinstance(part, Model)
    assert part.can_stop
    return auto, part, ask


@cache
def weighed(confidences: tuple[float, ...]) -> Step:
    evidence = [Evidence(confidence=confidence) for confidence in confidences]
    return stepping(Timed(0.1), slope=0.1)[1].goes_on(evidence)


def by_value(evidence: Sequence[Evidence]) -> Step:
    return weighed(tuple(kind.confidence or 0.0 for kind in evidence))


def by_threshold(evidence: Sequence[Evidence]) -> Step:
    """On while the product of the confidences is high, not even this one where it is low."""
    product = float(np.prod([kind.confidence or 0.0 for kind in evidence]))
    return Step.GO_ON if product > 0.3 else Step.STOP_AFTER if product > 0.1 else Step.STOP_BEFORE


DECIDERS: dict[str, GoesOn] = {"value": by_value, "threshold": by_threshold}
WAYS: dict[str, Deciding] = {
    "rejection": ByRule(COIN_RULES["rejection"]),
    "block": ByRule(COIN_RULES["block"]),
    "coupled": ByCoupling(),
}


@cache
def model(name: str = "qwen2") -> nn.Module:
    return tiny.build(name, seed=3)


def session(sampling: sd.Sampling, name: str = "qwen2", overlaps: bool = False) -> WritingSession:
    context = sd.drafters.DraftContext(sampling=sampling, noise=Noise(7), vocab_size=VOCAB)
    begun: Any = sd.ModelDrafter(model(name)).begin(PROMPT, context)
    begun.pace.build, begun.pace.wait = float(overlaps), 1.0
    return begun


def stop_at(n: int, step: Step) -> GoesOn:
    return lambda evidence: step if len(evidence) == n else Step.GO_ON


@in_one_test("temp", [0.0, 1.0])
@in_one_test("overlaps", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "mamba", "gemma3_text"])
def test_a_stopped_draft_is_a_head_of_the_whole_one(name: str, overlaps: bool, temp: float) -> None:
    """Tokens and distributions, wherever it stops, whether a step too many was under way or not;
    and so is the next one, after a rejection in between. It is decided once a position, in order,
    by the largest probability of what is drawn from.
    """
    sampling = sd.Sampling(temp=temp)
    for stop, step in [(1, Step.STOP_AFTER), (3, Step.STOP_BEFORE), (3, Step.STOP_AFTER)]:
        whole, stopped = session(sampling, name), session(sampling, name, overlaps)
        for emitted in ([9], [11, 12]):
            asked: list[Sequence[Evidence]] = []

            def goes_on(evidence: Sequence[Evidence]) -> Step:
                asked.append([*evidence])  # noqa: B023
                return stop_at(stop, step)(evidence)  # noqa: B023

            expected, draft = whole.propose(5), stopped.propose_while(5, goes_on)
            kept = stop - (step is Step.STOP_BEFORE)
            assert draft.tokens.tolist() == expected.tokens.tolist()[:kept]
            assert asked == [asked[-1][:n] for n in range(1, stop + 1)]
            if temp:
                assert np.allclose(draft.logprobs, expected.logprobs[:kept], atol=1e-5)
                largest = mx.exp(mx.max(expected.logprobs, axis=-1)).tolist()[:stop]
                assert [one.confidence for one in asked[-1]] == pytest.approx(largest, rel=1e-4)
            whole.observe(emitted)
            stopped.observe(emitted)


class Coins(Auto):
    """A draft length that stops anywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.coins = random.Random(seed)

    def begin(self, part: str, session: Any, may_fork: Any) -> Any:
        super().begin(part, session, may_fork)
        return lambda limit: session.propose_while(limit, self.goes_on)

    def limit(self, part: str, cheap: bool) -> int:
        return 6

    def goes_on(self, evidence: Sequence[Evidence]) -> Step:
        return self.coins.choice([Step.GO_ON, Step.GO_ON, Step.STOP_AFTER, Step.STOP_BEFORE])

    def record(self, round_: RoundRecord) -> None: ...


@in_one_test("temp", [0.0, 1.0])
def test_texts_are_the_same_however_it_stops(temp: float) -> None:
    """Coupled: a seed's text, greedy: the target's; with decisions made by coins."""
    target = tiny.build("qwen2", seed=4)
    options: Any = {"rule": "coupled", "seed": 5, "sampler": sd.Sampling(temp=temp)}

    def text(drafter: Any, length: Any) -> list[int]:
        how = {"max_tokens": 30, "num_draft_tokens": length} | options
        return [token.token for token in sd.speculate(target, PROMPT, drafter, **how)]

    expected = text(None, 0)
    drafters = [sd.ModelDrafter(target), sd.ModelDrafter(model())]
    assert all(text(drafter, Coins(seed)) == expected for drafter in drafters for seed in range(3))


# What it is worth

CURVES = {"measured": CostCurve("c", (1, 2, 3, 4, 5, 9, 16), (1, 1.1, 1.3, 1.2, 1.4, 1.6, 1.9))}
CURVES["slope"] = linear_cost(0.24, 1.0)


def varied(coins: random.Random) -> float:
    """Sure at two places of three, a guess at the third."""
    return coins.choice([0.97, 0.95, 0.3])


def guess(coins: random.Random) -> float:
    """Right at every second place, and never sure."""
    return 0.5


def useless(coins: random.Random) -> float:
    return 0.02


Share = Callable[[random.Random], float]


def made_up(
    shares: Sequence[Share], num_tokens: int = 120
) -> tuple[list[RecordedText], RecordedDrafter]:
    """Texts, and a draft model that knows its own chance at each position and says so."""
    texts, drafts = [], []
    for number, chance in enumerate(shares):
        coins = random.Random(number)
        prompt, generated = [number + 1, 0], [coins.randrange(50) for _ in range(num_tokens)]
        sure = [chance(coins) for _ in generated]
        own = [t if coins.random() < c else 60 for t, c in zip(generated, sure, strict=True)]
        wrong = {
            i: Chain([60] * 13, [min(0.9, chance(coins)) for _ in range(13)])
            for i, token in enumerate(own)
            if token == 60
        }
        texts.append(RecordedText(str(number), "made up", prompt, generated))
        drafts.append(RecordedDrafts(str(number), Chain(own, sure), wrong))
    return texts, RecordedDrafter("made up", texts, drafts)


def modelled(
    shares: Sequence[Share], length: int | str, cost: CostCurve, draft_cost: float
) -> list[Sample]:
    """Replays of made-up texts, one after the other."""
    (texts, drafter), tuning = made_up(shares), Tuning()
    options: Any = {"vocab_size": 100, "draft_seconds": draft_cost * cost(1), "max_tokens": 120}
    lengths = [make_draft_length(length, tuning) for _ in texts]
    return [
        replay_text(text, drafter, one, cost, **options)
        for text, one in zip(texts, lengths, strict=True)
    ]


def speed(runs: Sequence[Sample]) -> float:
    return sum(run.plain_seconds for run in runs) / sum(run.seconds for run in runs)


@pytest.mark.full
@in_one_test("draft_cost", [0.02, 0.1, 0.25, 0.5])
@in_one_test("curve", CURVES)
def test_stopping_beats_the_best_fixed_length(curve: str, draft_cost: float) -> None:
    """The best of K = 1 to 8 in hindsight, where a step costs neither next to nothing nor so much
    that drafting hardly pays; there by no more than 2% less.
    """
    how: Any = (CURVES[curve], draft_cost)
    best = max(speed(modelled([varied] * 12, k, *how)) for k in range(1, 9))
    auto = speed(modelled([varied] * 12, "auto", *how))
    assert auto > (1.0 if draft_cost in (0.1, 0.25) else 0.98) * best


SHARES = st.lists(st.sampled_from([varied, useless, guess]), min_size=1, max_size=8)


@given(SHARES, st.sampled_from([0.02, 0.1, 0.25, 0.5, 1.0]), st.sampled_from(sorted(CURVES)))
@settings(max_examples=25, deadline=None)
@example([varied] * 6 + [useless] * 2, 0.1, "measured")
@example([useless] * 10, 0.5, "slope")
@example([varied] * 6, 1.0, "measured")
def test_no_text_loses_more_than_it_may(shares: list[Share], draft_cost: float, curve: str) -> None:
    """Whatever came before: what the account holds at most, a hundredth of the time, and what its
    last round lost beyond what was expected; all texts but once what it begins with.
    """
    runs = modelled(shares, "auto", CURVES[curve], draft_cost)
    lost = [(run.seconds - run.plain_seconds) / CURVES[curve](1) for run in runs]
    assert max(lost) < 2 * BUDGET + EXPLORATION * 120 + 1
    if varied not in shares and guess not in shares:
        assert 0 < sum(lost) < BUDGET + EXPLORATION * 120 * len(runs)


class Given(Chances):
    """Chances that a confidence is right about, wherever it stands; half for what says nothing."""

    def of_draft(self, evidence: Any, *args: Any, **kwargs: Any) -> list[float]:
        return [told.confidence if told else 0.5 for told in evidence]


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=LONGEST),
    st.floats(0.0, 1.0),
    st.floats(0.01, 1.0),
    st.floats(1.0, 3.0),
    st.booleans(),
)
def test_a_draft_goes_on_while_the_next_tokens_are_worth_their_step(
    confidences: list[float], step: float, slope: float, rate: float, is_free: bool
) -> None:
    """By brute force over all lengths that are chosen from: longer ones cost steps, unless what
    follows is free and as likely as the last token.
    """
    auto, part, _ = stepping(Timed(step), slope)
    part.learned.chances = part.learned.unseen = Given([])
    auto.prices.rate, auto.prices.most, part.gain = rate, LONGEST, 1.0
    said = [Evidence(confidence=confidence, is_free=is_free) for confidence in confidences]
    length, price = len(said), 0.0 if is_free else step
    chances = [*confidences, *[confidences[-1] if is_free else 0.5] * (LONGEST - length)]
    reaches = np.cumprod(chances)
    values = {
        k: sum(reaches[:k]) - rate * (slope * k + price * max(0, k - length))
        for k in {0, *LENGTHS, length, LONGEST}
        if k <= LONGEST
    }
    best = max(values, key=lambda k: values[k])
    assume(all(values[best] - value > 1e-6 for k, value in values.items() if k != best))
    for n in range(1, length + 1):
        found = part.goes_on(said[:n])
    expected = Step.GO_ON if best > length else Step.STOP_BEFORE
    assert found is (Step.STOP_AFTER if best == length else expected)


def test_a_draft_that_is_to_find_out_is_verified_where_its_pass_was_never_measured() -> None:
    """What was believed of a width may be wrong; a width that was measured is no longer tried."""
    auto, part, _ = stepping(Timed(0.1), slope=5.0)
    said = [Evidence(confidence=0.9)]
    auto.limit("it", cheap=False)
    assert (part.gain, part.goes_on(said)) == (0.0, Step.STOP_AFTER)
    auto.prices.cost_model.add(2, 6.0)
    auto.limit("it", cheap=False)
    assert (part.gain, part.goes_on(said)) == (0.0, Step.STOP_BEFORE)


@given(st.integers(10, 4000), st.floats(0.02, 0.3))
@settings(max_examples=30, deadline=None)
def test_a_prompt_is_read_once_the_text_would_have_saved_as_much(context: int, step: float) -> None:
    """The ski rental rule: not before its gain and the account would have paid for it, and soon
    after, so that twice what was needed is paid at most. One that reads along hardly waits.
    """
    rounds, part = waited(Timed(step), context)
    cost = context * READING * step if context > LONGEST + 1 else 0.0

    def saved(rounds: int) -> float:
        return part.gain * rounds + min(2 * BUDGET, BUDGET + EXPLORATION * rounds)

    if rounds < 600:
        assert cost <= saved(rounds)
    if rounds > PAUSE:
        assert cost + part.learned.steps(1) > saved(rounds - PAUSE - 1)
    assert waited(Seeing(0.1), 10_000)[0] < 3 < waited(Timed(0.1), 10_000)[0]


class Seeing(Timed):
    """No more than a few hundred rows are charged to a session that sees the target."""

    def see(self, features: Any) -> None: ...


def waited(session: Timed, context: int) -> tuple[int, Model]:
    """Plain rounds until a model that has read nothing is asked, 600 at the most."""
    auto, part, _ = stepping(session, slope=0.02, context=context)
    rounds = 0
    while not auto.limit("it", False) and rounds < 600:
        auto.record(RoundRecord(0, 0, 1, 1, [1], 1.0, context=context))
        rounds += 1
    return rounds, part


def test_recorded_drafts_are_what_the_model_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every place of a text, in rows and one by one, with the confidence of each token."""
    target = tiny.build("qwen2", seed=5)
    generated = [t.token for t in sd.speculate(target, PROMPT, max_tokens=12)]
    text = RecordedText("t", "c", PROMPT, generated)
    in_rows = record_drafts(model(), text, longest=4)
    monkeypatch.setattr(recorded_drafts, "_in_rows", recorded_drafts._one_by_one)
    one_by_one = record_drafts(model(), text, longest=4)
    assert in_rows.wrong  # they do not always agree
    for place in range(len(generated)):
        begun = session(sd.Sampling())
        begun.observe(generated[:place]) if place else None
        draft = begun.propose_while(4, lambda evidence: Step.GO_ON)
        sure = [kind.confidence for kind in draft.evidence or ()]
        for recorded in (in_rows, one_by_one):
            chain = recorded.chain(place, generated, 4)
            n = len(chain.tokens)  # the text's end cuts it
            assert n == 4 or place + n == len(generated)
            assert chain.tokens == draft.tokens.tolist()[:n]
            assert chain.confidence == pytest.approx(sure[:n], abs=1e-4)
