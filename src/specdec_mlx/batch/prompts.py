"""Prompts that are read before their texts become rows, in parts, and once for several texts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from specdec_mlx.batch.rows import Request
from specdec_mlx.target.inputs import CacheOptions, check_ids, check_prompt, split_cache
from specdec_mlx.target.model_pass import vocab_size_of


@dataclass
class PromptReading:
    """A prompt that is being read, but for its last token.

    prompt: [n] token ids. caches: hold its first `num_read` tokens and what came before.
    """

    model: nn.Module
    prompt: Sequence[int]
    caches: list[Any]
    stream: Any
    num_read: int = 0
    seconds: float = 0.0

    @property
    def num_left(self) -> int:
        """Tokens that are still to be read."""
        return len(self.prompt) - 1 - self.num_read

    def read(self, most: int) -> int:
        """Read the next part, of at most so many tokens; returns how many."""
        size = min(self.num_left, most)
        started = perf_counter()
        if size > 0:
            part = self.prompt[self.num_read : self.num_read + size]
            with mx.stream(self.stream):
                self.model(mx.array([list(part)], mx.uint32), cache=self.caches)
                mx.eval([cache.state for cache in self.caches])
                mx.clear_cache()
            self.num_read += size
            self.seconds += perf_counter() - started
        return size

    def read_all(self, step_size: int) -> None:
        """Read all of it, in parts of `step_size`."""
        while self.read(step_size):
            pass


def samples_of(
    model: nn.Module, request: Request, num_samples: int, options: CacheOptions, stream: Any
) -> Iterator[Request]:
    """Several texts of one prompt, read once, when the first is asked for; else PromptError."""
    if num_samples == 1:
        yield request
        return
    prompt = check_prompt(request.prompt, None, None)
    check_ids(prompt, vocab_size_of(model))
    caches, _ = split_cache(model, copy.deepcopy(request.prompt_cache), options)
    reading = PromptReading(model, prompt, caches, stream)
    reading.read_all(options.prefill_step_size)
    for _ in range(num_samples):
        yield replace(request, prompt=prompt, prompt_cache=caches, num_read=reading.num_read)
