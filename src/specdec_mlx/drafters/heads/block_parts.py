"""Parts of published block heads whose layers differ from those of mlx-lm's Qwen 3."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.qwen3 import Attention, ModelArgs
from mlx_lm.models.qwen3_next import Qwen3NextAttention

from specdec_mlx.drafters.heads.drafter import Config

NUM_FREQUENCIES, LARGEST_PERIOD, CLEAN = 64, 10000.0, 1000.0
"""Numbers of Bonsai's embedding of noise levels; a level is between 0 for a mask and `CLEAN`."""


class AttentionWithSinks(Attention):  # type: ignore[misc]
    """Attention of Qwen 3 with a sink logit for each head, as in Nemotron's DSpark heads.

    A sink s adds exp(s) to the denominator of its head's softmax, and has no value.
    """

    def __init__(self, arguments: ModelArgs) -> None:
        super().__init__(arguments)
        self.attention_sink_bias = mx.zeros(self.n_heads)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> Any:
        def by_head(states: mx.array, heads: int) -> mx.array:
            return states.reshape(*states.shape[:2], heads, -1)

        queries = self.q_norm(by_head(self.q_proj(x), self.n_heads)).swapaxes(1, 2)
        keys = self.k_norm(by_head(self.k_proj(x), self.n_kv_heads)).swapaxes(1, 2)
        values = by_head(self.v_proj(x), self.n_kv_heads).swapaxes(1, 2)
        queries, keys = (self.rope(part, offset=cache.offset) for part in (queries, keys))
        keys, values = cache.update_and_fetch(keys, values)
        sinks = self.attention_sink_bias.astype(queries.dtype)
        output = scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=self.scale, mask=mask, sinks=sinks
        )
        return self.o_proj(output.swapaxes(1, 2).reshape(*x.shape[:2], -1))


class NoiseLevels(nn.Module):  # type: ignore[misc]
    """Embedding of each position's noise level, which Bonsai's DSpark heads add to a block.

    The known token is clean and each mask is noise, whatever the trained range of levels was.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2 * NUM_FREQUENCIES, width)
        self.fc2 = nn.Linear(width, width)

    def __call__(self, size: int) -> Any:
        """Embeddings [size, D] of the positions of a block."""
        levels = CLEAN * (mx.arange(size) == 0)
        # [sin(t f_i), cos(t f_i)] with f_i = 10000^(-i / 64)
        frequencies = LARGEST_PERIOD ** (-mx.arange(NUM_FREQUENCIES) / NUM_FREQUENCIES)
        angles = levels[:, None] * frequencies
        features = mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1)
        return self.fc2(nn.silu(self.fc1(features.astype(self.fc2.weight.dtype))))


def change_attention(layer: nn.Module, settings: Config, arguments: Config) -> None:
    """Give a decoder layer the attention that its head's config asks for.

    Args:
        layer: a layer of mlx-lm's Qwen 3.
        settings: config of the head.
        arguments: arguments of the mlx-lm model that has the layer.
    """
    if settings.get("attention_sink_bias"):
        layer.self_attn = AttentionWithSinks(ModelArgs.from_dict(arguments))
    if settings.get("enable_qwen35_gated_q_proj"):
        # q_proj makes a gate beside each query, and a part of each head rotates.
        rotated = (arguments.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0)
        rest = {"attention_bias": False, "partial_rotary_factor": rotated}
        layer.self_attn = Qwen3NextAttention(SimpleNamespace(**{**rest, **arguments}))
    if settings.get("rope_is_neox_style") is False:
        # Neighbouring channels rotate together. The other order loads as well and drafts worse.
        layer.self_attn.rope.traditional = True
