"""Vision models of mlx-vlm, small enough for a test, and a processor that makes inputs for them.

Random weights, as of the tiny text models: every logit depends on the whole context, the image's
rows included.
"""

from __future__ import annotations

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm.tokenizer_utils import NaiveStreamingDetokenizer
from PIL import Image
from transformers import PreTrainedTokenizerFast

import tiny
from tiny_text import bpe

START, MARK, FILM = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>"
WORDS = ("<|bos|>", "<|end|>", START, MARK, FILM, "<|pad|>")
FAST = bpe(special=WORDS)
IDS = {word: FAST.token_to_id(word) for word in WORDS}
VOCAB = 288
SIZE = 8  # of an image's sides, in pixels

TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}
SEEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 2,
    "image_size": SIZE,
}
QWEN_SEEN = SEEN | {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "in_channels": 3}
QWEN = {
    "image_token_id": IDS[MARK],
    "video_token_id": IDS[FILM],
    "vision_start_token_id": IDS[START],
    "vocab_size": VOCAB,
    "eos_token_id": [IDS["<|end|>"]],
}
ROPE = {"type": "mrope", "mrope_section": [4, 6, 6]}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "rope_parameters": ROPE
    | {"mrope_section": [2, 1, 1], "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "full_attention_interval": 2,
}

CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": (
        {"image_token_index": IDS[MARK], "vocab_size": VOCAB, "vision_feature_layer": -1},
        TEXT | {"model_type": "llama"},
        SEEN | {"model_type": "clip_vision_model"},
    ),
    "qwen2_5_vl": (
        QWEN,
        TEXT | {"model_type": "qwen2_5_vl", "rope_scaling": ROPE},
        QWEN_SEEN | {"window_size": 8, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        QWEN,
        TEXT
        | {"model_type": "qwen3_vl_text", "head_dim": 32, "rope_theta": 1e4}
        | {"rope_scaling": ROPE | {"rope_type": "default"}},
        QWEN_SEEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": (
        QWEN,
        TEXT | {"model_type": "qwen3_5"} | LINEAR,
        QWEN_SEEN | {"num_position_embeddings": 16},
    ),
    "gemma3": (
        {"image_token_index": IDS[MARK], "pad_token_id": IDS["<|pad|>"], "hidden_size": 64},
        TEXT
        | {"model_type": "gemma3", "head_dim": 16, "sliding_window": 16}
        | {"sliding_window_pattern": 2, "mm_tokens_per_image": 4, "query_pre_attn_scalar": 16},
        SEEN | {"model_type": "siglip_vision_model"},
    ),
}
"""Of each architecture: the whole's configuration, the text's, and that of what sees."""

ROWS = {"llava": 16, "qwen2_5_vl": 4, "qwen3_vl": 4, "qwen3_5": 4, "gemma3": 4}
"""Rows of one image in the text."""


@cache
def build(name: str, seed: int = 0) -> nn.Module:
    """An architecture's tiny model as mlx-vlm has it; one that reads no images too."""
    mx.random.seed(seed)
    module = import_module(f"mlx_vlm.models.{name}")
    if name in CONFIGS:
        whole, text, seen = CONFIGS[name]
        config = module.ModelConfig(
            model_type=name,
            text_config=module.TextConfig(**text),
            vision_config=module.VisionConfig.from_dict(seen),
            **whole,
        )
    else:
        config = module.ModelConfig.from_dict(tiny.CONFIGS[name] | {"vocab_size": VOCAB})
    model: nn.Module = module.Model(config)
    model.update(tree_unflatten(tiny.randomised(model, tiny.OVERRIDES.get(name, {}))))
    model.eval()
    mx.eval(model.parameters())
    return model


TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}"
    + f"{START}{MARK}"
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}<|bos|>{% endfor %}"
)


def write_folder(folder: Path, name: str = "qwen2_5_vl") -> Path:
    """Write a tiny model with a tokenizer and mlx-vlm's own processor of it."""
    whole, text, seen = CONFIGS[name]
    config = text | whole | {"model_type": name, "vision_config": seen | {"model_type": name}}
    roles = {"bos_token": "<|bos|>", "eos_token": "<|end|>", "pad_token": "<|pad|>"}
    pixels = {"min_pixels": 16, "max_pixels": 4096, "patch_size": 2, "merge_size": 2}
    files = {
        "config": config,
        "tokenizer_config": roles
        | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE},
        "preprocessor_config": pixels | {"image_processor_type": "Qwen2VLImageProcessor"},
    }
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    FAST.save(str(folder / "tokenizer.json"))
    weights = dict(tree_flatten(build(name).parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def image(seed: int = 0) -> Image.Image:
    """A square of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), np.uint8)
    return Image.fromarray(pixels)


class Processor:
    """Text with image marks, and images, as mlx-vlm's processors encode them.

    Each mark becomes as many tokens as the image has rows, and pixels are laid out as the
    architecture's own processor does it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=FAST, bos_token="<|bos|>", eos_token="<|end|>", pad_token="<|pad|>"
        )
        self.tokenizer.stopping_criteria = Stops(IDS["<|end|>"])
        self.detokenizer = NaiveStreamingDetokenizer(self.tokenizer)

    def __call__(self, text: Any, images: Any, **_: Any) -> dict[str, mx.array]:
        """The inputs of one prompt."""
        rows = ROWS[self.name]
        expanded = (text[0] if isinstance(text, list) else text).replace(MARK, MARK * rows)
        ids = mx.array([self.tokenizer.encode(expanded, add_special_tokens=False)])
        sized = [one.resize((SIZE, SIZE)) for one in images]
        pixels = np.stack([np.array(one, np.float32) / 255 for one in sized])
        inputs = {"input_ids": ids, "attention_mask": mx.ones_like(ids)}
        if self.name.startswith("qwen"):
            return inputs | patches(pixels)
        return inputs | {"pixel_values": mx.array(pixels.transpose(0, 3, 1, 2))}


def patches(pixels: np.ndarray) -> dict[str, mx.array]:
    """Images [n, H, W, 3] as rows of Qwen's patches, 2 by 2 merged, and how many each has."""
    side = SEEN["patch_size"]
    count = SIZE // side
    twice = np.stack([pixels, pixels], axis=1)  # two frames, as of a film that stands still
    grid = twice.reshape(len(pixels), 2, count // 2, 2, side, count // 2, 2, side, 3)
    rows = grid.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(len(pixels) * count**2, -1)
    return {
        "pixel_values": mx.array(rows),
        "image_grid_thw": mx.array([[1, count, count]] * len(pixels)),
    }


class Stops:
    """End tokens, as mlx-vlm's tokenizers have them."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = set(tokens)

    def __call__(self, token: int) -> bool:
        """True at the end of a text."""
        return token in self.tokens

    def reset(self, tokens: Any) -> None:
        """Take a model's own end tokens, if it has any."""
        self.tokens = set(tokens or self.tokens)
