"""What a caller gives to a generation, checked and taken apart before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.errors import DraftError, PromptError
from specdec_mlx.target.rollback import check_usable
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Checks, Draft, DraftContext, Drafter


@dataclass(frozen=True)
class CacheOptions:
    """How the target's caches are made and filled; as in mlx-lm's `generate_step`.

    max_kv_size: positions after which caches rotate, None for no limit. prefill_step_size: most
    positions of the prompt in one pass. kv_bits: bits of quantized caches, None for none, in groups
    of kv_group_size, from position quantized_kv_start on.
    """

    max_kv_size: int | None = None
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 0


def check_prompt(
    tokens: Sequence[int] | mx.array, embeddings: mx.array | None, drafter: Drafter | None
) -> list[int]:
    """The prompt as a list.

    Args:
        tokens: [n] token ids.
        embeddings: [n, D] to feed in their place, or None.
        drafter: what is going to draft from them.

    Raises:
        PromptError: for what cannot be a prompt.
    """
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


def check_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise PromptError for ids that the target does not have, before they are computed with."""
    if (highest := max(tokens)) >= vocab_size:
        raise PromptError(
            f"The prompt holds token {highest}; the target has 0 to {vocab_size - 1}. Encode "
            "the prompt with the target's own tokenizer."
        )


def split_cache(
    model: nn.Module, prompt_cache: list[Any] | None, max_kv_size: int | None
) -> tuple[list[Any], list[Any] | None]:
    """The target's caches and, if the caller's list goes on behind them, the draft model's.

    Raises:
        ValueError: for fewer caches than the model needs.
        CacheRollbackError: for caches that an interrupted generation could not bring in order.
    """
    fresh = make_prompt_cache(model, max_kv_size=max_kv_size)
    if prompt_cache is None:
        return fresh, None
    if len(prompt_cache) < len(fresh):
        raise ValueError(
            f"prompt_cache has {len(prompt_cache)} caches; this model needs {len(fresh)}. Make it "
            "with mlx_lm.models.cache.make_prompt_cache(model)."
        )
    check_usable(prompt_cache)
    return prompt_cache[: len(fresh)], prompt_cache[len(fresh) :] or None


def check_is_drafter(drafter: object) -> None:
    """Raise ValueError for what is neither a drafter nor None."""
    if drafter is not None and not isinstance(drafter, Drafter):
        raise ValueError(
            f"drafter={drafter!r} has no begin(prompt, context). Give a drafter, the name of one, "
            "or a mlx-lm model as draft_model=."
        )


def check_fits(drafter: Drafter | None, context: DraftContext) -> None:
    """Refuse what is no drafter, and let a drafter refuse the target that it is to draft for."""
    check_is_drafter(drafter)
    if isinstance(drafter, Checks):
        drafter.check(context)


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Refuse what can be seen to be wrong before anything is computed.

    Ids that are not computed yet are not waited for; `check_drafted` sees them with the verdict.

    Raises:
        DraftError: for tokens that are no ids of the target, a distribution of another shape than
            [K, V], and parents that are no tree.
    """
    tokens = draft.tokens
    if isinstance(tokens, mx.array):
        if tokens.ndim != 1 or not mx.issubdtype(tokens.dtype, mx.integer):
            raise DraftError(
                f"The drafter proposed an array of shape {tokens.shape} and type {tokens.dtype}; "
                "expected token ids [K], integers."
            )
    elif isinstance(tokens, Sequence) and set(map(type, tokens)) <= {int}:
        check_drafted(tokens, vocab_size)
    else:
        raise DraftError(
            f"The drafter proposed a {type(tokens).__name__} that is no sequence of ints; expected "
            "one, or an mx.array of them. Use .tolist() on arrays of other libraries."
        )
    num_tokens = len(tokens)
    logprobs = draft.logprobs
    if logprobs is not None and (
        not isinstance(logprobs, mx.array) or logprobs.shape != (num_tokens, vocab_size)
    ):
        shape = getattr(logprobs, "shape", None)
        raise DraftError(
            f"The drafter's distribution is a {type(logprobs).__name__} of shape {shape}; expected "
            f"an mx.array [K, V] = {(num_tokens, vocab_size)}. Hand over one row a draft token."
        )
    _check_parents(draft.parents, num_tokens)


def _check_parents(parents: Sequence[int] | None, num_tokens: int) -> None:
    if parents is None:
        return
    in_order = all(-1 <= parent < i for i, parent in enumerate(parents))
    if len(parents) != num_tokens or not in_order:
        raise DraftError(
            f"The drafter's parents are {list(parents)}; expected {num_tokens} indices, each of an "
            "earlier token, or -1 for the text itself."
        )


def check_drafted(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise DraftError for drafted ids [K] that the target does not have."""
    if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise DraftError(
            f"The drafter proposed token {wrong}; the target has 0 to {vocab_size - 1}. Use a "
            "drafter for the same tokenizer."
        )
