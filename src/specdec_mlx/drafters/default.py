"""The drafter for who names none: the best one that needs no second model."""

from __future__ import annotations

from specdec_mlx.drafters.first_of import BestOf, TreeOf
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.recycling import RecyclingDrafter, SuccessorTable
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.memory.store import Memory


def default_drafter(
    memory: Memory | str | None = None, trees: bool = False, recycling: bool = False
) -> SuffixDrafter | BestOf | TreeOf:
    """Copies what followed the places that match best, in the text and in a memory.

    memory: as `SuffixDrafter` takes it; None remembers nothing. trees: it, n-grams and Token
    Recycling share a tree where that is worth more than a chain. recycling: Token Recycling
    competes in any case, with tables kept from generation to generation.
    """
    if not trees and not recycling:
        return SuffixDrafter(memory)
    recyclers = [RecyclingDrafter()]
    if recycling:
        recyclers = [
            RecyclingDrafter(table=SuccessorTable(), context=width) for width in (2, 1)
        ]
    several = TreeOf if trees else BestOf
    return several(SuffixDrafter(memory), NGramDrafter(), *recyclers)
