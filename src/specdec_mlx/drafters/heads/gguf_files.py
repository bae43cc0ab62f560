"""DSpark heads in GGUF files, as PrismML publishes them for Bonsai."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.errors import HeadError

NAMES = {
    r"^token_embd\.": "embed_tokens.",
    r"^output\.": "lm_head.",
    r"^output_norm\.": "norm.",
    r"^dspark\.markov_head_a\.": "markov_head.markov_w1.",
    r"^dspark\.markov_head_b\.": "markov_head.markov_w2.",
    r"^dspark\.confidence_head\.": "confidence_head.proj.",
    r"^dspark\.log_snr_(fc\d)\.": r"log_snr_embed.\1.",
    r"^dspark\.": "",
    r"^blk\.": "layers.",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.",
    r"\.attn_output\.": ".self_attn.o_proj.",
    r"\.attn_([qk])_norm\.": r".self_attn.\1_norm.",
    r"\.attn_([qkv])\.": r".self_attn.\1_proj.",
    r"\.ffn_(gate|up|down)\.": r".mlp.\1_proj.",
}
"""Patterns of GGUF names, and the names of the same tensors in safetensors, applied in order."""

TYPES = {"BF16": mx.bfloat16, "F16": mx.float16}

KEYS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "dspark.block_size": "block_size",
    "dspark.mask_token_id": "mask_token_id",
    "dspark.target_layers": "target_layer_ids",
    "dspark.markov_rank": "markov_rank",
    "dspark.log_snr_conditioning": "log_snr_conditioning",
    "dspark.confidence_head": "enable_confidence_head",
    "dspark.confidence_head_with_markov": "confidence_head_with_markov",
}
"""Keys of the GGUF file after "dspark.", and keys of a config.json."""


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Config and tensors of a head, with the names of a config.json and of safetensors.

    Embeddings and the output matrix are copies of the target's, and are left out. Raises HeadError
    for another kind of file, and without the package gguf.
    """
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        how = "Install its reader: pip install 'specdec-mlx[gguf]'."
        raise HeadError(f"{path.name} is a GGUF file. {how}") from error
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # a damaged file may raise anything
        raise HeadError(f"{path.name} cannot be read: {error}. Fetch it again.") from error
    if (kind := fields.get("general.architecture")) != "dspark":
        raise HeadError(
            f"{path.name} holds {kind!r}. Of GGUF files, only DSpark heads with the architecture "
            "'dspark' are read. Give a head in safetensors."
        )
    config = {
        new: fields[f"dspark.{old}"] for old, new in KEYS.items() if f"dspark.{old}" in fields
    }
    tensors = {_name_of(tensor.name): tensor for tensor in reader.tensors}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if (table := tensors.pop(name, None)) is not None:
            # GGUF gives the width of a matrix first.
            config["vocab_size"] = int(table.shape[1])
    return {"model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], **config}, tensors


def dequantized(tensor: Any) -> mx.array:
    """The values of a tensor, in its own type if it is not quantized."""
    quants = importlib.import_module("gguf.quants")
    values = mx.array(np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32))
    values = values.astype(TYPES.get(tensor.tensor_type.name, mx.float32))
    mx.eval(values)  # before the next tensor is widened
    return values


def _name_of(name: str) -> str:
    for old, new in NAMES.items():
        name = re.sub(old, new, name)
    return name
