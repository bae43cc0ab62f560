"""What was learned about a loaded model and its drafters, from call to call and on disk."""

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

FIRST_BUDGET = 2.0
"""What a drafter that costs time may lose at first, and in each text, in plain rounds."""

EXPLORATION = 0.01
"""Share of the time that finding out may take, besides."""

LARGEST_BUDGET = 20.0
"""Most that gains add up to: what a good drafter may lose when texts turn, over all of them."""

SHORT_CONTEXT = 2048
"""Positions below which all contexts are of one class; then a class for each doubling."""

IDLE_DOUBT = 0.15
"""Share by which recent acceptance moves to 0.5 in a round in which nothing was tried."""

LONGEST_NAME = 64
"""Letters of a drafter's key that are kept as they are; longer ones are shortened by a digest."""


@dataclass
class Account:
    """What a drafter that costs time may still lose, in plain rounds.

    budget: what its rounds brought beyond what they cost, and a share of the time; below 0 where
    more was lost than expected. above: that of all texts, for the account of one.
    """

    budget: float = FIRST_BUDGET
    above: Account | None = None

    def of_text(self) -> Account:
        """The account of one text, within this one."""
        return Account(above=self)

    def stands(self, loss: float) -> bool:
        """True if a loss can be borne."""
        return loss <= self.budget and (self.above is None or self.above.stands(loss))

    def add(self, amount: float) -> None:
        """Book what a round brought beyond its cost."""
        self.budget = min(max(-FIRST_BUDGET, self.budget + amount), LARGEST_BUDGET)
        if self.above is not None:
            self.above.add(amount)

    def earn(self) -> None:
        """Add a round's share of the time."""
        self.add(EXPLORATION)


@dataclass
class Learned:
    """What was learned about one drafter on one model.

    chances: of its tokens. Of one that costs time: unseen: of tokens that are not drafted yet, by
    their places; steps: cost of drafting; account: what it may lose; shares: what the n-th node of
    its trees adds to the expected tokens.
    """

    chances: Chances
    unseen: Chances = field(default_factory=lambda: Chances.of("unseen"))
    steps: Steps = field(default_factory=Steps)
    account: Account = field(default_factory=Account)
    shares: list[float] = field(default_factory=lambda: [0.8**n for n in range(1, 15)])

    def begin_text(self) -> None:
        """Doubt how predictable the last text was."""
        self.chances.doubt(0.5)
        self.unseen.doubt(0.5)

    def idle(self) -> None:
        """Let a round go by in which nothing was tried."""
        self.chances.doubt(IDLE_DOUBT)
        self.unseen.doubt(IDLE_DOUBT)

    def learn_shares(self, size: int, accepted: int) -> None:
        """Learn from a tree of `size` nodes of which so many were kept."""
        factor = 1 + (accepted / sum(self.shares[:size]) - 1) / 10
        most = 1.0
        for n, share in enumerate(self.shares):
            most = self.shares[n] = min(most, share * factor if n < size else share)

    def as_dict(self) -> dict[str, Any]:
        """All but what tokens were written, ready for JSON."""
        steps = self.steps
        return {
            "chances": self.chances.as_dict(),
            "unseen": self.unseen.as_dict(),
            "first": list(steps.first),
            "further": list(steps.further),
            "reading": [] if steps.reading is None else [steps.reading],
            "budget": self.account.budget,
            "shares": self.shares,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Take over what `as_dict` gave. Raises ValueError for anything else."""
        self.chances.restore(saved["chances"])
        self.unseen.restore(saved["unseen"])
        self.steps.first.extend(finite(saved["first"]))
        self.steps.further.extend(finite(saved["further"]))
        self.steps.reading = next(iter(finite(saved["reading"])), None)
        (self.account.budget,) = finite([saved["budget"]])
        self.shares = [max(share, 0.001) for share in finite(saved["shares"], len(self.shares))]


@dataclass
class Tuning:
    """What was learned about one loaded model, for `draft_length="auto"`.

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
            prior = self.prior if num_texts == 1 else Curve(tuple(points))
            self.costs[kind] = Staircase(prior)
            near = [k for k in self.costs if k != kind and (k[0] > 1) == (num_texts > 1)]
            if near:
                nearest = min(near, key=lambda k: (abs(k[0] - kind[0]), abs(k[1] - kind[1])))
                self.costs[kind].restore(self.costs[nearest].as_dict())
        return self.costs[kind]

    def of(self, key: str, look_up: bool = False) -> Learned:
        """What was learned with a drafter; the same object, which goes on learning, for a key."""
        name = short_name(key)
        if name not in self.drafters:
            self.drafters[name] = Learned(Chances.of("look-up" if look_up else "model"))
        return self.drafters[name]

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


def short_name(key: str) -> str:
    """A drafter's key, or where it is long, its class and a digest of it; the same in any process.

    A short name is its own short name.
    """
    if len(key) <= LONGEST_NAME:
        return key
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    kind = re.split(r"[^\w.]", key, maxsplit=1)[0].rpartition(".")[2]
    return f"{kind[: LONGEST_NAME - 13]}-{digest}"


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
        _warn(f"starts to learn anew: {error}")
    try:
        yield
    finally:
        try:
            tuning_for(model).save(path)
        except OSError as error:
            _warn(f"cannot keep what was learned: {error}")


def tuning_path(name: str, adapter: str | None = None) -> Path:
    """Where the tuning of a model is kept: a file for each model, machine, MLX and ranks.

    With an adapter a model is another one: it writes other texts, at other costs.
    """
    folder = Path(name).expanduser()
    name = _place(name)
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", folder.name) or "model"
    device = mx.device_info().get("device_name", platform.processor())
    num_ranks = mx.distributed.init().size()
    parts = [name, platform.node(), platform.machine(), str(device), version("mlx")]
    parts += [f"{num_ranks} ranks"] if num_ranks > 1 else []
    parts += [f"adapter {_place(adapter)}"] if adapter is not None else []
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    return cache_root() / "tuning" / f"{readable}-{digest}.json"


def _place(name: str) -> str:
    """A folder's place, however it is written; what is no folder stays a name."""
    folder = Path(name).expanduser()
    return str(folder.resolve()) if folder.exists() else name


def _warn(text: str) -> None:
    print(f"specdec-mlx: draft_length=auto {text}", file=sys.stderr)
