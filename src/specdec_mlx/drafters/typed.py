"""From what a user names to a drafter: a draft model or a trained head, with options."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.nn as nn

from specdec_mlx.drafters.draft_models import NO_PAIR, Lighter, load_draft_model
from specdec_mlx.drafters.heads.loading import is_head, load_head, named_head
from specdec_mlx.drafters.registry import MODEL_DRAFTER, WITH_MODEL, make_drafter
from specdec_mlx.errors import HeadError
from specdec_mlx.options import split_spec
from specdec_mlx.types import Drafter


@dataclass
class NamedModel:
    """A draft model or a trained head by its folder or Hugging Face name; loaded once.

    name: None for neither. lighter: changes to it as it loads.
    """

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
            return NO_PAIR
        return load_draft_model(self.name, self.lighter)

    def make(self, spec: str, target: nn.Module | None = None, **options: Any) -> Drafter | None:
        """The drafter of NAME or NAME:key=value,..., with this model if it is one that needs one.

        A trained head needs the target.

        Raises:
            ValueError: as `make_drafter`, or an option that a head does not take.
            ModelFolderError: there is no such draft model.
            HeadError: the head is not known, or does not fit.
            DraftModelError: a flag that makes it no lighter.
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
        bits = self.lighter.bits_of_head()
        if name == MODEL_DRAFTER:
            return named_head(spec, self.name, target, bits)
        head = load_head(self.name, target, draft_bits=bits)
        return make_drafter(spec, draft_model=head, **options)
