"""Draft models that stop by confidence: exact whatever they decide, and worth what they cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import specdec_mlx as sd
import tiny
from exact import COIN_RULES, TARGET, ByCoupling, ByRule, Deciding, Rounds, Source
from specdec_mlx import loop
from specdec_mlx.bench import recorded_drafts
from specdec_mlx.bench.cost import CostCurve, linear_cost
from specdec_mlx.bench.record import RecordedText
from specdec_mlx.bench.recorded import Modelled, replay_text
from specdec_mlx.bench.recorded_drafts import (
    Chain,
    RecordedDrafter,
    RecordedDrafts,
    load_drafts,
    record_drafts,
    save_drafts,
)
from specdec_mlx.draft_length.acceptance import UNKNOWN, AcceptanceHistory
from specdec_mlx.draft_length.accounts import LONGEST
from specdec_mlx.draft_length.budgets import READING_SHARE, TEXT_BUDGET, Budgets
from specdec_mlx.draft_length.costs import DraftingCosts
from specdec_mlx.draft_length.policy import make_draft_length
from specdec_mlx.draft_length.stepwise import RETRY_AFTER, StepwiseAccount
from specdec_mlx.draft_length.store import Learned, Tuning
from specdec_mlx.drafters.drawing import Pace
from specdec_mlx.drafters.model import ModelSession
from specdec_mlx.rounds import clock
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.testing.enumeration import Tokens, state_after
from specdec_mlx.types import DraftContext, Evidence, GoesOn, RoundRecord, Step

EXACT = 1e-12
VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]


# The distribution of what comes out ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stopped:
    """Up to 4 tokens drawn from a source, as long as `goes_on` says so.

    peeks: whether it is told the drawn token's own probability in place of the largest one, which
    nobody may do.
    """

    source: Source
    goes_on: GoesOn
    peeks: bool = False

    def drafts(self, state: int) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        """Every path that has a chance."""
        yield from self._longer(state, (), 1.0, [], [])

    def _longer(
        self,
        state: int,
        tokens: Tokens,
        weight: float,
        rows: list[np.ndarray],
        evidence: list[Evidence],
    ) -> Iterator[tuple[float, Tokens, np.ndarray]]:
        probs = self.source.probs[state_after(state, tokens)]
        dropped = 0.0
        for token in np.flatnonzero(probs):
            seen = float(probs[token] if self.peeks else probs.max())
            known = [*evidence, Evidence(confidence=seen)]
            step = Step.STOP_AFTER if len(known) == 4 else self.goes_on(known)
            longer, chance = (*tokens, int(token)), weight * probs[token]
            if step is Step.STOP_BEFORE:
                dropped += chance
            elif step is Step.STOP_AFTER:
                yield chance, longer, np.stack([*rows, probs])
            else:
                yield from self._longer(state, longer, chance, [*rows, probs], known)
        if dropped:
            stacked = np.stack(rows) if rows else np.zeros((0, self.source.vocab_size))
            yield dropped, tokens, stacked


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


def account(step: float = 0.2, slope: float = 0.2) -> StepwiseAccount:
    """One that knows what steps and passes cost."""
    learned = Learned(step=0.0, slope=slope, exploration_budget=2.0)
    learned.drafting.set_price(step)
    learned.costs.add(0, 1.0)
    return StepwiseAccount(learned)


@cache
def weighed(confidences: tuple[float, ...]) -> Step:
    evidence = [Evidence(confidence=confidence) for confidence in confidences]
    return account(step=0.1, slope=0.1).goes_on(evidence, rate=1.0)


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


def lengths(drafting: Stopped) -> set[int]:
    return {len(tokens) for state in range(7) for _, tokens, _ in drafting.drafts(state)}


@pytest.mark.parametrize("how", DECIDERS)
@pytest.mark.parametrize("name", WAYS)
def test_stopping_by_confidence_leaves_the_joint_distribution_alone(name: str, how: str) -> None:
    """Two rounds, three tokens, a draft whose distribution varies with the text, K up to 4."""
    drafting = Stopped(PEAKED, DECIDERS[how])
    assert len(lengths(drafting)) > 1  # it does stop at different places
    assert Rounds(TARGET, drafting, WAYS[name]).total_variation(2, 3) < EXACT


@pytest.mark.parametrize("name", ["rejection", "block"])
def test_a_decision_that_peeks_at_the_draw_is_caught(name: str) -> None:
    """The same enumeration, told the drawn token's probability instead of the largest."""
    drafting = Stopped(PEAKED, by_threshold, peeks=True)
    assert Rounds(TARGET, drafting, WAYS[name]).total_variation(1, 3) > 0.01


