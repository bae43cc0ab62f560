"""Every architecture of mlx-lm, small enough to build and run in milliseconds.

A test that holds for one architecture says little about the next: caches wrap, recur, share and
chunk in different ways. Here each architecture file has a small configuration and random weights,
chosen so that every logit depends on the whole context. A model that ignored its context would
pass any test of a cache, however wrong the cache.
"""

from __future__ import annotations

import copy
import importlib
import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from . import configs_a_to_h, configs_i_to_z

GAIN = 1.5
"""Matrices have this gain over unit variance: attention is then peaked, not an average.

Embeddings too are divided by the root of their width. A larger embedding would outweigh the
layers, and a model that reads its logits from the same matrix would repeat its input.
"""

DYNAMIC: dict[str, Any] = {
    "max_position_embeddings": 64,
    "rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 4.0},
}
"""What makes the base of a rope follow the length of a text, once that is past 64 positions."""

RANGES: dict[str, tuple[float, float]] = {
    "A_log": (-3.0, -1.5),  # with dt near 0.5, a state keeps about 0.95 of itself at each step
    "dt_bias": (-1.0, 0.0),
}
"""Parameters drawn uniformly between two ends, by the last part of their name."""

HALVES = (configs_a_to_h, configs_i_to_z)


def _merged(attribute: str) -> dict[str, Any]:
    """One table from both halves of the alphabet. A half may lack an optional table."""
    return {k: v for half in HALVES for k, v in getattr(half, attribute, {}).items()}


CONFIGS: dict[str, dict[str, Any]] = _merged("CONFIGS")
"""A configuration per architecture file, in the words of a model's config.json."""

CANNOT_RUN: dict[str, str] = _merged("CANNOT_RUN")
"""Architectures that fail on the CPU, with the exception that they raise there."""

NOTES: dict[str, str] = _merged("NOTES")
"""What a test of the architecture must know, with measured numbers."""

OVERRIDES: dict[str, dict[str, tuple[float, float]]] = _merged("OVERRIDES")
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
    return sorted(file.stem for file in files if _defines_model(file.read_text()))


def _defines_model(source: str) -> bool:
    defined = r"^class Model\b|^from \S+ import (.*, )?Model\b(?! as)"
    return bool(re.search(defined, source, re.M)) and "class ModelArgs" in source


def build(name: str, dtype: mx.Dtype = mx.float32, seed: int = 0, **changes: Any) -> nn.Module:
    """Build the architecture's tiny model, with the same weights for the same seed.

    changes: entries of the configuration to set otherwise.
    """
    mx.random.seed(seed)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    config = copy.deepcopy({**CONFIGS[name], **changes})
    model: nn.Module = module.Model(module.ModelArgs.from_dict(config))
    weights = randomised(model, OVERRIDES.get(name, {}))
    model.update(tree_unflatten(_cast(model, weights, dtype)))
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
    ends = _range(path, overrides)
    if ends is not None:
        return mx.random.uniform(*ends, shape=value.shape)
    if value.ndim == 0 or path.endswith("freqs"):
        return value
    noise = mx.random.normal(value.shape)
    if value.ndim == 1 or "norm" in path.rpartition(".")[0].rpartition(".")[2]:
        return value.astype(mx.float32) + noise * _spread(path)
    return noise * _deviation(value, kind)


def _range(path: str, overrides: dict[str, tuple[float, float]]) -> tuple[float, float] | None:
    for pattern, ends in overrides.items():
        if re.search(pattern, path):
            return ends
    return RANGES.get(path.rpartition(".")[2])


def _spread(path: str) -> float:
    """How far a vector moves from its initial value: scales far, biases a little."""
    return 0.3 if path.endswith("weight") else 0.1


def _deviation(value: mx.array, kind: type | None) -> float:
    convolution = kind is not None and issubclass(kind, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    inputs = math.prod(value.shape[1:]) if convolution else value.shape[-1]
    return GAIN / math.sqrt(inputs)


def _cast(
    model: nn.Module, weights: list[tuple[str, mx.array]], dtype: mx.Dtype
) -> list[tuple[str, mx.array]]:
    """Cast as mlx-lm does: a model may keep some parameters in float32."""
    keeps = getattr(model, "cast_predicate", lambda path: True)
    return [(path, w.astype(dtype) if keeps(path) else w) for path, w in weights]
