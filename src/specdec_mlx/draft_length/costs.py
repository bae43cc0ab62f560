"""What a round that drafts K tokens costs, in plain rounds: medians, and a line between them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

NUM_SAMPLES = 7
"""Rounds that a median is taken over: other programs use the machine too."""

MIN_PLAIN_SAMPLES = 3
"""Plain rounds to measure before anything is drafted: the first ones after a start are slow."""

PLAIN_EXPIRES = 128
"""Drafting rounds after which plain ones are measured again: the machine's pace changes."""

NUM_DRAFTS = 32
"""Drafts of a draft model of which the cost is remembered."""

PRIOR_LENGTHS = (1, 8)
"""Draft lengths at which the prior line is held against what was measured."""

PRIOR_WEIGHT = 0.5
"""For how many rounds each of those counts."""

STALE_AFTER = 256
"""Plain rounds in a row after which the costs of drafting may be out of date."""

STALE_DISCOUNT = 0.5
"""Share of a measured cost's excess over the prior that is forgiven then."""


@dataclass
class RoundCosts:
    """Seconds of a round that drafts K tokens, relative to a plain one.

    No length costs more than a longer one does, so that a disturbed round, after which a length is
    not tried again, does no lasting harm. Everything between two readings of a result counts:
    drafting, the pass, replays of recurrent caches, and the overlap that pipelined decoding has and
    a speculative round has not. Measured lengths speak for themselves; the others lie on the line 1
    + step + slope K that fits them and a prior best. Where nothing was drafted for long, drafts are
    taken for cheaper than they were, so that one bad moment of the machine does not count for ever.

    step, slope: the prior line; see `Tuning.for_model`. plain: seconds of plain rounds. ratios: K
    -> rounds that drafted K, over plain ones.
    """

    step: float = 0.05
    slope: float = 0.05
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    ratios: dict[int, deque[float]] = field(default_factory=dict)
    _borrowed: set[int] = field(default_factory=set)
    _line: tuple[float, float] | None = None
    _highest: float | None = None
    _plain_seconds: float | None = None
    _ratio: dict[int, float] = field(default_factory=dict)
    _worst: dict[int, float] = field(default_factory=dict)
    _is_measured: dict[int, bool] = field(default_factory=dict)
    _typical: dict[int, float] = field(default_factory=dict)
    _plain_in_a_row: int = 0
    _plain_wanted: int = MIN_PLAIN_SAMPLES
    _since_plain: int = 0

    def add(self, num_drafted: int, seconds: float) -> None:
        """Add a round whose seconds are those of one pass."""
        if seconds <= 0:
            return
        if num_drafted == 0:
            self._add_plain(seconds)
        elif self.plain:
            self._add_drafting(num_drafted, self.relative(num_drafted, seconds))

    def borrow(self, num_drafted: int, ratio: float) -> None:
        """Take a length's cost from elsewhere: one sample, and no other is needed to go by it."""
        self.ratios[num_drafted] = deque([ratio], maxlen=NUM_SAMPLES)
        self._borrowed.add(num_drafted)
        self._forget(num_drafted)

    def _add_plain(self, seconds: float) -> None:
        if self._since_plain >= PLAIN_EXPIRES:  # the rounds after a start are slow ones
            self.plain.clear()
        self.plain.append(seconds)
        self._plain_seconds = None
        self._plain_wanted = max(0, self._plain_wanted - 1)
        self._since_plain = 0
        self._plain_in_a_row += 1

    def _add_drafting(self, num_drafted: int, relative: float) -> None:
        samples = self.ratios.setdefault(num_drafted, deque(maxlen=NUM_SAMPLES))
        if self.is_stale and relative < _typical(samples or [0.0]):
            samples.extend([relative] * NUM_SAMPLES)
        before, was_full = self._typical.get(num_drafted), len(samples) == NUM_SAMPLES
        samples.append(relative)
        if not was_full or _typical(samples) != before:
            self._forget(num_drafted)
        self._since_plain += 1
        if self._since_plain == PLAIN_EXPIRES:
            self._plain_wanted = MIN_PLAIN_SAMPLES
        self._plain_in_a_row = 0

    def _forget(self, num_drafted: int) -> None:
        """What followed from the samples is worked out anew when it is asked for."""
        self._typical.pop(num_drafted, None)
        self._line = self._highest = None
        for known in (self._ratio, self._worst, self._is_measured):
            known.clear()

    def relative(self, num_drafted: int, seconds: float) -> float:
        """Seconds in plain rounds, of which some were measured; K + 2 at most.

        A round brings K + 1 tokens at most, so that anything more expensive is as good as K + 2.
        """
        if self._plain_seconds is None:
            self._plain_seconds = _median(self.plain)
        return min(seconds / self._plain_seconds, num_drafted + 2.0)

    @property
    def needs_plain(self) -> bool:
        """Whether plain rounds have to be measured before a ratio means anything."""
        return self._plain_wanted > 0

    @property
    def is_stale(self) -> bool:
        """Whether nothing was drafted for so long that the costs of drafting may have changed."""
        return self._plain_in_a_row >= STALE_AFTER

    def ratio(self, num_drafted: int) -> float:
        """Cost of a round that drafts K tokens, in plain rounds; >= 1."""
        if num_drafted not in self._ratio:  # asked in every round, and changed by those that draft
            self._ratio[num_drafted] = self._find_ratio(num_drafted)
        return self._ratio[num_drafted]

    def _find_ratio(self, num_drafted: int) -> float:
        if num_drafted == 0:
            return 1.0
        if self.is_measured(num_drafted):
            cheapest = math.inf
            for length in sorted(self.ratios, reverse=True):  # all at once: they are asked for next
                if self.is_measured(length):
                    cheapest = min(cheapest, self._typical_of(length))
                    self._ratio[length] = max(1.0, cheapest)
            return self._ratio[num_drafted]
        step, slope = self.line()
        shorter = [self._typical_of(k) for k in self.ratios if k < num_drafted]
        return max(1.0, 1.0 + step + slope * num_drafted, *shorter)

    def rough_ratio(self, num_drafted: int) -> float:
        """The same, by a single round where there was no second one; it may be too high."""
        if self.is_measured(num_drafted) or num_drafted not in self.ratios:
            return self.ratio(num_drafted)
        return max(1.0, *self.ratios[num_drafted])

    def optimistic_ratio(self, num_drafted: int) -> float:
        """The same; where the costs are stale, nearer to the prior."""
        ratio = self.ratio(num_drafted)
        if not num_drafted or not self.is_stale:
            return ratio
        prior = 1.0 + self.step + self.slope * num_drafted
        return ratio - STALE_DISCOUNT * max(0.0, ratio - prior)

    def worst_ratio(self, num_drafted: int) -> float:
        """The same, if each token of a length not measured cost as much as any that was."""
        if num_drafted not in self._worst:
            self._worst[num_drafted] = self._find_worst_ratio(num_drafted)
        return self._worst[num_drafted]

    def _find_worst_ratio(self, num_drafted: int) -> float:
        if self.is_measured(num_drafted):
            return self.ratio(num_drafted)
        highest = self._most_expensive_token()
        return 1.0 + num_drafted * (1.0 if highest is None else highest)

    def is_measured(self, num_drafted: int) -> bool:
        """Whether a length was tried twice: the first round at a new width may compile kernels.

        Once is enough where it cost no more a token than another length does.
        """
        if num_drafted not in self._is_measured:
            self._is_measured[num_drafted] = self._find_is_measured(num_drafted)
        return self._is_measured[num_drafted]

    def _find_is_measured(self, num_drafted: int) -> bool:
        samples: Sequence[float] = self.ratios.get(num_drafted, ())
        if len(samples) != 1:
            return len(samples) > 1
        if num_drafted in self._borrowed:
            return True
        highest = self._most_expensive_token()
        return highest is not None and samples[0] <= 1.0 + num_drafted * highest

    def _most_expensive_token(self) -> float | None:
        """Cost of a draft token where it was highest, of lengths tried twice; None before that."""
        if self._highest is None:
            tried_twice = [
                k for k, samples in self.ratios.items() if len(samples) > 1 or k in self._borrowed
            ]
            per_token = [(self._typical_of(k) - 1.0) / k for k in tried_twice]
            self._highest = max(0.0, *per_token) if per_token else None
        return self._highest

    def line(self) -> tuple[float, float]:
        """Step and slope that fit the measured lengths and the prior, by weighted least squares."""
        if self._line is None:
            points = [
                (k, self._typical_of(k) - 1.0, float(len(samples)))
                for k, samples in self.ratios.items()
                if self.is_measured(k)
            ]
            points += [(k, self.step + self.slope * k, PRIOR_WEIGHT) for k in PRIOR_LENGTHS]
            self._line = _fit(points)
        return self._line

    def _typical_of(self, num_drafted: int) -> float:
        """What was typically measured of a length that was tried."""
        if num_drafted not in self._typical:
            self._typical[num_drafted] = _typical(self.ratios[num_drafted])
        return self._typical[num_drafted]

    def as_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        return {
            "plain": list(self.plain),
            "ratios": {str(length): list(samples) for length, samples in self.ratios.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `as_dict` gave; the machine's pace today is yet to be measured."""
        self.plain.extend(float(seconds) for seconds in saved["plain"])
        self._plain_seconds = None
        for length, ratios in saved["ratios"].items():
            self.ratios[int(length)] = deque(map(float, ratios), maxlen=NUM_SAMPLES)
            self._forget(int(length))


FIRST_PATIENCE = 32
"""Half the idle rounds after which a draft model that cannot pay is priced for the second time."""

LONGEST_PATIENCE = 4096
"""Most of them, later on: pricing takes three steps."""


@dataclass
class DraftingCosts:
    """What a draft model takes besides the passes of the target, in plain rounds.

    A draft of n steps takes start + n step: each ask has its own overhead, and the line through
    what was measured tells the two apart.

    at_once: whether all steps are one pass, so that a draft of any length costs as much. price: of
    a step on nothing, None where it was not measured. reading_price: the same of reading a token.
    drafts: steps of a draft, and what
    it took. readings: of reading one token of the text, many at a time. num_idle: rounds since it
    was priced, of those in which no draft could pay. patience: how many of them there may be.
    """

    at_once: bool = False
    price: float | None = None
    reading_price: float | None = None
    drafts: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=NUM_DRAFTS))
    readings: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    num_idle: int = 0
    patience: int = FIRST_PATIENCE
    _line: tuple[float, float] | None = None

    def add(self, num_steps: int, cost: float) -> None:
        """Add a draft of so many steps that read no more than a round's tokens."""
        self.drafts.append((num_steps, cost))
        self._line = None

    def set_price(self, price: float) -> None:
        """Note what a step on nothing takes; the next time is twice as far off."""
        self.price, self._line = price, None
        self.num_idle, self.patience = 0, min(2 * self.patience, LONGEST_PATIENCE)

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return self.price is not None or bool(self.drafts)

    def line(self) -> tuple[float, float]:
        """Start and step; (0, 1) where nothing is known.

        A single draft, the first one, may have been slow, and its price is at hand.
        """
        if self._line is None:
            price = self.price
            few = len(self.drafts) == 1 and price is not None
            points = [] if few else [(n, cost, 1.0) for n, cost in self._typical_drafts()]
            if price is None and points:
                price = min(cost / self._times(n) for n, cost, _ in points)
            if price is not None:
                points += [(n, self._times(n) * price, PRIOR_WEIGHT) for n in PRIOR_LENGTHS]
            self._line = _fit(points) if points else (0.0, 1.0)
        return self._line

    def _times(self, num_steps: int) -> int:
        """How often the price of a step is to be paid for so many."""
        return 1 if self.at_once else num_steps

    def _typical_drafts(self) -> list[tuple[int, float]]:
        """For each number of steps the median of what it took.

        A number tried once does not count where it took more a step than those tried twice: it may
        have been slow, and a long draft alone decides on the slope of the line.
        """
        by_length: dict[int, list[float]] = {}
        for n, cost in self.drafts:
            by_length.setdefault(n, []).append(cost)
        of_step = [_typical(costs) / n for n, costs in by_length.items() if len(costs) > 1]
        most = max(of_step, default=math.inf)
        drafts = [(n, _typical(costs), len(costs)) for n, costs in by_length.items()]
        return [(n, cost) for n, cost, num in drafts if num > 1 or cost <= n * most]

    @property
    def reading(self) -> float | None:
        """Of a token that is read; None where none was measured."""
        return statistics.median(self.readings) if self.readings else self.reading_price

    def as_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        drafts = [list(draft) for draft in self.drafts]
        return {
            "price": self.price,
            "reading price": self.reading_price,
            "drafts": drafts,
            "readings": list(self.readings),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `as_dict` gave."""
        self.price = None if saved["price"] is None else float(saved["price"])
        reading = saved.get("reading price")  # not in an earlier version's file
        self.reading_price = None if reading is None else float(reading)
        self.drafts.extend((int(n), float(cost)) for n, cost in saved["drafts"])
        self.readings.extend(map(float, saved["readings"]))


def _typical(samples: Sequence[float]) -> float:
    """Median; of two the smaller: a round is more often disturbed than quicker than it can be."""
    return min(samples) if len(samples) == 2 else _median(samples)


def _median(samples: Sequence[float]) -> float:
    """Of one number at least; `statistics.median` takes three times as long."""
    ordered, half = sorted(samples), len(samples) // 2
    return ordered[half] if len(samples) % 2 else (ordered[half - 1] + ordered[half]) / 2


def _fit(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of the least-squares line through (x, y, weight)."""
    total = mean_x = mean_y = 0.0
    for x, y, weight in points:
        total += weight
        mean_x += weight * x
        mean_y += weight * y
    mean_x, mean_y = mean_x / total, mean_y / total
    spread = joint = 0.0
    for x, y, weight in points:
        spread += weight * (x - mean_x) ** 2
        joint += weight * (x - mean_x) * (y - mean_y)
    slope = max(0.0, joint / spread)
    return max(0.0, mean_y - slope * mean_x), slope
