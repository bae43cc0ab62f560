"""`SpeculatingBatch`: texts of one batch, each with drafts of its own, for mlx-lm's server.

It has the methods of mlx-lm's `BatchGenerator` that the server calls; `batch` has the schedule.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from specdec_mlx.batch.generation import BatchGeneration
from specdec_mlx.batch.schedule import BatchToken, Request, Schedule
from specdec_mlx.contracts import LogitsProcessor
from specdec_mlx.drafters.grammar import GrammarProcessor
from specdec_mlx.engine.options import Options
from specdec_mlx.mlx_lm_plugin.requests import Requested, ServerEndingError
from specdec_mlx.models import PerModel
from specdec_mlx.verify.exactness import can_hold_rows
from specdec_mlx.verify.rollback import states_of


@dataclass(eq=False)
class _Served:
    """A request in the batch. tokens: prompt and text so far."""

    requested: Requested
    num_top: int
    text: Request
    tokens: list[int]
    seconds_before: float
    uid: int = -1


class GuardedGrammar(GrammarProcessor):
    """A grammar that keeps its error; it answers with NaN, which ends its own text alone."""

    error: Exception | None = None

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Logits [1, V]; see `GrammarProcessor`."""
        try:
            return super().__call__(tokens, logits)
        except Exception as error:
            self.error = error
            return logits * mx.nan


