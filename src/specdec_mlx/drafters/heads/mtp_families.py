"""Where the multi-token prediction layer of a family of models is kept, and what it is made of.

mlx-lm drops these tensors when it loads a model, so they are read from the original repository, or
from a repository that has nothing else. A family whose formula is the same is a row here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import CacheList, KVCache

Config = Mapping[str, Any]

Further = Literal["again", "chained", "side by side"]
"""What drafts further tokens: the same layer again; a layer for each, which reads the states that
the one before made; a layer for each, which reads the target's states."""


@dataclass(frozen=True)
class MTPFamily:
    """One way to write such a layer.

    architecture: the module of mlx_lm.models that has its decoder layer. prefix: of all its
        tensors in the original repository, with {layer} for the number behind the target's last,
        and {depth} for how many such layers come before it. names: ours -> the checkpoint's, behind
        the prefix, with {last} for the last decoder layer; with a "head" it has one of its own.
    layer: what comes before the names of the decoder layer itself. here: and in mlx-lm's model.
    renamed: beginnings of names in it, the checkpoint's -> mlx-lm's.
    changes: entries of the configuration, besides the number of layers, that make a model of just
        this layer. derived: those that
        follow from the target's, and from the depth. adapted: what else is done to that model.
    body: what mlx-lm calls the part of that model without its head. final_norm: its last norm.
    attributes: what else to set on that part.
    hidden_first: order of the concatenation. norms_less_one: norms are stored as w - 1.
    has_final_norm: the layer is followed by a norm of its own. pre_norm: it reads states before a
        final norm, the target's and its own, and that norm belongs to the head.
    further: what drafts further tokens.
    """

    architecture: str
    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    here: str = "layers.0."
    renamed: Mapping[str, str] = field(default_factory=dict)
    changes: Config = field(default_factory=dict)
    derived: Callable[[Config, int], Config] = lambda config, depth: {}
    adapted: Callable[[nn.Module], None] = lambda model: None
    body: str = "model"
    final_norm: str = "norm"
    attributes: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    norms_less_one: bool = False
    has_final_norm: bool = True
    pre_norm: bool = False
    further: Further = "again"

    def prefix_at(self, config: Config, depth: int = 0) -> str:
        """What comes before its tensors in the original repository."""
        layer = int(config.get("num_hidden_layers") or 0) + depth
        return self.prefix.format(layer=layer, depth=depth)

    def prefixes_in(self, names: Collection[str], config: Config) -> list[str]:
        """What comes before the tensors of each layer among these, the first first.

        A repository that has nothing but a layer leaves the prefix out, or keeps just `mtp.`.
        """
        again, projection = self.further == "again", f"{self.names['projection']}.weight"
        prefixes = [self.prefix_at(config), *(["mtp.", ""] if again else [])]
        found = [prefix for prefix in prefixes if f"{prefix}{projection}" in names][:1]
        while found and not again:
            following = self.prefix_at(config, len(found))
            if not any(name.startswith(following) for name in names):
                break
            found.append(following)
        return found


def _names(*theirs: str) -> dict[str, str]:
    """Names of the parts around the decoder layer, ours -> the checkpoint's."""
    ours = ("embedding_norm", "hidden_norm", "projection", "norm", "head")
    return dict(zip(ours, theirs, strict=False))


