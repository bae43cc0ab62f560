"""What a round costs and how often drafts are right: learned from the rounds themselves.

Two small models, both plain counts and medians: `RoundCosts`, the price of drafting K tokens
relative to plain decoding, and `AcceptanceHistory`, how often a draft token was right, by what
spoke for it. `Tuning` holds both for one loaded model, is carried from call to call, and can be
saved.
"""

from __future__ import annotations

import json
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.nn as nn

from specdec_mlx.per_model import PerModel

NUM_SAMPLES = 7
"""Rounds that a median is taken over: other programs use the machine too."""

AFTERMATH_SAMPLES = 20
"""Drafting rounds over which the cost of the round after is averaged."""

FADE_AFTER = 256
"""Plain rounds in a row after which what was measured fades: trying again costs 1 in hundreds."""

FADE = 0.25
"""Share of the way back to the prior that it fades."""


@dataclass
class RoundCosts:
    """Seconds of a round that drafts K tokens, relative to a plain one.

    Everything between two readings of a result counts: drafting, the pass, replays of recurrent
    caches, and the overlap that the plain gear has and a speculative round has not, nor the plain
    round that comes after one. Measured lengths speak for themselves; the others lie on the line
    1 + step + slope K that fits them best, starting from a prior. While nothing is drafted, what
    was measured fades, so that one bad moment of the machine does not count for ever.

    step, slope: the prior line; see `Tuning.for_model`. plain: seconds of plain rounds. ratios: K
    -> rounds that drafted K, over plain ones. aftermath: for each of those, what the plain rounds
    at the shifts of gear after it cost more than one in the plain gear, or less.
    """

    step: float = 0.05
    slope: float = 0.05
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_SAMPLES))
    ratios: dict[int, deque[float]] = field(default_factory=dict)
    aftermath: deque[float] = field(default_factory=lambda: deque(maxlen=AFTERMATH_SAMPLES))
    _line: tuple[float, float] | None = None
    _idle: int = 0

    def observe(self, num_drafted: int, seconds: float, *, overlapped: bool) -> None:
        """Learn from a round; a plain one counts only if it ran in the plain gear."""
        if seconds <= 0:
            return
        if self.plain:
            relative = seconds / statistics.median(self.plain)
            if num_drafted:
                self.aftermath.append(0.0)
            elif self.aftermath and not overlapped:
                self.aftermath[-1] += min(relative - 1.0, 1.0)
            if num_drafted:
                # It brings K + 1 tokens at most, so that anything dearer is as good as K + 2.
                self._samples(num_drafted).append(min(relative, num_drafted + 2.0))
                self._line = None
        if overlapped:
            self.plain.append(seconds)
        self._idle = 0 if num_drafted else self._idle + 1
        if self._idle == FADE_AFTER:
            self._fade()

    def ratio(self, num_drafted: int) -> float:
        """Cost of a round that drafts K tokens, in plain rounds; >= 1."""
        if num_drafted == 0:
            return 1.0
        after = max(0.0, statistics.fmean(self.aftermath)) if self.aftermath else 0.0
        if samples := self._measured().get(num_drafted):
            return max(1.0, _typical(samples) + after)
        step, slope = self.line()
        return max(1.0, 1.0 + step + slope * num_drafted + after)

    def _fade(self) -> None:
        """Move what was measured some way back to the prior line, where that is cheaper."""
        for length, samples in self.ratios.items():
            prior = 1.0 + self.step + self.slope * length
            for i, ratio in enumerate(samples):
                samples[i] = min(ratio, ratio + FADE * (prior - ratio))
        for i, extra in enumerate(self.aftermath):
            self.aftermath[i] = min(extra, (1 - FADE) * extra)
        self._line = None
        self._idle = 0

    def longest_to_try(self) -> float:
        """Twice the longest length measured, so that a prior that is wrong costs little.

        1 at first, and nothing before a plain round was measured to compare with.
        """
        return 2 * max(self._measured(), default=0.5) if self.plain else 0

    def line(self) -> tuple[float, float]:
        """Step and slope that fit the measured lengths best, in the least squares sense."""
        if self._line is None:
            points = [(k, _typical(samples) - 1.0) for k, samples in self._measured().items()]
            points += [(k, self.step + self.slope * k) for k in (1, 8)] if len(points) < 2 else []
            self._line = _fit(points)
        return self._line

    def _samples(self, num_drafted: int) -> deque[float]:
        return self.ratios.setdefault(num_drafted, deque(maxlen=NUM_SAMPLES))

    def _measured(self) -> dict[int, deque[float]]:
        """Lengths tried twice or more: the first round at a new width may compile kernels."""
        return {length: samples for length, samples in self.ratios.items() if len(samples) > 1}


