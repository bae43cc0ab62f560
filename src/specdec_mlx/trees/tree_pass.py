"""Passes over a token tree: each row attends to its own path, at the position of its depth.

For such a pass each cache is replaced by a *view*. A view shares the cache's attributes, and its
mask lets a row see the text and its ancestors. Rope modules, and attention scaled by position, get
a class that reads the depths while its thread builds such a pass. Rotary embeddings take one offset
for each row of a batch, so that the rows are made a batch for them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.caches import READABLE, Rollback, parts_of
from specdec_mlx.contracts import chain
from specdec_mlx.models.anatomy import change_class, setting
from specdec_mlx.models.loading import PerModel
from specdec_mlx.trees.shape import depths_of, path_to
from specdec_mlx.window_cache import WindowCache


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Pending tokens and the tree after them. E rows are in the caches, and T rows in the pass.

    Attributes:
        depths: [E + T] position of each row, relative to the first row.
        sees: [T, E + T] the row itself and its ancestors.
    """

    depths: mx.array
    sees: mx.array

    @classmethod
    def after(cls, num_pending: int, parents: Sequence[int], num_fed: int = 0) -> TreeLayout:
        """Rows of `num_pending` tokens and of a tree with parents [K] after the last of them.

        num_fed: E, the number of these rows that are in the caches.
        """
        of_rows = [*chain(num_pending), *(parent + num_pending for parent in parents)]
        sees = [[False] * len(of_rows) for _ in of_rows[num_fed:]]
        for row in range(num_fed, len(of_rows)):
            for other in path_to(row, of_rows):
                sees[row - num_fed][other] = True
        return cls(mx.array(depths_of(of_rows), mx.int32), mx.array(sees))

    def __len__(self) -> int:
        return self.sees.shape[0]

    @property
    def num_fed(self) -> int:
        return self.sees.shape[1] - self.sees.shape[0]

    @property
    def offsets(self) -> mx.array:
        """[T] position of each row, relative to the next position of the caches."""
        return self.depths[self.num_fed :] - self.num_fed

    def mask(
        self, start: int, past_positions: mx.array, window: int | None, sinks: int = 0
    ) -> mx.array:
        """Mask [T, num_past + T] of the cached rows and the rows of the pass.

        Args:
            start: position of the first row of the pass.
            past_positions: [num_past] positions of the cached rows, the last ones before `start`.
            window: positions that a row sees, or None for all.
            sinks: number of first positions that every row sees.
        """
        tree_mask = self.sees
        if window is not None:
            tree_mask = tree_mask & (self.depths[self.num_fed :, None] < self.depths[None] + window)
        num_text = past_positions.shape[0] - self.num_fed
        # The window has forgotten the text, and perhaps some rows.
        if num_text <= 0:
            return tree_mask[:, -num_text:]
        past = mx.ones((len(self), num_text), mx.bool_)
        if window is not None:
            text = past_positions[:num_text]
            past = (start + self.offsets)[:, None] < text[None] + window
            past = past | (text < sinks)
        return mx.concatenate([past, tree_mask], axis=1)


def next_level(fed: list[int], parents: Sequence[int]) -> TreeLayout:
    """Rows of the next level of a tree that is fed level by level after the text.

    Args:
        fed: parents of the rows fed before. The new parents are appended.
        parents: parents of the new rows, among all rows.
    """
    num_fed = len(fed)
    fed += parents
    return TreeLayout.after(0, fed, num_fed)


_pass_over: ContextVar[TreeLayout | None] = ContextVar("_pass_over", default=None)
"""The rows of the pass that is being built in this thread; None for a chain."""


def pass_over(rows: TreeLayout) -> AbstractContextManager[None]:
    return setting(_pass_over, rows)


def view_class(kind: type) -> type:
    """Class of the views of a cache class. Its mask lets each row see its own path."""

    def make_mask(self: Any, N: int, **options: Any) -> mx.array:
        # A rotating cache has a window as long as itself.
        size = getattr(self, "max_size", None)
        # mlx-lm keeps at most size - 1 old positions in a pass over several positions.
        num_past = self.offset if size is None else min(self.offset, size - 1)
        past = mx.arange(self.offset - num_past, self.offset)
        mask: mx.array = self.rows.mask(self.offset, past, options.get("window_size") or size)
        return mask[None, None]  # as mlx-lm's batches have it; DeepSeek V3.2 needs all dimensions

    def mask_of_window(self: Any, N: int, **options: Any) -> mx.array:
        past = self.positions(N)[:-N]
        mask: mx.array = self.rows.mask(self.offset, past, self.window, self.sinks)
        if (size := options.get("window_size")) is not None:
            mask = mask & self.rows.mask(self.offset, past, size)
        return mask[None, None]

    if kind is WindowCache:
        make_mask = mask_of_window

    return type(kind.__name__, (kind,), {"__slots__": ("rows",), "make_mask": make_mask})


