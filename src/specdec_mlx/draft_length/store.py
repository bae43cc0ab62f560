"""What was learned about a loaded model and its drafters, from call to call and on disk."""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.draft_length.chances import Chances, numbers
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

LONGEST_NAME = 64
"""Letters of a drafter's key that are kept as they are; longer ones are shortened by a digest."""


@dataclass
class Account:
    """What a drafter that costs time may still lose, in plain rounds.

    budget: what its rounds brought beyond what they cost, and a share of the time. above: that of
    all texts, for the account of one.
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
        """Book an amount; a loss beyond the budget is forgotten."""
        self.budget = min(max(0.0, self.budget + amount), LARGEST_BUDGET)
        if self.above is not None:
            self.above.add(amount)

    def earn(self) -> None:
        """Add a round's share of the time."""
        self.add(EXPLORATION)


@dataclass
class Learned:
    """What was learned about one drafter on one model.

    chances: of its tokens. Of one that costs time: later: of the token after one whose confidence
    is known; blind: by the place alone; steps: what drafting costs; account: what it may lose;
    shares: what the n-th node of its trees adds to the expected tokens.
    """

    chances: Chances
    later: Chances = field(default_factory=lambda: Chances.of("one token later"))
    blind: Chances = field(default_factory=lambda: Chances.of("model"))
    steps: Steps = field(default_factory=Steps)
    account: Account = field(default_factory=Account)
    shares: list[float] = field(default_factory=lambda: [0.8**n for n in range(1, 15)])

    def begin_text(self) -> None:
        """Doubt how predictable the last text was."""
        for chances in (self.chances, self.later, self.blind):
            chances.begin_text()

    def idle(self) -> None:
        """Let a round go by in which nothing was tried."""
        for chances in (self.chances, self.later, self.blind):
            chances.idle()

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
            "later": self.later.as_dict(),
            "blind": self.blind.as_dict(),
            "steps": [steps.price, steps.reading, *steps.measured],
            "budget": self.account.budget,
            "shares": self.shares,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what `as_dict` gave."""
        for name in ("chances", "later", "blind"):
            getattr(self, name).restore(saved[name])
        price, reading, *measured = saved["steps"]
        self.steps.price = None if price is None else finite([price])[0]
        self.steps.reading = None if reading is None else finite([reading])[0]
        self.steps.measured.extend(finite(measured))
        (self.account.budget,) = numbers([saved["budget"]], 1)
        self.shares = [max(share, 0.001) for share in numbers(saved["shares"], len(self.shares))]


@dataclass
class Tuning:
    """What was learned about one loaded model, for `draft_length="auto"`.

    prior: costs of passes that are believed at first. costs: by class of context length. batches:
    of passes over several texts. drafters: short form of a drafter's key -> what was learned with
    it. tokens, cost: what the latest rounds have brought, and cost in plain rounds; they end with
    the process. Pass the same object to several generations to go on learning; `save` and `load`
    keep it as JSON.
    """

    prior: Curve = MILDEST
    costs: dict[int, Staircase] = field(default_factory=dict)
    batches: dict[int, Staircase] = field(default_factory=dict)
    drafters: dict[str, Learned] = field(default_factory=dict)
    tokens: float = 0.0
    cost: float = 0.0

    @classmethod
    def for_model(cls, model: nn.Module) -> Tuning:
        """Nothing learned yet, with a prior for the machine and the kind of model."""
        prior = prior_for(model)
        return cls(prior)

    def stairs(self, context: int) -> Staircase:
        """Costs at a context length; at first, those of the next shorter class.

        Its plain rounds are measured anew in any case.
        """
        kind = (context // SHORT_CONTEXT).bit_length()
        if kind not in self.costs:
            shorter = [k for k in self.costs if k < kind]
            known = copy.deepcopy(self.costs[max(shorter)].ratios) if shorter else {}
            self.costs[kind] = Staircase(self.prior, ratios=known)
        return self.costs[kind]

    def batch_stairs(self, num_rows: int) -> Staircase:
        """Costs of passes over so many texts by the rows of each; at first, those of the nearest number."""
        if num_rows not in self.batches:
            prior, known = self.prior, {}
            if self.batches:
                nearest = min(self.batches, key=lambda n: abs(n - num_rows))
                known = copy.deepcopy(self.batches[nearest].ratios)
            points = tuple((m, prior(m * num_rows) / prior(num_rows)) for m in (1, *WIDTHS))
            self.batches[num_rows] = Staircase(Curve(points), ratios=known)
        return self.batches[num_rows]

    def of(self, key: str, look_up: bool = False) -> Learned:
        """What was learned with a drafter; the same object, which goes on learning, for a key."""
        name = short_name(key)
        if name not in self.drafters:
            self.drafters[name] = Learned(Chances.of("look-up" if look_up else "confidence"))
        return self.drafters[name]

    def as_dict(self) -> dict[str, Any]:
        """All that was learned, ready for JSON."""
        return {
            "costs": {str(kind): stairs.as_dict() for kind, stairs in self.costs.items()},
            "drafters": {name: learned.as_dict() for name, learned in self.drafters.items()},
        }

    def save(self, path: Path | str) -> None:
        """Write as JSON; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(self.as_dict(), indent=1))
        part.replace(path)

    @classmethod
    def load(cls, path: Path | str, prior: Curve = MILDEST) -> Tuning:
        """Read what `save` wrote. Raises ValueError for another kind of file."""
        tuning = cls(prior)
        try:
            saved = json.loads(Path(path).read_text())
            for kind, stairs in saved["costs"].items():
                tuning.costs[int(kind)] = Staircase(prior)
                tuning.costs[int(kind)].restore(stairs)
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