def _typical(samples: Sequence[float]) -> float:
    """Median; of two the smaller: a round is more often disturbed than quicker than it can be."""
    return min(samples) if len(samples) == 2 else statistics.median(samples)


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line, neither below 0."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    slope = max(0.0, slope)
    return max(0.0, mean_y - slope * mean_x), slope


EVIDENCE_EDGES = (1, 2, 3, 4, 5, 7, 10, 16)
"""Lower ends of the classes of evidence, such as the length of a match in tokens."""

PRIOR_ACCEPTANCE = (0.6, 0.3, 0.45, 0.55, 0.65, 0.72, 0.8, 0.87, 0.93)
"""Chance that a draft token is right before anything was learned, by class; class 0: no evidence.

From greedy text of SmolLM2-135M with prompt lookup over 8 kinds of prompts, rounded.
"""

POSITION_EDGES = (1, 2, 4, 8)
"""Lower ends of the classes of positions in a draft."""

MEMORY = 0.98
"""Share of a count that is left after another trial: about the last 50 count."""

PARENT_WEIGHT = 4.0
"""How many trials a more general estimate counts for beside a more particular one."""


def class_of(value: float, edges: Sequence[float]) -> int:
    """Number of edges at or below the value."""
    return sum(value >= edge for edge in edges)


FORM_EDGES = (0.2, 0.4, 0.6, 0.8)
"""Lower ends of the classes of form."""

FORM_MEMORY = 0.7
"""Share of the form that is left after another trial: texts turn quickly."""

ALL = -1
"""Stands for all positions, or all forms, in a cell."""

Cell = tuple[int, int, int]


@dataclass
class AcceptanceHistory:
    """How often a draft token was accepted, given that all before it were.

    cells: (class of evidence, class of position or ALL, class of form or ALL) -> [accepted, tried],
    both fading. form: share of the tokens tried lately that were accepted; the same evidence means
    more in a text that has been predictable.

    An estimate starts from the prior and is refined by the counts over all positions and forms, at
    the position, and in the form, each counting against the one before it.
    """

    cells: dict[Cell, list[float]] = field(default_factory=dict)
    form: float = 0.5

    def observe(self, evidence: int, position: int, accepted: bool) -> None:
        """Learn from one token of a draft that was tried or could be scored afterwards."""
        for cell in self._cells(evidence, position):
            counts = self.cells.setdefault(cell, [0.0, 0.0])
            counts[0] = MEMORY * counts[0] + accepted
            counts[1] = MEMORY * counts[1] + 1
        self.form = FORM_MEMORY * self.form + (1 - FORM_MEMORY) * accepted

    def chance(self, evidence: int, position: int) -> float:
        """Chance that the token at a position is accepted if those before it were."""
        chance = PRIOR_ACCEPTANCE[class_of(evidence, EVIDENCE_EDGES)]
        for cell in self._cells(evidence, position):
            accepted, tried = self.cells.get(cell, (0.0, 0.0))
            chance = (accepted + PARENT_WEIGHT * chance) / (tried + PARENT_WEIGHT)
        return chance

    def _cells(self, evidence: int, position: int) -> tuple[Cell, Cell, Cell]:
        """From the general to the particular."""
        kind = class_of(evidence, EVIDENCE_EDGES)
        return (
            (kind, ALL, ALL),
            (kind, class_of(position, POSITION_EDGES), ALL),
            (kind, ALL, class_of(self.form, FORM_EDGES)),
        )


@dataclass
class Learned:
    """What was learned about one kind of drafter on one model."""

    costs: RoundCosts = field(default_factory=RoundCosts)
    acceptance: AcceptanceHistory = field(default_factory=AcceptanceHistory)

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "plain": list(self.costs.plain),
            "ratios": {str(length): list(r) for length, r in self.costs.ratios.items()},
            "acceptance": {
                ",".join(map(str, cell)): counts for cell, counts in self.acceptance.cells.items()
            },
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `as_dict` gave."""
        self.costs.plain.extend(float(seconds) for seconds in saved["plain"])
        for length, ratios in saved["ratios"].items():
            self.costs.ratios[int(length)] = deque(map(float, ratios), maxlen=NUM_SAMPLES)
        for cell, counts in saved["acceptance"].items():
            kind, position, form = map(int, cell.split(","))
            self.acceptance.cells[kind, position, form] = [float(x) for x in counts]


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
            self.drafters[drafter] = Learned(RoundCosts(self.step, self.slope))
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


tuning_for = PerModel(Tuning.for_model)
"""The tuning that is kept with a loaded model for as long as the model lives."""
