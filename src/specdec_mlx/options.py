"""How a text is generated. Every function that generates takes these options, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import mlx.core as mx
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START, generation_stream

from specdec_mlx.arguments import argument_error, check_int, short_repr
from specdec_mlx.contracts import AcceptanceRule, LogitsProcessor
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.draft_length.value import DraftLength
from specdec_mlx.kernels import Kernels, make_kernels
from specdec_mlx.sampling import Noise, Sampler, Sampling


def max_tokens_of(value: Any, least: int = 0) -> int:
    return -1 if value == -1 else check_int("max_tokens", value, least, ", or -1 for no limit")


def noise_of(seed: int | None) -> Noise:
    # A seed of None takes one from MLX's global state.
    return Noise.from_global_state() if seed is None else Noise(check_int("seed", seed))


def check_sampler(sampler: object) -> None:
    if not callable(sampler) or isinstance(sampler, type):
        how = "a sampler, such as specdec_mlx.Sampling(temp=...)"
        raise argument_error(
            "sampler", sampler, f"{how}. For a temperature give temp={short_repr(sampler)}"
        )


def processors_of(processors: Sequence[LogitsProcessor]) -> list[LogitsProcessor]:
    if isinstance(processors, Sequence) and all(map(callable, processors)):
        return list(processors)
    raise argument_error(
        "logits_processors", processors, f"a list of processors, such as [{short_repr(processors)}]"
    )


def sampler_of(
    sampler: Sampler | Sampling | None, temp: float | None, **filters: float
) -> Sampler | Sampling | None:
    """The sampler of the options. None for greedy decoding. Raises ValueError.

    filters: `top_p`, `min_p` and `top_k` of a `Sampling`, 0 for none.
    """
    used: dict[str, Any] = {name: value for name, value in filters.items() if value != 0}
    if temp is None and not used:
        return sampler
    if sampler is not None:
        name = next(iter(used), "temp")
        raise ValueError(f"Give {name}= or sampler=, not both: a sampler has its own {name}.")
    return Sampling(0.0 if temp is None else temp, **used)


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a text is generated.

    Args:
        max_tokens: tokens to generate, -1 for no limit.
        temp: temperature, 0 for greedy decoding. `temp`, `top_p`, `min_p` and `top_k` are short for
            `sampler=Sampling(...)`.
        top_p: the likeliest tokens to draw from, by the sum of their probabilities; 0 for all.
        min_p: least probability of these tokens, relative to the likeliest token's; 0 for any.
        top_k: number of these tokens; 0 for all.
        sampler: how tokens are drawn, a `Sampling` or any mlx-lm sampler; greedy if None.
        seed: one text for each seed, whatever drafts, unless `rule` names another rule than "auto",
            "match" and "coupled". None takes a seed from MLX's global random state, and the drafts
            of a draft model then influence which text is drawn.
        rule: acceptance rule, by name or as an object. "auto" takes match for greedy decoding,
            opaque samplers and deterministic drafts. For drafts drawn at random it takes coupled
            with a seed, and block, which accepts more, without. "lenient" and "typical" change the
            text's distribution.
        ties: "plain" lets a plain pass decide wherever the rounding of a wide pass could exchange
            two tokens. It is for greedy decoding, or a seed with rule "auto", "match" or "coupled",
            and for one text at a time. Drafts are chains then. None takes the wide pass's token.
        num_draft_tokens: most tokens to draft a round, K. "auto" takes what pays, 0 included, from
            measured cost and acceptance.
        tuning: what "auto" has learned and goes on learning; None takes the loaded model's own.
        logits_processors: mlx-lm's; (tokens [n], logits [1, V]) -> logits [1, V].
        stop: strings, or one string, that end the text wherever tokens fall. They are not part of
            it. `speculate` yields tokens, and refuses them.
        prompt_cache: caches of earlier turns, which the prompt continues: the target's or, as
            mlx-lm lays them out, the target's and then a draft model's. None makes new caches.
        history: [n] tokens that prompt_cache holds already, for drafters to draw on; None for the
            tokens that earlier calls are known to have put there.
        max_kv_size: positions after which new caches rotate; None for no limit.
        prefill_step_size: most positions of the prompt in one pass.
        kv_bits: bits of quantized caches, None for caches that are not quantized.
        kv_group_size: their group size.
        quantized_kv_start: the position from which on caches are quantized.
        prompt_progress_callback: called with (positions read, positions in all).
        input_embeddings: [n, D] to feed in place of the prompt's tokens.
        tokenizer: the target's, for drafters that compare it.
        probe: measure once, for each loaded model, whether passes over several positions are exact,
            and do not draft where they are not.
        kernels: other kernels for passes over several rows, where they are faster: "auto", "split",
            "mlx-dspark" or an object. None leaves all passes to MLX's own kernels.
        prefill_stops: ascending positions of the prompt at which a pass ends, for the progress
            callback to take the caches as they are there.
        stream: MLX's stream to run on.

    Raises:
        ValueError: for a value that cannot be.
    """

    max_tokens: int = 256
    temp: float | None = None
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    sampler: Sampler | Sampling | None = None
    seed: int | None = None
    rule: str | AcceptanceRule = "auto"
    ties: str | None = None
    num_draft_tokens: int | str | DraftLength = "auto"
    tuning: Tuning | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    stop: str | Iterable[str] = ()
    prompt_cache: list[Any] | None = None
    history: Sequence[int] | mx.array | None = None
    max_kv_size: int | None = None
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = DEFAULT_QUANTIZED_KV_START
    prompt_progress_callback: Callable[[int, int], None] | None = None
    input_embeddings: mx.array | None = None
    tokenizer: Any = None
    probe: bool = True
    kernels: Kernels | str | None = None
    prefill_stops: Sequence[int] = ()
    stream: Any = generation_stream

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"max_tokens": max_tokens_of(self.max_tokens)}
        bounds = {"prefill_step_size": 1, "kv_group_size": 1, "quantized_kv_start": 0}
        for name, least in bounds.items():
            checked[name] = check_int(name, getattr(self, name), least)
        for name in ("max_kv_size", "kv_bits"):
            if (value := getattr(self, name)) is not None:
                checked[name] = check_int(name, value, 1)
        if self.ties not in (None, "plain"):
            raise argument_error("ties", self.ties, 'None or "plain"')
        if not isinstance(self.tuning, Tuning | None):
            instead = "None or specdec_mlx.drafters.Tuning.load(path)"
            raise argument_error("tuning", self.tuning, instead)
        filters = {"top_p": self.top_p, "min_p": self.min_p, "top_k": self.top_k}
        if self.kernels is not None:
            checked["kernels"] = make_kernels(self.kernels)
        checked["sampler"] = sampler_of(self.sampler, self.temp, **filters)
        # `dataclasses.replace` passes all fields again. A temperature next to the sampler that was
        # made of it would be an error.
        checked |= {"temp": None} | dict.fromkeys(filters, 0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)


class BatchArguments(TypedDict, total=False):
    """The fields of `Options` that several texts have in common, as keyword arguments."""

    temp: float | None
    top_p: float
    min_p: float
    top_k: int
    sampler: Sampler | Sampling | None
    rule: str | AcceptanceRule
    num_draft_tokens: int | str | DraftLength
    tuning: Tuning | None
    logits_processors: Sequence[LogitsProcessor] | None
    stop: str | Iterable[str]
    max_kv_size: int | None
    prefill_step_size: int
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    probe: bool
    kernels: Kernels | str | None
    stream: Any


class TextArguments(BatchArguments, total=False):
    """`BatchArguments` and the fields that belong to one text."""

    seed: int | None
    ties: str | None
    prompt_cache: list[Any] | None
    history: Sequence[int] | mx.array | None
    prompt_progress_callback: Callable[[int, int], None] | None
    input_embeddings: mx.array | None
    prefill_stops: Sequence[int]


class OptionArguments(TextArguments, total=False):
    max_tokens: int
    tokenizer: Any
