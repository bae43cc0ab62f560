"""Text for tiny models: small byte-level tokenizers of several kinds, and a model to go with them.

Its weights are random, so that it writes halves of characters too, which detokenizers hold back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.nn as nn
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

import tiny

MERGES = ("t h", "th e", "Ġ the", "i n", "Ġ a", "e r", "o n", "Ġ s")
SPECIAL = ("<|bos|>", "<|end|>", "<|user|>")
BOS, END, _ = SPECIAL
VOCAB = 288  # width of the model's logits: 267 tokens, and padding

SHAPE: dict[str, Any] = tiny.CONFIGS["qwen2"] | {
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
}


BYTES = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


def bpe(
    merges: Sequence[str] = MERGES, special: Sequence[str] = SPECIAL, single: Sequence[str] = BYTES
) -> Tokenizer:
    """Byte-level BPE. single: the bytes in the order of their ids; merges and special follow."""
    pieces = list(single) + [merge.replace(" ", "") for merge in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    pairs = [(left, right) for left, right in (merge.split() for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def tokenizer(
    fast: Tokenizer | None = None, *, eos_token_ids: Sequence[int] = (), **roles: str
) -> TokenizerWrapper:
    """A tokenizer as `mlx_lm.load` gives it. roles: bos_token, eos_token if others than usual."""
    hugging_face = PreTrainedTokenizerFast(
        tokenizer_object=fast or bpe(), **{"bos_token": BOS, "eos_token": END} | roles
    )
    return TokenizerWrapper(
        hugging_face, BPEStreamingDetokenizer, eos_token_ids=list(eos_token_ids) or None
    )


@cache
def model(seed: int = 0, vocab_size: int = VOCAB) -> nn.Module:
    """A tiny model with logits for the tokenizer and a little padding."""
    return tiny.build("qwen2", seed=seed, **SHAPE | {"vocab_size": vocab_size})


def merged(pieces: Sequence[str], merges: Sequence[str]) -> models.BPE:
    """BPE over pieces and what its merges make of them."""
    words = [*pieces, *(merge.replace(" ", "") for merge in merges)]
    vocab = {word: i for i, word in enumerate(dict.fromkeys(words))}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    return models.BPE(vocab, pairs, byte_fallback="<0x00>" in vocab, unk_token="<unk>")


PRINTABLE = [chr(code) for code in range(0x20, 0x7F)] + ["\n", "\t"]


def sentencepiece(merges: Sequence[str] = ("t h", "th e", "▁ the", "i n", "▁ a")) -> Tokenizer:
    """As Llama's: a space before every text, spaces as a sign, other bytes as <0xNN>."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [letter for letter in PRINTABLE if letter not in " \n\t"]
    tokenizer = Tokenizer(merged([*pieces, "▁", *letters], merges))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def plain(merges: Sequence[str] = ("t h", "e r", "i n")) -> Tokenizer:
    """BPE over printable characters alone."""
    tokenizer = Tokenizer(merged(["<unk>", *PRINTABLE], merges))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return tokenizer
