"""The drafter for who names none: the best one that needs no second model."""

from __future__ import annotations

from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.memory.store import Memory


def default_drafter(memory: Memory | str | None = None) -> SuffixDrafter:
    """Copies what followed the places that match best, in the text and in a memory.

    memory: as `SuffixDrafter` takes it; None remembers nothing.
    """
    return SuffixDrafter(memory)
