"""A cache class that came with somebody's model: each pass leaves a block of its own."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


class BlockCache:
    """Keys and values in blocks, one a pass; it cannot be trimmed."""

    def __init__(self) -> None:
        self.blocks: list[tuple[mx.array, mx.array]] = []

    @property
    def offset(self) -> int:
        return sum(keys.shape[2] for keys, _ in self.blocks)

    @property
    def state(self) -> Any:
        return self.blocks

    def is_trimmable(self) -> bool:
        return False

    def make_mask(self, N: int, **kwargs: Any) -> mx.array | None:
        return create_causal_mask(N, self.offset) if N > 1 else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.blocks.append((keys, values))
        all_keys, all_values = zip(*self.blocks, strict=True)
        return mx.concatenate(all_keys, axis=2), mx.concatenate(all_values, axis=2)
