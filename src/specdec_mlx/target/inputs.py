"""What a caller gives to a generation, checked and taken apart before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import PromptError
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Drafter


def check_prompt(
    tokens: Sequence[int] | mx.array, embeddings: mx.array | None, drafter: Drafter | None
) -> list[int]:
    """The prompt as a list; raises PromptError for what cannot be one."""
    prompt = to_list(tokens)
    if not prompt and embeddings is None:
        raise PromptError("The prompt is empty. Give at least one token, such as the BOS token.")
    if prompt and min(prompt) < 0:
        raise PromptError(f"The prompt holds token {min(prompt)}; token ids are >= 0.")
    if embeddings is None or len(prompt) == len(embeddings):
        return prompt
    if prompt:
        raise PromptError(
            f"input_embeddings has {len(embeddings)} rows for {len(prompt)} prompt tokens. Give "
            "one row a token."
        )
    if drafter is not None:
        raise PromptError(
            "input_embeddings without prompt tokens leaves a drafter nothing to draft from. Give "
            "the prompt tokens as well, or drafter=None."
        )
    return [0] * len(embeddings)


def split_cache(
    model: nn.Module, prompt_cache: list[Any] | None, max_kv_size: int | None
) -> tuple[list[Any], list[Any] | None]:
    """The target's caches and, if the caller's list goes on behind them, the draft model's."""
    fresh = make_prompt_cache(model, max_kv_size=max_kv_size)
    if prompt_cache is None:
        return fresh, None
    if len(prompt_cache) < len(fresh):
        raise ValueError(
            f"prompt_cache has {len(prompt_cache)} caches; this model needs {len(fresh)}. Make it "
            "with mlx_lm.models.cache.make_prompt_cache(model)."
        )
    return prompt_cache[: len(fresh)], prompt_cache[len(fresh) :] or None
