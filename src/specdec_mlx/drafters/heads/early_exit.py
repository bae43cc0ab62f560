"""Early exit: the target's own first layers, final norm and head draft for it.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains models for that; others can be tried. No
second set of weights is loaded. The first layers have caches of their own, so that they run twice
on what is drafted, and the drafter needs to know nothing of the target's pass.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.errors import HeadError

LAYERS = "layers"


def early_exit(
    target: nn.Module, num_layers: int, *, greedy: bool = False, draft_temp: float | None = None
) -> ModelDrafter:
    """A drafter of the target's first layers.

    Args:
        target: a loaded model.
        num_layers: how many layers draft, at least one and fewer than the target has.
        greedy: see `ModelDrafter`.
        draft_temp: see `ModelDrafter`.

    Raises:
        HeadError: the target has not so many layers, or they cannot be run alone.
    """
    return ModelDrafter(first_layers(target, num_layers), greedy=greedy, draft_temp=draft_temp)


def first_layers(target: nn.Module, num_layers: int) -> nn.Module:
    """The target with its first layers only, as a model that shares all of its weights."""
    layers = list(target.layers)
    if not 0 < num_layers < len(layers):
        raise HeadError(
            f"Early exit after {num_layers} layers: expected 1 to {len(layers) - 1}, since the "
            f"target has {len(layers)}."
        )
    shortened = _shortened(target, layers, num_layers)
    if shortened is None or len(shortened.layers) != num_layers or not _runs(shortened):
        raise HeadError(
            f"The first {num_layers} layers of {type(target).__module__} cannot be run alone. Try "
            "another number, or use a draft model."
        )
    return shortened


def _shortened(module: nn.Module, layers: list[nn.Module], num_layers: int) -> nn.Module | None:
    """A copy of the module in which the list of layers is cut; None if it has no such list.

    Copied are only the modules on the way there; all others are shared.
    """
    for name, value in module.items():
        replacement = None
        if isinstance(value, list) and _same(value, layers):
            replacement = value[:num_layers]
        elif isinstance(value, nn.Module):
            replacement = _shortened(value, layers, num_layers)
        if replacement is not None:
            shortened = copy.copy(module)
            shortened[name] = replacement
            return shortened
    return None


def _runs(model: nn.Module) -> bool:
    """Whether a pass can be built; some models look for a layer of each kind."""
    try:
        model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    except Exception:
        return False
    return True


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
