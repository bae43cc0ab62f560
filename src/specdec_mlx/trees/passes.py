"""Passes over a token tree: each row attends to its own path, at the position of its depth.

For the pass each cache is replaced by a *view*, an object of a subclass that shares its state,
whose mask lets a row see the text and its ancestors. Rope modules, and attention scaled by
position, get a class that reads depths while its thread is in such a pass. Rotary embeddings take
one offset for each row of a batch, so the rows are made a batch for that.
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


@dataclass(frozen=True, eq=False)
class TreeLayout:
    """Pending tokens and the tree after them: E rows on the caches already, T rows of a pass.

    depths: [E + T] position of each row, from the first's. sees: [T, E + T] itself and its
    ancestors.
    """

    depths: mx.array
    sees: mx.array

    @classmethod
    def after(cls, num_pending: int, parents: Sequence[int], num_fed: int = 0) -> TreeLayout:
        """Rows of `num_pending` tokens and of a tree, parents [K], after the last; E = num_fed."""
        of_rows = [*chain(num_pending), *(parent + num_pending for parent in parents)]
        sees = [[False] * len(of_rows) for _ in of_rows[num_fed:]]
        for row in range(num_fed, len(of_rows)):
            for other in path_to(row, of_rows):
                sees[row - num_fed][other] = True
        return cls(mx.array(depths_of(of_rows), mx.int32), mx.array(sees))

    def __len__(self) -> int:
        """T."""
        return self.sees.shape[0]

    @property
    def num_fed(self) -> int:
        """E."""
        return self.sees.shape[1] - self.sees.shape[0]

    @property
    def offsets(self) -> mx.array:
        """[T] position of each row, from that of the next one on the caches."""
        return self.depths[self.num_fed :] - self.num_fed

    def mask(self, start: int, num_past: int, window: int | None) -> mx.array:
        """Rows of a cache that each row sees in its window (None: all), [T, num_past + T].

        The cache holds the last `num_past` positions before `start`, that of the first row.
        """
        own = self.sees
        if window is not None:
            own = own & (self.depths[self.num_fed :, None] < self.depths[None] + window)
        num_text = num_past - self.num_fed
        # a window so small that it has forgotten the text, and some rows
        if num_text <= 0:
            return own[:, -num_text:]
        past = mx.ones((len(self), num_text), mx.bool_)
        if window is not None:
            places = mx.arange(start - num_past, start - self.num_fed)
            past = (start + self.offsets)[:, None] < places[None] + window
        return mx.concatenate([past, own], axis=1)


def next_level(fed: list[int], parents: Sequence[int]) -> TreeLayout:
    """Rows of further tokens of a tree that is fed level by level, the text being on the caches.

    fed: parents of those fed before, to which these are added. parents: of each, among all.
    """
    num_fed = len(fed)
    fed += parents
    return TreeLayout.after(0, fed, num_fed)


_pass_over: ContextVar[TreeLayout | None] = ContextVar("_pass_over", default=None)
"""The rows of the pass that is being built in this thread; None for a chain."""


def pass_over(rows: TreeLayout) -> AbstractContextManager[None]:
    """Have modules that read positions take each row's own while the model is called."""
    return setting(_pass_over, rows)


def view_class(kind: type) -> type:
    """Of a cache class, that of its views: its mask lets each row see its own path."""

    def make_mask(self: Any, N: int, **options: Any) -> mx.array:
        """See mlx-lm's; here always an array."""
        size = getattr(self, "max_size", None)
        num_past = self.offset if size is None else min(self.offset, size - 1)
        return self.rows.mask(self.offset, num_past, options.get("window_size") or size)  # type: ignore[no-any-return]

    return type(kind.__name__, (kind,), {"__slots__": ("rows",), "make_mask": make_mask})


VIEWS = {kind: view_class(kind) for kind in READABLE}
"""Cache classes that a pass over a tree can be made with, and their views."""


def takes_trees(rollback: Rollback) -> bool:
    """True if a pass over a tree can be made with these caches, and a path of it kept."""
    return all(
        type(cache) in VIEWS and strategy.gathers for cache, strategy in rollback.strategies()
    )


class _Shifted:
    """A cache that claims `shift` positions before its own, to measure far along a text."""

    cache: Any = None

    def __init__(self, cache: Any, shift: int) -> None:
        vars(self).update(cache=cache, shift=shift)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.cache, name)
        return value + self.shift if name in ("offset", "start_position") else value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.cache, name, value)