@dataclass(eq=False)
class SpeculatingBatch:
    """mlx-lm's `BatchGenerator` with drafts.

    incoming: tells mlx-lm's arguments of the request that is put in next. finish: adds a drafter
    and a grammar to its text; may raise.
    """

    model: nn.Module
    incoming: Callable[[], Any]
    finish: Callable[[Requested, Request], Request]
    tokenizer: Any
    stream: Any
    completion_batch_size: int = 32
    prefill_batch_size: int = 8
    prefill_step_size: int = 2048
    _batch: BatchGeneration = field(init=False)
    _tokens: Generator[BatchToken | None, None, None] | None = field(default=None, init=False)
    _served: dict[int, _Served] = field(default_factory=dict, init=False)
    _news: list[Any] = field(default_factory=list, init=False)
    _beside: Any = field(default_factory=lambda: mx.new_stream(mx.cpu), init=False)

    def __post_init__(self) -> None:
        self._batch = BatchGeneration(
            self.model,
            options=Options(
                prefill_step_size=self.prefill_step_size,
                tokenizer=self.tokenizer,
                stream=self.stream,
            ),
            schedule=Schedule(max(self.completion_batch_size, self.prefill_batch_size)),
            returns_caches=True,
            completes_caches=False,
            on_error=self._fail,
        )

    def insert_segments(
        self,
        segments: Sequence[Sequence[Sequence[int]]],
        max_tokens: Sequence[int],
        caches: Sequence[list[Any] | None],
        all_tokens: Sequence[Sequence[int]],
        samplers: Sequence[Any],
        logits_processors: Sequence[Sequence[LogitsProcessor]],
        stop_sequences: Sequence[Any],
    ) -> list[int]:
        """Put a request in, and return its uid; as in mlx-lm, with one entry in each argument."""
        args = self.incoming()
        requested: Requested = args.speculation
        prompt = [*all_tokens[0], *(token for part in segments[0] for token in part)]
        num_said = requested.channel.num_before
        matcher = stop_sequences[0].matcher()
        for token in prompt[len(prompt) - num_said :]:
            matcher.advance(token)
        num_read = len(all_tokens[0])
        _, *ends = accumulate(map(len, segments[0]), initial=num_read)
        ends[-1] -= 1  # the last token is fed with the first round
        text = Request(
            prompt,
            *(max_tokens[0] + num_said, samplers[0], args.seed, list(logits_processors[0])),
            prompt_cache=caches[0] if num_read else None,
            num_read=num_read,
            num_said=num_said,
            is_end=lambda token: matcher.advance(token.token),
            stats=requested.stats,
            stops=ends,
        )
        before = 0.0 if text.stats is None else text.stats.prefill_seconds
        served = _Served(requested, args.top_logprobs, text, list(prompt), before)
        text.on_progress = partial(self._tell, served)
        failure = None
        try:
            text = self.finish(requested, text)
        except Exception as error:
            failure = error
        served.uid = self._batch.insert(text)
        served.text = replace(text, prompt_cache=None)  # which others may free
        self._served[served.uid] = served
        if failure is not None:
            self._give_up([served], failure)
        return [served.uid]

    def _tell(self, served: _Served, done: int, total: int) -> None:
        """Mlx-lm's news of how far a prompt is read, in tokens, while the request is there."""
        if served.uid in self._served:
            is_whole = done == total
            is_end = is_whole or done in served.text.stops
            news = PromptProcessingBatch.Response(served.uid, (done, total), is_end, is_whole)
            self._news.append(news)

    def next(self) -> tuple[list[Any], list[Any]]:
        """News: parts of prompts that were read, and tokens; nothing when all has ended."""
        tokens = self._next_token()
        news, self._news = self._news, []
        return news, tokens

    def _next_token(self) -> list[Any]:
        self._tokens = self._tokens or self._batch.steps()
        try:
            token = next(self._tokens)
        except StopIteration:
            self._tokens = None
            return []
        except Exception as error:
            self._tokens = None
            waiting = {uid for uid, _ in self._batch.schedule.waiting}  # which are begun anew
            written = [served for uid, served in self._served.items() if uid not in waiting]
            self._give_up(written, error)
            return []
        if token is None or (served := self._served.get(token.uid)) is None:
            return []
        try:
            return [self._said(served, token)]
        except Exception as error:
            self._give_up([served], error)
            return []

    def _said(self, served: _Served, row: BatchToken) -> Any:
        stats = served.requested.stats = row.token.stats
        if len(served.tokens) == len(served.text.prompt):
            stats.prefill_seconds += served.seconds_before
        served.tokens.append(row.token.token)
        held = None
        if row.finish_reason is not None:
            held = served.tokens[: row.num_cached]
            if row.prompt_cache is not None:
                mx.async_eval(states_of(row.prompt_cache))
            del self._served[row.uid]
        if served.num_top > 0:
            logprobs: Any = row.token.logprobs
        else:
            with mx.stream(self._beside):  # which need not wait for the pass under way
                logprobs = np.array(row.token.logprobs.astype(mx.float32))  # NumPy has no bfloat16
        return GenerationBatch.Response(
            served.uid, row.token.token, logprobs, row.finish_reason, row.prompt_cache, held
        )

    def extract_cache(self, uids: Sequence[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Copies of the caches of prompts that are being read, and their tokens."""
        readers = {text.uid: text.reader for text in self._batch.schedule.reading}
        return {
            uid: (copy.deepcopy(one.caches.caches), list(one.prompt[: one.num_read]))
            for uid, one in readers.items()
            if uid in uids
        }

    def remove(self, uids: Sequence[int]) -> None:
        """Take requests out, wherever they are."""
        for uid in uids:
            self._batch.schedule.remove(uid)
            self._served.pop(uid, None)

    def _fail(self, uid: int, error: Exception) -> None:
        if uid in self._served:
            self._end(self._served[uid], error)

    def _give_up(self, those: Iterable[_Served], error: Exception) -> None:
        logging.error("Requests failed.", exc_info=error)
        for served in list(those):
            self._batch.schedule.remove(served.uid)
            self._end(served, error)

    def _end(self, served: _Served, error: Exception) -> None:
        """Tell a client why, and mlx-lm with the next news."""
        own = [getattr(processor, "error", None) for processor in served.text.logits_processors]
        served.requested.channel.put(next(filter(None, own), error))
        served.requested.channel.stop()
        self._tell(served, 0, len(served.text.prompt))
        self._served.pop(served.uid, None)

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of all caches."""
        return self._batch.num_cache_bytes

    def close(self) -> None:
        """End all requests, and tell their clients."""
        for served in list(self._served.values()):
            self._end(served, ServerEndingError())
        if self._tokens is not None:
            self._tokens.close()
            self._tokens = None


def _say_whether_rows(model: nn.Module) -> bool:
    with warnings.catch_warnings(action="ignore"):
        found = can_hold_rows(model)
    if not found:
        logging.warning(
            f"{type(model).__module__}: its texts cannot be rows of one batch. Requests that run "
            "together are batched by mlx-lm, without drafts."
        )
    return found


has_rows = PerModel(_say_whether_rows)
"""True for models whose texts can be rows of one batch; a line in the log if not."""
