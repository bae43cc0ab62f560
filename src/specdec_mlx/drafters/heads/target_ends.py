"""The ends of a target that heads share, its embedding and its head."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.drafters.lighter import HEADS, some_rows
from specdec_mlx.errors import HeadError
from specdec_mlx.verify.watching import LastCache, anatomy_of


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


def target_ends(model: nn.Module) -> TargetEnds:
    """The ends of a loaded model. They hold its modules, and not the model."""
    anatomy = anatomy_of(model)
    if anatomy.embedding is None or isinstance(anatomy.head, str):
        missing = "embeds its tokens" if anatomy.embedding is None else "makes its logits"
        raise HeadError(
            f"No module was found in {type(model).__module__} that {missing}, so a head cannot "
            "share it. Use a draft model, or a drafter that works on tokens."
        )
    head = anatomy.head.module
    return TargetEnds(
        anatomy.embedding,
        getattr(head, "as_linear", head),
        anatomy.width,
        anatomy.vocab_size,
        len(anatomy.layers),
        anatomy.dtype,
        anatomy.last_caches,
    )
