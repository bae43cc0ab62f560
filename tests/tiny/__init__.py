"""Every architecture of mlx-lm, small enough to build and run in milliseconds.

Each architecture file has a small configuration, in configs.json, and random weights, chosen so
that every logit depends on the whole context: a model that ignored it would pass any test of a
cache. A configuration has every kind of layer that its file knows. Windows and chunks are 16
tokens, so that a test of 60 tokens wraps them.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

GAIN = 1.5
"""Matrices have this gain over unit variance: attention is then peaked, not an average.

Embeddings too are divided by the root of their width. A larger embedding would outweigh the
layers, and a model that reads its logits from the same matrix would repeat its input.
"""

DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 64,
    "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0},
}
"""Makes the base of a rope follow the length of a text, once that is past 64 positions."""

RANGES: dict[str, tuple[float, float]] = {
    "A_log": (-3.0, -1.5),  # with dt near 0.5, a state keeps about 0.95 of itself at each step
    "dt_bias": (-1.0, 0.0),
}
"""Parameters drawn uniformly between two ends, by the last part of their name."""

_TABLES = json.loads((Path(__file__).parent / "configs.json").read_text())


def _resolved(config: Any) -> Any:
    """A configuration with what its dicts are "like", each over the one before: templates, or
    other architectures."""
    if isinstance(config, list):
        return [_resolved(item) for item in config]
    if not isinstance(config, dict):
        return config
    made: dict[str, Any] = {}
    for name in config.get("like", ()):
        made |= _resolved(_TABLES["templates"].get(name) or _TABLES["architectures"][name])
    return made | {key: _resolved(value) for key, value in config.items() if key != "like"}


CONFIGS: dict[str, dict[str, Any]] = {
    name: {"model_type": name} | _resolved(config)
    for name, config in _TABLES["architectures"].items()
}
"""A configuration per architecture file, in the words of a model's config.json.

bailing_moe_v3: n_group must exceed topk_group, the router partitions at their difference. llama4:
one expert per token is all that the file supports. phi3small: blocks of 32 tokens are the least
that the file allows, and it writes -inf up to token 100352 without a check of bounds.
"""

CANNOT_RUN: dict[str, str] = {
    "bitnet": "RuntimeError: [metal_kernel] No Metal back-end. (BitLinear has no other path)",
    "muse_spark": "RuntimeError: [metal_kernel] No Metal back-end. "
    "Its norms, rotary embedding and routing are Metal kernels without an alternative.",
    "olmo": "SystemExit: 1. The file exits at import where the package ai2-olmo is missing. "
    "Past that, a pass of two or more tokens raises ValueError: it adds the mask 'causal' to an "
    "array of scores. Single tokens run.",
}
"""Architectures that fail on the CPU, with the exception that they raise there."""

# These norms multiply by 1 + w, but their files set w to 1: sharp attention then hides most tokens.
_NORMS_ABOUT_ONE = {r"norm\.weight$": (-0.5, 0.5)}

# Embeddings are multiplied by 8 on their way in and are the output matrix too: without these, the
# most likely next token would be the last one. A large final norm restores the spread of logits.
_NO_ECHO = {
    r"embed_tokens\.weight$": (-0.05, 0.05),
    r"(model|language_model)\.norm\.weight$": (2.0, 10.0),
}

OVERRIDES: dict[str, dict[str, tuple[float, float]]] = {
    "cohere": {r"[qk]_norm\.weight$": (0.7, 1.5)},  # 0 in the file: attention would be an average
    # The cache holds whole multiples of these steps: at 1.0 almost every value would be 0 or 1.
    "afm7": {r"quant_(key|value)_scale$": (0.03, 0.03)},
    # The gate is exp(-5 sigmoid(exp(A_log) (a + dt_bias))), and should keep most of the state.
    "bailing_moe_v3": {r"A_log$": (-0.3, 0.3), r"dt_bias$": (-5.0, -3.0)},
    "gemma": _NO_ECHO | _NORMS_ABOUT_ONE,
    "gemma2": _NO_ECHO | _NORMS_ABOUT_ONE,
    "gemma3": _NORMS_ABOUT_ONE,
    "gemma3_text": _NORMS_ABOUT_ONE,
    "gemma3n": _NO_ECHO,
    "prism_hadamard_qwen35": {r"\.signs$": (1.0, 1.0)},
    "rwkv7": {r"w_lora.*bias$": (-4.0, -2.0)},  # the state keeps about 0.97 of itself at each step
}
"""Per architecture: a regular expression searched in a parameter's path, and its range."""

