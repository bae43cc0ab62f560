"""Earlier texts to draft from: an index of contexts, its bounds and its file."""

from specdec_mlx.memory.store import Memory

__all__ = ["Memory"]
