"""Learned state of a loaded model and its drafters, kept from call to call and on disk."""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import mlx.core as mx
import mlx.nn as nn
import msgspec
from msgspec import Meta, Struct

from specdec_mlx.draft_length.chances import NUM_WEIGHTS, Chances
from specdec_mlx.draft_length.costs import (
    FIRST_ROWS,
    MILDEST,
    WIDTHS,
    CostModel,
    Curve,
    Samples,
    Steps,
    has_experts,
    prior_for,
)
from specdec_mlx.files import cache_root, parse, read_text, replacing
from specdec_mlx.models.loading import PerModel

BUDGET = 2.0  # of a drafter that costs time at first, in plain rounds; gains double it at most
EXPLORATION = 0.01  # share of the time that finding out may take, besides
SHORT_CONTEXT = 2048  # positions below which contexts are of one class; then one a doubling


@dataclass
class Account:
    """Budget for trying a drafter, in plain rounds.

    right: share of drafts lately whose first token was right.
    """

    budget: float = BUDGET
    right: float = 0.45

    def add(self, amount: float = EXPLORATION) -> None:
        """Book a gain or a loss; by default a round's share of the time."""
        self.budget = min(max(-BUDGET, self.budget + amount), 2 * BUDGET)


Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
Ratio = Annotated[float, Meta(gt=0, le=1e9)]
Weight = Annotated[list[Number], Meta(min_length=2, max_length=2)]
Weights = Annotated[list[Weight], Meta(min_length=NUM_WEIGHTS, max_length=NUM_WEIGHTS)]


SavedCosts = dict[Annotated[int, Meta(ge=0, le=64)], dict[int, list[Ratio]]]


class SavedDrafter(Struct, forbid_unknown_fields=True):
    """State of one drafter in a file.

    weights: of `Chances`, of drafted and of unseen tokens. steps: of `Steps`, first and further.
    """

    weights: tuple[Weights, Weights]
    steps: tuple[list[Number], list[Number]]
    budget: Annotated[float, Meta(ge=-BUDGET, le=2 * BUDGET)]


class SavedTuning(Struct, forbid_unknown_fields=True):
    """A tuning in a file.

    costs: class of context length -> rows -> ratios of `CostModel`. copied: the same of rows that
    copy text; None for a model without experts, and in files of earlier versions.
    """

    costs: SavedCosts
    drafters: dict[str, SavedDrafter]
    copied: SavedCosts | None = None


@dataclass
class Learned:
    """Learned state of one drafter on one model; `unseen` is of tokens that are not drafted yet."""

    chances: Chances
    unseen: Chances = field(default_factory=lambda: Chances.of("unseen"))
    steps: Steps = field(default_factory=Steps)
    account: Account = field(default_factory=Account)

    def begin_text(self) -> None:
        """Decay what was recent: another text begins."""
        self.chances.decay()
        self.unseen.decay()

    def saved(self) -> SavedDrafter:
        """All but the tokens that were written."""
        steps = list(self.steps.first), list(self.steps.further)
        return SavedDrafter((self.chances.weights, self.unseen.weights), steps, self.account.budget)

    def restore(self, saved: SavedDrafter) -> None:
        """Take over what `saved` gave."""
        self.chances.weights, self.unseen.weights = saved.weights
        self.account.budget = saved.budget
        self.steps.first.extend(saved.steps[0])
        self.steps.further.extend(saved.steps[1])


