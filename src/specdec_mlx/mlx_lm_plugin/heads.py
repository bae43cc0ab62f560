"""Trained heads in the server, which loads the target itself, and another one when asked to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.nn as nn

from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.heads.loading import load_head
from specdec_mlx.errors import HeadError
from specdec_mlx.per_model import PerModel
from specdec_mlx.types import DraftContext, Drafter, DraftSession

if TYPE_CHECKING:
    from specdec_mlx.drafters.heads.drafter import HeadDrafter
    from specdec_mlx.drafters.heads.pard import PardDrafter


class HeadToLoad:
    """A trained head that is loaded for each target when that is there.

    Args:
        path: folder or Hugging Face name.
        bits: quantize it to so many, None as it is.
    """

    def __init__(self, path: str, bits: int | None = None) -> None:
        """Nothing is loaded yet."""
        self.path = path
        self.loaded: PerModel[HeadDrafter | PardDrafter] = PerModel(
            lambda model: load_head(path, model, draft_bits=bits)
        )

    def begin(self, prompt: Sequence[int], context: DraftContext) -> DraftSession:
        """Not without a target."""
        raise HeadError(f"{self.path} is a trained head; load it for its target first.")


def with_heads(drafter: Drafter | None, target: nn.Module) -> Drafter | None:
    """The drafter, with the heads in it loaded for a target, once for each.

    Raises:
        HeadError: one does not fit.
    """
    if isinstance(drafter, HeadToLoad):
        return drafter.loaded(target)
    if isinstance(drafter, FirstOf):
        return FirstOf(*(with_heads(part, target) or part for part in drafter.drafters))
    return drafter
