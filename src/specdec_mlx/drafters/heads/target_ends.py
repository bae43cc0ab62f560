"""The ends of a target that heads share, its embedding and its head, found by watching one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.lighter import HEADS, some_rows
from specdec_mlx.errors import HeadError
from specdec_mlx.models import PerModel
from specdec_mlx.verify.strategies import leaves, window_of
from specdec_mlx.verify.taps import READABLE
from specdec_mlx.verify.watching import watching


@dataclass(frozen=True)
class LastCache:
    """One of the target's caches: its place among all, nested ones counted, and a key's width."""

    index: int
    width: int


@dataclass(frozen=True)
class TargetEnds:
    """The ends of a target, and the sizes that a head has to fit.

    embed: ids [..., n] -> states [..., n, D], without a factor. logits: the head's input [..., D]
    -> logits [..., V], without a cap. last_caches: kind of attention -> the last cache that it
    fills.
    """

    embed: Callable[[mx.array], mx.array]
    logits: Callable[[mx.array], mx.array]
    width: int
    vocab_size: int
    num_layers: int
    dtype: mx.Dtype
    last_caches: Mapping[str, LastCache] = field(default_factory=dict)

    def narrowed(self, ids: mx.array) -> TargetEnds:
        """A copy with logits [..., Vd] of these tokens alone."""
        head: Any = getattr(self.logits, "__self__", self.logits)
        if not isinstance(head, HEADS):
            return replace(self, logits=lambda states: self.logits(states)[..., ids])
        narrow = some_rows(head, ids)
        return replace(self, logits=getattr(narrow, "as_linear", narrow))


class DraftVocabulary:
    """The target's tokens that the Vd rows of a head stand for; ids: [Vd]."""

    def __init__(self, ids: mx.array, vocab_size: int) -> None:
        """Raise ValueError for ids beyond V."""
        self.ids, self.vocab_size = ids.astype(mx.int32), vocab_size
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"d2t names tokens {low} to {high}, and the target has {vocab_size}")

    def widen(self, logits: mx.array) -> mx.array:
        """Logits [n, V] from [n, Vd]: -inf for tokens that the head cannot propose."""
        wide = mx.full((logits.shape[0], self.vocab_size), -mx.inf, logits.dtype)
        wide[:, self.ids] = logits
        return wide


Call = tuple[nn.Module, Any, Any]  # a module, the first argument and the result of its call


def watched_pass(model: nn.Module) -> tuple[list[Call], list[Call], list[Any]]:
    """Calls in a pass over two tokens, those that make logits of states, and the caches."""
    calls: list[Call] = []
    parts = [part for part in model.modules() if part is not model]
    caches = make_prompt_cache(model)
    with watching(parts, lambda *call: calls.append(call)):
        shape = model(mx.array([[0, 1]]), cache=caches).shape
    of_states = [c for c in calls if _is(c[1], mx.floating) and _is(c[2], mx.floating)]
    heads = [c for c in of_states if c[2].shape == shape != c[1].shape]
    return calls, heads, caches


def _is(x: Any, kind: mx.DtypeCategory) -> bool:
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, kind)


def _find(model: nn.Module) -> TargetEnds:
    calls, heads, caches = watched_pass(model)
    embeddings = [c[0] for c in calls if _is(c[1], mx.integer) and _is(c[2], mx.floating)]
    if not embeddings or not heads:
        missing = "makes its logits" if embeddings else "embeds its tokens"
        raise HeadError(
            f"No module was found in {type(model).__module__} that {missing}, so a head cannot "
            "share it. Use a draft model, or a drafter that works on tokens."
        )
    last_caches = {}
    for index, cache in enumerate(leaves(caches)):
        if isinstance(cache, READABLE) and not cache.empty():
            kind = "full_attention" if window_of(cache) is None else "sliding_attention"
            last_caches[kind] = LastCache(index, cache.keys.shape[-1])
    head, states, logits = heads[-1]
    ends = (embeddings[0], getattr(head, "as_linear", head))
    sizes = (states.shape[-1], logits.shape[-1], len(model.layers))
    return TargetEnds(*ends, *sizes, states.dtype, last_caches)


target_ends = PerModel(_find)
"""The ends of a loaded model, looked for once. They hold its modules, and not the model."""
