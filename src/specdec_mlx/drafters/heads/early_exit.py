"""Early exit: the target's own first layers, final norm and head draft for it.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains models for that; others can be tried, or
get a trained exit in place of the final norm, see `trained_exit`. No second set of layers is
loaded. The first layers have caches of their own, so that they run twice on what is drafted; what
the target has read by itself is copied from its caches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.heads.trained_exit import EXIT_LAYER, Exit, ExitModel, final_norm
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.errors import HeadError
from specdec_mlx.target.keys_values import keys_values_of
from specdec_mlx.target.strategies import leaves
from specdec_mlx.types import DraftContext


@dataclass(frozen=True, eq=False)
class ExitDrafter(ModelDrafter):
    """The target's first layers, with a trained exit or without.

    name: what it was loaded from. exit: what was trained, None for the target's own norm. copies:
    whether its caches may be filled with what the target's hold.
    """

    name: str = ""
    exit: Exit | None = None
    copies: bool = False

    def describe(self) -> str:
        """What was recognised, in a line."""
        return f"{self.name}: early exit after {len(self.model.layers)} layers, trained"

    def session(self, prompt: Sequence[int], context: DraftContext) -> ModelSession:
        """One that reads what the target has not."""
        if self.copies and context.target_caches is not None:
            return ExitSession(self, prompt, context)
        return super().session(prompt, context)


class ExitSession(ModelSession):
    """Copies what the target has read, so that a long prompt costs it next to nothing."""

    def __init__(self, drafter: ExitDrafter, prompt: Sequence[int], context: DraftContext) -> None:
        """As any other."""
        super().__init__(drafter, prompt, context)
        self.exit = drafter.exit

    def catch_up(self) -> None:
        """Copy what was missed, and feed what cannot be copied."""
        self.copy_missed()
        super().catch_up()

    def copy_missed(self) -> None:
        """Take over keys and values of the tokens that it missed, if they are more than one.

        With them those of earlier turns, where its caches are its own and hold nothing. Not where
        they began elsewhere than the target's, or the target's forget. A trained exit's own layer
        is left to read what it attends to.
        """
        held, own = self.context.target_caches, self.rollback.caches[: len(self.model.layers)]
        missed = 0 if held is None else held.position - self.rollback.position
        if held is None or missed < 2 + self.attended:
            return
        read = [held.keys_values(i) for i in range(len(own))]
        is_new = self.callers_cache is None and own[0].offset == 0
        start, end = 0 if is_new else read[0].offset - missed, read[0].offset - self.attended
        whole = all(keys.shape[2] == offset for keys, _, offset in read)
        if whole and own[0].offset == start:
            for cache, (keys, values, _) in zip(own, read, strict=False):
                cache.update_and_fetch(keys[..., start:end, :], values[..., start:end, :])
            for cache in self.rollback.caches[len(own) :]:
                cache.trim(cache.offset)
            self.rollback.advance(missed - self.attended)

    @property
    def attended(self) -> int:
        """How many tokens behind the last one its own layer looks at; 0 if it has none."""
        return self.exit.window - 1 if self.exit is not None else 0

    def fork(self) -> ModelSession:
        """One that reads for itself: what the target holds is this one's text."""
        other = super().fork()
        other.context = replace(self.context, target_caches=None)
        return other


def load_exit(
    files: HeadFiles, target: nn.Module, *, greedy: bool = False, draft_temp: float | None = None
) -> ExitDrafter:
    """The drafter of a trained exit.

    Args:
        files: where it is.
        target: the model that it was trained for.
        greedy: see `ModelDrafter`.
        draft_temp: see `ModelDrafter`.

    Raises:
        HeadError: it does not fit the target, or is not complete.
    """
    shortened = first_layers(target, int(files.config[EXIT_LAYER]))
    tensors, _ = files.read(files.names)
    norm = final_norm(shortened)
    width = int(norm.weight.shape[0])
    theirs = files.config.get("hidden_size", width)
    if theirs != width:
        raise HeadError(
            f"{files.name}: its exit is for states of {theirs} numbers, and those of this target "
            f"have {width}. Use one that was trained for it."
        )
    trained = Exit({**files.config, "hidden_size": width})
    trained.load_weights([(name, x.astype(norm.weight.dtype)) for name, x in tensors.items()])
    model, copies = ExitModel(shortened, trained), fills_alike(target, shortened)
    return ExitDrafter(
        model, None, greedy, draft_temp, name=files.name, exit=trained, copies=copies
    )


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
    model = first_layers(target, num_layers)
    copies = fills_alike(target, model)
    return ExitDrafter(model, greedy=greedy, draft_temp=draft_temp, copies=copies)


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


def fills_alike(target: nn.Module, shortened: nn.Module) -> bool:
    """Whether the caches of first layers come to hold what the target's first caches do."""
    theirs, own = make_prompt_cache(target), make_prompt_cache(shortened)
    first = list(leaves(theirs))[: len(own)]
    if len(first) < len(own) or any(type(cache) is not KVCache for cache in [*first, *own]):
        return False
    ids = mx.array([[0, 1]])
    target(ids, cache=theirs)
    shortened(ids, cache=own)
    if any(cache.empty() for cache in [*first, *own]):
        return False
    pairs = [(keys_values_of(first, i), keys_values_of(own, i)) for i in range(len(own))]
    return all(
        one.shape == other.shape and bool(mx.allclose(one, other, atol=1e-3).item())
        for mine, his in pairs
        for one, other in zip(mine[:2], his[:2], strict=True)
    )


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
