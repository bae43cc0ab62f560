"""What is drafted with where nobody says how: the best combination that needs no second model."""

from __future__ import annotations

from specdec_mlx.drafters.best_of import BestOf
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.memory.store import Memory


def default_drafter(memory: Memory | str | None = None) -> BestOf:
    """The better draft of two look-ups: the longest match anywhere, and the most frequent n-gram.

    Args:
        memory: what was written before, as `SuffixDrafter` takes it; None remembers nothing.

    Raises:
        ValueError: for what is no memory.
    """
    return BestOf(SuffixDrafter(memory), NGramDrafter())
