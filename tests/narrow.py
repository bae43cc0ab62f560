"""A tiny model whose text repeats itself, with a tokenizer, and one that counts its passes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

import tiny
from specdec_mlx.lab.prompts import RecordedText

NUM_TOKENS = 4  # ids that it writes; so few that look-ups find matches, right and wrong ones
VOCAB = 128


class Narrow(nn.Module):
    """A model that only ever writes the first few token ids."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @property
    def layers(self) -> list[Any]:
        return self.inner.layers  # type: ignore[no-any-return]

    def __call__(self, ids: mx.array, cache: Any = None) -> mx.array:
        logits = self.inner(ids, cache=cache)
        return mx.where(mx.arange(logits.shape[-1]) < NUM_TOKENS, logits, -1e9)


@cache
def model(seed: int = 0) -> nn.Module:
    return Narrow(tiny.build("llama", seed=seed))


def tasks(count: int = 4, categories: int = 2) -> list[RecordedText]:
    """Tasks with random prompts over the same few ids."""
    coins = random.Random(0)
    prompts = [[coins.randrange(NUM_TOKENS) for _ in range(10 + i)] for i in range(count)]
    return [RecordedText(f"task {i}", f"kind {i % categories}", p) for i, p in enumerate(prompts)]


@dataclass
class FakeTokenizer:
    """One id a letter; `seen` holds the chats that went through the template."""

    has_chat_template: bool = True
    eos_token_ids: set[int] = field(default_factory=set)
    seen: list[Any] = field(default_factory=list)

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(NUM_TOKENS)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % NUM_TOKENS for letter in text]

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        self.seen.append(messages)
        return [0, *self.encode(messages[0]["content"]), 1]


class Counting(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_passes = 0

    @property
    def layers(self) -> Any:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        return make_prompt_cache(self.model)  # type: ignore[no-any-return]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        self.num_passes += 1
        logits: mx.array = self.model(inputs, cache=cache)
        return logits
