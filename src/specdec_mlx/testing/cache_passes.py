"""Passes over one cache, without a model: a layer of attention, what a cache holds, interruptions.

A pass gives one row for each of its tokens, made from what the cache holds; so that caches which
hold the same give the same rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

Feed = Callable[[Any, mx.array], mx.array]
"""(cache, tokens [S]) -> rows [S, D]: one pass over S positions, which the cache then holds."""

WIDTH = 64
"""Of the keys, so that quantized caches take them."""

MANY_TOKENS = 4096
"""Tokens that have keys of their own."""


def attend(cache: Any, tokens: mx.array) -> mx.array:
    """A layer of attention over a cache with `update_and_fetch`; rows [S, D + 1].

    Keys and values follow from a token alone, and the last column is its position: which tokens a
    row has attended to can be seen, and how many the cache has counted.
    """
    states = _states()[tokens % MANY_TOKENS][None, None]
    mask = create_attention_mask(states[0], cache, return_array=True)
    positions = cache.offset + mx.arange(tokens.shape[0], dtype=mx.float32)
    keys, values = cache.update_and_fetch(states, states)
    flat = 1 / WIDTH  # so that every token attended to weighs about as much
    rows = scaled_dot_product_attention(states, keys, values, cache=cache, scale=flat, mask=mask)
    return mx.concatenate([rows[0, 0], positions[:, None]], axis=-1)


@functools.cache
def _states() -> mx.array:
    """A vector for each token, [MANY_TOKENS, WIDTH]."""
    states = mx.random.normal((MANY_TOKENS, WIDTH), key=mx.random.key(0))
    mx.eval(states)
    return states


def contents(cache: Any) -> dict[str, Any]:
    """What a cache holds, copied: its arrays, without spare rows, and its numbers.

    A class with spare rows offers `keys_and_values()`, as mlx-lm's do; `state` is taken else.
    """
    has_rows = hasattr(cache, "keys_and_values") and not cache.empty()
    arrays = cache.keys_and_values() if has_rows else cache.state
    held = {name: _copied(value) for name, value in tree_flatten(arrays, prefix=".state")}
    plain = (bool, int, float, str, type(None))
    return held | {k: v for k, v in getattr(cache, "__dict__", {}).items() if isinstance(v, plain)}


def _copied(value: Any) -> Any:
    if not isinstance(value, mx.array):
        return value
    return np.array(value.view(mx.uint16) if value.dtype == mx.bfloat16 else value)


def difference(got: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first thing that is not as it was, in words; None if all is, bit for bit."""
    for name in {**expected, **got}:
        before: Any = expected.get(name)
        after: Any = got.get(name)
        is_real = isinstance(after, np.ndarray) and after.dtype.kind == "f"  # it may have NaN
        if type(before) is type(after) and np.array_equal(before, after, equal_nan=is_real):
            continue
        now, then = (str(getattr(x, "shape", repr(x))) for x in (after, before))
        return f"{name} is {now}, was {then}" if now != then else f"{name} holds other numbers"
    return None


class InterruptedPass(BaseException):
    """What `interrupting` raises."""


@contextmanager
def interrupting(cache: Any, at: int) -> Iterator[None]:
    """Raise InterruptedPass in place of the change number `at` that is made to a cache."""
    kind, changes = type(cache), count()

    def counted(change: Callable[..., None]) -> Callable[..., None]:
        def counted_change(self: Any, *args: Any) -> None:
            if next(changes) == at:
                raise InterruptedPass
            change(self, *args)

        return counted_change

    names = [name for name in ("__setattr__", "__setitem__") if hasattr(kind, name)]
    members = {name: counted(getattr(kind, name)) for name in names}
    counting = type(kind.__name__, (kind,), {"__slots__": (), **members})
    object.__setattr__(cache, "__class__", counting)
    try:
        yield
    finally:
        object.__setattr__(cache, "__class__", kind)
