"""How `BlockCache` goes back: rows are taken off the last blocks, and nothing is fed again."""

from specdec_mlx.target.strategies import STRATEGIES, Trim
from strangers.cache import BlockCache


class DropBlocks(Trim):
    """It can always trim, and passes may have any width: as `Trim` says."""

    name = "drop blocks"

    def save(self, cache):
        """The blocks; a pass adds others, and writes to none."""
        return list(cache.blocks)

    def restore(self, cache, saved):
        """As they were."""
        cache.blocks = list(saved)

    def trim(self, cache, back):
        """Whole blocks, and a part of the one before."""
        dropped = left = min(back, cache.offset)
        while left:
            keys, values = cache.blocks.pop()
            kept = max(0, keys.shape[2] - left)
            left -= keys.shape[2] - kept
            cache.blocks += [(keys[:, :, :kept], values[:, :, :kept])] if kept else []
        return dropped


STRATEGIES[BlockCache] = DropBlocks()
