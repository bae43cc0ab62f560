"""From what a user gives to a drafter: the one place that decides who drafts.

The rule, in Python and in every command: a draft model competes with look-up for each draft. A
drafter that is named is asked before the model instead; where a named one takes the model itself,
as "model" does, the names are all that drafts.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.arguments import add_lighter_arguments as add_lighter_arguments
from specdec_mlx.arguments import make_with, name_in, split_spec
from specdec_mlx.contracts import Drafter, check_is_drafter
from specdec_mlx.drafters.choosing.registry import (
    DEFAULT_DRAFTER,
    MODEL_DRAFTER,
    NO_DRAFTER,
    drafter_names,
    first_of,
    make_drafter,
    takes,
    takes_model,
)
from specdec_mlx.drafters.first_of import BestOf, FirstOf
from specdec_mlx.drafters.heads.loading import is_head, named_head
from specdec_mlx.drafters.lighter import first_layers
from specdec_mlx.errors import DraftModelError, HeadError
from specdec_mlx.memory.store import Memory
from specdec_mlx.models.loading import load_model

AUTO = "auto"

Named = Any
"""A drafter, or the name of one with options, "ngram:max_order=3"; what else is given is refused
where it is made, with a sentence."""


@dataclass
class NamedModel:
    """A draft model, the folder or name of one or of a trained head, or what else drafts.

    A model that is named is loaded once. layers: draft with its first ones only.
    """

    name: Any = None
    layers: int | None = None

    @property
    def flags(self) -> dict[str, str]:
        """What makes it lighter, by the flag that asks for it."""
        return {} if self.layers is None else {"--draft-layers": str(self.layers)}

    @property
    def drafter(self) -> Named:
        """What stands for it among the drafters: a drafter for itself, a model by a name."""
        is_name = isinstance(self.name, str) and name_in(self.name) in drafter_names()
        is_model = isinstance(self.name, str | Path | nn.Module) and not is_name
        return MODEL_DRAFTER if is_model else self.name

    @cached_property
    def is_head(self) -> bool:
        """True for a trained head."""
        return isinstance(self.name, str | Path) and is_head(self.name)

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The draft model and its tokenizer, None where it is not known; no model for a head."""
        if self.is_head or not isinstance(self.name, str | Path):
            return (None if self.is_head else self.name), None
        model, tokenizer = load_model(self.name)
        if self.layers is not None:
            model = first_layers(model, self.layers)
            mx.eval(model.parameters())
        return model, tokenizer

    def forget(self) -> None:
        """Free a model that was loaded by its name; it is loaded again when it is asked for."""
        if isinstance(self.name, str | Path):
            self.__dict__.pop("pair", None)

    def make(self, spec: str, target: nn.Module | None = None) -> Drafter | None:
        """The drafter of a name that stands for this model, for a target, which a head needs.

        Raises ValueError as `make_drafter`, and ModelFolderError, HeadError and DraftModelError for
        what the name or a flag cannot be.
        """
        if not self.is_head:
            model, tokenizer = self.pair
            if spec == MODEL_DRAFTER and isinstance(model, Drafter):
                return model
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
        is_alone = name_in(spec) == MODEL_DRAFTER
        head = named_head(spec if is_alone else MODEL_DRAFTER, self.name, target)
        return head if is_alone else make_drafter(spec, draft_model=head)