_QWEN_NAMES = _names("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
_DEEPSEEK_NAMES = _names("enorm", "hnorm", "eh_proj", "shared_head.norm")


def _qwen(architecture: str, **changes: Any) -> MTPFamily:
    """A full-attention layer, although most layers of the target are recurrent."""
    return MTPFamily(
        architecture,
        "mtp.",
        _QWEN_NAMES,
        layer="layers.0.",
        changes={"full_attention_interval": 1, **changes},
        norms_less_one=True,
        attributes={"ssm_idx": None},
    )


def _deepseek(architecture: str) -> MTPFamily:
    """The layer behind the last one, with experts."""
    changes = {"first_k_dense_replace": 0, "moe_layer_freq": 1}
    return MTPFamily(architecture, "model.layers.{layer}.", _DEEPSEEK_NAMES, changes=changes)


def _bailing(architecture: str, **changes: Any) -> MTPFamily:
    """Ling's and Ring's: DeepSeek's formula, with a full-attention layer among recurrent ones."""
    names = _DEEPSEEK_NAMES | {"norm": "final_layernorm"}
    return MTPFamily(
        architecture,
        "model.layers.{layer}.",
        names,
        changes={"first_k_dense_replace": 0, **changes},
    )


def _exaone_moe(config: Config, depth: int) -> Config:
    """Its kind of attention stands apart from the other layers'.

    In a model with windows, attention to everything has no rotation; mlx-lm asks the kinds of all
    layers for that.
    """
    kind, *_ = config.get("mtp_layer_types") or ["full_attention"]
    windows = config.get("mtp_sliding_windows")
    derived = {"layer_types": [kind, *config["layer_types"]]}
    if kind == "sliding_attention" and windows:
        derived["sliding_window"] = windows[0]
    return derived


class HalfLayer(nn.Module):  # type: ignore[misc]
    """The first attention and the first dense network of a layer of LongCat-Flash.

    A whole layer is two of each, one behind the other, and experts beside them (technical report,
    arXiv 2509.01322).
    """

    def __init__(self, layer: nn.Module) -> None:
        """Take the first of each."""
        super().__init__()
        for part in ("input_layernorm", "self_attn", "post_attention_layernorm", "mlps"):
            self[part] = layer[part][:1]

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """States [batch, n, D] of n positions."""
        attended = self.self_attn[0](self.input_layernorm[0](x), mask=mask, cache=cache[0])
        x = x + attended
        made: mx.array = x + self.mlps[0](self.post_attention_layernorm[0](x))
        return made


def keep_half_of_its_layer(model: nn.Module) -> None:
    """Let a model with one layer have half of it, and a cache for that."""
    model.model.layers = [HalfLayer(model.model.layers[0])]
    model.make_cache = lambda: [CacheList(KVCache())]


_STEP_LISTS = (
    "layer_types",
    "rope_theta",
    "partial_rotary_factors",
    "swiglu_limits",
    "swiglu_limits_shared",
)
"""What a Step configuration says of each layer, those behind the last one included."""


def _step(config: Config, depth: int) -> Config:
    """What is said of its layers behind the target's last; lists that end before repeat."""
    at = config["num_hidden_layers"] + depth
    given = {name: config[name] for name in _STEP_LISTS if isinstance(config.get(name), list)}
    found = {name: [x[min(at, len(x) - 1)]] for name, x in given.items() if x}
    return {"layer_types": ["sliding_attention"]} | found


def _nemotron_h(config: Config, depth: int) -> Config:
    """Several layers, each of one kind, that predict one token; by a pattern or by a list."""
    kinds = {"hybrid_override_pattern": None, "layer_types": None}
    if config.get("mtp_layers_block_type"):
        return kinds | {"layers_block_type": config["mtp_layers_block_type"]}
    pattern = config.get("mtp_hybrid_override_pattern") or "*E"
    return kinds | {"hybrid_override_pattern": list(pattern)}


FAMILIES: dict[str, MTPFamily] = {
    "qwen3_next": _qwen("qwen3_next", mlp_only_layers=[], decoder_sparse_step=1),
    "qwen3_5": _qwen("qwen3_5_moe"),
    "qwen3_5_moe": _qwen("qwen3_5_moe"),
    "deepseek_v3": _deepseek("deepseek_v3"),
    "deepseek_v32": _deepseek("deepseek_v32"),
    "glm4_moe": _deepseek("glm4_moe"),
    "glm4_moe_lite": _deepseek("glm4_moe_lite"),
    "glm_moe_dsa": _deepseek("glm_moe_dsa"),
    "bailing_moe": _bailing("bailing_moe"),
    "bailing_hybrid": _bailing("bailing_hybrid", layer_group_size=1),
    "bailing_moe_v3": _bailing("bailing_moe_v3", layer_group_size=1),
    "llama_mtp": MTPFamily("llama", "mtp.", _QWEN_NAMES, layer="layers.0."),
    "mimo": MTPFamily(
        "mimo",
        "model.mtp_layers.0.",
        _names("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        hidden_first=True,
    ),
    "ernie4_5_moe": MTPFamily(
        "ernie4_5",
        "model.",
        _names("mtp_emb_norm.0", "mtp_hidden_norm.0", "mtp_linear_proj.0"),
        layer="mtp_block.0.",
        has_final_norm=False,
    ),
    "exaone_moe": MTPFamily(
        "exaone_moe",
        "mtp.",
        _QWEN_NAMES,
        layer="layers.0.",
        changes={"is_moe_layer": [False]},
        derived=_exaone_moe,
    ),
    "longcat_flash": MTPFamily(
        "longcat_flash",
        "model.mtp.",
        _names("layers.0.enorm.m", "layers.0.hnorm.m", "layers.0.eh_proj", "norm"),
        layer="layers.0.",
        renamed={
            "input_layernorm.": "input_layernorm.0.",
            "self_attn.": "self_attn.0.",
            "post_attention_layernorm.": "post_attention_layernorm.0.",
            "transformer_layer.mlp.": "mlps.0.",
        },
        changes={"num_layers": 1},
        adapted=keep_half_of_its_layer,
    ),
    "step3p5": MTPFamily(
        "step3p5",
        "model.layers.{layer}.",
        _names(
            "enorm",
            "hnorm",
            "eh_proj",
            "transformer.shared_head.norm",
            "transformer.shared_head.output",
        ),
        changes={"moe_layers_enum": None},
        derived=_step,
        norms_less_one=True,
        pre_norm=True,
        further="chained",
    ),
    "nemotron_h": MTPFamily(
        "nemotron_h",
        "mtp.",
        _names(
            "layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj", "layers.{last}.final_layernorm"
        ),
        layer="layers.",
        here="layers.",
        derived=_nemotron_h,
        body="backbone",
        final_norm="norm_f",
        attributes={"ssm_idx": slice(0)},  # of the caches that of no recurrent layer: no mask
    ),
    "mimo_v2_flash": MTPFamily(
        "mimo_v2_flash",
        "model.mtp.layers.{depth}.",
        _DEEPSEEK_NAMES | {"norm": "final_layernorm"},
        renamed={"pre_mlp_layernorm.": "post_attention_layernorm."},
        changes={"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0]},  # one of each kind
        attributes={"ga_idx": 0},
        further="side by side",
    ),
}
"""Model type -> where its layer is. The decoder layer is mlx-lm's own. "llama_mtp" is a layer that
was trained for a model of any kind, which has none itself."""

OTHER_FORMULAS = {
    "longcat_flash_ngram": "reads embeddings of several tokens, in a way that is not known here",
    "kimi_linear": "is not in its repository",
    "kimi_k3": "is not in its repository",
    "deepseek_v4": "carries four streams of states, which are added instead of concatenated",
    "deepseek_v41": "is DSpark, which drafts a block and corrects it by a Markov chain",
}
"""Model type -> why its multi-token prediction cannot be drafted with: its formula is another."""


def family_of(config: Mapping[str, Any]) -> tuple[str, MTPFamily] | None:
    """Model type and family that a config names, its text part included; None for another."""
    for model_type in model_types(config):
        if model_type in FAMILIES:
            return model_type, FAMILIES[model_type]
    return None


def model_types(config: Mapping[str, Any]) -> list[str]:
    """What a config and its text part call the model, also without what marks a part of it."""
    text = config.get("text_config") or {}
    whole = [str(config.get("model_type")), str(text.get("model_type"))]
    return [name for w in whole for name in (w, w.removesuffix("_mtp").removesuffix("_text"))]


def other_formula(config: Mapping[str, Any]) -> str | None:
    """Why a model's multi-token prediction cannot be drafted with; None where nothing is known."""
    return next((OTHER_FORMULAS[n] for n in model_types(config) if n in OTHER_FORMULAS), None)