REPRESENTATIVE: dict[str, str] = {
    "llama": "key-value caches and rotating windows",
    "gpt_oss": "windows, attention sinks and experts",
    "deepseek_v3": "latent attention",
    "llama4": "chunks, with a mask of its own",
    "mamba2": "recurrent states, of which one is chosen",
    "rwkv7": "recurrent states, from which tokens are fed again",
    "lfm2": "short convolutions and key-value caches",
    "qwen3_next": "gated delta and key-value caches",
    "falcon_h1": "both in one layer",
}
"""The architecture that stands for each kind of cache and attention, and for which.

It has every test; all others have one, and their row on the page.
"""


@cache
def architecture_files() -> list[str]:
    """Names of the modules of mlx_lm.models that define a whole model."""
    folders = [Path(folder) for folder in importlib.import_module("mlx_lm.models").__path__]
    files = [file for folder in folders for file in folder.glob("*.py")]
    defined = re.compile(r"^class Model\b|^from \S+ import (.*, )?Model\b(?! as)", re.M)
    texts = {file.stem: file.read_text() for file in files}
    return sorted(
        name for name, text in texts.items() if defined.search(text) and "class ModelArgs" in text
    )


def build(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """Build the architecture's tiny model, with the same weights for the same seed.

    In 16 bits its experts are quantized: MLX's CPU chooses among matrices in float32 only.
    """
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = copy.deepcopy({**CONFIGS[name], **changes})
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    keeps = getattr(model, "cast_predicate", lambda path: True)  # some stay in float32
    weights = randomised(model, OVERRIDES.get(name, {}))
    cast = [(path, w.astype(dtype) if keeps(path) else w) for path, w in weights]
    model.update(tree_unflatten(cast))
    if dtype != mx.float32:
        nn.quantize(model, 32, class_predicate=lambda _, module: isinstance(module, SwitchLinear))
    model.eval()
    mx.eval(model.parameters())
    return model


def randomised(
    model: nn.Module, overrides: dict[str, tuple[float, float]] | None = None
) -> list[tuple[str, mx.array]]:
    """Random values for each floating-point parameter. Integers and packed weights are kept."""
    kinds = {path: type(module) for path, module in model.named_modules()}
    parameters = dict(tree_flatten(model.parameters()))
    return [
        (path, _draw(path, value, kinds.get(path.rpartition(".")[0]), overrides or {}))
        for path, value in sorted(parameters.items())
        if mx.issubdtype(value.dtype, mx.floating) and not _packed(path, parameters)
    ]


def _packed(path: str, parameters: dict[str, mx.array]) -> bool:
    """Tell whether a parameter belongs to quantized weights."""
    owner, _, leaf = path.rpartition(".")
    weight = parameters.get(f"{owner}.weight")
    packed = weight is not None and not mx.issubdtype(weight.dtype, mx.floating)
    return packed and leaf in ("scales", "biases", "weight_scale")


def _draw(
    path: str, value: mx.array, kind: type | None, overrides: dict[str, tuple[float, float]]
) -> mx.array:
    owner, _, leaf = path.rpartition(".")
    found = (ends for pattern, ends in overrides.items() if re.search(pattern, path))
    ends = next(found, RANGES.get(leaf))
    if ends is not None:
        return mx.random.uniform(*ends, shape=value.shape)
    if value.ndim == 0 or path.endswith("freqs"):
        return value
    noise = mx.random.normal(value.shape)
    if value.ndim == 1 or "norm" in owner.rpartition(".")[2]:
        spread = 0.3 if path.endswith("weight") else 0.1  # scales move far, biases a little
        return value.astype(mx.float32) + noise * spread
    is_convolution = kind is not None and issubclass(kind, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    num_inputs = math.prod(value.shape[1:]) if is_convolution else value.shape[-1]
    return noise * (GAIN / math.sqrt(num_inputs))
