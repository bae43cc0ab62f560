"""Drafters as the flags of a command name them; a draft model may be a trained head."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.nn as nn

from specdec_mlx.drafters.draft_models import NO_PAIR, draft_pair, lighter_of
from specdec_mlx.drafters.heads.loading import is_head, load_head, named_head
from specdec_mlx.drafters.registry import MODEL_DRAFTER, WITH_MODEL, make_drafter
from specdec_mlx.options import split_spec
from specdec_mlx.types import Drafter


@dataclass
class TypedDrafters:
    """Makes drafters for a target out of names with options.

    arguments: of a parser that has --draft-model and the flags of `add_lighter_arguments`.
    target: the loaded model.
    """

    arguments: argparse.Namespace
    target: nn.Module

    @cached_property
    def has_head(self) -> bool:
        """Whether --draft-model names a trained head."""
        named = self.arguments.draft_model
        return bool(named) and is_head(named)

    @cached_property
    def pair(self) -> tuple[nn.Module | None, Any]:
        """The draft model and its tokenizer; (None, None) for none, and for a head."""
        return NO_PAIR if self.has_head else draft_pair(self.arguments)

    def make(self, spec: str) -> Drafter | None:
        """The drafter of a name; None for "none".

        Raises:
            ValueError: as `make_drafter`, or what a head does not take.
            HeadError: the head is not known, or does not fit.
            DraftModelError: a flag that makes no head lighter.
        """
        name = split_spec(spec)[0]
        if not self.has_head or name not in WITH_MODEL:
            model, tokenizer = self.pair
            return make_drafter(spec, draft_model=model, draft_tokenizer=tokenizer)
        folder, bits = self.arguments.draft_model, lighter_of(self.arguments).bits_of_head()
        if name == MODEL_DRAFTER:
            return named_head(spec, folder, self.target, bits)
        return make_drafter(spec, draft_model=load_head(folder, self.target, draft_bits=bits))
