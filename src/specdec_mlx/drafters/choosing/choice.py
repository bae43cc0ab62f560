"""Turns the user's choice of drafters and draft models into one drafter.

A user gives a drafter, the name of one with options, a loaded model, or the folder or Hugging Face
repository of a model or of a trained head. Several of them compete for each draft. A draft model
that is given as well competes with them, unless one of the drafters is made of it, as "model" and
"cascade" are.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.arguments import AUTO, argument_error, is_place, make_with, name_in, split_spec
from specdec_mlx.arguments import add_lighter_arguments as add_lighter_arguments
from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.choosing.registry import (
    DEFAULT_DRAFTER,
    MODEL_DRAFTER,
    NO_DRAFTER,
    drafter_names,
    make_drafter,
    takes,
    takes_model,
)
from specdec_mlx.drafters.first_of import BestOf
from specdec_mlx.drafters.heads.loading import is_head, named_head
from specdec_mlx.drafters.reduced_models import first_layers
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.duck_typed import as_drafter
from specdec_mlx.errors import DraftModelError, HeadError
from specdec_mlx.memory.store import Memory
from specdec_mlx.models.loading import load_model

AnyDrafter = Drafter | nn.Module | str | Path | list[Any] | None
"""What `drafter=` takes: a drafter, the name of one, a loaded model, the folder or repository of a
model or of a head, or a list of these; None for plain decoding."""


@dataclass
class DraftModel:
    """A draft model or a trained head, which is loaded once.

    Attributes:
        name: a loaded model, or the folder or Hugging Face repository of a model or a head.
        layers: draft with this number of the model's first layers.
        vocab: `draft_vocab` of its drafters, unless their options name it.
    """

    name: Any = None
    layers: int | None = None
    vocab: int | str | None = None

    @property
    def flags(self) -> dict[str, str]:
        values = {"--draft-layers": self.layers, "--draft-vocab": self.vocab}
        return {flag: str(value) for flag, value in values.items() if value is not None}

    @cached_property
    def is_head(self) -> bool:
        return isinstance(self.name, str | Path) and is_head(self.name)

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The draft model and its tokenizer, or None where unknown. A head has no model."""
        if self.is_head or not isinstance(self.name, str | Path):
            return (None if self.is_head else self.name), None
        model, tokenizer = load_model(self.name)
        if self.layers is not None:
            model = first_layers(model, self.layers)
            mx.eval(model.parameters())
        return model, tokenizer

    def forget(self) -> None:
        """Free a model that was loaded by its name. The next use loads it again."""
        if isinstance(self.name, str | Path):
            self.__dict__.pop("pair", None)

    def make(self, spec: str = MODEL_DRAFTER, target: nn.Module | None = None) -> Drafter | None:
        """Make the drafter of a name, such as "model", with this model.

        Args:
            spec: name of a drafter, with options.
            target: the loaded target, which a head needs.

        Raises:
            ModelFolderError: the model cannot be found.
            HeadError: the head cannot be loaded, or there is no target.
            DraftModelError: an option does not fit this kind of model.
            ValueError: as in `make_drafter`.
        """
        if self.vocab is not None and "draft_vocab" not in split_spec(spec)[1]:
            spec += f"{',' if ':' in spec else ':'}draft_vocab={self.vocab}"
        if not self.is_head:
            model, tokenizer = self.pair
            return make_drafter(spec, draft_model=model, draft_tokenizer=tokenizer)
        if target is None:
            raise HeadError(
                f"{self.name} is made for a loaded target, which is not known here. Load it with "
                "load_head(path, target)."
            )
        if self.layers is not None:
            raise DraftModelError(
                "--draft-layers: --draft-model is a trained head, which has no layers to leave "
                "out. Leave the flag out."
            )
        # A name such as "cascade" takes the head as its part.
        is_alone = name_in(spec) == MODEL_DRAFTER
        head = named_head(spec if is_alone else MODEL_DRAFTER, self.name, target)
        return head if is_alone else make_drafter(spec, draft_model=head)


@dataclass(frozen=True)
class DrafterChoice:
    """A user's choice of drafters.

    Attributes:
        drafters: the drafters, which compete. ("auto",) is the default, and () is plain decoding.
        model: a draft model, which competes with them.
        memory: for the drafters that take one.
        learner: makes a drafter that keeps learning, from a target and a spec, or None.
    """

    drafters: Sequence[Any] = (DEFAULT_DRAFTER,)
    model: DraftModel = field(default_factory=DraftModel)
    memory: Memory | None = None
    learner: Callable[[nn.Module | None, str], Drafter] | None = None

    @property
    def ordered(self) -> list[Any]:
        chosen = [one for one in self.drafters if one is not None and one != NO_DRAFTER]
        return chosen if self.model.name is None or self.names_model else [*chosen, MODEL_DRAFTER]

    @property
    def names_model(self) -> bool:
        return any(isinstance(one, str) and takes_model(name_in(one)) for one in self.drafters)

    @property
    def waits_for_target(self) -> bool:
        """True if one of the models may be a head, which needs a loaded target."""
        return self.model.is_head or any(map(is_place_of_model, self.drafters))

    def resolve(self, target: nn.Module | None = None) -> Drafter | None:
        return best_of([self.make(one, target) for one in self.ordered])

    def make(
        self, one: Any, target: nn.Module | None = None, memory: Memory | None = None
    ) -> Drafter | None:
        """Make one of the drafters. `memory` replaces the choice's own."""
        memory = self.memory if memory is None else memory
        if one == DEFAULT_DRAFTER:
            return SuffixDrafter(memory)
        if isinstance(one, nn.Module | Path) or (isinstance(one, str) and is_place_of_model(one)):
            return DraftModel(one).make(target=target)
        if not isinstance(one, str):
            drafter: Drafter = one if isinstance(one, Drafter) else as_drafter(one)
            return drafter
        if not takes_model(name := name_in(one)):
            takes_it = memory is not None and takes(name, "memory")
            return make_drafter(one, memory=memory) if takes_it else make_drafter(one)
        return self.learner(target, one) if self.learner else self.model.make(one, target)

    def each(self) -> dict[str, DrafterChoice]:
        """A choice for each named drafter, as benchmarks compare them, around one model."""
        # If a name stands for the draft model, the other names are compared without it.
        others = DraftModel() if self.names_model else self.model
        return {
            spec: replace(
                self, drafters=(spec,), model=self.model if takes_model(name_in(spec)) else others
            )
            for spec in self.drafters
            if isinstance(spec, str)
        }


