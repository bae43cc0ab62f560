"""Learned costs and chances of a loaded model and its drafters, kept between calls and on disk."""

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
    copied_prior_for,
    has_experts,
    prior_for,
)
from specdec_mlx.files import cache_root, parse, read_text, replacing
from specdec_mlx.kernels.contract import Kernels
from specdec_mlx.models.loading import PerModel

BUDGET = 2.0  # of a drafter that costs time, in plain rounds; gains at most double it
EXPLORATION = 0.01  # extra share of the time for trying drafters
SHORT_CONTEXT = 2048  # positions of the first class of contexts; each doubling is a class


@dataclass
class Account:
    """Time that a drafter may lose, in plain rounds.

    Attributes:
        budget: time left.
        right: share of recent drafts whose first token was right.
    """

    budget: float = BUDGET
    right: float = 0.45

    def add(self, amount: float = EXPLORATION) -> None:
        """Add a gain or a loss, by default a round's share of the time."""
        self.budget = min(max(-BUDGET, self.budget + amount), 2 * BUDGET)


Number = Annotated[float, Meta(ge=-1e9, le=1e9)]
Ratio = Annotated[float, Meta(gt=0, le=1e9)]
Weight = Annotated[list[Number], Meta(min_length=2, max_length=2)]
Weights = Annotated[list[Weight], Meta(min_length=NUM_WEIGHTS, max_length=NUM_WEIGHTS)]


SavedCosts = dict[Annotated[int, Meta(ge=0, le=64)], dict[int, list[Ratio]]]


class SavedDrafter(Struct, forbid_unknown_fields=True):
    """State of one drafter in a file.

    Attributes:
        weights: weights of `Chances`, for drafted tokens and for unseen tokens.
        steps: measurements of `Steps`, for first and later tokens.
        budget: budget of `Account`.
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
    """Learned state of one drafter on one model.

    Attributes:
        chances: chances of drafted tokens.
        unseen: chances of tokens that are not drafted yet.
        steps: costs of drafting.
        account: time that the drafter may lose.
    """

    chances: Chances
    unseen: Chances = field(default_factory=lambda: Chances.of("unseen"))
    steps: Steps = field(default_factory=Steps)
    account: Account = field(default_factory=Account)

    def begin_text(self) -> None:
        self.chances.decay()
        self.unseen.decay()

    def saved(self) -> SavedDrafter:
        """The state to save. The tokens of texts are left out."""
        steps = list(self.steps.first), list(self.steps.further)
        return SavedDrafter((self.chances.weights, self.unseen.weights), steps, self.account.budget)

    def restore(self, saved: SavedDrafter) -> None:
        self.chances.weights, self.unseen.weights = saved.weights
        self.account.budget = saved.budget
        self.steps.first.extend(saved.steps[0])
        self.steps.further.extend(saved.steps[1])


@dataclass
class Tuning:
    """What `num_draft_tokens="auto"` has learned for one loaded model, from any number of texts.

    prior: costs before anything is measured. copied_prior: those of copied rows, None for the same.
    costs: (texts in a pass, class of context length) -> costs of passes. drafters: by their keys.
    has_experts: passes over copied rows have costs of their own.
    """

    prior: Curve = MILDEST
    copied_prior: Curve | None = None
    has_experts: bool = False
    costs: dict[tuple[int, int], CostModel] = field(default_factory=dict)
    drafters: dict[str, Learned] = field(default_factory=dict)

    @classmethod
    def for_model(cls, model: nn.Module, kernels: Kernels | None = None) -> Tuning:
        """A tuning without measurements, with a prior for the machine and the kind of model."""
        name = kernels.name if kernels else ""
        return cls(prior_for(model, name), copied_prior_for(model), has_experts(model))

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
                    self.prior, FIRST_ROWS, depth, self.has_experts, related, self.copied_prior
                )
            else:
                costs = [
                    (m, self.prior(m * num_texts) / self.prior(num_texts)) for m in (1, *WIDTHS)
                ]
                # The first passes over several texts are narrow, because all texts pay for a wide
                # pass.
                self.costs[kind] = CostModel(Curve(tuple(costs)), 2, 0, self.has_experts)
                if alike:
                    # Costs of nearly as many texts at nearly the same depth are the best first
                    # guess.
                    nearest = min(alike, key=lambda k: (abs(k[0] - num_texts), abs(k[1] - depth)))
                    self.costs[kind].restore(alike[nearest].ratios, alike[nearest].copied)
        return self.costs[kind]

    def of(self, key: str, look_up: bool = False) -> Learned:
        """State of the drafter with a key. The caller keeps learning in it."""
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
    def load(
        cls, path: Path | str, model: nn.Module | None = None, kernels: Kernels | None = None
    ) -> Tuning:
        """Read a file of `save` for a model and kernels. Raises ValueError for any other file."""
        try:
            saved = parse(read_text(path), SavedTuning)
        except ValueError as error:
            raise ValueError(f"{path} is not a saved Tuning ({error}). Delete it.") from error
        tuning = (
            cls(has_experts=saved.copied is not None)
            if model is None
            else cls.for_model(model, kernels)
        )
        for depth in saved.costs:
            copied = (saved.copied or {}).get(depth, {})
            tuning._cost_model(1, depth).restore(saved.costs[depth], copied)
        for key, learned in saved.drafters.items():
            tuning.of(key).restore(learned)
        return tuning


def as_lists(samples: Samples) -> dict[int, list[float]]:
    return {rows: list(costs) for rows, costs in samples.items()}


tuning_for = PerModel(Tuning.for_model)
"""The tuning of a loaded model, which lives as long as the model."""

_with_kernels: PerModel[dict[str, Tuning]] = PerModel(lambda model: {})


def tuning_with(model: nn.Module, kernels: Kernels | None) -> Tuning:
    """The tuning of a loaded model whose passes over several rows use these kernels."""
    if kernels is None:
        return tuning_for(model)
    tunings = _with_kernels(model)
    if kernels.name not in tunings:
        tunings[kernels.name] = Tuning.for_model(model, kernels)
    return tunings[kernels.name]


@contextmanager
def kept_tuning(
    model: nn.Module, name: str, adapter: str | None = None, kernels: Kernels | None = None
) -> Iterator[None]:
    """Load the saved tuning of a model, and save it again at the end."""
    if mx.distributed.init().rank() > 0:  # the first rank decides for all ranks
        yield
        return
    path, source = tuning_path(name, adapter, kernels), "specdec-mlx: num_draft_tokens=auto"
    try:
        if path.exists():
            loaded = Tuning.load(path, model, kernels)
            if kernels is None:
                tuning_for.put(loaded, model)
            else:
                _with_kernels(model)[kernels.name] = loaded
    except (OSError, ValueError) as error:
        print(f"{source} starts to learn anew: {error}", file=sys.stderr)
    try:
        yield
    finally:
        try:
            tuning_with(model, kernels).save(path)
        except OSError as error:
            print(f"{source} cannot keep what was learned: {error}", file=sys.stderr)


def tuning_path(name: str, adapter: str | None = None, kernels: Kernels | None = None) -> Path:
    """File of the tuning of a model, adapter and kernels, on this machine and MLX version."""
    paths = [Path(part).expanduser() for part in (name, adapter) if part is not None]
    parts = [str(path.resolve() if path.exists() else path) for path in paths]
    # Costs differ between machines and MLX versions.
    parts += [platform.node(), version("mlx"), str(mx.distributed.init().size())]
    parts += [kernels.name] if kernels else []
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", paths[0].name) or "model"
    return cache_root() / "tuning" / f"{readable}-{digest}.json"
