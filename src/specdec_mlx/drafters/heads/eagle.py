"""EAGLE heads: one decoder layer over the target's states and the embeddings of the next tokens.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) fuses three layers of the target, attends over
[embedding, state], and has a head of its own over a part of the vocabulary. EAGLE-1 and 2
(2401.15077, 2406.16858) fuse the state after the final norm, and use the target's head.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from specdec_mlx.contracts import FeatureRows, Features
from specdec_mlx.drafters.heads.drafter import (
    Config,
    DraftVocabulary,
    Head,
    RecurrentHead,
    TargetEnds,
    Variation,
)
from specdec_mlx.drafters.heads.mtp import MTPFamily

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
SLIDING = "sliding_attention"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class LayersConfig:
    """Config of a head that fuses the outputs of several layers of the target, from 0.

    layer: of its own layers, in Hugging Face's words. windows: positions that each of them sees,
    None for all; empty for no windows.
    """

    layer: Config
    layers: tuple[int, ...]
    windows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Eagle3Config(LayersConfig):
    """Config of an EAGLE-3 head.

    norm_before_residual: the residual is the normed state. norm_before_fc: one norm over all that
    is fused; fc_norm: one for each. norm_output: the state after the final norm is fed back
    (EAGLE-3.1, as in vLLM's pull request 42764; SpecForge trained otherwise before its 879).
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def read(cls, config: Config, num_layers: int) -> Eagle3Config:
        """From a config.json of SafeAILab, SpecForge or speculators; num_layers: the target's."""
        nested = config.get("eagle_config") or {}
        layer = config.get("transformer_layer_config") or config
        flags = {
            name: bool(config.get(name, nested.get(name, False))) for name in FLAGS
        }
        ids = config.get(IDS_KEY) or nested.get(IDS_KEY)
        default = (1, num_layers // 2 - 1, num_layers - 4)  # of the paper's code
        depth, first = (
            layer.get("num_hidden_layers", 1),
            layer.get("max_window_layers") or 0,
        )
        kinds, uses = layer.get("layer_types"), layer.get("use_sliding_window")
        if not (bool(kinds) if uses is None else uses):
            kinds = []
        elif not kinds:  # Qwen's way to say it
            kinds = [SLIDING if i >= first else None for i in range(depth)]
        window = layer.get("sliding_window")
        windows = tuple(window if kind == SLIDING else None for kind in kinds[:depth])
        return cls(layer, output_layers(ids) if ids else default, windows, **flags)


def output_layers(ids: Sequence[int]) -> tuple[int, ...]:
    """Layers of the target whose outputs a config names, from 0.

    Stored ids are "output of", from 1 by default, or "input of", from 2 (sglang#25454). A wrong
    guess costs about 0.1 tokens a pass.
    """
    back = 0 if ids[0] == 1 else 1
    return tuple(i - back for i in ids)


def layer_arguments(config: Config) -> dict[str, Any]:
    """Arguments of mlx-lm's model with a head's layers, by its config; Qwen2's has biases."""
    name = "qwen3" if str(config.get("model_type", "")).startswith("qwen3") else "llama"
    rope, heads = config.get("rope_parameters") or {}, config["num_attention_heads"]
    depth = config.get("num_hidden_layers", 1)
    if is_gemma4(config):  # in DeepSpec: full attention, no layer shares another's keys
        mine = {"layer_types": ["full_attention"] * depth, "num_kv_shared_layers": 0}
        return {
            **config,
            **mine,
            "model_type": "gemma4_text",
            "num_hidden_layers": depth,
        }
    return {
        "num_hidden_layers": 1,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": rope or None,
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "max_position_embeddings": 2048,
        **{key: value for key, value in config.items() if value is not None},
        "model_type": "qwen2" if config.get("qkv_bias") else name,
        "tie_word_embeddings": False,
        "layer_types": None,
    }


def is_gemma4(config: Config) -> bool:
    """True for a head whose own layers are Gemma 4's."""
    return str(config.get("model_type", "")).startswith("gemma4")


def eagle1_family(config: Config) -> MTPFamily:
    """Description of EAGLE-1 and 2 heads as prediction layers without norms around."""

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
    """A head over the outputs of several layers of the target."""

    config: Any

    def __init__(
        self,
        config: LayersConfig,
        ends: TargetEnds,
        vocabulary: DraftVocabulary | None = None,
        own_embeddings: int = 0,
        own_head: int = 0,
    ) -> None:
        """Random weights; own_*: rows of its own matrices, 0 for the target's."""
        super().__init__()
        arguments = layer_arguments(config.layer)
        module = importlib.import_module(f"mlx_lm.models.{arguments['model_type']}")
        args = module.ModelArgs.from_dict(arguments)
        width, eps = args.hidden_size, args.rms_norm_eps
        self.config = config
        self.width = width
        self.ends = ends
        self.vocabulary = vocabulary
        self.fc = nn.Linear(len(config.layers) * ends.width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        depth = range(args.num_hidden_layers)
        if is_gemma4(arguments):
            self.layers = [module.DecoderLayer(args, i) for i in depth]
        else:
            self.layers = [module.TransformerBlock(args) for _ in depth]
        self.norm = nn.RMSNorm(width, eps)
        if own_embeddings:
            self.embed_tokens = nn.Embedding(own_embeddings, width)
        if own_head:
            self.lm_head = nn.Linear(width, own_head, bias=False)

    @property
    def features(self) -> Features:
        """The outputs of these layers."""
        return Features(layers=self.config.layers)

    def rows(self, features: FeatureRows) -> Any:
        """[n, D] the outputs of these layers, fused."""
        states = [features.layers[layer] for layer in self.config.layers]
        if "fc_norm" in self:
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
        fused = mx.concatenate(states, axis=-1)
        return self.fc(self.input_norm(fused) if "input_norm" in self else fused)

    def variations(self) -> Iterator[Variation]:
        """The outputs of the layers before and after, where the target has them."""
        for name, by in (("later", 1), ("earlier", -1)):
            layers = tuple(layer + by for layer in self.config.layers)
            if min(layers) >= 0 and max(layers) < self.ends.num_layers:
                advice = f"its layer ids look meant otherwise; load it with layers={list(layers)}"
                yield self.otherwise(f"one layer {name}", advice, layers=layers)

    def otherwise(self, name: str, advice: str, **changes: Any) -> Variation:
        """A variation with another config."""
        return Variation(
            self, name, advice, {"config": replace(self.config, **changes)}
        )

    def notes(self) -> list[str]:
        """Layers, vocabulary, windows."""
        notes = [
            f"reads the outputs of layers {', '.join(map(str, self.config.layers))}"
        ]
        windows = {window for window in self.config.windows if window is not None}
        return [
            *notes,
            *super().notes(),
            *(f"windows of {size}" for size in sorted(windows)),
        ]


class Eagle3(LayersHead, RecurrentHead):
    """An EAGLE-3 head."""

    kind = "EAGLE-3"

    def __init__(
        self, config: Eagle3Config, ends: TargetEnds, *args: Any, **own: Any
    ) -> None:
        super().__init__(config, ends, *args, **own)
        attention = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):  # they take [embedding, state]
            rows, has_bias = attention[name].weight.shape[0], "bias" in attention[name]
            attention[name] = nn.Linear(2 * self.width, rows, has_bias)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(config.layers) * ends.width, self.norm.eps)
        if config.fc_norm:
            self.fc_norm = [
                nn.RMSNorm(ends.width, self.norm.eps) for _ in config.layers
            ]

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> Any:
        """States [batch, n, D]: the first layer attends over [embedding, state]."""
        first = self.layers[0]
        windows = self.config.windows or (None,) * len(cache)
        masks = [
            create_attention_mask(states, *of)
            for of in zip(cache, windows, strict=True)
        ]
        embedded = first.input_layernorm(self.embed(tokens))
        normed = self.hidden_norm(states)
        residual = normed if self.config.norm_before_residual else states
        h = residual + first.self_attn(
            mx.concatenate([embedded, normed], -1), masks[0], cache[0]
        )
        h = h + first.mlp(first.post_attention_layernorm(h))
        for layer, mask, kept in zip(
            self.layers[1:], masks[1:], cache[1:], strict=True
        ):
            h = layer(h, mask, kept)
        return self.norm(h) if self.config.norm_output else h

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] of states [..., D]."""
        return super().draft_logits(
            states if self.config.norm_output else self.norm(states)
        )

    def variations(self) -> Iterator[Variation]:
        """Other layers, another residual, another state fed back."""
        yield from super().variations()
        for key in ("norm_before_residual", "norm_output"):
            other = not getattr(self.config, key)
            advice = (
                f"its config.json looks wrong; write {key}: {str(other).lower()} there"
            )
            yield self.otherwise(f"{key} {other}", advice, **{key: other})

    def notes(self) -> list[str]:
        """Layers, vocabulary, windows, flags."""
        return [
            *super().notes(),
            *(name for name in FLAGS if getattr(self.config, name)),
        ]
