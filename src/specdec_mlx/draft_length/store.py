"""Learned state of a loaded model and its drafters, kept from call to call and on disk."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.draft_length.chips import MILDEST, WIDTHS, Curve, prior_for
from specdec_mlx.draft_length.costs import Staircase, Steps, finite
from specdec_mlx.folders import cache_root
from specdec_mlx.per_model import PerModel

BUDGET = 2.0
"""Initial budget of a drafter that costs time, in plain rounds; gains double it at most."""

EXPLORATION = 0.01
"""Share of the time that finding out may take, besides."""

SHORT_CONTEXT = 2048
"""Positions below which all contexts are of one class; then a class for each doubling."""


@dataclass
class Account:
    """Budget for trying a drafter, in plain rounds.

    budget: what rounds brought beyond their cost, and a share of the time; below 0 where more was
    lost than expected.
    """

    budget: float = BUDGET

    def stands(self, loss: float) -> bool:
        """True if a loss can be borne."""
        return loss <= self.budget

    def add(self, amount: float) -> None:
        """Book what a round brought beyond its cost."""
        self.budget = min(max(-BUDGET, self.budget + amount), 2 * BUDGET)

    def earn(self) -> None:
        """Add a round's share of the time."""
        self.add(EXPLORATION)


@dataclass
class Learned:
    """Learned state of one drafter on one model.

    chances: of its tokens. Of one that costs time: unseen: of tokens that are not drafted yet, by
    their places; steps: cost of drafting; account: what it may lose.
    """

    chances: Chances
    unseen: Chances = field(default_factory=lambda: Chances.of("unseen"))
    steps: Steps = field(default_factory=Steps)
    account: Account = field(default_factory=Account)

    def as_dict(self) -> dict[str, Any]:
        """All but what tokens were written, ready for JSON."""
        return {
            "chances": self.chances.as_dict(),
            "unseen": self.unseen.as_dict(),
            "steps": self.steps.as_dict(),
            "budget": self.account.budget,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave. Raises ValueError for anything else."""
        self.chances.restore(saved["chances"])
        self.unseen.restore(saved["unseen"])
        self.steps.restore(saved["steps"])
        (self.account.budget,) = finite([saved["budget"]])


@dataclass
class Tuning:
    """Learned state of one loaded model, for `draft_length="auto"`.

    Pass the same object to several generations to go on learning; `save` and `load` keep it as
    JSON.

    prior: costs of passes that are believed at first. costs: (texts in a pass, class of context
    length) -> costs of its passes. drafters: short form of a drafter's key -> what was learned with
    it. tokens, cost: what the latest rounds have brought, and their cost in plain rounds; they end
    with the process.
    """

    prior: Curve = MILDEST
    costs: dict[tuple[int, int], Staircase] = field(default_factory=dict)
    drafters: dict[str, Learned] = field(default_factory=dict)
    tokens: float = 0.0
    cost: float = 0.0

    @classmethod
    def for_model(cls, model: nn.Module) -> Tuning:
        """Nothing learned yet, with a prior for the machine and the kind of model."""
        return cls(prior_for(model))

    def stairs(self, context: int = 0, num_texts: int = 1) -> Staircase:
        """Costs at a context length, by the rows of each text; at first, those of the nearest.

        Plain rounds are measured anew in any case.
        """
        kind = num_texts, (context // SHORT_CONTEXT).bit_length()
        if kind not in self.costs:
            points = [(m, self.prior(m * num_texts) / self.prior(num_texts)) for m in (1, *WIDTHS)]
            self.costs[kind] = Staircase(self.prior)
            if num_texts > 1:
                self.costs[kind] = Staircase(Curve(tuple(points)), first_rows=2)
            near = [k for k in self.costs if k != kind and (k[0] > 1) == (num_texts > 1)]
            if near:
                nearest = min(near, key=lambda k: (abs(k[0] - kind[0]), abs(k[1] - kind[1])))
                self.costs[kind].restore(self.costs[nearest].as_dict())
        return self.costs[kind]

    def of(self, key: str, look_up: bool = False) -> Learned:
        """State of a drafter; the same object, which goes on learning, for a key."""
        if key not in self.drafters:
            self.drafters[key] = Learned(Chances.of("look-up" if look_up else "model"))
        return self.drafters[key]

    def save(self, path: Path | str) -> None:
        """Write as JSON; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        saved = {
            "costs": {kind: stairs.as_dict() for (n, kind), stairs in self.costs.items() if n == 1},
            "drafters": {name: learned.as_dict() for name, learned in self.drafters.items()},
        }
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(saved, indent=1))
        part.replace(path)

    @classmethod
    def load(cls, path: Path | str, prior: Curve = MILDEST) -> Tuning:
        """Read what `save` wrote. Raises ValueError for another kind of file."""
        tuning = cls(prior)
        try:
            saved = json.loads(Path(path).read_text())
            for kind, ratios in saved["costs"].items():
                tuning.costs[1, int(kind)] = Staircase(prior)
                tuning.costs[1, int(kind)].restore(ratios)
            for name, learned in saved["drafters"].items():
                tuning.of(name).restore(learned)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path} is not a saved Tuning ({error!r}). Delete it.") from error
        return tuning


tuning_for = PerModel(Tuning.for_model)
"""The tuning that is kept with a loaded model for as long as the model lives."""


@contextmanager
def kept_tuning(model: nn.Module, name: str, adapter: str | None = None) -> Iterator[None]:
    """Begin with what earlier commands learned about a model here; keep what this one learns.

    A file that cannot be read or written costs a line on standard error and nothing else. Of
    several ranks the first one reads and writes: it decides for all.

    Args:
        model: as it is loaded.
        name: its folder or Hugging Face name.
        adapter: folder of the adapter that it was loaded with, None for none.
    """
    if mx.distributed.init().rank() > 0:
        yield
        return
    path = tuning_path(name, adapter)
    try:
        if path.exists():
            tuning_for.put(model, Tuning.load(path, prior_for(model)))
    except (OSError, ValueError) as error:
        print(f"specdec-mlx: draft_length=auto starts to learn anew: {error}", file=sys.stderr)
    try:
        yield
    finally:
        try:
            tuning_for(model).save(path)
        except OSError as error:
            message = f"cannot keep what was learned: {error}"
            print(f"specdec-mlx: draft_length=auto {message}", file=sys.stderr)


def tuning_path(name: str, adapter: str | None = None) -> Path:
    """File of the tuning of a model: one for each model, adapter, machine, MLX and ranks."""
    folders = [Path(given).expanduser() for given in (name, adapter) if given is not None]
    parts = [str(folder.resolve()) if folder.exists() else str(folder) for folder in folders]
    parts += [platform.node(), str(mx.device_info().get("device_name", platform.processor()))]
    parts += [version("mlx"), str(mx.distributed.init().size())]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", folders[0].name) or "model"
    return cache_root() / "tuning" / f"{readable}-{digest}.json"