@dataclass
class Tuning:
    """What `num_draft_tokens="auto"` has learned for one loaded model, from any number of texts.

    costs: (texts in a pass, class of context length) -> costs of passes. drafters: by their keys.
    has_experts: passes over copied rows have costs of their own.
    """

    prior: Curve = MILDEST
    has_experts: bool = False
    costs: dict[tuple[int, int], CostModel] = field(default_factory=dict)
    drafters: dict[str, Learned] = field(default_factory=dict)

    @classmethod
    def for_model(cls, model: nn.Module) -> Tuning:
        """Nothing learned yet, with a prior for the machine and the kind of model."""
        return cls(prior_for(model), has_experts=has_experts(model))

    def cost_model(self, context: int = 0, num_texts: int = 1) -> CostModel:
        """Costs at a context length, by the rows of each text."""
        kind = num_texts, (context // SHORT_CONTEXT).bit_length()
        return self.costs.get(kind) or self._cost_model(*kind)

    def _cost_model(self, num_texts: int, depth: int) -> CostModel:
        kind = num_texts, depth
        if kind not in self.costs:
            alike = {k: model for k, model in self.costs.items() if (k[0] > 1) == (num_texts > 1)}
            if num_texts == 1:
                related = next(iter(alike.values())).related if alike else []
                self.costs[kind] = CostModel(
                    self.prior, FIRST_ROWS, depth, self.has_experts, related
                )
            else:
                costs = [
                    (m, self.prior(m * num_texts) / self.prior(num_texts)) for m in (1, *WIDTHS)
                ]
                # the first passes over several texts are narrow: all of them pay for a wide one
                self.costs[kind] = CostModel(Curve(tuple(costs)), 2, 0, self.has_experts)
                if alike:
                    nearest = min(alike, key=lambda k: (abs(k[0] - num_texts), abs(k[1] - depth)))
                    self.costs[kind].restore(alike[nearest].ratios, alike[nearest].copied)
        return self.costs[kind]

    def of(self, key: str, look_up: bool = False) -> Learned:
        """State of the drafter with a key; goes on learning."""
        if key not in self.drafters:
            self.drafters[key] = Learned(Chances.of("look-up" if look_up else "model"))
        return self.drafters[key]

    def save(self, path: Path | str) -> None:
        """Write as JSON, all but seconds and costs of several texts; whole or not at all."""
        alone = {depth: model for (num, depth), model in self.costs.items() if num == 1}
        costs = {depth: as_lists(model.ratios) for depth, model in alone.items()}
        copied = {depth: as_lists(model.copied) for depth, model in alone.items()}
        drafters = {key: learned.saved() for key, learned in self.drafters.items()}
        saved = SavedTuning(costs, drafters, copied if self.has_experts else None)
        with replacing(Path(path)) as part:
            part.write_bytes(msgspec.json.encode(saved))

    @classmethod
    def load(cls, path: Path | str, model: nn.Module | None = None) -> Tuning:
        """Read what `save` wrote, for a model. ValueError names what is wrong in another file."""
        try:
            saved = parse(read_text(path), SavedTuning)
        except ValueError as error:
            raise ValueError(f"{path} is not a saved Tuning ({error}). Delete it.") from error
        tuning = (
            cls(has_experts=saved.copied is not None) if model is None else cls.for_model(model)
        )
        for depth in saved.costs:
            copied = (saved.copied or {}).get(depth, {})
            tuning._cost_model(1, depth).restore(saved.costs[depth], copied)
        for key, learned in saved.drafters.items():
            tuning.of(key).restore(learned)
        return tuning


def as_lists(samples: Samples) -> dict[int, list[float]]:
    """The samples as JSON has them."""
    return {rows: list(costs) for rows, costs in samples.items()}


tuning_for = PerModel(Tuning.for_model)
"""The tuning that is kept with a loaded model for as long as the model lives."""


@contextmanager
def kept_tuning(model: nn.Module, name: str, adapter: str | None = None) -> Iterator[None]:
    """Begin with what earlier commands learned about a model here; keep what this one learns."""
    if mx.distributed.init().rank() > 0:  # the first one decides for all
        yield
        return
    path, source = tuning_path(name, adapter), "specdec-mlx: draft_length=auto"
    try:
        if path.exists():
            tuning_for.put(Tuning.load(path, model), model)
    except (OSError, ValueError) as error:
        print(f"{source} starts to learn anew: {error}", file=sys.stderr)
    try:
        yield
    finally:
        try:
            tuning_for(model).save(path)
        except OSError as error:
            print(f"{source} cannot keep what was learned: {error}", file=sys.stderr)


def tuning_path(name: str, adapter: str | None = None) -> Path:
    """File of the tuning of a model: one for each model, adapter, machine, MLX and ranks."""
    given = [Path(one).expanduser() for one in (name, adapter) if one is not None]
    parts = [str(path.resolve() if path.exists() else path) for path in given]
    parts += [platform.node(), version("mlx"), str(mx.distributed.init().size())]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", given[0].name) or "model"
    return cache_root() / "tuning" / f"{readable}-{digest}.json"
