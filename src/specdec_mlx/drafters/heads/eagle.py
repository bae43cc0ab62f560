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

from specdec_mlx.contracts import FeatureRows, Features
from specdec_mlx.drafters.heads.drafter import Config, Head, RecurrentHead, Variation
from specdec_mlx.drafters.heads.mtp import SLIDING, MTPFamily, model_of, text_part
from specdec_mlx.models.anatomy import Anatomy

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def fused_layers(config: Config, num_layers: int) -> tuple[int, ...]:
    """Layers of the target whose outputs a config names, from 0; num_layers: of the target.

    Stored ids are "output of", from 1 by default, or "input of", from 2 (sglang#25454). A wrong
    guess costs about 0.1 tokens a pass. Without ids they are those of the paper's code.
    """
    ids = config.get(IDS_KEY) or (1, num_layers // 2 - 1, num_layers - 4)
    back = 0 if ids[0] == 1 else 1
    return tuple(i - back for i in ids)


def windows_of(layer: Config) -> tuple[int | None, ...]:
    """Positions that each layer sees, None for all: by a list of kinds, or in Qwen's words."""
    depth, first = layer.get("num_hidden_layers") or 1, layer.get("max_window_layers")
    kinds, slides = layer.get("layer_types"), layer.get("use_sliding_window")
    if slides is None:
        slides = bool(kinds)
    kinds = kinds or [SLIDING if i >= (first or 0) else None for i in range(depth)]
    window = layer.get("sliding_window") if slides else None
    return tuple(window if kind == SLIDING else None for kind in kinds[:depth])


def layer_arguments(config: Config) -> dict[str, Any]:
    """Arguments of mlx-lm's model with a head's layers, by its config; Qwen2's has biases."""
    kind, heads = str(config.get("model_type", "")), config["num_attention_heads"]
    name = "qwen3" if kind.startswith("qwen3") else "llama"
    name = "gemma4_text" if is_gemma4(config) else name
    rope, depth = config.get("rope_parameters"), config.get("num_hidden_layers") or 1
    return {
        "num_hidden_layers": depth,
        "rope_theta": (rope or {}).get("rope_theta", 10000.0),
        "rope_scaling": rope or None,
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "max_position_embeddings": 2048,
        **{key: value for key, value in config.items() if value is not None},
        "model_type": "qwen2" if config.get("qkv_bias") else name,
        "tie_word_embeddings": False,
        # of Gemma 4 in DeepSpec too, where no layer shares another's keys
        "layer_types": ["full_attention"] * depth,
        "num_kv_shared_layers": 0,
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
    """A head over the outputs of several layers of the target, which are `fused`.

    layer: config of its own layers, in Hugging Face's words. fused: numbers of layers, from 0.
    windows: positions that each of its own layers sees, None for all.
    """

    fused: tuple[int, ...]
    windows: tuple[int | None, ...]

    def __init__(self, layer: Config, fused: Sequence[int], ends: Anatomy) -> None:
        """Random weights."""
        super().__init__()
        shell: Any = model_of(layer_arguments(layer))
        self.layers, self.norm = shell.layers, shell.model.norm
        self.fused = tuple(fused)
        self.ends = ends
        self.width = self.norm.weight.size
        self.fc = nn.Linear(len(fused) * ends.width, self.width, bias=False)
        self.hidden_norm = nn.RMSNorm(self.width, self.norm.eps)

    @property
    def features(self) -> Features:
        """The outputs of these layers."""
        return Features(layers=self.fused)

    def rows(self, features: FeatureRows) -> Any:
        """[n, D] the outputs of these layers, fused."""
        states = [features.layers[layer] for layer in self.fused]
        if "fc_norm" in self:
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
        fused = mx.concatenate(states, axis=-1)
        return self.fc(self.input_norm(fused) if "input_norm" in self else fused)

    def variations(self) -> Iterator[Variation]:
        """The outputs of the layers before and after, where the target has them."""
        for name, by in (("later", 1), ("earlier", -1)):
            layers = [layer + by for layer in self.fused]
            if min(layers) >= 0 and max(layers) < self.ends.num_layers:
                advice = f"its layer ids look meant otherwise; load it with layers={layers}"
                other = self.otherwise(fused=tuple(layers))
                yield Variation(f"one layer {name}", advice, other)

    def notes(self) -> list[str]:
        """Layers, vocabulary, windows."""
        windows = sorted({window for window in self.windows if window is not None})
        return [
            f"reads the outputs of layers {', '.join(map(str, self.fused))}",
            *super().notes(),
            *(f"windows of {size}" for size in windows),
        ]


class Eagle3(LayersHead, RecurrentHead):
    """An EAGLE-3 head, by a config.json of SafeAILab, SpecForge or speculators.

    flags: those of its config that are set. norm_before_residual: the residual is the normed state.
    norm_before_fc: one norm over all that is fused; fc_norm: one for each. norm_output: the state
    after the final norm is fed back (EAGLE-3.1, as in vLLM's pull request 42764; SpecForge trained
    otherwise before its 879). layers: in place of those that the config names.
    """

    kind = "EAGLE-3"

    def __init__(self, config: Config, ends: Anatomy, layers: Sequence[int] | None = None) -> None:
        said = {**(config.get("eagle_config") or {}), **config}
        layer = text_part(config)
        super().__init__(layer, layers or fused_layers(said, ends.num_layers), ends)
        self.windows = windows_of(layer)
        self.flags = frozenset(name for name in FLAGS if said.get(name))
        attention, eps = self.layers[0].self_attn, self.norm.eps
        for name in ("q_proj", "k_proj", "v_proj"):  # they take [embedding, state]
            rows, has_bias = attention[name].weight.shape[0], "bias" in attention[name]
            attention[name] = nn.Linear(2 * self.width, rows, has_bias)
        if "norm_before_fc" in self.flags:
            self.input_norm = nn.RMSNorm(len(self.fused) * ends.width, eps)
        if "fc_norm" in self.flags:
            self.fc_norm = [nn.RMSNorm(ends.width, eps) for _ in self.fused]

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> Any:
        """States [batch, n, D]: the first layer attends over [embedding, state]."""
        layers = zip(self.layers, cache, self.windows, strict=True)
        first, kept, window = next(layers)
        normed = self.hidden_norm(states)
        both = mx.concatenate([first.input_layernorm(self.embed(tokens)), normed], -1)
        mask = create_attention_mask(states, kept, window)
        h = normed if "norm_before_residual" in self.flags else states
        h = h + first.self_attn(both, mask, kept)
        h = h + first.mlp(first.post_attention_layernorm(h))
        for layer, kept, window in layers:
            h = layer(h, create_attention_mask(h, kept, window), kept)
        return self.norm(h) if "norm_output" in self.flags else h

    def draft_logits(self, states: mx.array) -> Any:
        """Logits [..., Vd] of states [..., D]."""
        is_normed = "norm_output" in self.flags
        return super().draft_logits(states if is_normed else self.norm(states))

    def variations(self) -> Iterator[Variation]:
        """Other layers, another residual, another state fed back."""
        yield from super().variations()
        for key in ("norm_before_residual", "norm_output"):
            other = key not in self.flags
            advice = f"its config.json looks wrong; write {key}: {str(other).lower()} there"
            head = self.otherwise(flags=self.flags ^ {key})
            yield Variation(f"{key} {other}", advice, head)

    def notes(self) -> list[str]:
        """Layers, vocabulary, windows, flags."""
        return [*super().notes(), *(name for name in FLAGS if name in self.flags)]