def best_of(drafters: Iterable[Drafter | None]) -> Drafter | None:
    """One drafter in which these compete, or None if there are none."""
    present = [drafter for drafter in drafters if drafter is not None]
    return BestOf(*present) if len(present) > 1 else next(iter(present), None)


def is_place_of_model(one: Any) -> bool:
    """True for the folder or repository of a model, False for a drafter's name."""
    is_name = isinstance(one, str) and name_in(one) in drafter_names()
    return isinstance(one, str | Path) and not is_name and is_place(str(one))


def waits_for_model(one: Any) -> bool:
    """True for a drafter that needs a model, by the name of the drafter or of the model."""
    return isinstance(one, str) and (takes_model(name_in(one)) or is_place_of_model(one))


def resolve(
    drafter: Any, draft_model: Any = None, target: nn.Module | None = None, tokenizer: Any = None
) -> Drafter | None:
    """The drafter for Python's arguments `drafter` and `draft_model`, or None for plain decoding.

    Args:
        drafter: a drafter, the name of a drafter with options, a loaded model, the folder or
            Hugging Face repository of a model or of a head, or a list of these, which compete.
        draft_model: a loaded model, which competes with them. "auto" stands for a model on this
            machine (see `candidates.choose_for`) that fits the model of the tokenizer.
        target: the model to draft for, which heads need.
        tokenizer: the target's tokenizer.

    Raises:
        UnknownNameError: no drafter has this name, and it is no place of a model.
        ModelFolderError: a model is not there.
        HeadError: a head does not fit the target.
        ValueError: another value is wrong.
    """
    place, log = getattr(tokenizer, "name_or_path", ""), logging.getLogger(__name__)
    if isinstance(draft_model, str | Path) and name_in(str(draft_model)) != AUTO:
        instead = f"a loaded model. To draft with what is there, give drafter={str(draft_model)!r}"
        raise argument_error("draft_model", draft_model, instead)
    if not isinstance(draft_model, nn.Module | str | None):
        instead = "a loaded model: of mlx_lm.load(...) the first. A drafter is given as drafter="
        raise argument_error("draft_model", draft_model, instead)
    drafters = drafter if isinstance(drafter, list) else [drafter]
    model = DraftModel(resolve_auto(place, draft_model, log.warning))
    return DrafterChoice(drafters, model).resolve(target)


def resolve_auto(model: str | None, draft_model: Any, say: Callable[[str], object]) -> Any:
    """The draft model, or the model that "auto" stands for, or None if nothing fits.

    Args:
        model: name or folder of the target.
        draft_model: the user's draft model, or "auto" with options.
        say: called with each reason for the choice.

    Raises:
        ModelFolderError: the target is not here.
        ValueError: the target has no name, or an option is unknown.
    """
    if not isinstance(draft_model, str) or name_in(draft_model) != AUTO:
        return draft_model
    from specdec_mlx.drafters.choosing.candidates import choose_for

    if not model:
        raise ValueError(f"Draft model {AUTO!r}: the target has no name. Name a draft model.")
    choice = make_with("draft model", AUTO, partial(choose_for, model), split_spec(draft_model)[1])
    for line in choice.lines:
        say(f"specdec_mlx: {line}")
    return choice.place


def named_model(arguments: argparse.Namespace) -> DraftModel:
    """The draft model of a command's flags. "auto" in the flags is replaced by the model's name.

    Raises DraftModelError for options of a draft model without a draft model.
    """
    target, say = getattr(arguments, "model", None), partial(print, file=sys.stderr)
    arguments.draft_model = resolve_auto(target, arguments.draft_model, say)
    model = DraftModel(arguments.draft_model, arguments.draft_layers, arguments.draft_vocab)
    if model.flags and not arguments.draft_model:
        raise DraftModelError(f"{', '.join(model.flags)}: give --draft-model MODEL as well.")
    return model


def choice_of(arguments: argparse.Namespace) -> DrafterChoice:
    return DrafterChoice(arguments.drafter or (DEFAULT_DRAFTER,), named_model(arguments))
