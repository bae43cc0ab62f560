"""Token ids on the host and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx


def to_ids(tokens: Sequence[int] | mx.array) -> mx.array:
    """Token ids as a uint32 array [n]. A lazy array stays lazy."""
    if isinstance(tokens, mx.array):
        return tokens if tokens.dtype == mx.uint32 else tokens.astype(mx.uint32)
    return mx.array(list(tokens), dtype=mx.uint32)


def to_list(tokens: Sequence[int] | mx.array) -> list[int]:
    """Token ids as a list. Waits for a lazy array."""
    if isinstance(tokens, mx.array):
        return tokens.tolist()  # type: ignore[return-value]
    return list(map(int, tokens))


def read_all(*arrays: mx.array) -> list[Any]:
    """Several small arrays as lists, after a single wait."""
    mx.eval(*arrays)
    return list(map(mx.array.tolist, arrays))
