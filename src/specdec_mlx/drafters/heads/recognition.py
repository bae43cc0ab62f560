"""What kind of head some files hold, by their configuration and the names of the tensors."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from specdec_mlx.drafters.heads.mtp_families import family_of

MEDUSA_NAME = re.compile(r"(medusa_head\.)?\d+\.\d+\.linear\.weight")
EAGLE_LAYER = ("layers.0.", "midlayer.")

UNSUPPORTED = {
    "peagle": "P-EAGLE, which drafts in parallel",
    "dspark": "DSpark, which corrects a DFlash block by a Markov chain",
    "dflash2": "DFlash 2, with its convolutions and selectors",
    "hydra": "Hydra heads, which see each other's guesses",
    "pard2": "PARD-2, which reads the target",
}
"""What is recognised, and cannot be loaded yet."""


def known_kind(config: Mapping[str, Any]) -> str | None:
    """The kind of head that a configuration alone gives away; None where it does not.

    "eagle3", "dflash", "medusa", "pard", "exit", "mtp" (a repository of just that layer), or a key
    of UNSUPPORTED.
    """
    named = " ".join(
        str(config.get(key, ""))
        for key in ("speculators_model_type", "model_type", "architectures")
    ).lower()
    hints = {
        "dspark": "dspark" in named or "markov_rank" in config,
        "dflash2": "dflash2" in named or "selector_rank" in config,
        "dflash": "dflash" in named or "dflash_config" in config,
        "peagle": "peagle" in named or "p_eagle" in named,
        "eagle3": "eagle3" in named or "draft_vocab_size" in config,
        "gemma4_assistant": "gemma4" in named and "assistant" in named,
        "pard2": "pard2_target_layers" in config,
        "pard": "pard_token" in config,
        "hydra": "hydra_num_heads" in config,
        "medusa": "medusa_num_heads" in config or "medusa" in named,
        "exit": "exit_layer" in config,
        "mtp": str(config.get("model_type", "")).endswith("_mtp"),
    }
    return next((kind for kind, holds in hints.items() if holds), None)


def kind_of(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The kind of head, the names of the tensors considered too; also "eagle" and "mtp" of a model.

    A whole model whose repository still has its multi-token prediction layer counts as "mtp".
    """
    kind = known_kind(config)
    if kind is not None:
        return kind
    found = family_of(config)
    text = config.get("text_config") or config
    if found is not None and found[1].prefix_in(names, text) is not None:
        return "mtp"
    if any(MEDUSA_NAME.fullmatch(name) for name in names):
        return "medusa"
    if "fc.weight" in names and any(name.startswith(EAGLE_LAYER) for name in names):
        return "eagle3" if any("hidden_norm" in name for name in names) else "eagle"
    return None
