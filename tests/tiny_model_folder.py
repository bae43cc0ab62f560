"""A tiny model as an ordinary mlx-lm folder, so that commands can be run as processes.

A byte-level tokenizer with a few merges and a chat template, and random weights that prefer
printable characters, so that what the model writes can be read and compared as text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tokenizers import Tokenizer

import tiny
from tiny_text import BYTES, bpe

SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
MERGES = ["t h", "th e", "i n", "a n", "e r", "o n", "Ġ t"]

CONTEXT = 0.03
"""Weight of the layers: so little that the text repeats itself, enough to depend on all of it."""

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model_folder(
    folder: Path, name: str = "qwen2", seed: int = 0, swapped: bool = False, **changes: Any
) -> Path:
    """Write an architecture's tiny model to `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(swapped)
    vocab = tokenizer.get_vocab()
    changes = {"vocab_size": len(vocab), "tie_word_embeddings": False} | changes
    model = tiny.build(name, seed=seed, **changes)
    model.lm_head.weight = model.lm_head.weight * printable(vocab)[:, None]
    outputs = "o_proj.weight", "out_proj.weight", "down_proj.weight"  # of a layer's two halves
    weights = dict(tree_flatten(model.parameters()))
    small = [(key, weight * CONTEXT) for key, weight in weights.items() if key.endswith(outputs)]
    model.load_weights(small, strict=False)
    config = {"model_type": name, **tiny.CONFIGS[name], **changes}
    config |= {"eos_token_id": vocab["</s>"], "bos_token_id": vocab["<s>"]}
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "clean_up_tokenization_spaces": False}
    how = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(how))
    return folder


def make_tokenizer(swapped: bool = False) -> Tokenizer:
    """Every byte is a token, and so are a few frequent pairs. swapped: x has the id of y."""
    single = [*SPECIAL, *BYTES]
    if swapped:
        i, j = single.index("x"), single.index("y")
        single[i], single[j] = single[j], single[i]
    return bpe(MERGES, SPECIAL, single)


def printable(vocab: dict[str, int]) -> mx.array:
    """[V] 1 for tokens of printable ASCII, 0 for all others."""
    kept = [0.0] * len(vocab)
    for word, token in vocab.items():
        plain = word.replace("Ġ", "")
        kept[token] = float(plain.isascii() and word not in SPECIAL)
    return mx.array(kept)