# The session --------------------------------------------------------------------------------------


@cache
def model(name: str = "qwen2") -> nn.Module:
    return tiny.build(name, seed=3)


def session(sampling: sd.Sampling, name: str = "qwen2", overlaps: bool = False) -> ModelSession:
    context = DraftContext(sampling=sampling, noise=Noise(7), vocab_size=VOCAB)
    begun = sd.ModelDrafter(model(name)).begin(PROMPT, context)
    begun.pace.build = 1.0 if overlaps else 0.0
    begun.pace.wait = 1.0
    return begun


def stop_at(n: int, step: Step) -> GoesOn:
    return lambda evidence: step if len(evidence) == n else Step.GO_ON


def test_a_step_is_built_ahead_only_where_that_saves_a_wait() -> None:
    """Where the device is done by the time it is asked, a step ahead saves nothing and may be
    dropped; how long a step is waited for is not known from one that another was built behind.
    """
    pace = Pace(build=1.0)
    assert not pace.overlaps(0.99)
    with pace.waiting(alone=False):
        pass
    assert pace.wait is None
    with pace.waiting(alone=True):
        pass
    assert pace.wait is not None
    assert pace.wait < 0.1
    assert not pace.overlaps(0.99)
    assert Pace(build=1.0, wait=1.0).overlaps(0.99)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", ["qwen2", "mamba", "gemma3_text"])
def test_a_stopped_draft_is_the_head_of_the_whole_one(
    name: str, overlaps: bool, temp: float
) -> None:
    """Tokens and distributions, wherever it stops, whether a step too many was under way or not;
    and so is the next one, after a rejection in between.
    """
    sampling = sd.Sampling(temp=temp)
    for stop, step in [(1, Step.STOP_AFTER), (3, Step.STOP_BEFORE), (3, Step.STOP_AFTER)]:
        whole, stopped = session(sampling, name), session(sampling, name, overlaps)
        for emitted in ([9], [11, 12]):
            expected = whole.propose(5)
            draft = stopped.propose_while(5, stop_at(stop, step))
            kept = stop - (step is Step.STOP_BEFORE)
            assert len(draft) == kept
            assert draft.tokens.tolist() == expected.tokens.tolist()[:kept]
            if temp:
                assert np.allclose(draft.logprobs, expected.logprobs[:kept], atol=1e-5)
            whole.observe(emitted)
            stopped.observe(emitted)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_evidence_is_the_largest_probability_of_what_is_drawn_from(overlaps: bool) -> None:
    """And the decision is asked once a position, in order, with all that came before."""
    asked: list[list[float]] = []

    def goes_on(evidence: Sequence[Evidence]) -> Step:
        asked.append([kind.confidence or 0.0 for kind in evidence])
        return Step.GO_ON

    draft = session(sd.Sampling(temp=1.0), overlaps=overlaps).propose_while(4, goes_on)
    largest = mx.exp(mx.max(draft.logprobs, axis=-1)).tolist()
    assert [len(known) for known in asked] == [1, 2, 3, 4]
    assert asked[-1] == pytest.approx(largest, rel=1e-5)
    assert all(asked[-1][: len(known)] == known for known in asked)


@pytest.mark.parametrize("temp", [0.0, 1.0])
def test_texts_are_the_same_however_it_stops(temp: float) -> None:
    """Coupled: a seed's text, greedy: the target's; with decisions made by coins."""
    target = tiny.build("qwen2", seed=4)

    class Coins:
        """A draft length that stops anywhere."""

        def __init__(self, seed: int) -> None:
            self.coins = random.Random(seed)

        def begin_steps(self, part: str, time_step: Any, **kinds: bool) -> None: ...

        def prefilled(self, num_tokens: int, seconds: float) -> None: ...

        def limit(self, part: str, cheap: bool) -> int:
            return 6

        def cut(self, part: str, draft: Any) -> int:
            return len(draft)

        def goes_on(self, part: str, evidence: Sequence[Evidence]) -> Step:
            return self.coins.choice([Step.GO_ON, Step.GO_ON, Step.STOP_AFTER, Step.STOP_BEFORE])

        def record(self, round_: Any) -> None: ...

    def text(drafter: Any, length: Any) -> list[int]:
        options = {"rule": "coupled", "seed": 5, "sampler": sd.Sampling(temp=temp)}
        tokens = sd.speculate(
            target, PROMPT, drafter, max_tokens=30, draft_length=length, **options
        )
        return [token.token for token in tokens]

    expected = text(None, 0)
    drafters = [sd.ModelDrafter(target), sd.ModelDrafter(model())]
    assert all(text(drafter, Coins(seed)) == expected for drafter in drafters for seed in range(3))


