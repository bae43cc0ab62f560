"""Keys and values that the target's caches hold, for a drafter that attends to them itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from specdec_mlx.contracts import KeysValues
from specdec_mlx.errors import UnreadableError
from specdec_mlx.target.strategies import leaves

READABLE = (KVCache, RotatingKVCache, QuantizedKVCache)
"""Caches of one key and one value for each head and position."""


def keys_values_of(caches: Sequence[Any], index: int) -> KeysValues:
    """Contents of a cache as slices of its buffers; UnreadableError if it holds others."""
    cache = check_readable(caches, index)
    keys, values = cache.keys_and_values()
    if isinstance(cache, QuantizedKVCache):
        how = {"group_size": cache.group_size, "bits": cache.bits}
        keys, values = mx.dequantize(*keys, **how), mx.dequantize(*values, **how)
    if isinstance(cache, RotatingKVCache):  # after a pass of several positions it holds more
        keys, values = (part[..., -cache.max_size :, :] for part in (keys, values))
    return KeysValues(keys, values, cache.offset)


def check_readable(caches: Sequence[Any], index: int) -> Any:
    """A cache that has keys and values, by its index; UnreadableError for another."""
    all_caches = list(leaves(caches))
    kind = type(all_caches[index]).__name__ if index < len(all_caches) else "no cache"
    if index >= len(all_caches) or not isinstance(all_caches[index], READABLE):
        raise UnreadableError(
            f"Cache {index} of this target, {kind}, has no keys and values that a drafter can "
            f"read; expected one of {', '.join(known.__name__ for known in READABLE)}. Use "
            "another drafter."
        )
    return all_caches[index]
