"""A draft model that can stop in the middle: it drafts on as long as the next token is worth it.

At each position the draft's own distribution says how likely its token is to be accepted: with a
largest probability of 0.99 nearly always, of 0.2 hardly ever. What that means for a pair of models
is learned online. Stopping by it is what AdaEDL (Agrawal et al. 2024), SpecDec++ (Huang et al.
2024) and DISCO (Mamou et al. 2024) do with thresholds; here the value of a token is held against
its measured cost.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import ClassVar

from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.accounts import EXPENSIVE_BUDGET, LONGEST, Account
from specdec_mlx.draft_length.budgets import Budgets
from specdec_mlx.types import MOST_WAITING, Draft, Evidence, RoundRecord, Step

LOOK_AGAIN = 8
"""Rounds after which it is worked out anew whether asking may ever pay."""

REST = 2
"""Rounds from one in which it was not worth asking, or surely was, to the one in which that is
worked out anew: to work it out takes as long as a hundredth of a small model's round."""

LONGEST_REST = 8
"""The same where it is refused over and over for what changes slowly: costs, budgets, and what
reading takes."""

RETRY_AFTER = 12
"""Rounds after which a draft model is asked again where its last drafts were not worth it."""

RECENT_MEMORY = 0.85
"""Decay of the average of recent acceptance, a token: a draft model's depends less on the latest
ones than a look-up's."""

USUAL_SHARE = 0.02
"""Share of a trial in how often tokens are usually accepted, which is believed of a text that
nothing is known of: with 0.5 for all models a good one was asked too seldom in each new text."""

LEAST_RATE = 1.1
"""The going rate at which asking is weighed is at most that of the best fixed length by what is
known now, or this: a higher one came from better times, and would be waited for in vain. Below it
a model is asked that gains nothing: 1 loses 2% in a category of the recorded drafts."""

LOOKAHEAD = 4
"""Further tokens that are considered when one is weighed: a pass over some widths costs no more
than over fewer."""

UNKNOWN_POSITION = 0.5
"""Most that a draft token is taken to add to a pass of a width that was not measured."""

UNKNOWN_READING = 0.02
"""Cost of reading a token, in draft steps, where neither model was seen to read."""


