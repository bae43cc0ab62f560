"""Where the multi-token prediction layer of a family of models is kept, and what it is made of.

mlx-lm drops these tensors when it loads a model, so they are read from the original repository, or
from a repository that has nothing else. A family whose formula is the same is a row here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_LAYERS = "{num_hidden_layers}"


@dataclass(frozen=True)
class MTPFamily:
    """One way to write such a layer.

    architecture: the module of mlx_lm.models that has its decoder layer. prefix: of all its
        tensors in the original repository. names: ours -> the checkpoint's, behind the prefix.
    layer: what comes before the names of the decoder layer itself. changes: entries of the
        configuration that make a model of just this layer. hidden_first: order of the
        concatenation. norms_less_one: norms are stored as w - 1. has_final_norm: the layer is
        followed by a norm of its own. attributes: what else to set on that model.
    """

    architecture: str
    prefix: str
    names: Mapping[str, str]
    layer: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    hidden_first: bool = False
    norms_less_one: bool = False
    has_final_norm: bool = True
    attributes: Mapping[str, Any] = field(default_factory=dict)

    def prefix_in(self, names: Collection[str], config: Mapping[str, Any]) -> str | None:
        """What comes before its tensors among these; None if they are not there.

        A repository that has nothing else leaves the prefix out, or keeps just `mtp.`.
        """
        original = self.prefix.replace(NUM_LAYERS, str(config.get("num_hidden_layers")))
        for prefix in (original, "mtp.", ""):
            if f"{prefix}{self.names['projection']}.weight" in names:
                return prefix
        return None


_QWEN_NAMES = {
    "embedding_norm": "pre_fc_norm_embedding",
    "hidden_norm": "pre_fc_norm_hidden",
    "projection": "fc",
    "norm": "norm",
}
_DEEPSEEK_NAMES = {
    "embedding_norm": "enorm",
    "hidden_norm": "hnorm",
    "projection": "eh_proj",
    "norm": "shared_head.norm",
}


def _qwen(architecture: str, **changes: Any) -> MTPFamily:
    """A full-attention layer, although most layers of the target are recurrent."""
    return MTPFamily(
        architecture,
        "mtp.",
        _QWEN_NAMES,
        layer="layers.0.",
        changes={"num_hidden_layers": 1, "full_attention_interval": 1, **changes},
        norms_less_one=True,
        attributes={"ssm_idx": None},
    )


def _deepseek(architecture: str) -> MTPFamily:
    """The layer behind the last one, with experts."""
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1}
    return MTPFamily(architecture, f"model.layers.{NUM_LAYERS}.", _DEEPSEEK_NAMES, changes=changes)


def _bailing(architecture: str, **changes: Any) -> MTPFamily:
    """Ling's and Ring's: DeepSeek's formula, with a full-attention layer among recurrent ones."""
    names = _DEEPSEEK_NAMES | {"norm": "final_layernorm"}
    changes |= {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    return MTPFamily(architecture, f"model.layers.{NUM_LAYERS}.", names, changes=changes)


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
    "llama_mtp": MTPFamily(
        "llama", "mtp.", _QWEN_NAMES, layer="layers.0.", changes={"num_hidden_layers": 1}
    ),
    "mimo": MTPFamily(
        "mimo",
        "model.mtp_layers.0.",
        {
            "embedding_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "projection": "input_proj",
            "norm": "final_layernorm",
        },
        changes={"num_hidden_layers": 1},
        hidden_first=True,
    ),
    "ernie4_5_moe": MTPFamily(
        "ernie4_5",
        "model.",
        {
            "embedding_norm": "mtp_emb_norm.0",
            "hidden_norm": "mtp_hidden_norm.0",
            "projection": "mtp_linear_proj.0",
        },
        layer="mtp_block.0.",
        changes={"num_hidden_layers": 1},
        has_final_norm=False,
    ),
}
"""Model type -> where its layer is. The decoder layer is mlx-lm's own. "llama_mtp" is a layer that
was trained for a model of any kind, which has none itself."""

OTHER_FORMULAS = {
    "step3p5": "has three layers, one for each further token, with norms and windows of their own",
    "nemotron_h": "is several layers, of attention and of experts, that predict one token",
    "longcat_flash": "has one attention and no experts, and mlx-lm's layer two attentions and some",
    "exaone_moe": "has a window and a rotation that are set apart from the other layers'",
    "kimi_linear": "has a formula that is not known here",
    "kimi_k3": "has a formula that is not known here",
    "deepseek_v4": "carries four streams of states, which are added instead of concatenated",
    "deepseek_v41": "carries four streams of states, which are added instead of concatenated",
    "mimo_v2_flash": "has a formula that is not known here",
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
