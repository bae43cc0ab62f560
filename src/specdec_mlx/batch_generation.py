"""Several prompts in, their texts out: `mlx_lm.batch_generate` with one argument more."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, fields, replace
from itertools import count, islice, repeat
from typing import Any, Unpack

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import BatchResponse, BatchStats, wired_limit
from mlx_lm.tokenizer_utils import TokenizerWrapper

from specdec_mlx.arguments import DEFAULT_DRAFTER, argument_error, check_int, check_names
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import Request, Schedule
from specdec_mlx.drafters.choosing.choice import AnyDrafter, resolve
from specdec_mlx.generation import Prompt, SpeculativeResponse, TextUnderWay, encode, loaded, speeds
from specdec_mlx.loop import Token
from specdec_mlx.options import BatchArguments, Options, max_tokens_of
from specdec_mlx.stats.account import SpeculationStats
from specdec_mlx.stop_strings import StopStrings


@dataclass
class SpeculativeBatchResponse(BatchResponse):  # type: ignore[misc]
    # of each text, on request; mlx-lm 0.31 has neither field
    token_ids: list[list[int]] | None = None
    logprobs: list[list[float]] | None = None
    speculation: list[SpeculationStats] = field(default_factory=list)


def batch_stream_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    max_tokens: int | Sequence[int] = 128,
    drafter: AnyDrafter = DEFAULT_DRAFTER,
    draft_model: nn.Module | str | None = None,
    num_samples: int = 1,
    seed: int | Sequence[int | None] | None = None,
    prompt_caches: Sequence[list[Any]] | None = None,
    return_prompt_caches: bool = False,
    completion_batch_size: int = 32,
    **options: Unpack[BatchArguments],
) -> Generator[SpeculativeResponse, None, None]:
    """Stream the texts of several prompts, written together. Each text is as if written alone.

    Args:
        model: a loaded mlx-lm model.
        tokenizer: its tokenizer, as `mlx_lm.load` gives it.
        prompts: each is text, token ids or chat messages. The next prompt of an
            iterator is read when a slot is free.
        max_tokens: most tokens of each text, -1 for no limit; one number, or one for each prompt.
        drafter: as in `stream_generate`. Every text has its own session.
        draft_model: as in `stream_generate`.
        num_samples: texts of each prompt, which is read once for all of them.
        seed: one for each text, or a number to which the text's place is added, prompt by prompt.
            None takes seeds from MLX's global random state.
        prompt_caches: caches that each prompt continues; they are not changed.
        return_prompt_caches: give each text's caches with its last token.
        completion_batch_size: most texts that are written at a time.
        options: the fields of `Options` that are not of one text alone. A draft length that is an
            object is copied for each text. With `max_kv_size` or `kv_bits` the texts are written
            one by one.

    Yields:
        A response for each token, with the `index` of its prompt, row by row within a round.

    Raises:
        ValueError: for bad input, and its subclasses as in `stream_generate`.
    """
    check_names(options, batch_stream_generate, Options)
    tokenizer = loaded(model, tokenizer)
    num_samples = check_int("num_samples", num_samples, 1)
    if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes):
        raise argument_error("prompts", prompts, "a list of prompts. For one, give [prompt]")
    how = Options(**options, tokenizer=tokenizer)
    batch = BatchGeneration(
        model,
        resolve(drafter, draft_model, model, tokenizer),
        how,
        Schedule(check_int("completion_batch_size", completion_batch_size, 1)),
        stop_tokens=frozenset(tokenizer.eos_token_ids),
        returns_caches=return_prompt_caches,
    )
    caches = _each("prompt_caches", prompt_caches) if prompt_caches else repeat(None)
    columns = zip(prompts, _max_tokens(max_tokens), caches, strict=False)
    requests = (
        Request(
            ids,
            wanted,
            how.sampler,
            logits_processors=how.logits_processors or (),
            prompt_cache=cache,
            is_end=_end_at(how.stop, tokenizer),
        )
        for prompt, wanted, cache in columns
        for ids in repeat(encode(tokenizer, prompt), num_samples)
    )
    seeded = (
        replace(request, seed=value) for request, value in zip(requests, _seeds(seed), strict=False)
    )
    name = drafter if isinstance(drafter, str) else ""
    with wired_limit(model, [how.stream]):
        yield from _respond(batch, seeded, tokenizer, num_samples, name)


def _end_at(
    stop: str | Iterable[str], tokenizer: TokenizerWrapper
) -> Callable[[Token], bool] | None:
    """A function that is true for the token at which a stop string ends the text."""
    strings = StopStrings(stop)
    if not strings.strings:
        return None
    detokenizer = tokenizer.detokenizer

    def is_end(token: Token) -> bool:
        detokenizer.add_token(token.token)
        strings.add(detokenizer.last_segment)
        return strings.matched is not None

    return is_end


class BatchGenerateArguments(BatchArguments, total=False):
    drafter: AnyDrafter
    draft_model: nn.Module | str | None
    num_samples: int
    seed: int | Sequence[int | None] | None
    completion_batch_size: int


def batch_generate(
    model: nn.Module,
    tokenizer: Any,
    prompts: Iterable[Prompt],
    prompt_caches: Sequence[list[Any]] | None = None,
    max_tokens: int | Sequence[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    **options: Unpack[BatchGenerateArguments],
) -> SpeculativeBatchResponse:
    """Generate the same texts as `mlx_lm.batch_generate`, sooner; as `batch_stream_generate`.

    Args:
        verbose: print speeds, peak memory and the account.
        return_prompt_caches: return the caches of each text.
        return_token_ids: return its tokens.
        return_logprobs: return the log-probabilities of each token.
        options: all other arguments of `batch_stream_generate`.

    Returns:
        mlx-lm's response, with the account of each text in `speculation`; the samples of a prompt
        stand together.

    Raises:
        ValueError: for bad input, and its subclasses as in `stream_generate`.
    """
    check_names(options, batch_generate, batch_stream_generate, Options)
    tokenizer = loaded(model, tokenizer)
    started = time.perf_counter()
    texts: dict[tuple[int, int], list[SpeculativeResponse]] = {}
    for response in batch_stream_generate(
        model,
        tokenizer,
        prompts,
        max_tokens,
        prompt_caches=prompt_caches,
        return_prompt_caches=return_prompt_caches,
        **options,
    ):
        # A row has the size of the vocabulary. Do not keep it with the response.
        row, response.logprobs = response.logprobs, None
        if return_logprobs:
            response.logprobs = row[response.token].item()
        texts.setdefault((response.index, response.sample), []).append(response)
    collected = [texts[place] for place in sorted(texts)]
    lasts = [text[-1] for text in collected]
    end_tokens, has_stop = set(tokenizer.eos_token_ids), bool(options.get("stop"))
    contents = [[item for item in text if item.token not in end_tokens] for text in collected]
    tokens = [[item.token for item in text] for text in contents]
    # A stop string may end within a token, so that only the streamed segments are cut right.
    strings = [
        "".join(item.text for item in text) if has_stop else tokenizer.decode(ids)
        for text, ids in zip(collected, tokens, strict=True)
    ]
    prompt_time = sum(last.stats.prefill_seconds for last in lasts)
    wall_time = time.perf_counter() - started
    decode_time = max(0.0, wall_time - prompt_time)
    prompt_tokens = sum(last.prompt_tokens for last in lasts)
    generation_tokens = sum(last.generation_tokens for last in lasts)
    figures = {
        "prompt_tokens": prompt_tokens,
        "prompt_time": prompt_time,
        "generation_tokens": generation_tokens,
        "generation_steps": max((last.num_rounds for last in lasts), default=0),
        "decode_time": decode_time,
        "wall_time": wall_time,
        "peak_memory": mx.get_peak_memory() / 1e9,
        # as mlx-lm 0.31 has them
        "generation_time": decode_time,
        "prompt_tps": prompt_tokens / prompt_time if prompt_time else 0.0,
        "generation_tps": generation_tokens / decode_time if decode_time else 0.0,
    }
    known = {one.name for one in fields(BatchStats)}
    stats = BatchStats(**{name: value for name, value in figures.items() if name in known})
    result = SpeculativeBatchResponse(
        strings,
        stats,
        [last.prompt_cache for last in lasts] if return_prompt_caches else None,
        token_ids=tokens if return_token_ids else None,
        logprobs=[[item.logprobs for item in text] for text in contents]
        if return_logprobs
        else None,
        speculation=[last.stats for last in lasts],
    )
    if verbose:
        _print(result)
    return result


def _print(result: SpeculativeBatchResponse) -> None:
    drafted = sum(account.drafted for account in result.speculation)
    accepted = sum(account.accepted for account in result.speculation)
    drafts = f"{accepted} of {drafted} draft tokens accepted"
    passes = f"{result.stats.generation_steps} passes"
    for line in (*speeds(result.stats), f"Speculation: {drafts}, {passes}"):
        print(f"[batch_generate] {line}")


def _respond(
    batch: BatchGeneration,
    requests: Iterator[Request],
    tokenizer: Any,
    num_samples: int,
    drafter: str,
) -> Generator[SpeculativeResponse, None, None]:
    """Detokenize each text, and insert the next request when a slot is free."""
    texts: dict[int, TextUnderWay] = {}

    def let_in() -> None:
        places = batch.schedule
        while places.num_open < places.max_texts and (samples := [*islice(requests, num_samples)]):
            for request in samples:
                uid = batch.insert(request)
                start = tokenizer.detokenizer, len(request.prompt), drafter
                stop = batch.options.stop
                strings = StopStrings(stop) if stop else None
                texts[uid] = TextUnderWay(*start, strings)

    let_in()
    with closing(batch.run()) as tokens:
        for uid, token, reason, prompt_cache, _ in tokens:
            # A stop string ended this text. `response` finds it too, and cuts the segment.
            is_cut = reason == "stop" and token.token not in batch.stop_tokens
            response = texts[uid].response(
                token, None if is_cut else reason, token.stats.prefill_seconds
            )
            index, sample = divmod(uid, num_samples)
            yield replace(
                response,
                index=index,
                sample=sample,
                num_rounds=batch.num_rounds,
                prompt_cache=prompt_cache,
            )
            if reason is not None:
                del texts[uid]
                let_in()


def _each(name: str, values: Iterable[Any]) -> Iterator[Any]:
    """The values. Raises ValueError if more are asked for, because a text would be lost."""
    yield from values
    raise argument_error(name, values, "a value for each prompt, and a seed for each text")


def _max_tokens(limit: int | Sequence[int]) -> Iterable[int]:
    if isinstance(limit, Iterable) and not isinstance(limit, str):
        return _each("max_tokens", [max_tokens_of(number, 1) for number in limit])
    return repeat(max_tokens_of(limit, 1))


def _seeds(seed: int | Sequence[int | None] | None) -> Iterable[int | None]:
    if seed is None:
        return repeat(None)
    if isinstance(seed, Iterable) and not isinstance(seed, str):
        return _each("seed", seed)
    return count(check_int("seed", seed))
