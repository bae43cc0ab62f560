"""What is drafted with where nobody says how: the best combination that needs no second model."""

from __future__ import annotations

from specdec_mlx.drafters.best_of import BestOf
from specdec_mlx.drafters.ngram import NGramDrafter
from specdec_mlx.drafters.recycling import RecyclingDrafter
from specdec_mlx.drafters.suffix import SuffixDrafter
from specdec_mlx.drafters.tree_of import TreeOf
from specdec_mlx.memory.store import Memory


def default_drafter(memory: Memory | str | None = None, trees: bool = False) -> BestOf | TreeOf:
    """The better draft of two look-ups: the longest match anywhere, and the most frequent n-gram.

    Args:
        memory: what was written before, as `SuffixDrafter` takes it; None remembers nothing.
        trees: whether both, and what the target itself thought of next (Token Recycling), share a
            tree where that is worth more than a chain.

    Raises:
        ValueError: for what is no memory.
    """
    look_ups = SuffixDrafter(memory), NGramDrafter()
    return TreeOf(*look_ups, RecyclingDrafter()) if trees else BestOf(*look_ups)
