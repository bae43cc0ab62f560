"""A model that counts its passes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache


class Counting(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_passes = 0

    @property
    def layers(self) -> Any:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.num_passes += 1
        logits: mx.array = self.model(inputs, cache=cache)
        return logits
