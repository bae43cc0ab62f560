"""What a round costs and how often drafts are right: learned from the rounds themselves.

Two small models, both plain counts and medians: `RoundCosts`, the price of drafting K tokens
relative to plain decoding, and `AcceptanceHistory`, how often a draft token was right, by what
spoke for it. `Tuning` holds both for one loaded model, is carried from call to call, and can be
saved.
"""

from __future__ import annotations

import copy
import json
import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn

from specdec_mlx.per_model import PerModel
from specdec_mlx.types import Evidence

NUM_SAMPLES = 7
"""Rounds that a median is taken over: other programs use the machine too."""

MIN_PLAIN_SAMPLES = 3
"""Plain rounds to measure before anything is drafted: the first ones after a start are slow."""

PLAIN_EXPIRES = 128
"""Drafting rounds after which plain ones are measured again: the machine's pace changes."""

PRIOR_LENGTHS = (1, 8)
"""Draft lengths at which the prior line is held against what was measured."""

PRIOR_WEIGHT = 0.5
"""For how many rounds each of those counts."""

RETRY_AFTER = 256
"""Plain rounds in a row after which a draft is tried again, whatever it cost last."""

RETRY_DISCOUNT = 0.5
"""Share of a measured cost's excess over the prior that is forgiven then."""


