"""Early exit: drafts from the target's own first layers, final norm and head.

LayerSkip (Elhoushi et al. 2024, arXiv 2404.16710) trains models for early exits. Other models may
get a trained exit in place of the final norm. It is a causal convolution over the last states, an
MLP and a norm (cf. Kangaroo, arXiv 2404.18911). The caches are filled from the target's caches if
possible.
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

# the cache of the pass that this thread builds
_cache: ContextVar[Any] = ContextVar("cache", default=None)


@dataclass(frozen=True, eq=False)
class ExitDrafter(ModelDrafter):
    """The target's first layers, with or without a trained exit.

    Attributes:
        name: of the trained exit.
        exit: the trained exit, or None.
        copies: True if keys and values may be copied from the target's caches.
    """

    name: str = ""
    exit: Exit | None = None
    copies: bool = False

    def describe(self) -> str:
        return f"{self.name}: early exit after {len(self.model.layers)} layers, trained"

    def fill(self, source: ModelReader) -> None:
        """Copy what the target has read, so that a long prompt costs almost nothing."""
        target = source.context.target_caches
        if not self.copies or target is None:
            return
        # The exit's convolution reads these positions, so they have to be fed.
        attended = getattr(self.model, "window", 1) - 1
        missed = target.position - source.rollback.position
        if missed >= 2 + attended:
            copy_missed(target, source, missed, attended)


def copy_missed(target: Verifier, source: ModelReader, missed: int, attended: int) -> None:
    """Copy the missed positions except the last `attended` of them.

    Nothing is copied unless the caches hold the text before these positions.
    """
    num_layers = len(source.model.layers)
    caches = source.rollback.caches[:num_layers]
    read = [target.keys_values(i) for i in range(num_layers)]
    start, length = caches[0].offset, read[0].offset
    is_new = start == 0 and source.callers_cache is None
    if not is_new and start != length - missed:
        return
    # A cache that has dropped old positions cannot be copied by position.
    if any(one.keys.shape[2] != one.offset for one in read):
        return
    copied = slice(start, length - attended)
    for cache, (keys, values, _) in zip(caches, read, strict=True):
        cache.update_and_fetch(keys[:, :, copied], values[:, :, copied])
    for cache in source.rollback.caches[num_layers:]:
        # The exit's cache did not see these positions. It begins anew with the next ones.
        cache.trim(cache.offset)
    source.rollback.advance(missed - attended)


def early_exit(
    target: nn.Module, num_layers: int, *, greedy: bool = False, draft_temp: float | None = None
) -> ModelDrafter:
    """A drafter from the first layers of a loaded target.

    Raises DraftModelError if the target has fewer layers, or its layers cannot run alone.
    """
    model = first_layers(target, num_layers)
    copies = fills_alike(target, model)
    return ExitDrafter(model, greedy=greedy, draft_temp=draft_temp, copies=copies)


def load_exit(files: HeadFiles, target: nn.Module, **options: Any) -> ExitDrafter:
    shortened = first_layers(target, int(files.config[EXIT_LAYER]))
    scale = final_norm(shortened).weight
    trained = Exit({**files.config, "hidden_size": scale.shape[0]})
    files.load_into(trained, scale.dtype)
    copies = fills_alike(target, shortened)
    options |= {"name": files.name, "exit": trained, "copies": copies}
    return ExitDrafter(ExitModel(shortened, trained), None, **options)


def fills_alike(target: nn.Module, shortened: nn.Module) -> bool:
    """True if a pass fills the caches of the first layers like the target's caches."""
    theirs, shortened_caches = make_prompt_cache(target), make_prompt_cache(shortened)
    for model, caches in ((target, theirs), (shortened, shortened_caches)):
        # Two tokens show whether positions enter the keys alike.
        model(mx.array([[0, 1]]), cache=caches)
    first = list(leaves(theirs))[: len(shortened_caches)]
    every = [*first, *shortened_caches]
    if len(first) < len(shortened_caches) or any(
        type(c) is not KVCache or c.empty() for c in every
    ):
        return False
    pairs = [
        (getattr(theirs, name), getattr(ours, name))
        for theirs, ours in zip(first, shortened_caches, strict=True)
        for name in ("keys", "values")
    ]
    return all(a.shape == b.shape and mx.allclose(a, b, atol=1e-3).item() for a, b in pairs)


def final_norm(model: nn.Module) -> nn.Module:
    norm = anatomy_of(model).norm
    if norm is not None:
        return norm
    raise HeadError(
        f"The final norm of {type(model).__module__} was not found, so that it cannot be replaced "
        "by a trained exit. Use another kind of head."
    )


class Exit(nn.Module):  # type: ignore[misc]
    """norm(x + mlp(convolution(x))), in place of the target's final norm.

    The keys of its config are hidden_size D, intermediate_size of the MLP, conv_kernel W, and
    rms_norm_eps.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Make weights that leave x as it is: an identity convolution, and a zero MLP."""
        super().__init__()
        width, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
        self.window = int(config[WINDOW])
        if self.window < 1:
            raise ValueError(f"{WINDOW} is {self.window}; expected 1 or more")
        self.input_norm = nn.RMSNorm(width, eps)
        self.kernel = mx.zeros((self.window, width))
        # The last position of the window is the row itself.
        self.kernel[-1] = 1.0
        self.mlp = MLP(width, int(config["intermediate_size"]))
        self.mlp.down_proj.weight = mx.zeros_like(self.mlp.down_proj.weight)
        self.norm = nn.RMSNorm(width, eps)

    def __call__(self, x: mx.array) -> Any:
        """States [B, n, D] for the target's head, from outputs [B, n, D] of the last layer."""
        read = self.read_back(self.input_norm(x), _cache.get())
        return self.norm(x + self.mlp((read * self.kernel).sum(axis=-2)))

    def read_back(self, rows: mx.array, cache: Any) -> mx.array:
        """Windows [B, n, W, D] that end at each of `rows` [B, n, D], with rows of the cache."""
        num_rows, mask = rows.shape[1], create_attention_mask(rows, cache)
        if cache is not None:
            keys, _ = cache.update_and_fetch(rows[:, None], rows[:, None, :, :0])
            rows = keys[:, 0]
        # Places of each window, counted from 1. 0 is before the text.
        if isinstance(mask, mx.array):  # in a tree, each row's path
            mask = mask.reshape(mask.shape[-2:])  # of a single text
            seen = mx.where(mask, mx.arange(1, rows.shape[1] + 1), 0)
            places = mx.sort(seen, axis=-1)[:, -self.window :]
            missing = self.window - places.shape[1]
            places = mx.pad(places, [(0, 0), (missing, 0)])
        else:
            # Without a tree, the window of a row is the rows just before it.
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
        return list(self.model.layers)

    def make_cache(self) -> list[Any]:
        return [*make_prompt_cache(self.model), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None, **inputs: Any) -> Any:
        with setting(_cache, cache[-1] if cache else None):
            return self.model(tokens, cache=cache[:-1] if cache else None, **inputs)
