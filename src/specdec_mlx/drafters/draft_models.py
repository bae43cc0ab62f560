"""From what a user names to a drafter: a name with options, a draft model, a trained head."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.contracts import Drafter
from specdec_mlx.drafters.first_of import BestOf
from specdec_mlx.drafters.heads.loading import is_head, load_head, named_head
from specdec_mlx.drafters.lighter import first_layers
from specdec_mlx.drafters.registry import (
    DEFAULT_DRAFTER,
    MODEL_DRAFTER,
    WITH_MODEL,
    drafter_names,
    first_of,
    make_drafter,
)
from specdec_mlx.errors import DraftModelError, HeadError
from specdec_mlx.models import load_model
from specdec_mlx.options import argument, make_with, positive_int, split_spec
from specdec_mlx.target.inputs import check_is_drafter

AUTO = "auto"


@dataclass(frozen=True)
class Lighter:
    """How to make a draft model lighter as it loads: its first layers; None: as it is."""

    layers: int | None = None

    @property
    def flags(self) -> dict[str, str]:
        """What was asked for, by the flag that asks for it."""
        return {} if self.layers is None else {"--draft-layers": str(self.layers)}

    def applied_to(self, model: nn.Module) -> nn.Module:
        """The lighter model, its weights computed; DraftModelError if it cannot be made so."""
        if self.layers is not None:
            model = first_layers(model, self.layers)
            mx.eval(model.parameters())
        return model


@dataclass
class NamedModel:
    """What Python's `draft_model=` or a command's --draft-model names; a model is loaded once."""

    name: str | Path | None = None
    lighter: Lighter = field(default_factory=Lighter)

    @cached_property
    def is_head(self) -> bool:
        """True for a trained head."""
        return self.name is not None and is_head(self.name)

    @cached_property
    def pair(self) -> tuple[nn.Module | None, Any]:
        """The draft model and its tokenizer; (None, None) for none, and for a head."""
        if self.name is None or self.is_head:
            return None, None
        model, tokenizer = load_model(self.name)
        return self.lighter.applied_to(model), tokenizer

    def make(self, spec: str, target: nn.Module | None = None, **options: Any) -> Drafter | None:
        """The drafter of NAME or NAME:key=value,..., with this model if it is one that needs one.

        target: the model to draft for, which a trained head needs. Raises ValueError as
        `make_drafter`, and ModelFolderError, HeadError and DraftModelError for what the name or a
        flag cannot be.
        """
        name = split_spec(spec)[0]
        if name not in WITH_MODEL:
            return make_drafter(spec, **options)
        if self.name is None or not self.is_head:
            model, tokenizer = self.pair
            return make_drafter(spec, draft_model=model, draft_tokenizer=tokenizer, **options)
        if target is None:
            raise HeadError(
                f"{self.name} is made for a loaded target, which is not known here. Load it with "
                "load_head(path, target)."
            )
        if self.lighter.layers is not None:
            raise DraftModelError(
                "--draft-layers: --draft-model is a trained head, which has no layers to leave "
                "out. Leave the flag out."
            )
        if name == MODEL_DRAFTER:
            return named_head(spec, self.name, target)
        head = load_head(self.name, target)
        return make_drafter(spec, draft_model=head, **options)


def choose_drafter(
    drafter: Any, draft_model: Any, target: nn.Module | None = None, tokenizer: Any = None
) -> Drafter | None:
    """The drafter that the two arguments name; None for plain decoding.

    draft_model: a model, the folder or Hugging Face name of one or of a trained head, or what
    `drafter` takes; "auto" for what fits the model that the tokenizer was loaded with, see
    `candidates.choose_for`. With drafter "auto" the better draft of the two is taken, any other
    drafter is asked first. target: the model to draft for, which heads need. Raises
    UnknownNameError, ModelFolderError, HeadError for a head that does not fit the target, and
    ValueError for what is neither.
    """
    if is_auto(draft_model):
        place = getattr(tokenizer, "name_or_path", "")
        draft_model = found_for(place, draft_model, logging.getLogger(__name__).warning)
    look_up, of_model = _drafter(drafter), _model_drafter(draft_model, target)
    if drafter == DEFAULT_DRAFTER and look_up is not None and of_model is not None:
        return BestOf(look_up, of_model)
    return first_of([look_up, of_model])


def is_auto(draft_model: Any) -> bool:
    """True for "auto", with options or without, which asks for what fits the target."""
    return isinstance(draft_model, str) and split_spec(draft_model)[0] == AUTO


def found_for(model: str | None, spec: str, say: Callable[[str], object]) -> str | None:
    """The draft model for a model of this name or folder, None for none; `say` is told why.

    Raises ModelFolderError for a model that is not here, ValueError where none is named, or for an
    option of the spec that there is not.
    """
    from specdec_mlx.drafters.candidates import choose_for

    if not model:
        raise ValueError(f"Draft model {AUTO!r}: what it is for has no name. Name a draft model.")
    choice = make_with("draft model", AUTO, partial(choose_for, model), split_spec(spec)[1])
    for line in choice.lines:
        say(f"specdec_mlx: {line}")
    return choice.found


def _drafter(choice: Any) -> Drafter | None:
    if isinstance(choice, str):
        return make_drafter(choice)
    check_is_drafter(choice)
    drafter: Drafter | None = choice
    return drafter


def _model_drafter(choice: Any, target: nn.Module | None) -> Drafter | None:
    if isinstance(choice, nn.Module):
        return make_drafter(MODEL_DRAFTER, draft_model=choice)
    if isinstance(choice, str | Path):
        if str(choice).partition(":")[0] in drafter_names():
            return make_drafter(str(choice))
        return NamedModel(choice).make(MODEL_DRAFTER, target)
    return _drafter(choice)


def add_lighter_arguments(parser: Any) -> None:
    """The flags that make a draft model lighter, for a parser, or group, with --draft-model."""
    how = {"type": argument(positive_int), "metavar": "N"}
    parser.add_argument("--draft-layers", help="Draft with its first layers only.", **how)


def named_model(arguments: argparse.Namespace) -> NamedModel:
    """The draft model of a command's flags; raises as `lighter_of`."""
    lighter = lighter_of(arguments)
    return NamedModel(arguments.draft_model, lighter)


def lighter_of(arguments: argparse.Namespace) -> Lighter:
    """What these flags said; DraftModelError where no draft model is named.

    `--draft-model auto` becomes the name of what was found.
    """
    if is_auto(arguments.draft_model):
        say = partial(print, file=sys.stderr)
        arguments.draft_model = found_for(
            getattr(arguments, "model", None), arguments.draft_model, say
        )
    lighter = Lighter(arguments.draft_layers)
    if lighter.flags and not arguments.draft_model:
        raise DraftModelError(f"{', '.join(lighter.flags)}: give --draft-model MODEL as well.")
    return lighter