VIEWS = {kind: view_class(kind) for kind in (*READABLE, WindowCache)}
"""Cache classes that support a pass over a tree, and the classes of their views."""


def takes_trees(rollback: Rollback) -> bool:
    """True if these caches support a pass over a tree, and can keep a path of it."""
    return all(
        type(cache) in VIEWS and strategy.gathers for cache, strategy in rollback.strategies()
    )


class _Shifted:
    """A cache that claims `shift` more positions, to measure a model far along a text."""

    cache: Any = None

    def __init__(self, cache: Any, shift: int) -> None:
        vars(self).update(cache=cache, shift=shift)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cache, name)
        return value + self.shift if name in ("offset", "start_position") else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cache, name, value)


def with_offset_shift(cache: Any, shift: int) -> Any:
    """A stand-in for a cache that claims more positions. A custom cache is returned unchanged."""
    if parts := parts_of(cache):
        return type(cache)(*(with_offset_shift(part, shift) for part in parts))
    # the modules of mlx-lm and mlx-vlm
    is_known = type(cache).__module__.endswith(".models.cache")
    is_known = is_known and hasattr(cache, "offset")
    return _Shifted(cache, shift) if is_known and shift else cache


def view_of(cache: Any, rows: TreeLayout) -> Any:
    """A stand-in for a cache in one pass."""
    if parts := parts_of(cache):
        return type(cache)(*(view_of(part, rows) for part in parts))
    if isinstance(cache, _Shifted):
        return _Shifted(view_of(cache.cache, rows), cache.shift)
    view: Any = object.__new__(VIEWS[type(cache)])
    # One dictionary for both: keys, values and offset that the pass writes are the cache's.
    view.__dict__ = vars(cache)
    view.rows = rows
    return view


def chooses_blocks(model: nn.Module) -> bool:
    """True if a layer attends to blocks of rows that it chooses by scores (MiniMax M3)."""
    # Siblings and padding shift the rows of a block. This shows only in long texts, so that it is
    # read off the modules and not measured.
    return any(getattr(m, "index_block_size", None) is not None for m in model.modules())


@PerModel
def patch_ropes(model: nn.Module) -> None:
    """Give the modules that read positions a class that looks for the rows of a tree."""

    # A module that has the class keeps it.
    def aware_of_trees(module: nn.Module, kind: type) -> type:
        if is_rope(kind):
            return _with_rows(kind)
        is_scaled = "rope" in module and _parameters(kind)[1:2] == ["attn_scale"]
        return _with_scale(kind) if is_scaled else kind

    for module in model.modules():
        change_class(module, functools.partial(aware_of_trees, module))


def tree_pass(
    model: nn.Module, tokens: mx.array, caches: Sequence[Any], rows: TreeLayout, **inputs: Any
) -> mx.array:
    """Lazy logits [S, V] of a pass over a tree of tokens [S]."""
    patch_ropes(model)
    views = [view_of(cache, rows) for cache in caches]
    with pass_over(rows):
        logits: mx.array = model(tokens[None], cache=views, **inputs).squeeze(0)
    return logits


def is_rope(kind: type) -> bool:
    """True if modules of a class rotate rows by their positions, from an offset on."""
    name = kind.__name__.lower()
    return ("rope" in name or "rot" in name) and "offset" in _parameters(kind)


def _parameters(kind: type) -> list[str]:
    return list(inspect.signature(kind.__call__).parameters)[1:]


@functools.cache
def _with_rows(kind: type) -> type:
    """A rope's class that takes a position for every row of a tree."""
    signature = inspect.signature(kind.__call__)
    first = list(signature.parameters)[:2]  # the module and its input

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        rows = _pass_over.get()
        if rows is None or x.shape[-2] != len(rows):
            return kind.__call__(self, x, *args, **kwargs)
        arguments = signature.bind(self, x, *args, **kwargs).arguments
        start = arguments.pop("offset", 0)
        more = {name: value for name, value in arguments.items() if name not in first}
        # Ropes take an offset for each row of the batch: move the T rows of the tree to the batch
        # axis.
        heads = x.reshape(x.shape[0], -1, *x.shape[-2:]).swapaxes(1, 2)  # [B, T, H, D]
        as_batch = heads.reshape(-1, heads.shape[2], 1, heads.shape[3])
        positions = mx.tile(start + rows.offsets, x.shape[0])
        turned = kind.__call__(self, as_batch, offset=positions, **more)
        return turned.reshape(heads.shape).swapaxes(1, 2).reshape(x.shape)

    attributes = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), attributes)


@functools.cache
def _with_scale(kind: type) -> type:
    """An attention's class that scales every row of a tree by its own position."""

    def call(self: Any, x: mx.array, scale: Any = None, *args: Any, **kwargs: Any) -> Any:
        rows = _pass_over.get()
        if rows is not None and scale is not None:
            scale = scale[..., rows.offsets, :]
        return kind.__call__(self, x, scale, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
