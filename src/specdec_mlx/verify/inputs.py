"""Arguments of a generation, checked and taken apart before anything is computed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.contracts import (
    Checks,
    Draft,
    DraftContext,
    Drafter,
    DraftSession,
    LogitsProcessor,
    Session,
    SessionGroups,
)
from specdec_mlx.errors import DraftError, PromptError
from specdec_mlx.options import shown, whole, wrong
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.verify.rollback import check_usable


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How the target's caches are made and filled, as in mlx-lm's `generate_step`.

    Raises ValueError for what cannot be.
    """

    max_kv_size: int | None = None
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START

    def __post_init__(self) -> None:
        for field in fields(CacheOptions):
            value, least = (
                getattr(self, field.name),
                int(field.name != "quantized_kv_start"),
            )
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, whole(field.name, value, least))


def check_model(model: object) -> None:
    """Raise ValueError for a model that is not loaded."""
    if not isinstance(model, nn.Module):
        raise wrong(
            "model", model, "a loaded model: model, tokenizer = mlx_lm.load(...)"
        )


def max_tokens_of(given: Any, least: int = 0) -> int:
    """A number of tokens to write, -1 for no limit; ValueError for anything else."""
    return (
        -1 if given == -1 else whole("max_tokens", given, least, ", or -1 for no limit")
    )


def noise_of(seed: int | None) -> Noise:
    """The noise of a seed, of MLX's global state for None; ValueError for anything else."""
    return Noise.from_global_state() if seed is None else Noise(whole("seed", seed))


def check_sampler(sampler: object) -> None:
    """Raise ValueError for a sampler that cannot be called."""
    if not callable(sampler) or isinstance(sampler, type):
        how = "a sampler, such as specdec_mlx.Sampling(temp=...)"
        raise wrong(
            "sampler", sampler, f"{how}. For a temperature give temp={shown(sampler)}"
        )


def processors_of(given: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    """The logits processors; ValueError for anything but a list of them."""
    if isinstance(given, Sequence) and all(map(callable, given)):
        return list(given)
    raise wrong(
        "logits_processors", given, f"a list of processors, such as [{shown(given)}]"
    )


def prompt_ids(prompt: Any) -> list[int]:
    """Token ids of a prompt as a list; waits for an array. PromptError for anything else."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(ids, Sequence) and all(
        hasattr(kind, "__index__") for kind in {*map(type, ids)}
    ):
        return list(map(operator.index, ids))
    expected = (
        "token ids, a flat list of ints; generate also takes text and chat messages"
    )
    raise PromptError(
        f"prompt={shown(prompt)}: expected {expected}, batch_generate several."
    )


def check_prompt(
    tokens: Sequence[int] | mx.array,
    embeddings: mx.array | None,
    drafter: Drafter | None,
) -> list[int]:
    """The prompt [n] as a list; embeddings [n, D] may be fed in its place. Raises PromptError."""
    prompt = prompt_ids(tokens)
    if not prompt and embeddings is None:
        raise PromptError(
            "The prompt is empty. Give at least one token, such as the BOS token."
        )
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
    model: nn.Module, prompt_cache: list[Any] | None, options: CacheOptions
) -> tuple[list[Any], list[Any] | None]:
    """The target's caches and, if the caller's list is longer, the draft model's.

    Raises ValueError for fewer than needed and what MLX cannot quantize so, CacheRollbackError for
    those that an interrupted generation could not bring in order.
    """
    fresh = make_prompt_cache(model, max_kv_size=options.max_kv_size)
    if options.kv_bits is not None:
        _check_quantized(model, options)
    if prompt_cache is None:
        return fresh, None
    is_list = isinstance(prompt_cache, Sequence) and all(
        hasattr(type(c), "state") for c in prompt_cache
    )
    if not is_list or len(prompt_cache) < len(fresh):
        made_by = "mlx_lm.models.cache.make_prompt_cache(model)"
        raise wrong(
            "prompt_cache",
            prompt_cache,
            f"a list of caches, {len(fresh)} as of {made_by}",
        )
    check_usable(prompt_cache)
    return prompt_cache[: len(fresh)], prompt_cache[len(fresh) :] or None


def _check_quantized(model: nn.Module, options: CacheOptions) -> None:
    """Quantize caches of a pass that is never computed; ValueError where MLX does not."""
    caches = make_prompt_cache(model, max_kv_size=options.max_kv_size)
    model(mx.array([[0]]), cache=caches)
    bits, group_size = options.kv_bits, options.kv_group_size
    try:
        # of caches that rotate: mlx-lm says so, if it is due
        with suppress(NotImplementedError):
            maybe_quantize_kv_cache(caches, 0, group_size, bits)
    except ValueError as error:
        expected = f"what MLX can quantize this model's caches to ({error})"
        raise wrong(f"kv_bits={bits}, kv_group_size", group_size, expected) from error


def check_is_drafter(drafter: object) -> None:
    """Raise ValueError for what is neither a drafter nor None."""
    if drafter is None or (
        isinstance(drafter, Drafter) and not isinstance(drafter, type)
    ):
        return
    if isinstance(drafter, type):
        instead = f"give {shown(drafter)}()"
    elif isinstance(drafter, list | tuple):
        instead = "of mlx_lm.load give draft_model=model; specdec_mlx.FirstOf(*drafters) is one"
    else:
        instead = "give a drafter, the name of one, or a mlx-lm model as draft_model="
    raise wrong("drafter", drafter, f"an object with begin(prompt, context); {instead}")


def begin_session(
    drafter: Drafter, tokens: Sequence[int], context: DraftContext
) -> Session:
    """Begin a drafter's session; DraftError for one without `propose` or `observe`."""
    session = drafter.begin(tokens, context)
    if not isinstance(session, DraftSession | SessionGroups):
        raise DraftError(
            f"{type(drafter).__name__}.begin(...) returned {shown(session)}; expected a session "
            "with propose(limit) and observe(tokens)."
        )
    return session


def check_drafter_fits(drafter: Drafter | None, context: DraftContext) -> None:
    """Refuse what is no drafter, and let a drafter refuse the target that it is to draft for."""
    check_is_drafter(drafter)
    if isinstance(drafter, Checks):
        drafter.check(context)


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raise DraftError for a draft that can be seen to be wrong before anything is computed.

    Ids of the target, a distribution [K, V], a tree. `check_drafted` sees ids not computed yet.
    """
    tokens, parents = draft.tokens, draft.parents
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
    num_tokens, shape = len(tokens), getattr(draft.logprobs, "shape", None)
    is_array = isinstance(draft.logprobs, mx.array) and shape == (
        num_tokens,
        vocab_size,
    )
    if draft.logprobs is not None and not is_array:
        raise DraftError(
            f"The drafter's distribution is a {type(draft.logprobs).__name__} of shape {shape}; "
            f"expected an mx.array [K, V] = {(num_tokens, vocab_size)}. Hand over one row a draft "
            "token."
        )
    if parents is not None and not (
        len(parents) == num_tokens
        and all(-1 <= parent < i for i, parent in enumerate(parents))
    ):
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
