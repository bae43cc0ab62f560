"""The drafter for who names none: the best one that needs no second model."""

from __future__ import annotations

from specdec_mlx.drafters.first_of import BestOf
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.recycling import RecyclingDrafter, SuccessorTable
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.memory.store import Memory


def default_drafter(
    memory: Memory | str | None = None, recycling: bool = False
) -> SuffixDrafter | BestOf:
    """Copies what followed the places that match best, in the text and in a memory.

    memory: as `SuffixDrafter` takes it; None remembers nothing. recycling: n-grams and Token
    Recycling compete with it, with tables kept from generation to generation.
    """
    if not recycling:
        return SuffixDrafter(memory)
    recyclers = [
        RecyclingDrafter(table=SuccessorTable(), context=width) for width in (2, 1)
    ]
    return BestOf(SuffixDrafter(memory), NGramDrafter(), *recyclers)
