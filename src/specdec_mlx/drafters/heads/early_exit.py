"""Early exit: the target's own first layers, final norm and head draft for it.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains models for that; others can be tried, or
get a trained exit: an adapter (Houlsby et al. 2019, arXiv 1902.00751) and a norm in place of the
final norm, as the tuned lens has a linear map there (Belrose et al. 2023, arXiv 2303.08112). No
second set of layers is loaded. The first layers have caches of their own, so that they run twice on
what is drafted; what the target has read by itself is copied from its caches.
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
from specdec_mlx.drafters.model import ModelDrafter, ModelSession
from specdec_mlx.errors import HeadError
from specdec_mlx.target.keys_values import keys_values_of
from specdec_mlx.target.strategies import leaves
from specdec_mlx.target.watching import watching
from specdec_mlx.types import DraftContext

EXIT_LAYER = "exit_layer"
"""Key of a config that tells a trained exit: after how many layers it leaves."""

MLP_WIDTH = "intermediate_size"
"""Key of its config: how wide the adapter is inside, else as wide as the states."""


class Exit(nn.Module):  # type: ignore[misc]
    """norm(x + down(silu(up(inner_norm(x))))), what a trained exit has for the target's final norm.

    Args:
        width: of the target's states.
        mlp: of what lies between `up` and `down`.
        eps: of the norms.
    """

    def __init__(self, width: int, mlp: int, eps: float) -> None:
        """As if there were no adapter."""
        super().__init__()
        self.inner_norm = nn.RMSNorm(width, eps)
        self.up = nn.Linear(width, mlp)
        self.down = nn.Linear(mlp, width)
        self.down.weight = mx.zeros((width, mlp))
        self.down.bias = mx.zeros((width,))
        self.norm = nn.RMSNorm(width, eps)

    def __call__(self, x: mx.array) -> mx.array:
        """States [..., D] for the target's head, of the outputs [..., D] of the last layer run."""
        normed: mx.array = self.norm(x + self.down(nn.silu(self.up(self.inner_norm(x)))))
        return normed


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

    def catch_up(self) -> None:
        """Copy what was missed, and feed what cannot be copied."""
        self.copy_missed()
        super().catch_up()

    def copy_missed(self) -> None:
        """Take over keys and values of all tokens that it missed, if they are more than one.

        With them those of earlier turns, where its caches are its own and hold nothing. Not where
        they began elsewhere than the target's, or the target's forget.
        """
        held, own = self.context.target_caches, self.rollback.caches
        missed = 0 if held is None else held.position - self.rollback.position
        if held is None or missed < 2:
            return
        read = [held.keys_values(i) for i in range(len(own))]
        is_new = self.callers_cache is None and own[0].offset == 0
        start = 0 if is_new else read[0].offset - missed
        whole = all(keys.shape[2] == offset for keys, _, offset in read)
        if whole and own[0].offset == start:
            for cache, (keys, values, _) in zip(own, read, strict=True):
                cache.update_and_fetch(keys[..., start:, :], values[..., start:, :])
            self.rollback.advance(missed)

    def time_reading(self) -> float:
        """Next to nothing: it is not read but copied."""
        return 0.0

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
    theirs = tensors["norm.weight"].shape[0] if "norm.weight" in tensors else width
    if theirs != width:
        raise HeadError(
            f"{files.name}: its exit is for states of {theirs} numbers, and those of this target "
            f"have {width}. Use one that was trained for it."
        )
    mlp = int(files.config.get(MLP_WIDTH, width))
    trained = Exit(width, mlp, files.config.get("rms_norm_eps", 1e-5))
    try:
        dtype = norm.weight.dtype
        trained.load_weights([(name, x.astype(dtype)) for name, x in tensors.items()])
    except ValueError as error:
        raise HeadError(f"{files.name} is no complete exit: {error}") from error
    model, copies = with_exit(shortened, trained), fills_alike(target, shortened)
    return ExitDrafter(
        model, None, greedy, draft_temp, name=files.name, exit=trained, copies=copies
    )


def with_exit(shortened: nn.Module, trained: Exit) -> nn.Module:
    """The model with an exit in place of its final norm, all else shared."""
    replaced = _replaced(shortened, final_norm(shortened), trained)
    assert replaced is not None
    return replaced


def final_norm(model: nn.Module) -> nn.Module:
    """The module that makes the input of the model's head; raises HeadError if there is none."""
    calls: list[tuple[nn.Module, Any, Any]] = []
    parts = [part for part in model.modules() if part is not model]
    with watching(parts, lambda *call: calls.append(call)):
        logits = model(mx.array([[0, 1]]), cache=make_prompt_cache(model))
    heads = [given for _, given, result in calls if getattr(result, "shape", ()) == logits.shape]
    made = [module for module, _, result in calls if heads and result is heads[-1]]
    small = [module for module in made if not module.children()]
    if not small:
        raise HeadError(
            f"The final norm of {type(model).__module__} was not found, so that it cannot be "
            "replaced by a trained exit. Use another kind of head."
        )
    return small[0]


def _replaced(module: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module | None:
    """A copy of the module with one module in it replaced; None if it is not in it."""
    for name, value in module.items():
        if not isinstance(value, nn.Module):
            continue
        replacement = new if value is old else _replaced(value, old, new)
        if replacement is not None:
            copied = copy.copy(module)
            copied[name] = replacement
            return copied
    return None


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
