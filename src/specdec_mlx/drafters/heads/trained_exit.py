"""What a trained exit has behind the target's first layers: a convolution, an MLP and a norm.

Kangaroo (Liu et al. 2024, arXiv 2404.18911) has the attention of one more layer there: what the
target gathers from the text in the layers that are left out, its adapter gathers. Here the MLP
reads a causal convolution over the last few states, each channel by itself. That takes a third of
the operations, and looks equally far in a text of any length.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.qwen2 import MLP

from specdec_mlx.errors import HeadError
from specdec_mlx.target.watching import watching

EXIT_LAYER = "exit_layer"
"""Key of a config that tells a trained exit: after how many layers it leaves."""

WINDOW = "conv_kernel"
"""Key of its config: over how many positions its convolution goes, the own one included."""

_cache: ContextVar[Any] = ContextVar("cache", default=None)
"""The exit's cache in the pass that is being built in this thread."""


class Exit(nn.Module):  # type: ignore[misc]
    """norm(x + mlp(convolution(x))), what a trained exit has for the target's final norm.

    Args:
        config: hidden_size: D, width of the target's states. intermediate_size: of the MLP.
            conv_kernel: W, over how many positions the convolution goes, the own one included.
            rms_norm_eps: of both norms.

    Raises:
        KeyError: one of these is missing.
        ValueError: it would go over no position.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """As if there were no MLP, and it read its own position alone."""
        super().__init__()
        width, self.window = int(config["hidden_size"]), int(config[WINDOW])
        if self.window < 1:
            raise ValueError(f"{WINDOW} is {self.window}; expected 1 or more")
        self.input_norm = nn.RMSNorm(width, float(config["rms_norm_eps"]))
        self.kernel = mx.zeros((self.window, width))
        self.kernel[-1] = 1.0
        self.mlp = MLP(width, int(config["intermediate_size"]))
        self.mlp.down_proj.weight = mx.zeros_like(self.mlp.down_proj.weight)
        self.norm = nn.RMSNorm(width, float(config["rms_norm_eps"]))

    def __call__(self, x: mx.array) -> mx.array:
        """States [B, n, D] for the target's head, of the outputs [B, n, D] of the last layer run.

        Behind the cache of the pass, if it has one; else these are all positions of a text.
        """
        read = self.read_back(self.input_norm(x), _cache.get())
        convolved = (read * self.kernel).sum(axis=-2)
        states: mx.array = self.norm(x + self.mlp(convolved))
        return states

    def read_back(self, rows: mx.array, cache: Any) -> mx.array:
        """Each position and those before it, the oldest first; zeros before the text begins.

        Args:
            rows: [B, n, D] of the positions of this pass.
            cache: of those before; its keys are [B, 1, T, D], and its values of no width.

        Returns:
            [B, n, W, D].
        """
        num_rows, mask = rows.shape[1], create_attention_mask(rows, cache)
        if cache is not None:
            keys, _ = cache.update_and_fetch(rows[:, None], rows[:, None, :, :0])
            rows = keys[:, 0]
        if isinstance(mask, mx.array):
            return self._along(mask, rows)
        length = num_rows + self.window - 1
        rows = _with_zeros(rows[:, -length:], length)
        if num_rows == 1:
            return rows[:, None]
        shifted = [rows[:, i : i + num_rows] for i in range(self.window)]
        return mx.stack(shifted, axis=2)

    def _along(self, mask: mx.array, rows: mx.array) -> mx.array:
        """The same where a mask tells what comes before what, as in a tree.

        Args:
            mask: what each position of the pass sees, booleans [n, T].
            rows: [B, T, D] of all that is cached.
        """
        num_cached = rows.shape[1]
        seen = mx.where(mask, mx.arange(1, num_cached + 1), 0)
        last = mx.sort(seen, axis=-1)[:, -self.window :]
        last = mx.pad(last, [(0, 0), (self.window - last.shape[1], 0)])
        return _with_zeros(rows, num_cached + 1)[:, last]


def _with_zeros(rows: mx.array, length: int) -> mx.array:
    """Rows [B, n, D] behind as many rows of zeros as make them `length`."""
    missing = length - rows.shape[1]
    return mx.pad(rows, [(0, 0), (missing, 0), (0, 0)]) if missing else rows


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
