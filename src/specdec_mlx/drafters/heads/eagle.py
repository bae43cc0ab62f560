"""EAGLE heads: one decoder layer over the target's states and the embeddings of the next tokens.

EAGLE-3 (Li et al. 2025, arXiv 2503.01840) fuses the outputs of three layers of the target, its
layer attends over [embedding, state], and it has a head of its own over a part of the vocabulary.
EAGLE-1 and 2 (2401.15077, 2406.16858) read the state after the final norm, fuse it with the
embedding, and use the target's head. Trees, as EAGLE-2 drafts them, are grown in `growing`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask

from specdec_mlx.drafters.heads.drafter import FinalStateHead, Head
from specdec_mlx.drafters.heads.recurrent import RecurrentHead
from specdec_mlx.drafters.heads.target_ends import DraftVocabulary, TargetEnds
from specdec_mlx.drafters.heads.variations import Variation, shifted_layers
from specdec_mlx.types import FeatureRows, Features

IDS_KEY = "eagle_aux_hidden_state_layer_ids"
SLIDING = "sliding_attention"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class LayersConfig:
    """What the config of a head says that fuses the outputs of several layers of the target.

    layer: configuration of its decoder layers, in Hugging Face's words. layers: of the target, from
    0. windows: how many positions each of its own layers sees, None for all; empty for no windows.
    """

    layer: Mapping[str, Any]
    layers: tuple[int, ...]
    windows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Eagle3Config(LayersConfig):
    """What the config of an EAGLE-3 head says, whoever wrote it.

    norm_before_residual: the residual is the normed state. norm_before_fc: one norm over all that
        is fused. fc_norm: one norm for each.
    norm_output: the state after the final norm is fed back (EAGLE-3.1), as in vLLM (pull request
        42764), TensorRT-LLM (14988) and speculators' training. SpecForge's trained with the plain
        state whatever it said, until its pull request 879 of September 2026.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any], num_layers: int) -> Eagle3Config:
        """From a config.json, for a target of so many layers.

        SafeAILab and SpecForge write the layer's keys at the top, speculators under
        `transformer_layer_config`; the ids of the layers may stand under `eagle_config`.
        """
        nested = config.get("eagle_config") or {}
        layer = config.get("transformer_layer_config") or config
        flags = {name: bool(config.get(name, nested.get(name, False))) for name in FLAGS}
        ids = config.get(IDS_KEY) or nested.get(IDS_KEY)
        layers = output_layers(ids) if ids else default_layers(num_layers)
        return cls(layer, layers, windows_of(layer), **flags)


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Layers of a target whose outputs are read where the config names none (the paper's code)."""
    return (1, num_layers // 2 - 1, num_layers - 4)


def output_layers(ids: Sequence[int]) -> tuple[int, ...]:
    """Layers whose outputs are meant, from 0.

    Stored ids come in two conventions: "output of", which begins with 1 by default, and "input of",
    that is the output of the layer before, which begins with 2 (sglang#25454). A wrong guess costs
    about 0.1 tokens a pass, and no error.
    """
    back = 0 if ids[0] == 1 else 1
    return tuple(i - back for i in ids)


def windows_of(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """How many positions each decoder layer sees, its own included; None for all.

    `layer_types` says which layers have a window, or else Qwen's `use_sliding_window`, for those
    from `max_window_layers` on; where that is false, none has one.
    """
    kinds, uses = config.get("layer_types"), config.get("use_sliding_window")
    if not (bool(kinds) if uses is None else uses):
        return ()
    depth, first = config.get("num_hidden_layers", 1), config.get("max_window_layers") or 0
    kinds = kinds or [SLIDING if layer >= first else None for layer in range(depth)]
    return tuple(config.get("sliding_window") if k == SLIDING else None for k in kinds[:depth])


def layer_classes(config: Mapping[str, Any]) -> tuple[type[nn.Module], Any]:
    """mlx-lm's decoder layer for a head's config, and its arguments.

    Llama's; Qwen3's where that is the model type, which norms queries and keys; or Qwen2's where
    queries, keys and values have a bias.
    """
    name = "qwen3" if str(config.get("model_type", "")).startswith("qwen3") else "llama"
    if config.get("qkv_bias"):
        name = "qwen2"
    module = importlib.import_module(f"mlx_lm.models.{name}")
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    arguments = {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": rope or None,
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "max_position_embeddings": 2048,
        **{key: value for key, value in config.items() if value is not None},
        "model_type": name,
        "tie_word_embeddings": False,
        "layer_types": None,
    }
    return module.TransformerBlock, module.ModelArgs.from_dict(arguments)


class LayersHead(Head):
    """A head over the outputs of several layers of the target.

    Args:
        config: what its config says.
        ends: of the target.
        vocabulary: what its logits are over; None for the target's tokens.
        own_head: rows of its own head; 0 for the target's.
    """

    config: Any

    def __init__(
        self,
        config: LayersConfig,
        ends: TargetEnds,
        vocabulary: DraftVocabulary | None = None,
        *,
        own_head: int = 0,
    ) -> None:
        """Random weights."""
        super().__init__()
        block, args = layer_classes(config.layer)
        width, eps = args.hidden_size, args.rms_norm_eps
        self.config = config
        self.width = width
        self.ends = ends
        self.vocabulary = vocabulary
        self.fc = nn.Linear(len(config.layers) * ends.width, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps)
        self.layers = [block(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(width, eps)
        if own_head:
            self.lm_head = nn.Linear(width, own_head, bias=False)

    @property
    def features(self) -> Features:
        """The outputs of these layers."""
        return Features(layers=self.config.layers)

    def outputs(self, features: FeatureRows) -> list[mx.array]:
        """[n, D] of each of the layers."""
        return [features.layers[layer] for layer in self.config.layers]

    def draft_logits(self, states: mx.array) -> mx.array:
        """Logits [..., Vd] over the draft vocabulary, of normed states [..., D]."""
        logits: mx.array = self.lm_head(states) if "lm_head" in self else self.ends.logits(states)
        return logits

    def variations(self) -> list[Variation]:
        """Layers one off."""
        return shifted_layers(self)

    def notes(self) -> list[str]:
        """Layers, vocabulary, windows."""
        notes = [f"reads the outputs of layers {', '.join(map(str, self.config.layers))}"]
        windows = sorted({window for window in self.config.windows if window is not None})
        seen = [f"windows of {', '.join(map(str, windows))}"] * bool(windows)
        return [*notes, *super().notes(), *seen]


class Eagle3(LayersHead, RecurrentHead):
    """An EAGLE-3 head.

    Args:
        config: what its config says.
        ends: of the target.
        vocabulary: what its logits are over; None for the target's tokens.
        own_embeddings: rows of its own embeddings; 0 for the target's.
        own_head: rows of its own head; 0 for the target's.
    """

    kind = "EAGLE-3"

    def __init__(
        self,
        config: Eagle3Config,
        ends: TargetEnds,
        vocabulary: DraftVocabulary | None = None,
        *,
        own_embeddings: int = 0,
        own_head: int = 0,
    ) -> None:
        """Random weights."""
        super().__init__(config, ends, vocabulary, own_head=own_head)
        eps, read = self.norm.eps, config.layers
        attention = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):  # they take [embedding, state]
            rows, has_bias = attention[name].weight.shape[0], "bias" in attention[name]
            attention[name] = nn.Linear(2 * self.width, rows, has_bias)
        if config.norm_before_fc:
            self.input_norm = nn.RMSNorm(len(read) * ends.width, eps)
        if config.fc_norm:
            self.fc_norm = [nn.RMSNorm(ends.width, eps) for _ in read]
        if own_embeddings:
            self.embed_tokens = nn.Embedding(own_embeddings, self.width)

    def rows(self, features: FeatureRows) -> mx.array:
        """[n, D] the outputs of the target's layers, fused."""
        states = self.outputs(features)
        if self.config.fc_norm:
            states = [norm(x) for norm, x in zip(self.fc_norm, states, strict=True)]
        fused = mx.concatenate(states, axis=-1)
        if self.config.norm_before_fc:
            fused = self.input_norm(fused)
        rows: mx.array = self.fc(fused)
        return rows

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [batch, n, D]: the first layer attends over [embedding, state]."""
        h: mx.array = states
        first = self.layers[0]
        windows = self.config.windows or (None,) * len(cache)
        masks = [create_attention_mask(h, *of) for of in zip(cache, windows, strict=True)]
        embedded = first.input_layernorm(_embedded(self, tokens))
        normed = self.hidden_norm(h)
        residual = normed if self.config.norm_before_residual else h
        h = residual + first.self_attn(mx.concatenate([embedded, normed], -1), masks[0], cache[0])
        h = h + first.mlp(first.post_attention_layernorm(h))
        for layer, mask, kept in zip(self.layers[1:], masks[1:], cache[1:], strict=True):
            h = layer(h, mask, kept)
        return self.norm(h) if self.config.norm_output else h

    def draft_logits(self, states: mx.array) -> mx.array:
        """Logits [..., Vd] over the draft vocabulary, of states [..., D]."""
        return super().draft_logits(states if self.config.norm_output else self.norm(states))

    def variations(self) -> list[Variation]:
        """Layers one off, and what the residual and the state that is fed back are."""
        found = super().variations()
        for key in ("norm_before_residual", "norm_output"):
            flags: dict[str, Any] = {key: not getattr(self.config, key)}
            advice = f"its config.json looks wrong; write {key}: {str(flags[key]).lower()} there"
            config = replace(self.config, **flags)
            found.append(Variation(f"{key} {flags[key]}", advice, [self], {"config": config}))
        return found

    def notes(self) -> list[str]:
        """Layers, vocabulary, variants."""
        return [*super().notes(), *(name for name in FLAGS if getattr(self.config, name))]


def _embedded(head: Any, tokens: mx.array) -> mx.array:
    """[..., D] a head's own embeddings, or else the target's.

    Own ones may have fewer rows than the target has tokens; MLX reads beyond an array unchecked.
    """
    made: mx.array
    if "embed_tokens" in head:
        made = head.embed_tokens(mx.minimum(tokens, head.embed_tokens.weight.shape[0] - 1))
    else:
        made = head.ends.embed(tokens)
    return made


class Eagle1(FinalStateHead, RecurrentHead):
    """An EAGLE-1 or EAGLE-2 head, which are alike but for the trees drafted with them.

    Args:
        config: its config.json.
        ends: of the target.
        own_embeddings: rows of its own embeddings; 0 for the target's.
        has_bias: True if what fuses has one.
    """

    kind = "EAGLE"

    def __init__(
        self,
        config: Mapping[str, Any],
        ends: TargetEnds,
        *,
        own_embeddings: int = 0,
        has_bias: bool = False,
    ) -> None:
        """Random weights."""
        super().__init__()
        block, args = layer_classes(config)
        width = self.width = args.hidden_size
        self.ends = ends
        self.fc = nn.Linear(2 * width, width, bias=has_bias)
        self.layers = [block(args) for _ in range(args.num_hidden_layers)]
        self.layers[0].input_layernorm = nn.Identity()
        if own_embeddings:
            self.embed_tokens = nn.Embedding(own_embeddings, width)

    def forward(self, states: mx.array, tokens: mx.array, cache: list[Any]) -> mx.array:
        """States [batch, n, D] in place of the target's after its final norm."""
        h: mx.array = self.fc(mx.concatenate([_embedded(self, tokens), states], axis=-1))
        mask = create_attention_mask(h, cache[0])
        for layer, kept in zip(self.layers, cache, strict=True):
            h = layer(h, mask, kept)
        return h
