"""The two ends of a target: what embeds its tokens, and what makes logits of its last state.

Heads share them. They are found by watching one short pass, not by guessing where a model keeps
them: the embedding is the first module that turns ids into states, the head the last that turns
states into logits. The watched instances get a subclass for as long as the pass lasts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import HeadError
from specdec_mlx.per_model import PerModel

METHODS = ("__call__", "as_linear")
"""What is watched of a module; the second is what an embedding does where the head is tied to it.
"""


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
    """One call of a watched module."""

    function: Callable[[mx.array], mx.array]
    given: Any
    result: Any


def _find(model: nn.Module) -> TargetEnds:
    """Watch a pass over two tokens, of which only the embedding is computed."""
    calls: list[_Call] = []
    with _watched(model, calls):
        logits = model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    embeds = [call for call in calls if _is(call.given, mx.integer) and _is(call.result)]
    heads = [
        call
        for call in calls
        if _is(call.given) and getattr(call.result, "shape", ()) == logits.shape
    ]
    if not embeds or not heads:
        missing = "embeds its tokens" if not embeds else "makes its logits"
        raise HeadError(
            f"No module was found in {type(model).__module__} that {missing}, so a head cannot "
            "share it. Use a draft model, or a drafter that works on tokens."
        )
    embed, head = embeds[0], heads[-1]
    scale = _embedding_scale(embed.result, calls)
    return TargetEnds(
        embed=embed.function if scale == 1 else lambda ids: embed.function(ids) * scale,
        logits=head.function,
        width=head.given.shape[-1],
        vocab_size=logits.shape[-1],
        num_layers=len(model.layers),
        dtype=head.given.dtype,
    )


target_ends = PerModel(_find)
"""The ends of a loaded model, looked for once. They hold its modules, and not the model."""


def _is(x: Any, kind: Any = mx.floating) -> bool:
    """Whether this is an array of a kind of numbers."""
    return isinstance(x, mx.array) and mx.issubdtype(x.dtype, kind)


def _embedding_scale(embedded: mx.array, calls: list[_Call]) -> float:
    """The square root of D if the next module gets the embedding times that, else 1.

    Other factors (Granite, MiniCPM) are not part of the embedding that heads are trained with.
    """
    following = next(
        (c.given for c in calls if _is(c.given) and c.given.shape == embedded.shape), None
    )
    root = math.sqrt(embedded.shape[-1])
    if following is None:
        return 1.0
    off = mx.abs(following.astype(mx.float32) - embedded.astype(mx.float32) * root).max()
    return root if bool(off <= 0.02 * mx.abs(following).max()) else 1.0


@contextmanager
def _watched(model: nn.Module, calls: list[_Call]) -> Iterator[None]:
    """Note the calls of all modules of a model, each when it returns."""
    modules = list({id(module): module for _, module in model.named_modules()}.values())
    classes = [type(module) for module in modules]
    for module, kind in zip(modules, classes, strict=True):
        if module is not model:
            methods = {name: _noting(kind, name, calls) for name in METHODS if hasattr(kind, name)}
            module.__class__ = type(
                kind.__name__, (kind,), {**methods, "__module__": kind.__module__}
            )
    try:
        yield
    finally:
        for module, kind in zip(modules, classes, strict=True):
            module.__class__ = kind


def _noting(kind: type, name: str, calls: list[_Call]) -> Callable[..., Any]:
    """A method of a class, which also notes what it was given and what it returned."""
    method = getattr(kind, name)

    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        given = args[0] if args else next(iter(kwargs.values()), None)
        function = self if name == "__call__" else getattr(self, name)
        calls.append(_Call(function, given, result))
        return result

    return noting
