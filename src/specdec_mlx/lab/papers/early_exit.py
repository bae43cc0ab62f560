"""Early exit: drafts from the target's own first layers, final norm and head.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains models for that; others may get a trained
exit in place of the final norm: a causal convolution over the last states, an MLP and a norm (cf.
Kangaroo, arXiv 2404.18911). Their caches are filled from the target's where possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.qwen2 import MLP

from specdec_mlx.caches import leaves
from specdec_mlx.drafters.heads.files import HeadFiles
from specdec_mlx.drafters.model import ModelDrafter, ModelReader
from specdec_mlx.drafters.reduced_models import first_layers
from specdec_mlx.errors import HeadError
from specdec_mlx.models.anatomy import anatomy_of, setting

if TYPE_CHECKING:
    from specdec_mlx.target import Verifier

EXIT_LAYER = "exit_layer"  # keys of a trained exit's config: layers before it,
WINDOW = "conv_kernel"  # and positions that its convolution reads

# of the pass that this thread builds
_cache: ContextVar[Any] = ContextVar("cache", default=None)


@dataclass(frozen=True, eq=False)
class ExitDrafter(ModelDrafter):
    """The target's first layers, maybe with a trained exit; copies: the target's caches."""

    name: str = ""
    exit: Exit | None = None
    copies: bool = False

    def describe(self) -> str:
        """Name and number of layers."""
        return f"{self.name}: early exit after {len(self.model.layers)} layers, trained"

    def fill(self, source: ModelReader) -> None:
        """Copy what the target has read, so that a long prompt costs next to nothing."""
        target = source.context.target_caches
        if not self.copies or target is None:
            return
        # positions before its own that the exit's convolution reads, so that they are fed
        attended = getattr(self.model, "window", 1) - 1
        missed = target.position - source.rollback.position
        if missed >= 2 + attended:
            copy_missed(target, source, missed, attended)


def copy_missed(target: Verifier, source: ModelReader, missed: int, attended: int) -> None:
    """Copy the missed positions but the attended, if the caches hold the text before them."""
    num_layers = len(source.model.layers)
    own = source.rollback.caches[:num_layers]
    read = [target.keys_values(i) for i in range(num_layers)]
    start, length = own[0].offset, read[0].offset
    is_new = start == 0 and source.callers_cache is None
    if not is_new and start != length - missed:
        return
    if any(one.keys.shape[2] != one.offset for one in read):
        return
    copied = slice(start, length - attended)
    for cache, (keys, values, _) in zip(own, read, strict=True):
        cache.update_and_fetch(keys[:, :, copied], values[:, :, copied])
    for cache in source.rollback.caches[num_layers:]:
        cache.trim(cache.offset)
    source.rollback.advance(missed - attended)


def early_exit(
    target: nn.Module, num_layers: int, *, greedy: bool = False, draft_temp: float | None = None
) -> ModelDrafter:
    """A drafter of the first layers of a loaded target.

    Raises DraftModelError for more layers than it has, and where they cannot be run alone.
    """
    model = first_layers(target, num_layers)
    copies = fills_alike(target, model)
    return ExitDrafter(model, greedy=greedy, draft_temp=draft_temp, copies=copies)


def load_exit(files: HeadFiles, target: nn.Module, **options: Any) -> ExitDrafter:
    """The drafter of a trained exit; options: of `ModelDrafter`."""
    shortened = first_layers(target, int(files.config[EXIT_LAYER]))
    scale = final_norm(shortened).weight
    trained = Exit({**files.config, "hidden_size": scale.shape[0]})
    files.load_into(trained, scale.dtype)
    copies = fills_alike(target, shortened)
    options |= {"name": files.name, "exit": trained, "copies": copies}
    return ExitDrafter(ExitModel(shortened, trained), None, **options)


def fills_alike(target: nn.Module, shortened: nn.Module) -> bool:
    """True if a pass fills the caches of the first layers as it fills the target's."""
    theirs, own = make_prompt_cache(target), make_prompt_cache(shortened)
    for model, caches in ((target, theirs), (shortened, own)):
        model(mx.array([[0, 1]]), cache=caches)
    first = list(leaves(theirs))[: len(own)]
    every = [*first, *own]
    if len(first) < len(own) or any(type(c) is not KVCache or c.empty() for c in every):
        return False
    pairs = [
        (getattr(theirs, name), getattr(ours, name))
        for theirs, ours in zip(first, own, strict=True)
        for name in ("keys", "values")
    ]
    return all(a.shape == b.shape and mx.allclose(a, b, atol=1e-3).item() for a, b in pairs)


