"""The two ends of a target: what embeds its tokens, and what makes logits of its last state.

Heads share them. They are found by watching one short pass, not by guessing where a model keeps
them: the embedding is the first module that turns ids into states, the head the last that turns
states into logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import HeadError
from specdec_mlx.per_model import PerModel
from specdec_mlx.target.watching import watching


@dataclass(frozen=True)
class TargetEnds:
    """The ends of a target, and the sizes that a head has to fit.

    embed: token ids [..., n] -> states [..., n, D], with the factor sqrt(D) where the target's
        layers get it (Gemma). logits: the head's input [..., D] -> logits [..., V]; a cap on the
        logits that the model has behind it is left out. width: D. vocab_size: V. num_layers: of the
        decoder. dtype: of the states.
    """

    embed: Callable[[mx.array], mx.array]
    logits: Callable[[mx.array], mx.array]
    width: int
    vocab_size: int
    num_layers: int
    dtype: mx.Dtype


class _Call(NamedTuple):
    """A module that was called with `given` and returned `result`."""

    module: Any
    given: Any
    result: Any


def _find(model: nn.Module) -> TargetEnds:
    """Watch a pass over two tokens, of which only the embedding is computed."""
    calls: list[_Call] = []
    parts = [part for part in model.modules() if part is not model]
    with watching(parts, lambda *call: calls.append(_Call(*call))):
        logits = model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    embeddings = [c for c in calls if _is(c.given, mx.integer) and _is(c.result, mx.floating)]
    heads = [c for c in calls if _is(c.given, mx.floating) and _shape(c.result) == logits.shape]
    if not embeddings or not heads:
        missing = "makes its logits" if embeddings else "embeds its tokens"
        raise HeadError(
            f"No module was found in {type(model).__module__} that {missing}, so a head cannot "
            "share it. Use a draft model, or a drafter that works on tokens."
        )
    embedding, head = embeddings[0], heads[-1]
    embed, scale = embedding.module, _embedding_scale(embedding.result, calls)
    return TargetEnds(
        embed=embed if scale == 1 else lambda ids: embed(ids) * scale,
        logits=head.module.as_linear if hasattr(head.module, "as_linear") else head.module,
        width=head.given.shape[-1],
        vocab_size=logits.shape[-1],
        num_layers=len(model.layers),
        dtype=head.given.dtype,
    )


target_ends = PerModel(_find)
"""The ends of a loaded model, looked for once. They hold its modules, and not the model."""


def _is(x: Any, kind: Any) -> bool:
    """Whether this is an array of a kind of numbers."""
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, kind)


def _shape(x: Any) -> tuple[int, ...]:
    """Shape of an array; none of anything else."""
    return x.shape if isinstance(x, mx.array) else ()


def _embedding_scale(embedded: mx.array, calls: list[_Call]) -> float:
    """The square root of D if the next module gets the embedding times that, else 1.

    Other factors (Granite, MiniCPM) are not part of the embedding that heads are trained with.
    """
    alike = (c.given for c in calls if _is(c.given, mx.floating))
    following = next((given for given in alike if given.shape == embedded.shape), None)
    if following is None:
        return 1.0
    root = math.sqrt(embedded.shape[-1])
    off = mx.abs(following.astype(mx.float32) - embedded.astype(mx.float32) * root).max()
    return root if bool(off <= 0.02 * mx.abs(following).max()) else 1.0
