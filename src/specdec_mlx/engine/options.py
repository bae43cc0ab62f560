"""How a text is generated: the arguments of `speculate` besides model, prompt and drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from specdec_mlx.contracts import AcceptanceRule, LogitsProcessor
from specdec_mlx.draft_length.policy import DraftLength
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.sampling.distribution import Sampler, Sampling
from specdec_mlx.verify.inputs import CacheOptions


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