# What it is worth ---------------------------------------------------------------------------------

CURVES = {"measured": CostCurve("c", (1, 2, 3, 4, 5, 9, 16), (1, 1.1, 1.3, 1.2, 1.4, 1.6, 1.9))}
CURVES["slope"] = linear_cost(0.24, 1.0)


def made_up(
    shares: Sequence[Callable[[random.Random], float]], num_tokens: int = 120
) -> tuple[list[RecordedText], RecordedDrafter]:
    """Texts, and a draft model that knows its own chance at each position and says so.

    shares: for each text, what draws that chance.
    """
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
    texts: Sequence[RecordedText],
    drafter: RecordedDrafter,
    length: int | str,
    cost: CostCurve,
    draft_cost: float,
) -> list[Modelled]:
    tuning = Tuning()
    return [
        replay_text(
            text,
            drafter,
            make_draft_length(length, tuning),
            cost,
            max_tokens=len(text.generated),
            vocab_size=100,
            draft_seconds=draft_cost * cost(1),
        )
        for text in texts
    ]


def speed(runs: Sequence[Modelled]) -> float:
    return sum(run.plain_seconds for run in runs) / sum(run.seconds for run in runs)


def varied(coins: random.Random) -> float:
    """Sure at two places of three, a guess at the third."""
    return coins.choice([0.97, 0.95, 0.3])


def useless(coins: random.Random) -> float:
    return 0.02


