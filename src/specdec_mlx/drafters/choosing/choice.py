"""From what a user gives to a drafter: the one place that decides who drafts.

A user gives a drafter, the name of one with options, a loaded model, or the folder or Hugging Face
repository of a model or of a trained head. Several of them compete for each draft. A draft model
that is given besides competes with them, unless one of the drafters is made of it, as "model" and
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
from specdec_mlx.drafters.lighter import first_layers
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
    """A loaded model, or the folder or Hugging Face repository of a model or of a trained head.

    A model that is named is loaded once. layers: draft with its first layers only.
    """

    name: Any = None
    layers: int | None = None

    @property
    def flags(self) -> dict[str, str]:
        """What makes it lighter, by the flag that asks for it."""
        return {} if self.layers is None else {"--draft-layers": str(self.layers)}

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

    def make(self, spec: str = MODEL_DRAFTER, target: nn.Module | None = None) -> Drafter | None:
        """The drafter of a name that stands for this model, for a target, which a head needs.

        Raises ValueError as `make_drafter`, and ModelFolderError, HeadError and DraftModelError for
        what the name or a flag cannot be.
        """
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
        is_alone = name_in(spec) == MODEL_DRAFTER
        head = named_head(spec if is_alone else MODEL_DRAFTER, self.name, target)
        return head if is_alone else make_drafter(spec, draft_model=head)


@dataclass(frozen=True)
class DrafterChoice:
    """A user's choice of what drafts.

    drafters: what competes; ("auto",) is the default, () is none. model: a draft model besides.
    memory: for the drafters that take one. learner: (target, spec) -> the drafter of a model that
    learns on; None: it does not.
    """

    drafters: Sequence[Any] = (DEFAULT_DRAFTER,)
    model: DraftModel = field(default_factory=DraftModel)
    memory: Memory | None = None
    learner: Callable[[nn.Module | None, str], Drafter] | None = None

    @property
    def ordered(self) -> list[Any]:
        """All that draft, the draft model the last unless it is named among them."""
        given = [one for one in self.drafters if one is not None and one != NO_DRAFTER]
        return given if self.model.name is None or self.names_model else [*given, MODEL_DRAFTER]

    @property
    def names_model(self) -> bool:
        """True if one of the drafters is made of the draft model."""
        return any(isinstance(one, str) and takes_model(name_in(one)) for one in self.drafters)

    @property
    def waits_for_target(self) -> bool:
        """True if one of the models may be a trained head, which is made for a target."""
        return self.model.is_head or any(map(is_place_of_model, self.drafters))

    def resolve(self, target: nn.Module | None = None) -> Drafter | None:
        """The drafter, for a target, which trained heads need; None for plain decoding."""
        return best_of([self.make(one, target) for one in self.ordered])

    def make(
        self, one: Any, target: nn.Module | None = None, memory: Memory | None = None
    ) -> Drafter | None:
        """One of the drafters; memory: in place of the choice's own."""
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
        """The choice of each named drafter alone, as benchmarks compare them, around one model."""
        # where a name stands for it
        others = DraftModel() if self.names_model else self.model
        return {
            spec: replace(
                self, drafters=(spec,), model=self.model if takes_model(name_in(spec)) else others
            )
            for spec in self.drafters
            if isinstance(spec, str)
        }


def best_of(drafters: Iterable[Drafter | None]) -> Drafter | None:
    """The drafters as one, for each draft of which they compete; None if there is none."""
    some = [drafter for drafter in drafters if drafter is not None]
    return BestOf(*some) if len(some) > 1 else next(iter(some), None)


def is_place_of_model(one: Any) -> bool:
    """True for the folder or repository of a model or a head, False for a drafter's name."""
    is_name = isinstance(one, str) and name_in(one) in drafter_names()
    return isinstance(one, str | Path) and not is_name and is_place(str(one))


def waits_for_model(one: Any) -> bool:
    """True for a drafter that is made of a model, by the name of the drafter or of the model."""
    return isinstance(one, str) and (takes_model(name_in(one)) or is_place_of_model(one))


def resolve(
    drafter: Any, draft_model: Any = None, target: nn.Module | None = None, tokenizer: Any = None
) -> Drafter | None:
    """The drafter that Python's two arguments name; None for plain decoding.

    Args:
        drafter: a drafter, the name of one with options, a loaded model, the folder or Hugging Face
            repository of a model or of a head, or a list of these, which compete.
        draft_model: a loaded model, which competes with them; "auto" for what is found here for the
            model that the tokenizer was loaded with, see `candidates.choose_for`.
        target: the model to draft for, which heads need.
        tokenizer: the target's.

    Raises:
        UnknownNameError: no drafter has this name, and it is no place of a model.
        ModelFolderError, HeadError: a model is not there, or a head does not fit the target.
        ValueError: for anything else.
    """
    place, log = getattr(tokenizer, "name_or_path", ""), logging.getLogger(__name__)
    if isinstance(draft_model, str | Path) and name_in(str(draft_model)) != AUTO:
        instead = f"a loaded model. To draft with what is there, give drafter={str(draft_model)!r}"
        raise argument_error("draft_model", draft_model, instead)
    if not isinstance(draft_model, nn.Module | str | None):
        instead = "a loaded model: of mlx_lm.load(...) the first. A drafter is given as drafter="
        raise argument_error("draft_model", draft_model, instead)
    drafters = drafter if isinstance(drafter, list) else [drafter]
    model = DraftModel(found_for(place, draft_model, log.warning))
    return DrafterChoice(drafters, model).resolve(target)


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


def named_model(arguments: argparse.Namespace) -> DraftModel:
    """The draft model of a command's flags; DraftModelError where none is named to be lightened.

    `--draft-model auto` becomes the name of what was found.
    """
    target, say = getattr(arguments, "model", None), partial(print, file=sys.stderr)
    arguments.draft_model = found_for(target, arguments.draft_model, say)
    model = DraftModel(arguments.draft_model, arguments.draft_layers)
    if model.flags and not arguments.draft_model:
        raise DraftModelError(f"{', '.join(model.flags)}: give --draft-model MODEL as well.")
    return model


def choice_of(arguments: argparse.Namespace) -> DrafterChoice:
    """The choice of a command's --drafter, which may be repeated, and --draft-model."""
    return DrafterChoice(arguments.drafter or (DEFAULT_DRAFTER,), named_model(arguments))
