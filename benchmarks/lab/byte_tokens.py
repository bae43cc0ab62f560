"""The pair's tokens: one byte each, and the end of a text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 256
VOCAB_SIZE = 257


def to_stream(documents: list[str]) -> np.ndarray:
    """Documents as one row of token ids, int32 [n], each after an end-of-text token."""
    parts = [[END_OF_TEXT_ID, *text.encode()] for text in documents]
    return np.array([token for part in parts for token in part], dtype=np.int32)


def digest(stream: np.ndarray) -> str:
    """Fingerprint of a stream: tells whether two Pythons carry the same text."""
    return hashlib.sha256(stream.tobytes()).hexdigest()


def build_tokenizer() -> Tokenizer:
    """Token i is the byte i; behind them comes the end of a text."""
    vocab = {character: byte for byte, character in byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer


def byte_characters() -> dict[int, str]:
    """The visible character that stands for each byte in byte-level vocabularies (GPT-2's)."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {b: chr(b) for b in visible} | {b: chr(256 + i) for i, b in enumerate(hidden)}


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer into a model folder, as Hugging Face's libraries expect it."""
    build_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
    }
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