@dataclass
class RoundCosts:
    """Seconds of a round that drafts K tokens, relative to a plain one.

    Everything between two readings of a result counts: drafting, the pass, replays of recurrent
    caches, and the overlap that the plain gear has and a speculative round has not. Measured
    lengths speak for themselves; the others lie on the line 1 + step + slope K that fits them and
    a prior best. Where nothing was drafted for long, one draft is tried as if it were cheaper, so
    that one bad moment of the machine does not count for ever.

    step, slope: the prior line; see `Tuning.for_model`. plain: seconds of plain rounds. ratios: K
    -> rounds that drafted K, over plain ones.
    """

    step: float = 0.05
    slope: float = 0.05
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    ratios: dict[int, deque[float]] = field(default_factory=dict)
    _line: tuple[float, float] | None = None
    _idle: int = 0
    _plain_wanted: int = MIN_PLAIN_SAMPLES
    _since_plain: int = 0

    def observe(self, num_drafted: int, seconds: float) -> None:
        """Learn from a round whose seconds are those of one pass."""
        if seconds <= 0:
            return
        if num_drafted == 0:
            self.plain.append(seconds)
            self._plain_wanted = max(0, self._plain_wanted - 1)
            self._since_plain = 0
        elif self.plain:
            relative = seconds / statistics.median(self.plain)
            # It brings K + 1 tokens at most, so that anything dearer is as good as K + 2.
            samples = self.ratios.setdefault(num_drafted, deque(maxlen=NUM_SAMPLES))
            relative = min(relative, num_drafted + 2.0)
            if self.is_retry_due and relative < _typical(samples or [0.0]):
                samples.extend([relative] * NUM_SAMPLES)
            samples.append(relative)
            self._line = None
            self._since_plain += 1
            if self._since_plain == PLAIN_EXPIRES:
                self._plain_wanted = MIN_PLAIN_SAMPLES
        self._idle = 0 if num_drafted else self._idle + 1

    @property
    def needs_plain(self) -> bool:
        """Whether plain rounds have to be measured before a ratio means anything."""
        return self._plain_wanted > 0

    @property
    def is_retry_due(self) -> bool:
        """Whether so long was nothing drafted that a draft should be tried again."""
        return self._idle >= RETRY_AFTER

    def hoped_ratio(self, num_drafted: int) -> float:
        """The same; where a retry is due, nearer to the prior."""
        ratio, prior = self.ratio(num_drafted), 1.0 + self.step + self.slope * num_drafted
        if num_drafted and self.is_retry_due and ratio > prior:
            ratio -= RETRY_DISCOUNT * (ratio - prior)
        return ratio

    def ratio(self, num_drafted: int) -> float:
        """Cost of a round that drafts K tokens, in plain rounds; >= 1."""
        if num_drafted == 0:
            return 1.0
        if self.is_measured(num_drafted):
            return max(1.0, _typical(self.ratios[num_drafted]))
        step, slope = self.line()
        shorter = [_typical(self.ratios[k]) for k in self.ratios if k < num_drafted]
        return max(1.0, 1.0 + step + slope * num_drafted, *shorter)

    def worst_ratio(self, num_drafted: int) -> float:
        """The same, if each token of a length not measured cost as much as the dearest measured."""
        if self.is_measured(num_drafted):
            return self.ratio(num_drafted)
        dearest = self._dearest_token()
        return 1.0 + num_drafted * (1.0 if dearest is None else dearest)

    def _dearest_token(self) -> float | None:
        """Cost of a draft token where it was highest, of lengths tried twice; None before that."""
        tried_twice = {k: samples for k, samples in self.ratios.items() if len(samples) > 1}
        per_token = [(_typical(samples) - 1.0) / k for k, samples in tried_twice.items()]
        return max(0.0, *per_token) if per_token else None

    def as_dict(self) -> dict[str, Any]:
        """What was measured, ready for JSON."""
        return {
            "plain": list(self.plain),
            "ratios": {str(length): list(samples) for length, samples in self.ratios.items()},
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `as_dict` gave; the machine's pace today is yet to be measured."""
        self.plain.extend(float(seconds) for seconds in saved["plain"])
        for length, ratios in saved["ratios"].items():
            self.ratios[int(length)] = deque(map(float, ratios), maxlen=NUM_SAMPLES)

    def is_measured(self, num_drafted: int) -> bool:
        """Whether a length was tried twice: the first round at a new width may compile kernels.

        Once is enough where it cost no more a token than another length does.
        """
        samples = list(self.ratios.get(num_drafted, []))
        if len(samples) != 1:
            return len(samples) > 1
        dearest = self._dearest_token()
        return dearest is not None and samples[0] <= 1.0 + num_drafted * dearest

    def line(self) -> tuple[float, float]:
        """Step and slope that fit the measured lengths and the prior, by weighted least squares."""
        if self._line is None:
            points = [
                (k, _typical(samples) - 1.0, float(len(samples)))
                for k, samples in self.ratios.items()
                if self.is_measured(k)
            ]
            points += [(k, self.step + self.slope * k, PRIOR_WEIGHT) for k in PRIOR_LENGTHS]
            self._line = _fit(points)
        return self._line


def _typical(samples: Sequence[float]) -> float:
    """Median; of two the smaller: a round is more often disturbed than quicker than it can be."""
    return min(samples) if len(samples) == 2 else statistics.median(samples)


def _fit(points: Sequence[tuple[int, float, float]]) -> tuple[float, float]:
    """Intercept and slope, neither below 0, of the least-squares line through (x, y, weight)."""
    total = sum(w for _, _, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread
    slope = max(0.0, slope)
    return max(0.0, mean_y - slope * mean_x), slope


FIRST_CREDIT = 0.3
"""What the first trials may lose, in plain rounds."""

SHORT_CONTEXT = 2048
"""Positions below which all contexts are of one class; then a class for each doubling."""

MATCH_EDGES = (1, 2, 3, 4, 5, 7, 10, 16)
"""Lower ends of the classes of matches, in tokens."""

POSITION_EDGES = (1, 2, 4, 8)
"""Lower ends of the classes of positions in a draft."""

FORM_EDGES = (0.2, 0.4, 0.6, 0.8)
"""Lower ends of the classes of form."""

FORM_MEMORY = 0.7
"""Share of the form that is left after another trial: texts turn quickly."""

LEARNING_RATE = 0.035
"""Step of the log-odds towards a trial's outcome."""

PRIOR_LOG_ODDS: dict[str, tuple[float, ...]] = {
    "match": (0.0, -0.45, -0.26, 0.1, 0.12, 0.12, 0.19, 0.62, 1.13),
    "position": (0.42, 0.35, 0.46, 0.13, 0.15),
    "form": (0.07, 0.18, 0.13, 0.2, 0.92),
    "after one": (0.0, 0.02, 0.96, 1.02, -0.01, -0.49),
    "after two": (0.0, 0.64, 1.34, 0.44, -0.09, -0.82),
}
"""What is believed before anything was learned, by feature and class."""


def class_of(value: float, edges: Sequence[float]) -> int:
    """Number of edges at or below the value."""
    return bisect_right(edges, value)


@dataclass
class AcceptanceHistory:
    """How often a draft token was accepted, given that all before it were: a logistic regression.

    The chance of acceptance is 1 / (1 + exp(-z)), z the sum of one weight for each feature: the
    evidence, the position in the draft and the form. Every trial moves those weights a little
    (stochastic gradient on the log-likelihood), so that old trials fade.

    weights: feature -> log-odds by class. form: share of the tokens tried lately that were
    accepted; the same evidence means more in a text that has been predictable.
    """

    weights: dict[str, list[float]] = field(
        default_factory=lambda: {name: list(odds) for name, odds in PRIOR_LOG_ODDS.items()}
    )
    form: float = 0.5

    def observe(self, evidence: Evidence | int, position: int, accepted: bool) -> None:
        """Learn from one token of a draft that was tried or could be scored afterwards."""
        step = LEARNING_RATE * (accepted - self.chance(evidence, position))
        for weights, index in self._active(evidence, position):
            weights[index] += step
        self.form = FORM_MEMORY * self.form + (1 - FORM_MEMORY) * accepted

    def chance(self, evidence: Evidence | int, position: int) -> float:
        """Chance that the token at a position is accepted if those before it were."""
        log_odds = sum(weights[index] for weights, index in self._active(evidence, position))
        return 1 / (1 + math.exp(-log_odds))

    def _active(self, evidence: Evidence | int, position: int) -> Iterator[tuple[list[float], int]]:
        """The weights that count, as lists and places in them."""
        if not isinstance(evidence, Evidence):
            evidence = Evidence(evidence)
        yield self.weights["match"], class_of(evidence.match, MATCH_EDGES)
        yield self.weights["position"], class_of(position, POSITION_EDGES)
        yield self.weights["form"], class_of(self.form, FORM_EDGES)
        yield self.weights["after one"], evidence.after_one
        yield self.weights["after two"], evidence.after_two


@dataclass
class Learned:
    """What was learned about one kind of drafter on one model.

    step, slope: the prior line of costs. by_context: costs by class of context length, since
    attention over a long context weighs on wide and narrow passes alike. context: positions on the
    caches at the latest round. credit: what may be lost in trying lengths whose cost is not known,
    in plain rounds.
    """

    step: float = 0.05
    slope: float = 0.05
    by_context: dict[int, RoundCosts] = field(default_factory=dict)
    acceptance: AcceptanceHistory = field(default_factory=AcceptanceHistory)
    context: int = 0
    credit: float = FIRST_CREDIT

    @property
    def costs(self) -> RoundCosts:
        """Costs at the latest context length; at first, those of the next shorter class.

        Its plain rounds are measured anew in any case.
        """
        kind = (self.context // SHORT_CONTEXT).bit_length()
        if kind not in self.by_context:
            shorter = [k for k in self.by_context if k < kind]
            known = self.by_context[max(shorter)].ratios if shorter else {}
            self.by_context[kind] = RoundCosts(self.step, self.slope, ratios=copy.deepcopy(known))
        return self.by_context[kind]

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "costs": {str(kind): costs.as_dict() for kind, costs in self.by_context.items()},
            "acceptance": self.acceptance.weights,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `as_dict` gave."""
        for kind, costs in saved["costs"].items():
            self.by_context[int(kind)] = RoundCosts(self.step, self.slope)
            self.by_context[int(kind)].restore(costs)
        for name, weights in self.acceptance.weights.items():
            weights[:] = _numbers(saved["acceptance"][name], len(weights))


@dataclass
class Tuning:
    """What was learned about one loaded model, for `draft_length="auto"`.

    step, slope: the prior line of `RoundCosts`. drafters: kind of drafter -> what was learned with
    it. Pass the same object to several generations to go on learning; `save` and `load` keep it
    as JSON.
    """

    step: float = 0.05
    slope: float = 0.05
    drafters: dict[str, Learned] = field(default_factory=dict)

    @classmethod
    def for_model(cls, model: nn.Module) -> Tuning:
        """Nothing learned yet, with a prior for the kind of model.

        A pass over m rows costs little more than one row as long as reading the weights limits it.
        From users' reports on Apple GPUs: bfloat16 is nearly flat, 4-bit weights cost about 0.24
        of a plain step for each further row, and mixtures of experts pay for more experts with
        every row.
        """
        layers = model.modules()
        quantized = any(hasattr(layer, "bits") for layer in layers)
        experts = any("Switch" in type(layer).__name__ for layer in layers)
        return cls(slope=0.05 + 0.15 * quantized + 0.2 * experts)

    def of(self, drafter: str) -> Learned:
        """What was learned with a kind of drafter."""
        if drafter not in self.drafters:
            self.drafters[drafter] = Learned(self.step, self.slope)
        return self.drafters[drafter]

    def save(self, path: Path | str) -> None:
        """Write as JSON; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(self.as_dict(), indent=1))
        part.replace(path)

    def as_dict(self) -> dict[str, Any]:
        """All that was learned, ready for JSON."""
        return {
            "step": self.step,
            "slope": self.slope,
            "drafters": {name: learned.as_dict() for name, learned in self.drafters.items()},
        }

    @classmethod
    def load(cls, path: Path | str) -> Tuning:
        """Read what `save` wrote. Raises ValueError for another kind of file."""
        try:
            saved = json.loads(Path(path).read_text())
            tuning = cls(float(saved["step"]), float(saved["slope"]))
            for name, learned in saved["drafters"].items():
                tuning.of(name).restore(learned)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a saved Tuning ({error!r}). Delete it.") from error
        return tuning


def _numbers(values: Sequence[Any], length: int) -> list[float]:
    """`length` numbers. Raises ValueError for another length."""
    if len(values) != length:
        raise ValueError(f"{len(values)} numbers where {length} are expected")
    return [float(value) for value in values]


tuning_for = PerModel(Tuning.for_model)
"""The tuning that is kept with a loaded model for as long as the model lives."""