@pytest.mark.parametrize("draft_cost", [0.1, 0.5])
def test_what_a_replay_says_does_not_depend_on_the_clock(
    draft_cost: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine it is the same: seconds are those of the cost curve alone."""

    def replayed() -> list[Modelled]:
        texts, drafter = made_up([varied] * 6 + [useless])
        return modelled(texts, drafter, "auto", CURVES["slope"], draft_cost)

    expected = replayed()
    coins, ticks = random.Random(0), itertools.count()
    for module in (clock, loop):
        monkeypatch.setattr(module, "perf_counter", lambda: next(ticks) * coins.choice([1e-6, 1.0]))
    assert replayed() == expected


@pytest.mark.parametrize("draft_cost", [0.02, 0.1, 0.25, 0.5])
@pytest.mark.parametrize("curve", CURVES)
def test_stopping_beats_the_best_fixed_length(curve: str, draft_cost: float) -> None:
    """The best of K = 1 to 8 in hindsight; by 3% where a step costs neither next to
    nothing nor so much that drafting hardly pays.
    """
    texts, drafter = made_up([varied] * 12)
    run = [modelled(texts, drafter, k, CURVES[curve], draft_cost) for k in range(1, 9)]
    best = max(map(speed, run))
    auto = speed(modelled(texts, drafter, "auto", CURVES[curve], draft_cost))
    assert auto > (1.03 if draft_cost in (0.1, 0.25) else 0.98) * best


@pytest.mark.parametrize("draft_cost", [0.02, 0.25, 0.5])
@pytest.mark.parametrize("curve", CURVES)
def test_a_useless_draft_model_costs_a_hundredth(curve: str, draft_cost: float) -> None:
    """Over all texts; and no text loses more than it may."""
    texts, drafter = made_up([useless] * 10, num_tokens=96)
    runs = modelled(texts, drafter, "auto", CURVES[curve], draft_cost)
    assert sum(run.drafted for run in runs) > 0  # it was tried
    assert speed(runs) > 0.99
    assert min(run.plain_seconds / run.seconds for run in runs) > 0.96


@pytest.mark.parametrize("draft_cost", [0.1, 0.25])
def test_a_bad_text_after_good_ones_loses_what_a_text_may(draft_cost: float) -> None:
    """However much the good ones have earned; and a good one after it gains at once."""
    texts, drafter = made_up([varied] * 6 + [useless] * 2 + [varied])
    runs = modelled(texts, drafter, "auto", CURVES["slope"], draft_cost)
    lost = [run.seconds - run.plain_seconds for run in runs]
    assert max(lost) < TEXT_BUDGET + 0.02 * 120
    assert min(run.plain_seconds / run.seconds for run in runs) > 0.95
    assert runs[-1].plain_seconds / runs[-1].seconds > 0.95 * speed(runs[:6])


def test_a_text_of_which_nothing_is_sure_is_asked_about_less_and_less() -> None:
    """A step that ends before its token costs time as well; asking in every second round took 39 of
    them.
    """
    good, drafter = made_up([varied] * 6)
    texts, bad = made_up([varied] * 6 + [useless])
    modelled(good, drafter, "auto", CURVES["slope"], 0.1)
    modelled(texts, bad, "auto", CURVES["slope"], 0.1)
    assert 0 < bad.num_steps - drafter.num_steps < 30


@pytest.mark.parametrize(
    ("step", "is_proven", "waits"),
    [(0.6, True, (11, 39)), (0.2, True, (0, 0)), (0.2, False, (1, 200))],
)
def test_a_text_that_began_with_bad_luck_is_drafted_for_again(
    step: float, is_proven: bool, waits: tuple[int, int]
) -> None:
    """By a model that paid in other texts: within a few dozen tokens where it gains a tenth of a
    round, and at once where it gains a whole one, which makes up for the loss soon.
    """
    unlucky = account(step=step, slope=0.1)
    unlucky.learned.is_proven, unlucky.learned.exploration_budget = is_proven, 10.0
    unlucky.num_missed, unlucky.budgets.of_text = 0, -0.3
    rounds = 0
    while not unlucky.limit(1.0) and rounds < 200:
        unlucky.num_missed = 0
        unlucky.follow(RoundRecord(0, 0, 1, 1))
        rounds += 1
    least, most = waits
    assert least <= rounds <= most


def test_what_a_text_may_earn_back_is_not_borrowed_from_all_texts() -> None:
    """Their budget stands what it stands, whatever is expected of this one."""
    budgets = Budgets(Learned(exploration_budget=0.5, is_proven=True), of_text=2.0)
    assert budgets.stand(0.5, gain=2.0)
    assert not budgets.stand(0.6, gain=2.0)


def test_luck_is_booked_in_part_once_a_draft_model_has_paid() -> None:
    """Of one that never paid, what is expected is a guess; and what a text loses is lost."""
    for is_proven, booked in ((False, 1.0), (True, 1 / 3)):
        budgets = Budgets(Learned(exploration_budget=5.0, is_proven=is_proven), of_text=2.0)
        budgets.book(1, expected=2.5, cost=2.0)  # all rejected: 1.5 tokens less than expected
        assert budgets.learned.exploration_budget == pytest.approx(5.0 + 0.5 - 1.5 * booked)
        assert budgets.of_text == pytest.approx(2.0 + 0.5 - 1.5)


def test_a_model_that_gains_a_tenth_is_not_silenced_by_its_luck() -> None:
    """Each draft of four is accepted whole or not at all, by a coin: 3 tokens a round that costs
    2.7 on average, and 2 more or less than that; each round in another text.
    """
    coins = random.Random(1)
    budgets = Budgets(Learned(exploration_budget=3.0, is_proven=True))
    silent = 0
    for _ in range(400):
        budgets.of_text = 2.0
        if budgets.stand(1.7):
            budgets.book(coins.choice([1, 5]), expected=3.0, cost=2.7)
        else:
            silent += 1
        budgets.earn(0.3)
    assert silent == 0


def test_a_new_text_is_met_at_the_usual_acceptance() -> None:
    """And so is one that was silent for long; another account of the same model begins with it."""
    known = account()
    for _ in range(300):
        for history in known._histories():
            history.learn(0, 0, True)
    usual = known.learned.blind.usual
    assert usual > 0.95
    known.learned.blind.recent = 0.1
    for _ in range(40):
        known.learned.blind.pass_by()
    assert known.learned.blind.recent == pytest.approx(usual, abs=1e-3)
    known.learned.blind.recent = 0.1
    assert StepwiseAccount(known.learned).learned.blind.recent == usual
    look_up = AcceptanceHistory.of_look_ups()
    look_up.learn(0, 0, True)
    assert look_up.usual == UNKNOWN


def test_a_proven_model_reads_a_long_prompt_once_the_text_can_bear_it() -> None:
    """Where little is gained, since what is believed of it changes only where it is asked."""
    proven = account(step=0.2, slope=0.2)
    proven.learned.is_proven, proven.learned.exploration_budget = True, 20.0
    for _ in range(60):
        proven.learned.blind.learn(0, 0, False)  # believed to gain nothing
    proven.learned.context, proven.prefill = 1000, 0.03  # 6 plain rounds to read
    cost, rounds = proven._reading_cost(), 0
    while not proven.limit(1.0) and rounds < 400:
        proven.follow(RoundRecord(0, 0, 1, 1))
        rounds += 1
    assert READING_SHARE * rounds >= cost > READING_SHARE * (rounds - RETRY_AFTER)
    bank, of_text = proven.learned.exploration_budget, proven.budgets.of_text
    proven.goes_on([Evidence(confidence=0.9)], 1.0)
    proven.follow(RoundRecord(0, 0, 1, 1))
    assert proven.learned.exploration_budget == pytest.approx(bank - cost, abs=0.2)
    assert proven.budgets.of_text >= of_text


def test_a_model_that_never_paid_reads_where_enough_is_left_for_a_draft() -> None:
    """Of the budget of all texts; saved up, it is there to be spent."""
    budgets = Budgets(Learned(exploration_budget=2.2), of_text=4.0)
    assert budgets.stand_reading(1.4, num_emitted=0, draft_loss=0.7)
    assert not budgets.stand_reading(1.4, num_emitted=0, draft_loss=0.9)
    budgets.of_text = 2.0  # a text without a gain in sight gives half of what it may lose
    assert not budgets.stand_reading(1.4, num_emitted=0, draft_loss=0.7)
    assert budgets.stand_reading(1.4, num_emitted=40, draft_loss=0.7)


def test_what_reading_costs_is_measured_where_the_guess_keeps_a_model_silent() -> None:
    """A guess goes by a draft step, which of a small model is mostly overhead. The round in which
    it is measured drafts nothing, and is no plain one.
    """
    asked = []

    def time_reading() -> float:
        asked.append(paused.num_rounds)
        return 0.0005

    paused = account(step=0.2, slope=0.05)
    paused.learned.context, paused.prefill, paused.time_reading = 1000, 0.1, time_reading
    guessed = paused._reading_cost()
    assert guessed == pytest.approx(20.0)
    assert not paused.limit(1.0)
    assert paused.num_steps == 1
    assert paused._reading_cost() == pytest.approx(0.5)
    rounds = 0
    while not paused.limit(1.0):
        paused.follow(RoundRecord(0, 0, 1, 1))
        rounds += 1
    assert rounds < 10
    assert asked == [0]  # once


def test_a_draft_model_times_its_reading_on_caches_of_its_own() -> None:
    """What it has read stays."""
    drafter, context = sd.ModelDrafter(tiny.build("llama")), DraftContext(vocab_size=VOCAB)
    session = drafter.begin(PROMPT * 20, context)
    session.propose(2)
    before = session.rollback.position
    assert session.time_reading() > 0
    assert session.rollback.position == before


def between_weighings(paused: StepwiseAccount) -> list[int]:
    """Rounds from one in which it is weighed to the next, in 60 rounds that draft nothing."""
    weighed = []
    plan = paused._plan

    def counted(rate: float) -> tuple[float, int]:
        weighed.append(paused.num_rounds)
        return plan(rate)

    paused._plan = counted  # type: ignore[method-assign]
    for _ in range(60):
        assert not paused.limit(1.0)
        paused.follow(RoundRecord(0, 0, 1, 1))
    return [after - before for before, after in itertools.pairwise(weighed)]


def without_budget(*, is_right: bool) -> StepwiseAccount:
    """One whose budget has been spent; is_right: whether its drafts have been."""
    spent = account(step=0.2, slope=0.2)
    spent.num_missed, spent.learned.exploration_budget = 0, -0.2
    for _ in range(60):
        spent.learned.blind.learn(0, 0, is_right)
    return spent


def test_what_is_refused_is_weighed_less_and_less_often() -> None:
    """For reading, or by a budget; to weigh it takes a hundredth of a small model's round."""
    unread = account(step=0.2, slope=0.2)
    unread.learned.context, unread.prefill = 10_000, 0.03
    for paused in (unread, without_budget(is_right=False)):
        assert between_weighings(paused)[:8] == [3, 4, 5, 6, 7, 8, 8, 8]


def test_what_would_gain_is_weighed_often_until_it_can_be_afforded() -> None:
    """In the first text of a good draft model every round counts."""
    assert between_weighings(without_budget(is_right=True))[:8] == [2] * 8


def test_what_is_surely_worth_asking_is_weighed_in_every_second_round() -> None:
    """As long as it drafts: after a round without its draft, or an empty one, at once."""
    sure = account(step=0.01, slope=0.01)
    sure.learned.exploration_budget = sure.budgets.of_text = 10.0
    sure.num_missed = 0
    weighed = 0
    plan = sure._plan

    def counted(rate: float) -> tuple[float, int]:
        nonlocal weighed
        weighed += 1
        return plan(rate)

    sure._plan = counted  # type: ignore[method-assign]
    counts = []
    for what in ("draft", "draft", "nothing", "draft", "draft", "empty", "draft", "draft"):
        assert sure.limit(1.0) == LONGEST
        counts.append(weighed)
        if what != "nothing":
            sure.goes_on([Evidence(confidence=0.9)], 1.0)
        round_ = RoundRecord(0, 0, 1, 1) if what != "draft" else RoundRecord(1, 1, 2, 1)
        (sure.settle if what == "draft" else sure.settle_steps)(round_)
        sure.follow(round_)
        sure.budgets.of_text = 10.0
    assert counts == [1, 1, 2, 3, 3, 4, 5, 5]


def test_a_step_as_expensive_as_a_pass_is_never_taken() -> None:
    """It is known from the price alone; nothing is read or drafted."""
    texts, drafter = made_up([varied] * 3)
    runs = modelled(texts, drafter, "auto", CURVES["measured"], 1.0)
    assert sum(run.drafted for run in runs) == 0
    assert drafter.num_steps == 0


def test_a_long_prompt_is_not_read_for_a_short_answer() -> None:
    """Reading waits until the text so far would have saved as much: the ski rental rule."""
    waiting = account(step=0.1, slope=0.02)
    waiting.learned.costs.add(0, 1.0)
    waiting.learned.context = 5000
    waiting.prefill = 0.03  # seconds a token, and a plain round takes one: 15 rounds to read it
    rounds = 0
    while not waiting.limit(1.0) and rounds < 60:
        waiting.follow(RoundRecord(0, 0, 1, 1))
        rounds += 1
    assert 4 < rounds < 60
    waiting.learned.context = 50
    waiting.num_emitted, waiting.rest = 2, 0
    assert waiting.limit(1.0) > 0


# The record ---------------------------------------------------------------------------------------


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


def test_drafts_are_saved_and_loaded(tmp_path: Any) -> None:
    """And refused for other texts."""
    texts, drafter = made_up([varied] * 2, num_tokens=20)
    drafts = [drafter._by_prompt[tuple(text.prompt)][1] for text in texts]
    save_drafts("small", drafts, tmp_path / "drafts.json")
    loaded = load_drafts(tmp_path / "drafts.json", texts)
    assert loaded._by_prompt == drafter._by_prompt
    others = [RecordedText("other", "c", [1], [2])]
    with pytest.raises(ValueError, match="Record them"):
        load_drafts(tmp_path / "drafts.json", others)


def test_a_first_draft_that_was_slow_is_not_taken_for_the_price() -> None:
    """What was measured twice speaks for it until there is a second one."""
    costs = DraftingCosts(price=0.3)
    costs.add(2, 2.3)
    assert costs.line() == pytest.approx((0.0, 0.3))
    costs.add(2, 0.7)
    assert costs.line()[1] == pytest.approx(0.3, abs=0.1)
    assert costs.line()[0] < 0.3
    unpriced = DraftingCosts()
    unpriced.add(2, 2.3)
    assert unpriced.line()[1] > 1


def test_a_slow_draft_of_a_length_tried_once_counts_from_its_second_time_on() -> None:
    """Alone it would decide on the slope; one that took no more a step than others counts."""
    costs = DraftingCosts(price=0.2)
    for num_steps, cost in [(4, 1.0), (4, 0.9), (14, 7.0)]:
        costs.add(num_steps, cost)
    assert costs.line()[1] == pytest.approx(0.2, abs=0.05)
    costs.add(14, 7.0)
    assert costs.line()[1] > 0.4
    costs.add(9, 1.8)
    assert (9, 1.8) in costs._typical_drafts()


def test_a_rate_that_present_costs_cannot_bring_is_not_waited_for() -> None:
    """Drafts became more expensive: they still pay, and plain rounds would bring less than they."""
    cheap, late = account(step=0.02, slope=0.02), account(step=0.2, slope=0.1)
    assert cheap.limit(1.0) > 0
    before = 1 + max(cheap.gains)
    assert late._best_rate() > 1.2
    assert late._plan(before)[0] < 0
    assert late.limit(before) > 0
