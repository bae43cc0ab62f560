"""What a trained exit has behind the target's first layers: a small decoder layer, and a norm.

As in Kangaroo (Liu et al. 2024, arXiv 2404.18911), whose adapter is the attention of such a layer:
what the target would have gathered from the text in the layers that are left out, it gathers here.
It attends to the last positions only, so that it drafts alike in texts longer than any that it was
trained on.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

from specdec_mlx.errors import HeadError
from specdec_mlx.target.watching import watching

EXIT_LAYER = "exit_layer"
"""Key of a config that tells a trained exit: after how many layers it leaves."""

WINDOW = "sliding_window"
"""Key of its config: how many positions its layer attends to, the own one included."""

_cache: ContextVar[Any] = ContextVar("cache", default=None)
"""The cache of the exit's layer in the pass that is being built in this thread."""


class Exit(nn.Module):  # type: ignore[misc]
    """norm(layer(x)), what a trained exit has for the target's final norm.

    Args:
        config: of the layer, in Hugging Face's words; `hidden_size` is the width of the target's
            states.

    Raises:
        KeyError: the window is not said.
        TypeError: nor is something else.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """As if there were no layer."""
        super().__init__()
        args = llama.ModelArgs.from_dict({**config, "model_type": "llama", "num_hidden_layers": 1})
        self.window = int(config[WINDOW])
        self.layer = llama.TransformerBlock(args)
        for last in (self.layer.self_attn.o_proj, self.layer.mlp.down_proj):
            last.weight = mx.zeros_like(last.weight)
        self.norm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(self, x: mx.array) -> mx.array:
        """States [B, n, D] for the target's head, of the outputs [B, n, D] of the last layer run.

        Behind the cache of the pass, if it has one; else these are all positions of a text.
        """
        cache = _cache.get()
        mask = create_attention_mask(x, cache, window_size=self.window)
        normed: mx.array = self.norm(self.layer(x, mask, cache))
        return normed


class ExitModel(nn.Module):  # type: ignore[misc]
    """The target's first layers with a trained exit, as a model.

    Args:
        shortened: those layers, see `first_layers`; all of it but the final norm is shared.
        trained: the exit.
    """

    def __init__(self, shortened: nn.Module, trained: Exit) -> None:
        """Nothing is copied."""
        super().__init__()
        replaced = _replaced(shortened, final_norm(shortened), trained)
        assert replaced is not None
        self.model = replaced

    @property
    def layers(self) -> list[nn.Module]:
        """Those of the target."""
        return list(self.model.layers)

    def make_cache(self) -> list[Any]:
        """Those of the target's layers, and the exit's."""
        return [*make_prompt_cache(self.model), KVCache()]

    def __call__(self, tokens: mx.array, cache: list[Any] | None = None, **inputs: Any) -> mx.array:
        """Logits [B, n, V] of tokens [B, n]."""
        before = _cache.set(cache[-1] if cache else None)
        try:
            logits: mx.array = self.model(tokens, cache=cache[:-1] if cache else None, **inputs)
        finally:
            _cache.reset(before)
        return logits


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