@dataclass
class StepwiseAccount(Account):
    """A draft model in one generation, asked step by step.

    It drafts on account as `ModelAccount` does, and within what a single text may lose.

    time_step: measures the seconds of one draft step before anything is read. time_reading: the
    same of reading one token. reads_along: whether
    the text is read as it comes, and nothing is ever missed. evidence: of the draft in the making.
    reaches: chance that all of it is accepted, up to each position. num_rounds: of this generation.
    num_steps: draft steps since the latest round was recorded. num_missed: tokens of the text that
    it has not read, None for all. num_emitted: tokens of this generation. prefill: seconds that the
    target took to read a token of the prompt. is_trial: whether reading is charged to the budgets.
    outlook: what `_outlook` found. num_idle: rounds since it was last asked. num_dropped: drafts in
    a row that ended before their first token; after each of them it rests a round longer.
    num_waits: times in a row that it was refused for what changes slowly. rest:
    rounds until it is worked out again whether to ask. is_sure: whether it is asked until then,
    since the budgets stood the longest draft. budgets: what may be lost. _passes, _gains: costs of
    passes and expected tokens, by length, worked out for a round.
    """

    time_step: Callable[[], float] | None = None
    time_reading: Callable[[], float] | None = None
    reads_along: bool = False
    prefill: float | None = None
    is_trial: bool = False
    evidence: list[Evidence] = field(default_factory=list)
    reaches: list[float] = field(default_factory=list)
    outlook: tuple[bool, float] | None = None
    num_rounds: int = 0
    num_steps: int = 0
    num_idle: int = 0
    num_dropped: int = 0
    num_waits: int = 0
    rest: int = 0
    is_sure: bool = False
    num_missed: int | None = None
    num_emitted: int = 0
    _passes: list[float] = field(default_factory=list)
    _gains: list[float] | None = None
    first_budget: ClassVar[float] = EXPENSIVE_BUDGET

    def __post_init__(self) -> None:
        """How predictable the text is, is not known yet."""
        for history in self._histories():
            history.memory, history.settling = RECENT_MEMORY, USUAL_SHARE
            history.begin_text()
        self.budgets = Budgets(self.learned)

    def _histories(self) -> tuple[AcceptanceHistory, ...]:
        return self.learned.acceptance, self.learned.before, self.learned.blind

    def limit(self, rate: float) -> int:
        """The longest draft whose loss can be borne, if drafting may pay."""
        self.evidence, self.reaches, self.is_trial = [], [], False
        if self.rest:
            return LONGEST if self.is_sure else 0
        length = self._worth_asking(rate)
        self.is_sure = length == LONGEST and self.gain > 0
        self.rest = 0 if 0 < length < LONGEST else REST + self.num_waits
        return length

    def _worth_asking(self, rate: float) -> int:
        """The same, worked out anew."""
        if not self.learned.drafting.is_known or self._is_stuck():
            self._measure_step()
        if not self._outlook()[0]:
            self.gain = 0.0
            return self._wait()
        rate = min(rate, max(LEAST_RATE, self._best_rate()))
        self.gain, needed = self._plan(rate)
        longest = self._longest()
        if longest < needed and self.gain >= 0:  # each round counts until it can be afforded
            self.num_waits = 0
            return 0
        if longest < needed or not self._may_read():
            return self._wait()
        self.num_waits = 0
        if self.gain < 0 and self.num_idle < RETRY_AFTER:
            return 0
        return longest

    def _wait(self) -> int:
        """No draft, and a longer rest each time in a row."""
        self.num_waits = min(self.num_waits + 1, LONGEST_REST - REST)
        return 0

    def _plan(self, rate: float) -> tuple[float, int]:
        """Value of a draft of which nothing is known yet but its places, and the length it needs.

        That is the shortest with a value above 0, or else the best: with the overhead of each
        ask, a shorter draft may lose where a longer one gains.
        """
        best, needed = -float("inf"), 0
        passes, (start, step) = self.passes, self.learned.drafting.line()
        for k, tokens in enumerate(self.gains, start=1):
            value = tokens - rate * (passes[k] - 1.0 + start + k * step)
            if value > best:
                needed = k if best <= 0 else needed
                best = value
        return best, needed

    def can_afford(self, length: int, expected: float) -> bool:
        """Whether the budgets stand a round that accepts half of what is expected of it.

        Args:
            length: of the draft.
            expected: tokens that it is expected to bring, besides the round's own.
        """
        return self.budgets.stand(self._loss(length) - expected / 2, self.gain)

    def _loss(self, length: int) -> float:
        """Most that a round is taken to lose whose draft is wrong from its first token."""
        return self._worst_pass(length) - 1.0 + self._drafting(length)

    def _worst_pass(self, length: int) -> float:
        """Most that a pass over a draft is taken to cost."""
        costs = self.learned.costs
        worst = costs.worst_ratio(length)
        return worst if costs.is_measured(length) else min(worst, 1.0 + UNKNOWN_POSITION * length)

    def _longest(self) -> int:
        """The longest draft that can be afforded; 0 if there is none."""
        for length, expected in enumerate(self.gains, start=1):
            if not self.can_afford(length, expected):
                return length - 1
        return LONGEST

    @property
    def gains(self) -> list[float]:
        """[K] tokens that a draft of each length brings, of which only the places are known."""
        if self._gains is None:
            chances = self.learned.blind.chances([0] * LONGEST)
            self._gains = list(accumulate(accumulate(chances, mul)))
        return self._gains

    def goes_on(self, evidence: Sequence[Evidence], rate: float) -> Step:
        """Weigh the latest position and those that could follow it."""
        length = len(evidence)
        self.num_steps += not evidence[-1].is_free
        del self.reaches[length - 1 :]  # of a position that was not taken, where a free one stands
        for i in range(len(self.reaches), length):
            before = self.reaches[-1] if i else 1.0
            self.reaches.append(before * self.learned.acceptance.chance(evidence[i], i))
        self.evidence, reach = list(evidence), self.reaches[-1]
        passes = self.passes
        own = reach - rate * (passes[length] - passes[length - 1])
        if length < LONGEST and self._more_is_worth(max(0.0, -own), length, rate):
            return Step.GO_ON
        return Step.STOP_AFTER if own > 0 else Step.STOP_BEFORE

    def _more_is_worth(self, least: float, length: int, rate: float) -> bool:
        """Whether some further tokens are worth more than `least`, by what is known now."""
        latest, passes, value, reached = self.evidence[-1], self.passes, 0.0, self.reaches[-1]
        step = 0.0 if latest.is_free else self.step
        history = self.learned.acceptance if latest.is_free else self.learned.before
        for chance in history.chances([latest] * LOOKAHEAD, first=length):
            reached *= chance
            length += 1
            value += reached - rate * (passes[length] - passes[length - 1] + step)
            if value > least:
                return True
        return False

    def cut(self, draft: Draft, rate: float) -> int:
        """All of it: its length was chosen while it was drafted."""
        return len(draft)

    def round_cost(self, num_drafted: int) -> float:
        """The pass, and the steps that were run for it."""
        verified = self.learned.costs.optimistic_ratio(num_drafted)
        return verified + self._drafting(self.num_steps)

    @property
    def dropped_cost(self) -> float:
        """Cost of draft steps of this round that brought no draft, in plain rounds."""
        return self._drafting(self.num_steps) if self.num_steps else 0.0

    @property
    def step(self) -> float:
        """Cost of a draft step, in plain rounds; 1 where it is not known."""
        return self.learned.drafting.line()[1]

    def _drafting(self, num_steps: int) -> float:
        """Cost of a draft of so many steps, without the pass."""
        start, step = self.learned.drafting.line()
        return start + num_steps * step

    @property
    def passes(self) -> list[float]:
        """Costs of passes over drafts of 0, 1, ... tokens."""
        if not self._passes:
            ratio = self.learned.costs.optimistic_ratio
            self._passes = [ratio(length) for length in range(LONGEST + LOOKAHEAD + 1)]
        return self._passes

    # --- whether to ask at all ------------------------------------------------------------------

    def _measure_step(self) -> None:
        """Learn what a step costs, where the session can tell."""
        costs = self.learned.costs
        if self.time_step is not None and costs.plain:
            self.learned.drafting.set_price(self.time_step() / statistics.median(costs.plain))
            self.outlook = None
            self.num_steps += 1  # this round's seconds are not those of a plain one

    def _measure_reading(self) -> None:
        """Learn what reading costs, where the session can tell and nothing was read yet.

        A step is mostly overhead where a draft model is small, and says little of reading.
        """
        drafting, plain = self.learned.drafting, self.learned.costs.plain
        if self.time_reading is not None and drafting.reading is None and plain:
            drafting.reading_price = self.time_reading() / statistics.median(plain)
            self.num_steps += 1  # this round's seconds are not those of a plain one

    def _is_stuck(self) -> bool:
        """Whether it has long been thought never to pay: its price may be that of a bad moment."""
        drafting = self.learned.drafting
        return drafting.num_idle >= drafting.patience and not self._outlook()[0]

    def _outlook(self) -> tuple[bool, float]:
        """Whether it can ever pay, and the best rate; worked out anew now and then only."""
        if self.outlook is None:
            self.outlook = self._can_ever_pay(), self._best_rate()
        return self.outlook

    def _can_ever_pay(self) -> bool:
        """Whether some length would pay if every token of it were accepted."""
        start, step = self.learned.drafting.line()
        return any(k + 1 > self.passes[k] + start + k * step for k in range(1, LONGEST + 1))

    def _may_read(self) -> bool:
        """Whether what it has missed is read by now.

        Either the text so far would have saved as much as reading takes: who always waits for
        that never pays more than twice what was needed (the ski rental bound), and a short answer
        pays nothing. Or the budgets stand it: then it is a part of finding out.
        """
        if not self._has_to_catch_up():
            return True
        gain = self._outlook()[1] - 1.0
        cost = self._reading_cost()
        if cost <= gain * self.num_emitted:
            return True
        self.is_trial = self.budgets.stand_reading(cost, self.num_emitted, self._loss(1))
        if not self.is_trial:
            self._measure_reading()
        return self.is_trial

    def _reading_cost(self) -> float:
        """Cost of reading what was missed, in plain rounds."""
        return self._num_to_read() * self.reading

    def _num_to_read(self) -> int:
        """Tokens that it reads with its next draft, besides the last ones."""
        missed = self.learned.context if self.num_missed is None else self.num_missed
        return min(missed, MOST_WAITING) if self.reads_along else missed

    @property
    def reading(self) -> float:
        """Cost of reading a token, in plain rounds: measured, or as the target does it."""
        drafting, plain = self.learned.drafting, self.learned.costs.plain
        if drafting.reading is not None:
            return drafting.reading
        if self.prefill is not None and plain:
            return self.step * self.prefill / statistics.median(plain)
        return self.step * UNKNOWN_READING

    def _best_rate(self) -> float:
        """Tokens that the time of a plain round would bring at the best fixed length."""
        passes, (start, step) = self.passes, self.learned.drafting.line()
        rates = [
            (1.0 + tokens) / (passes[k] + start + k * step)
            for k, tokens in enumerate(self.gains, start=1)
        ]
        return max(1.0, *rates)

    def _has_to_catch_up(self) -> bool:
        """Whether it reads more than a round's tokens first: the prompt, or those of a pause."""
        return self.num_missed is None or self.num_missed > LONGEST + 1

    # --- what it learns -------------------------------------------------------------------------

    def settle(self, round_: RoundRecord) -> None:
        """Add what the round brought less what it cost; learn what its pass and steps cost."""
        costs = self.learned.costs
        self.num_dropped = 0
        if round_.steady and costs.plain:
            costs.add(round_.drafted, round_.seconds - round_.draft_seconds)
        cost = self.round_cost(round_.drafted)
        self._learn_steps(round_)
        self.budgets.book(round_.emitted, 1.0 + sum(self.reaches[: round_.drafted]), cost)

    def settle_steps(self, round_: RoundRecord) -> None:
        """The same of a round that verified nothing of what it drafted."""
        if not self.num_steps and not self.evidence:
            return
        if self.evidence:
            self.is_sure = False
            self.num_dropped += 1
            self.rest = min(self.num_dropped - 1, RETRY_AFTER)
        self._learn_steps(round_)
        self.budgets.change(-self.dropped_cost)

    def _learn_steps(self, round_: RoundRecord) -> None:
        """Learn from the host time of drafting, which waits for every step."""
        plain, drafting = self.learned.costs.plain, self.learned.drafting
        if not plain or not self.num_steps or not self.evidence:
            return
        relative = round_.draft_seconds / statistics.median(plain)
        if not self._has_to_catch_up():
            drafting.add(self.num_steps, relative)
        elif drafting.is_known:
            read = max(0.0, relative - self._drafting(self.num_steps))
            drafting.readings.append(read / max(1, self._num_to_read()))

    def follow(self, round_: RoundRecord) -> None:
        """Earn this round's share of the time."""
        self._forget()
        self.budgets.earn(self.gain)
        self.rest = max(0, self.rest - 1)
        self.num_emitted += round_.emitted
        if self.evidence:  # it was asked, and read all that there was
            if self.is_trial:
                self.budgets.pay_for_reading(self._reading_cost(), self.num_emitted)
            self.num_missed, self.is_trial, self.num_idle = 0, False, 0
        else:
            if self.is_sure:
                self.is_sure, self.rest = False, 0
            self.num_idle += 1
            self.learned.drafting.num_idle += 1
            for history in self._histories():
                history.pass_by()
            if self.num_missed is not None:
                self.num_missed += round_.emitted
        self.num_steps = 0
        self.evidence = []

    def _forget(self) -> None:
        """What was worked out for the round before is out of date."""
        self._passes = []
        self._gains = None
        self.num_rounds += 1
        if self.num_rounds % LOOK_AGAIN == 0:
            self.outlook = None

    def learn_acceptance(self, round_: RoundRecord) -> None:
        """Learn from the verdict on its draft, by what was known when."""
        for i in range(min(round_.accepted + 1, round_.drafted)):
            right = i < round_.accepted
            self.learned.acceptance.learn(self.evidence[i], i, right)
            self.learned.blind.learn(0, i, right)
            if i and not self.evidence[i].is_free:
                self.learned.before.learn(self.evidence[i - 1], i, right)
