"""EAGLE heads: one decoder layer over the target's states and the embeddings of the next tokens.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) fuses three layers of the target, attends over
[embedding, state], and has a head of its own over a part of the vocabulary. EAGLE-1 and 2
(2401.15077, 2406.16858) fuse the state after the final norm, and use the target's head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from specdec_mlx.contracts import FeatureRows, Features
from specdec_mlx.drafters.heads.drafter import Config, Head, RecurrentHead, Variation
from specdec_mlx.drafters.heads.mtp import SLIDING, MTPFamily, model_of, text_part
from specdec_mlx.models.anatomy import Anatomy
from specdec_mlx.window_cache import WindowCache

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def fused_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Layers of the target, from 0, whose outputs the head reads.

    Args:
        config: config of the head. Without ids, the layers are those in the paper's code.
        num_layers: layers of the target.
    """
    ids = config.get(IDS_KEY) or (1, num_layers // 2 - 1, num_layers - 4)
    # A stored id names a layer by its output, and the first is 1 by default, or names the next
    # layer by its input, and the first is 2 (sglang#25454). A wrong guess costs about 0.1 tokens
    # a pass.
    back = 0 if ids[0] == 1 else 1
    return tuple(i - back for i in ids)


def windows_of(layer: Config) -> tuple[int | None, ...]:
    """Number of positions that each layer sees, None for all."""
    depth, first = layer.get("num_hidden_layers") or 1, layer.get("max_window_layers")
    kinds, slides = layer.get("layer_types"), layer.get("use_sliding_window")
    if slides is None:
        slides = bool(kinds)
    # Qwen's configs have no list of kinds. Their layers slide from `max_window_layers` on.
    kinds = kinds or [SLIDING if i >= (first or 0) else None for i in range(depth)]
    window = layer.get("sliding_window") if slides else None
    return tuple(window if kind == SLIDING else None for kind in kinds[:depth])


def layer_arguments(config: Config) -> dict[str, Any]:
    """Arguments of the mlx-lm model that provides a head's layers."""
    kind, num_heads = str(config.get("model_type", "")), config["num_attention_heads"]
    name = "qwen3" if kind.startswith("qwen3") else "llama"
    name = "gemma4_text" if is_gemma4(config) else name
    rope, depth = config.get("rope_parameters"), config.get("num_hidden_layers") or 1
    return {
        "num_hidden_layers": depth,
        "rope_theta": (rope or {}).get("rope_theta", 10000.0),
        "rope_scaling": rope or None,
        "num_key_value_heads": num_heads,
        "head_dim": config["hidden_size"] // num_heads,
        "max_position_embeddings": 2048,
        **{key: value for key, value in config.items() if value is not None},
        # Qwen 2's projections have biases.
        "model_type": "qwen2" if config.get("qkv_bias") else name,
        "tie_word_embeddings": False,
        # A mask limits what each layer sees, so mlx-lm's own sliding windows are off. DeepSpec's
        # Gemma 4 layers do not share keys either.
        "layer_types": ["full_attention"] * depth,
        "num_kv_shared_layers": 0,
    }


def is_gemma4(config: Config) -> bool:
    return str(config.get("model_type", "")).startswith("gemma4")


def eagle1_family(config: Config) -> MTPFamily:
    def without_first_norm(model: nn.Module) -> None:
        model.layers[0].input_layernorm = nn.Identity()

    arguments = layer_arguments(config)
    return MTPFamily(
        arguments["model_type"],
        prefix="",
        names={"projection": "fc"},
        changes=arguments,
        adapted=without_first_norm,
        label="EAGLE",
    )


class LayersHead(Head):
    """A head over the fused outputs of several layers of the target.

    Attributes:
        fused: numbers of the target's layers, from 0.
        windows: number of positions that each of the head's own layers sees, None for all.
    """

    fused: tuple[int, ...]
    windows: tuple[int | None, ...]

    def __init__(self, layer: Config, fused: Sequence[int], anatomy: Anatomy) -> None:
        super().__init__()
        shell: Any = model_of(layer_arguments(layer))
        self.layers, self.norm = shell.layers, shell.model.norm
        self.fused = tuple(fused)
        self.anatomy = anatomy
        self.width = self.norm.weight.size
        self.fc = nn.Linear(len(fused) * anatomy.width, self.width, bias=False)
        self.hidden_norm = nn.RMSNorm(self.width, self.norm.eps)

    def full_caches(self) -> list[Any]:
        # A layer that was trained with a window of its own sees no first positions beyond it.
        return [WindowCache(size, sinks=0) if size else KVCache() for size in self.windows]

    @property
    def features(self) -> Features:
        return Features(layers=self.fused)

    def rows(self, features: FeatureRows) -> Any:
        states = [features.layers[layer] for layer in self.fused]
        if "fc_norm" in self:
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
        fused = mx.concatenate(states, axis=-1)
        return self.fc(self.input_norm(fused) if "input_norm" in self else fused)

    def variations(self) -> Iterator[Variation]:
        for name, by in (("later", 1), ("earlier", -1)):
            layers = [layer + by for layer in self.fused]
            if min(layers) >= 0 and max(layers) < self.anatomy.num_layers:
                advice = f"its layer ids look meant otherwise; load it with layers={layers}"
                other = self.otherwise(fused=tuple(layers))
                yield Variation(f"one layer {name}", advice, other)

    def notes(self) -> list[str]:
        windows = sorted({window for window in self.windows if window is not None})
        return [
            f"reads the outputs of layers {', '.join(map(str, self.fused))}",
            *super().notes(),
            *(f"windows of {size}" for size in windows),
        ]


class Eagle3(LayersHead, RecurrentHead):
    """An EAGLE-3 head, from a config.json of SafeAILab, SpecForge or speculators.

    Attributes:
        flags: names in `FLAGS` that its config sets. "norm_before_residual" takes the normed state
            as the residual. "norm_before_fc" has one norm over the concatenated states, and
            "fc_norm" one norm for each state. "norm_output" feeds back the state after the final
            norm (EAGLE-3.1, as in vLLM's pull request 42764; SpecForge before its pull request 879
            trained in another way).
    """

    kind = "EAGLE-3"

    def __init__(
        self, config: Config, anatomy: Anatomy, layers: Sequence[int] | None = None
    ) -> None:
        settings = {**(config.get("eagle_config") or {}), **config}
        layer = text_part(config)
        super().__init__(layer, layers or fused_layers(settings, anatomy.num_layers), anatomy)
        self.windows = windows_of(layer)
        self.flags = frozenset(name for name in FLAGS if settings.get(name))
        attention, eps = self.layers[0].self_attn, self.norm.eps
        # The first layer attends over [embedding, state], which is twice as wide.
        for name in ("q_proj", "k_proj", "v_proj"):
            rows, has_bias = attention[name].weight.shape[0], "bias" in attention[name]
            attention[name] = nn.Linear(2 * self.width, rows, has_bias)
        if "norm_before_fc" in self.flags:
            self.input_norm = nn.RMSNorm(len(self.fused) * anatomy.width, eps)
        if "fc_norm" in self.flags:
            self.fc_norm = [nn.RMSNorm(anatomy.width, eps) for _ in self.fused]

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> Any:
        layers = zip(self.layers, cache, self.windows, strict=True)
        first, layer_cache, window = next(layers)
        # q, k, v = W [norm(embedding), norm(state)] in the first layer
        normed = self.hidden_norm(states)
        both = mx.concatenate([first.input_layernorm(self.embed(tokens)), normed], -1)
        mask = create_attention_mask(states, layer_cache, window)
        h = normed if "norm_before_residual" in self.flags else states
        h = h + first.self_attn(both, mask, layer_cache)
        h = h + first.mlp(first.post_attention_layernorm(h))
        for layer, layer_cache, window in layers:
            h = layer(h, create_attention_mask(h, layer_cache, window), layer_cache)
        return self.norm(h) if "norm_output" in self.flags else h

    def draft_logits(self, states: mx.array) -> Any:
        is_normed = "norm_output" in self.flags
        return super().draft_logits(states if is_normed else self.norm(states))

    def variations(self) -> Iterator[Variation]:
        yield from super().variations()
        for key in ("norm_before_residual", "norm_output"):
            other = key not in self.flags
            advice = f"its config.json looks wrong; write {key}: {str(other).lower()} there"
            head = self.otherwise(flags=self.flags ^ {key})
            yield Variation(f"{key} {other}", advice, head)

    def notes(self) -> list[str]:
        return [*super().notes(), *(name for name in FLAGS if name in self.flags)]