@dataclass(frozen=True)
class DrafterChoice:
    """A user's choice of what drafts.

    drafters: in order; ("auto",) is the default, () is none. model: a draft model besides. memory:
    for the drafters that take one. learner: (target, spec) -> the drafter of a model that learns
    on; None: it does not.
    """

    drafters: Sequence[Named] = (DEFAULT_DRAFTER,)
    model: NamedModel = field(default_factory=NamedModel)
    memory: Memory | None = None
    learner: Callable[[nn.Module | None, str], Drafter] | None = None

    @property
    def ordered(self) -> list[Named]:
        """All that draft, the draft model the last unless it is named among them."""
        given = [one for one in self.drafters if one != NO_DRAFTER]
        if self.model.name is not None and not self.names_model:
            given.append(self.model.drafter)
        return given

    @property
    def names_model(self) -> bool:
        """True if one of the drafters is made of the draft model."""
        return any(map(is_of_model, self.drafters))

    def resolve(self, target: nn.Module | None = None) -> Drafter | None:
        """The drafter, for a target, which trained heads need; None for plain decoding."""
        return self.combined([self.make(one, target) for one in self.ordered])

    def combined(self, parts: Sequence[Drafter | None]) -> Drafter | None:
        """The drafters of `ordered` as one: they compete if none but the default was named."""
        competes = list(self.drafters) == [DEFAULT_DRAFTER]
        return first_of(parts, BestOf if competes else FirstOf)

    def make(
        self, one: Named, target: nn.Module | None = None, memory: Memory | None = None
    ) -> Drafter | None:
        """One of the drafters; memory: in place of the choice's own."""
        if not isinstance(one, str):
            check_is_drafter(one)
            drafter: Drafter | None = one
            return drafter
        name, memory = name_in(one), self.memory if memory is None else memory
        if not takes_model(name):
            takes_it = memory is not None and takes(name, "memory")
            return make_drafter(one, memory=memory) if takes_it else make_drafter(one)
        return self.learner(target, one) if self.learner else self.model.make(one, target)

    def each(self) -> dict[str, DrafterChoice]:
        """The choice of each named drafter alone, as benchmarks compare them, around one model."""
        # where a name stands for it
        others = NamedModel() if self.names_model else self.model
        return {
            spec: replace(self, drafters=(spec,), model=self.model if is_of_model(spec) else others)
            for spec in self.drafters
            if isinstance(spec, str)
        }


def is_of_model(one: Named) -> bool:
    """True for the name of a drafter that is made of the draft model."""
    return isinstance(one, str) and takes_model(name_in(one))


def resolve(
    drafter: Any, draft_model: Any = None, target: nn.Module | None = None, tokenizer: Any = None
) -> Drafter | None:
    """The drafter that Python's two arguments name; None for plain decoding.

    draft_model: a model, the folder or Hugging Face name of one or of a trained head, or what
    `drafter` takes; "auto" for what fits the model that the tokenizer was loaded with, see
    `candidates.choose_for`. target: the model to draft for, which heads need. Raises
    UnknownNameError, ModelFolderError, HeadError for a head that does not fit the target, and
    ValueError for what is neither.
    """
    place, log = getattr(tokenizer, "name_or_path", ""), logging.getLogger(__name__)
    draft_model = found_for(place, draft_model, log.warning)
    given = () if drafter is None else (drafter,)
    return DrafterChoice(given, NamedModel(draft_model)).resolve(target)


def found_for(model: str | None, given: Any, say: Callable[[str], object]) -> Any:
    """What was given for a draft model; for "auto" what fits a model of this name or folder.

    `say` is told why; None where nothing fits. Raises ModelFolderError for a model that is not
    here, ValueError where none is named, or for an option of the spec that there is not.
    """
    if not isinstance(given, str) or name_in(given) != AUTO:
        return given
    from specdec_mlx.drafters.choosing.candidates import choose_for

    if not model:
        raise ValueError(f"Draft model {AUTO!r}: what it is for has no name. Name a draft model.")
    choice = make_with("draft model", AUTO, partial(choose_for, model), split_spec(given)[1])
    for line in choice.lines:
        say(f"specdec_mlx: {line}")
    return choice.found


def named_model(arguments: argparse.Namespace) -> NamedModel:
    """The draft model of a command's flags; DraftModelError where none is named to be lightened.

    `--draft-model auto` becomes the name of what was found.
    """
    target, say = getattr(arguments, "model", None), partial(print, file=sys.stderr)
    arguments.draft_model = found_for(target, arguments.draft_model, say)
    model = NamedModel(arguments.draft_model, arguments.draft_layers)
    if model.flags and not arguments.draft_model:
        raise DraftModelError(f"{', '.join(model.flags)}: give --draft-model MODEL as well.")
    return model


def choice_of(arguments: argparse.Namespace) -> DrafterChoice:
    """The choice of a command's --drafter, which may be repeated, and --draft-model."""
    return DrafterChoice(arguments.drafter or (DEFAULT_DRAFTER,), named_model(arguments))
