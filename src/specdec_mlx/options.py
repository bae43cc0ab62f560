"""How a text is generated: the arguments of `speculate` besides model, prompt and drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
from mlx_lm.generate import (
    DEFAULT_QUANTIZED_KV_START,
    generation_stream,
)

from specdec_mlx.arguments import shown, whole, wrong
from specdec_mlx.contracts import (
    AcceptanceRule,
    LogitsProcessor,
)
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.sampling import Noise, Sampler, Sampling


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


@dataclass(frozen=True, kw_only=True)
class Options(CacheOptions):
    """How a text is generated.

    Args:
        max_tokens: tokens to generate, -1 for no limit.
        sampler: how tokens are drawn, a `Sampling` or any mlx-lm sampler; greedy if None.
        seed: one text for each, whatever drafts, unless another rule than "auto", "match" and
            "coupled" is named; None takes one from MLX's global random state, and what a draft
            model drafts then has a say in the text.
        rule: acceptance rule, by name or as an object. "auto" takes match for greedy decoding,
            opaque samplers and point-mass drafts; for drafts drawn at random coupled with a seed,
            and block, which accepts more, without. "lenient" and "typical" change the text's
            distribution.
        draft_length: most tokens to draft a round, K; "auto" takes what pays, 0 included, from
            measured cost and acceptance.
        tuning: what "auto" has learned and goes on learning; None takes the loaded model's own.
        logits_processors: mlx-lm's; (tokens [n], logits [1, V]) -> logits [1, V].
        prompt_cache: the target's caches or, as mlx-lm lays them out, the target's and then a draft
            model's; None makes new ones.
        history: [n] tokens that prompt_cache holds already, for drafters to draw on; None for what
            is known of it, from earlier calls or by `specdec_mlx.remember`.
        max_kv_size: positions after which new caches rotate; None for no limit.
        prefill_step_size: most positions of the prompt in one pass.
        kv_bits: bits of quantized caches, None for none.
        kv_group_size: their group size.
        quantized_kv_start: the position from which on caches are quantized.
        prompt_progress_callback: called with (positions read, positions in all).
        input_embeddings: [n, D] to feed in place of the prompt's tokens.
        tokenizer: the target's, for drafters that compare it.
        probe: measure once, for each loaded model, whether passes over several positions are exact,
            and do not draft where they are not.
        prefill_stops: ascending positions of the prompt at which a pass ends, for the progress
            callback to take the caches as they are there.
        stream: MLX's stream to run on.
    """

    max_tokens: int = 256
    sampler: Sampler | Sampling | None = None
    seed: int | None = None
    rule: str | AcceptanceRule = "auto"
    draft_length: int | str | DraftLength = "auto"
    tuning: Tuning | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    prompt_cache: list[Any] | None = None
    history: Sequence[int] | mx.array | None = None
    prompt_progress_callback: Callable[[int, int], None] | None = None
    input_embeddings: mx.array | None = None
    tokenizer: Any = None
    probe: bool = True
    prefill_stops: Sequence[int] = ()
    stream: Any = generation_stream