def final_norm(model: nn.Module) -> nn.Module:
    """The module that makes the input of the model's head; HeadError if there is none."""
    norm = anatomy_of(model).norm
    if norm is not None:
        return norm
    raise HeadError(
        f"The final norm of {type(model).__module__} was not found, so that it cannot be replaced "
        "by a trained exit. Use another kind of head."
    )


class Exit(nn.Module):  # type: ignore[misc]
    """norm(x + mlp(convolution(x))), in place of the target's final norm.

    Its config has hidden_size: D, intermediate_size: of the MLP, conv_kernel: W, rms_norm_eps.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Weights that leave x as it is: an identity as convolution, an MLP that adds zeros."""
        super().__init__()
        width, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
        self.window = int(config[WINDOW])
        if self.window < 1:
            raise ValueError(f"{WINDOW} is {self.window}; expected 1 or more")
        self.input_norm = nn.RMSNorm(width, eps)
        self.kernel = mx.zeros((self.window, width))
        self.kernel[-1] = 1.0
        self.mlp = MLP(width, int(config["intermediate_size"]))
        self.mlp.down_proj.weight = mx.zeros_like(self.mlp.down_proj.weight)
        self.norm = nn.RMSNorm(width, eps)

    def __call__(self, x: mx.array) -> Any:
        """States [B, n, D] for the target's head, from the outputs [B, n, D] of the last layer."""
        read = self.read_back(self.input_norm(x), _cache.get())
        return self.norm(x + self.mlp((read * self.kernel).sum(axis=-2)))

    def read_back(self, rows: mx.array, cache: Any) -> mx.array:
        """Windows [B, n, W, D] that end with each of rows [B, n, D]; the cache has them as keys."""
        num_rows, mask = rows.shape[1], create_attention_mask(rows, cache)
        if cache is not None:
            keys, _ = cache.update_and_fetch(rows[:, None], rows[:, None, :, :0])
            rows = keys[:, 0]
        # of each row the places of its window, from 1; 0 before the text
        if isinstance(mask, mx.array):  # as in a tree: each row's own path
            seen = mx.where(mask, mx.arange(1, rows.shape[1] + 1), 0)
            places = mx.sort(seen, axis=-1)[:, -self.window :]
            missing = self.window - places.shape[1]
            places = mx.pad(places, [(0, 0), (missing, 0)])
        else:
            end = rows.shape[1] - num_rows + 2
            window = mx.arange(end - self.window, end)
            places = mx.maximum(mx.arange(num_rows)[:, None] + window, 0)
        return rows[:, mx.maximum(places - 1, 0)] * (places > 0)[..., None]


class ExitModel(nn.Module):  # type: ignore[misc]
    """The target's first layers as a model, with a trained exit in place of the final norm."""

    def __init__(self, shortened: nn.Module, trained: Exit) -> None:
        super().__init__()
        norm = final_norm(shortened)
        for part in shortened.modules():
            for name in [name for name, value in part.items() if value is norm]:
                part[name] = trained
        self.model, self.window = shortened, trained.window

    @property
    def layers(self) -> list[nn.Module]:
        """The target's layers."""
        return list(self.model.layers)

    def make_cache(self) -> list[Any]:
        """Caches of the target's layers and of the exit."""
        return [*make_prompt_cache(self.model), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None, **inputs: Any) -> Any:
        """Logits [B, n, V] of tokens [B, n]."""
        with setting(_cache, cache[-1] if cache else None):
            return self.model(tokens, cache=cache[:-1] if cache else None, **inputs)
