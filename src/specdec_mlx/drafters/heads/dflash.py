"""DFlash: a small diffusion model fills a block of masks in one pass (z-lab, arXiv 2602.06036).

Its layers attend over the block in both directions and, before it, over the context: outputs of
several layers of the target, fused and projected to keys and values only. The block begins with the
last token of the text; embeddings and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from specdec_mlx.drafters.heads.eagle import SLIDING, LayersConfig, LayersHead
from specdec_mlx.drafters.heads.session import OnePassSession
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, TargetEnds
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import FeatureRows

DEFAULT_BLOCK = 16


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LayersConfig):
    """What the config of a DFlash head says.

    mask_token: what the block is filled with. block_size: tokens of the block, the first included.
    causal: of each layer, True if it sees only what comes before in the block too.
    embedding_scale, logit_scale: factors. logit_cap: logits are cap * tanh(logits / cap); None for
    no cap.
    """

    mask_token: int
    block_size: int = DEFAULT_BLOCK
    causal: tuple[bool, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], num_layers: int) -> DFlashConfig:
        """From a config.json, for a target of so many layers.

        z-lab's ids name the layers whose outputs are read, those of speculators the states of
        Hugging Face's list, in which 0 is the embedding.
        """
        nested = {**config, **(config.get("dflash_config") or {})}
        layer = {"model_type": "qwen3", **(config.get("transformer_layer_config") or config)}
        depth = layer["num_hidden_layers"]
        slides = [kind == SLIDING for kind in layer.get("layer_types") or ()]
        in_window = not config.get("sliding_window_non_causal", False)
        causal = [in_window and slide for slide in slides]
        if config.get("is_causal") is not None:
            causal = [bool(config["is_causal"])] * depth
        ids = config.get("aux_hidden_state_layer_ids")
        if ids is not None:
            layers = tuple(i - 1 for i in ids)
        elif nested.get("target_layer_ids"):
            layers = tuple(nested["target_layer_ids"])
        else:
            layers = spread_layers(config.get("num_target_layers", num_layers), depth)
        return cls(
            layer,
            layers,
            tuple(layer.get("sliding_window") if slide else None for slide in slides),
            mask_token=nested["mask_token_id"],
            block_size=nested.get("block_size", DEFAULT_BLOCK),
            causal=tuple(causal),
            embedding_scale=nested.get("input_embedding_scale", 1.0),
            logit_scale=nested.get("output_multiplier", 1.0),
            logit_cap=nested.get("final_logit_softcapping") or None,
        )


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers of a target, from the second to the third last, evenly spread."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


class DFlash(LayersHead):
    """A DFlash head.

    Args:
        config: what its config says.
        ends: of the target.
        vocabulary: what its logits are over; None for the target's tokens, and its head.
    """

    kind = "DFlash"
    session = OnePassSession

    def __init__(
        self, config: DFlashConfig, ends: TargetEnds, vocabulary: DraftVocabulary | None = None
    ) -> None:
        """Random weights."""
        rows = 0 if vocabulary is None else vocabulary.ids.size
        super().__init__(config, ends, vocabulary, own_head=rows)
        self.most_drafted = config.block_size - 1

    def rows(self, features: FeatureRows) -> mx.array:
        """[n, D] the outputs of the target's layers, fused."""
        fused = self.fc(mx.concatenate(self.outputs(features), axis=-1))
        rows: mx.array = self.hidden_norm(fused)
        return rows

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Add n rows [n, D] to the context: their keys and values in every layer."""
        for layer, kept in zip(self.layers, cache, strict=True):
            kept.update_and_fetch(*_keys_and_values(layer.self_attn, rows[None], kept.offset))

    def guesses(self, token: int, number: int, cache: list[Any]) -> mx.array:
        """Logits [n, V] of the n tokens behind `token`, which is the first of a block."""
        masks = [self.config.mask_token] * self.most_drafted
        return self.fill(to_ids([token, *masks]), cache)[1 : number + 1]

    def fill(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Logits [B, V] of a block of B tokens behind the context, which stays as it was."""
        size = tokens.shape[0]
        h = self.ends.embed(tokens)[None] * self.config.embedding_scale
        for i, (layer, kept) in enumerate(zip(self.layers, cache, strict=True)):
            mask = self.mask(i, kept.offset, size)
            h = h + _attend(layer.self_attn, layer.input_layernorm(h), kept, mask)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            kept.trim(size)
        return self.logits(self.norm(h[0]))

    def mask(self, layer: int, start: int, size: int) -> mx.array | None:
        """[B, start + B] what each place of a block of B sees in a layer; None: everything."""
        window = self.config.windows[layer] if self.config.windows else None
        causal = self.config.causal[layer] if self.config.causal else False
        if window is None and not causal:
            return None
        back = mx.arange(start, start + size)[:, None] - mx.arange(start + size)
        seen = back >= 0 if causal else back == back
        return seen if window is None else seen & (mx.abs(back) < window)

    def draft_logits(self, states: mx.array) -> mx.array:
        """Logits [..., Vd] of normed states [..., D], scaled and capped."""
        logits = super().draft_logits(states) * self.config.logit_scale
        cap: float | None = self.config.logit_cap
        return logits if cap is None else cap * mx.tanh(logits / cap)

    def notes(self) -> list[str]:
        """Layers and block."""
        layers, *others = super().notes()
        return [layers, f"blocks of {self.config.block_size}", *others]


def _keys_and_values(attention: Any, x: mx.array, offset: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1, H, n, d] of states [1, n, D] that begin at a position."""
    shape = (1, x.shape[1], attention.n_kv_heads, -1)
    keys = attention.k_norm(attention.k_proj(x).reshape(shape)).transpose(0, 2, 1, 3)
    values = attention.v_proj(x).reshape(shape).transpose(0, 2, 1, 3)
    return attention.rope(keys, offset=offset), values


def _attend(attention: Any, x: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
    """Attention of a block [1, B, D] over the context and the block, as far as it is seen."""
    offset = cache.offset
    queries = attention.q_norm(attention.q_proj(x).reshape(1, x.shape[1], attention.n_heads, -1))
    queries = attention.rope(queries.transpose(0, 2, 1, 3), offset=offset)
    keys, values = cache.update_and_fetch(*_keys_and_values(attention, x, offset))
    mixed = mx.fast.scaled_dot_product_attention(
        queries, keys, values, scale=attention.scale, mask=mask
    )
    out: mx.array = attention.o_proj(mixed.transpose(0, 2, 1, 3).reshape(1, x.shape[1], -1))
    return out
