"""Trained heads in the server, which loads the target itself, and another one when asked to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.nn as nn

from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.errors import HeadError
from specdec_mlx.per_model import PerModel
from specdec_mlx.types import DraftContext, Drafter, DraftSession, ReadsTarget, all_drafters


class HeadToLoad:
    """A trained head that is loaded for each target when that is there.

    Args:
        path: folder or Hugging Face name.
        load: loads it for a target.
    """

    def __init__(self, path: str, load: Callable[[nn.Module], Drafter]) -> None:
        """Nothing is loaded yet."""
        self.path = path
        self.loaded = PerModel(load)

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
        return drafter.with_each(lambda part: with_heads(part, target) or part)
    return drafter


def without_readers(drafter: Drafter | None) -> Drafter | None:
    """What of a drafter needs no states of the target, which several texts at once do not show."""
    if isinstance(drafter, FirstOf):
        parts = [part for part in drafter.drafters if without_readers(part) is not None]
        return type(drafter)(*parts) if parts else None
    reads = any(isinstance(part, ReadsTarget) for part in all_drafters(drafter))
    return None if reads else drafter