def with_offset_shift(cache: Any, shift: int) -> Any:
    """A stand-in for a cache that claims more positions; one of a model's own stays as it is."""
    if parts := parts_of(cache):
        return type(cache)(*(with_offset_shift(part, shift) for part in parts))
    # mlx-lm's and mlx-vlm's
    is_known = type(cache).__module__.endswith(".models.cache")
    is_known = is_known and hasattr(cache, "offset")
    return _Shifted(cache, shift) if is_known and shift else cache


def view_of(cache: Any, rows: TreeLayout) -> Any:
    """A stand-in for a cache in one pass; what is written to it the cache has too."""
    if parts := parts_of(cache):
        return type(cache)(*(view_of(part, rows) for part in parts))
    if isinstance(cache, _Shifted):
        return _Shifted(view_of(cache.cache, rows), cache.shift)
    view: Any = object.__new__(VIEWS[type(cache)])
    view.__dict__ = vars(cache)
    view.rows = rows
    return view


def chooses_blocks(model: nn.Module) -> bool:
    """True if a layer attends to blocks of rows that it chooses by their scores (MiniMax M3).

    Siblings shift a block's rows, which shows only in long texts, so it is read off the modules.
    """
    return any(getattr(m, "index_block_size", None) is not None for m in model.modules())


@PerModel
def patch_ropes(model: nn.Module) -> None:
    """Have the modules that read positions look if a pass is over a tree."""

    # one that is taught stays as it is
    def taught(module: nn.Module, kind: type) -> type:
        if is_rope(kind):
            return _with_rows(kind)
        is_scaled = "rope" in module and _parameters(kind)[1:2] == ["attn_scale"]
        return _with_scale(kind) if is_scaled else kind

    for module in model.modules():
        change_class(module, functools.partial(taught, module))


def tree_pass(
    model: nn.Module, tokens: mx.array, caches: Sequence[Any], rows: TreeLayout, **inputs: Any
) -> mx.array:
    """Logits [S, V] of a pass over a tree of tokens [S], lazy."""
    patch_ropes(model)
    views = [view_of(cache, rows) for cache in caches]
    with pass_over(rows):
        logits: mx.array = model(tokens[None], cache=views, **inputs).squeeze(0)
    return logits


def is_rope(kind: type) -> bool:
    """True if modules of a class turn rows by their positions, from an offset on."""
    name = kind.__name__.lower()
    return ("rope" in name or "rot" in name) and "offset" in _parameters(kind)


def _parameters(kind: type) -> list[str]:
    return list(inspect.signature(kind.__call__).parameters)[1:]


@functools.cache
def _with_rows(kind: type) -> type:
    """A rope's class, with a position for every row of a tree."""
    signature = inspect.signature(kind.__call__)
    first = list(signature.parameters)[:2]  # the module and what it turns

    def call(self: Any, x: mx.array, *args: Any, **kwargs: Any) -> Any:
        rows = _pass_over.get()
        if rows is None or x.shape[-2] != len(rows):
            return kind.__call__(self, x, *args, **kwargs)
        given = signature.bind(self, x, *args, **kwargs).arguments
        start = given.pop("offset", 0)
        more = {name: value for name, value in given.items() if name not in first}
        heads = x.reshape(x.shape[0], -1, *x.shape[-2:]).swapaxes(1, 2)  # [B, T, H, D]
        as_batch = heads.reshape(-1, heads.shape[2], 1, heads.shape[3])
        places = mx.tile(start + rows.offsets, x.shape[0])
        turned = kind.__call__(self, as_batch, offset=places, **more)
        return turned.reshape(heads.shape).swapaxes(1, 2).reshape(x.shape)

    attributes = {"__call__": call, "__module__": kind.__module__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), attributes)


@functools.cache
def _with_scale(kind: type) -> type:
    """An attention's class, with the scale of its depth for every row of a tree."""

    def call(self: Any, x: mx.array, scale: Any = None, *args: Any, **kwargs: Any) -> Any:
        rows = _pass_over.get()
        if rows is not None and scale is not None:
            scale = scale[..., rows.offsets, :]
        return kind.__call__(self, x, scale, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})
