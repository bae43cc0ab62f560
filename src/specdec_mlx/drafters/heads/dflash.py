"""DFlash: a small diffusion model fills a block of masks in one pass (z-lab, arXiv 2602.06036).

Its layers attend over the block in both directions and, before it, over the context: outputs of
several layers of the target, fused and projected to keys and values only. The block begins with the
last token of the text; embeddings and head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache

from specdec_mlx.drafters.heads.drafter import Head
from specdec_mlx.drafters.heads.eagle import SLIDING, layer_classes
from specdec_mlx.drafters.heads.session import OnePassSession
from specdec_mlx.drafters.heads.target_ends import TargetEnds
from specdec_mlx.drafters.heads.variations import Variation, shifted_layers
from specdec_mlx.drafters.heads.vocabulary import DraftVocabulary
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import DraftContext, FeatureRows, Features

DEFAULT_BLOCK = 16


@dataclass(frozen=True)
class DFlashConfig:
    """What the config of a DFlash head says.

    layer: configuration of its layers. layers: whose outputs of the target it reads, from 0.
    mask_token: what the block is filled with. block_size: tokens of the block, the first included.
    windows: of each layer, how far back it sees; None: all of the context. causal: whether each
        layer sees only what comes before in the block too. embedding_scale, logit_scale: factors.
    logit_cap: logits are cap * tanh(logits / cap); None for no cap.
    """

    layer: Mapping[str, Any]
    layers: tuple[int, ...]
    mask_token: int
    block_size: int = DEFAULT_BLOCK
    windows: tuple[int | None, ...] = ()
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
        layer = config.get("transformer_layer_config") or config
        slides = [kind == SLIDING for kind in layer.get("layer_types") or ()]
        in_window = not config.get("sliding_window_non_causal", False)
        causal = [in_window and slide for slide in slides]
        if config.get("is_causal") is not None:
            causal = [bool(config["is_causal"])] * _depth(layer)
        ids = config.get("aux_hidden_state_layer_ids")
        if ids is not None:
            layers = tuple(i - 1 for i in ids)
        elif nested.get("target_layer_ids"):
            layers = tuple(nested["target_layer_ids"])
        else:
            layers = spread_layers(config.get("num_target_layers", num_layers), _depth(layer))
        return cls(
            {"model_type": "qwen3", **layer},
            layers,
            nested["mask_token_id"],
            nested.get("block_size", DEFAULT_BLOCK),
            tuple(layer.get("sliding_window") if slide else None for slide in slides),
            tuple(causal),
            nested.get("input_embedding_scale", 1.0),
            nested.get("output_multiplier", 1.0),
            nested.get("final_logit_softcapping") or None,
        )


def spread_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers of a target, from the second to the third last, evenly spread."""
    if count == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))


def _depth(layer: Mapping[str, Any]) -> int:
    return int(layer["num_hidden_layers"])


class DFlashSession(OnePassSession):
    """Reads rows as they come, and fills one block a draft; see `HeadSession`."""

    def __init__(
        self, head: DFlash, sampling: Sampling, prompt: Sequence[int], context: DraftContext
    ) -> None:
        """Nothing was read yet."""
        super().__init__(head, sampling, prompt, context)
        self.cache = head.make_cache()

    def all_logits(self, limit: int) -> mx.array | None:
        """Of a block, of which the first is known; none before the prompt was read."""
        self.read()
        length = min(limit, self.head.config.block_size - 1)
        if length == 0 or self.waiting.start == 0:
            return None
        logits: mx.array = self.head.fill(self.block(), self.cache)[1 : length + 1]
        return logits

    def block(self) -> mx.array:
        """[B] the last token of the text, and masks."""
        config = self.head.config
        return to_ids([self.tokens[-1], *[config.mask_token] * (config.block_size - 1)])

    def read(self) -> list[Any]:
        """Read the rows that wait into the context."""
        if len(self.waiting):
            self.head.read(self.waiting.take(len(self.waiting)), self.cache)
        return [cache.state for cache in self.cache]


class DFlash(Head):
    """A DFlash head.

    Args:
        config: what its config says.
        ends: of the target.
        vocabulary: what its logits are over; None for the target's tokens, and its head.
    """

    kind = "DFlash"
    session = DFlashSession

    def __init__(
        self, config: DFlashConfig, ends: TargetEnds, vocabulary: DraftVocabulary | None = None
    ) -> None:
        """Random weights."""
        super().__init__()
        block, args = layer_classes(config.layer)
        width, eps = args.hidden_size, args.rms_norm_eps
        self.config = config
        self.ends = ends
        self.vocabulary = vocabulary
        self.features = Features(layers=config.layers)
        self.fc = nn.Linear(len(config.layers) * ends.width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers = [block(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps)
        if vocabulary is not None:
            self.lm_head = nn.Linear(width, vocabulary.ids.shape[0], bias=False)

    def rows(self, features: FeatureRows) -> mx.array:
        """[n, D] the outputs of the target's layers, fused."""
        states = [features.layers[layer] for layer in self.config.layers]
        rows: mx.array = self.hidden_norm(self.fc(mx.concatenate(states, axis=-1)))
        return rows

    def read(self, rows: mx.array, cache: list[Any]) -> None:
        """Add n rows [n, D] to the context: their keys and values in every layer."""
        for layer, kept in zip(self.layers, cache, strict=True):
            kept.update_and_fetch(*_keys_and_values(layer.self_attn, rows[None], kept.offset))

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

    def logits(self, states: mx.array) -> mx.array:
        """Logits [B, V] of states [B, D]."""
        wide = self.vocabulary is None
        logits = self.ends.logits(states) if wide else self.lm_head(states)
        logits = logits * self.config.logit_scale
        if self.config.logit_cap is not None:
            logits = mx.tanh(logits / self.config.logit_cap) * self.config.logit_cap
        return logits if self.vocabulary is None else self.vocabulary.widen(logits)

    def make_cache(self) -> list[Any]:
        """One for each layer."""
        return [KVCache() for _ in self.layers]

    def variations(self) -> list[Variation]:
        """Layers one off."""
        return shifted_layers(self)

    def notes(self) -> list[str]:
        """Layers and block."""
        layers = ", ".join(map(str, self.config.layers))
        windows = sorted({window for window in self.config.windows if window is not None})
        notes = [f"reads the outputs of layers {layers}", f"blocks of {self.config.block_size}"]
        return notes + [f"windows of {', '.join(map(str, windows))}"] * bool(windows)


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
