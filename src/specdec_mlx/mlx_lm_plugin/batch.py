"""`SpeculatingBatch`: rows of one batch, each with drafts of its own, for mlx-lm's server.

It has the methods of mlx-lm's `BatchGenerator` that the server calls, and reads prompts in parts,
between rounds.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import make_prompt_cache

from specdec_mlx.batch.generation import BatchGeneration
from specdec_mlx.batch.rows import Request, RowToken
from specdec_mlx.contracts import LogitsProcessor
from specdec_mlx.drafters.grammar import GrammarProcessor
from specdec_mlx.engine.prompt_reader import PromptReader
from specdec_mlx.mlx_lm_plugin.requests import Requested, ServerEndingError
from specdec_mlx.models import PerModel
from specdec_mlx.verify.exactness import can_hold_rows
from specdec_mlx.verify.rollback import Rollback, states_of


@dataclass(eq=False)
class _Served:
    """A request in the batch.

    reading: of its prompt, which others may share. ends: positions of the prompt at which mlx-lm
    keeps the caches. tokens: prompt and text so far.
    """

    uid: int
    requested: Requested
    num_top: int
    text: Request
    reading: PromptReader
    ends: list[int]
    tokens: list[int]
    seconds_before: float

    def progress(self, *, end_of_segment: bool, is_let_in: bool = False) -> Any:
        """mlx-lm's news of how far the prompt is read, in tokens."""
        total = len(self.text.prompt)
        done = total if is_let_in else self.reading.num_read
        return PromptProcessingBatch.Response(self.uid, (done, total), end_of_segment, is_let_in)


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
    _tokens: Generator[RowToken, None, None] | None = field(default=None, init=False)
    _num_inserted: int = field(default=0, init=False)
    _reading: list[_Served] = field(default_factory=list, init=False)
    _rows: dict[int, _Served] = field(default_factory=dict, init=False)  # by the uids of `_batch`
    _failed: list[_Served] = field(default_factory=list, init=False)
    _read_in: int = field(default=-1, init=False)
    _beside: Any = field(default_factory=lambda: mx.new_stream(mx.cpu), init=False)

    def __post_init__(self) -> None:
        self._batch = self._new_batch()

    def _new_batch(self) -> BatchGeneration:
        return BatchGeneration(
            self.model,
            max_rows=max(self.completion_batch_size, self.prefill_batch_size),
            prefill_step_size=self.prefill_step_size,
            tokenizer=self.tokenizer,
            returns_caches=True,
            completes_caches=False,
            on_error=self._fail,
            stream=self.stream,
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
        args, uid = self.incoming(), self._num_inserted
        requested: Requested = args.speculation
        self._num_inserted += 1
        prompt = [*all_tokens[0], *(token for part in segments[0] for token in part)]
        num_said = requested.channel.num_before
        matcher = stop_sequences[0].matcher()
        for token in prompt[len(prompt) - num_said :]:
            matcher.advance(token)
        how = (max_tokens[0] + num_said, samplers[0], args.seed, list(logits_processors[0]))
        text = Request(prompt, *how, num_said=num_said, matcher=matcher, stats=requested.stats)
        _, *ends = accumulate(map(len, segments[0]), initial=len(all_tokens[0]))
        ends[-1] -= 1  # the last token is fed with the first round
        reading = self._reading_of(prompt, caches[0], len(all_tokens[0]))
        before = 0.0 if text.stats is None else text.stats.prefill_seconds
        top = args.top_logprobs
        served = _Served(uid, requested, top, text, reading, ends, list(prompt), before)
        with self._alone(served):
            served.text = self.finish(requested, text)
            self._reading.append(served)
        return [uid]

    @contextmanager
    def _alone(self, *those: _Served) -> Iterator[None]:
        """An error in this block ends these requests alone."""
        try:
            yield
        except Exception as error:
            logging.exception("A request failed.")
            self.remove([served.uid for served in those])
            for served in those:
                self._end(served, error)

    def _reading_of(self, prompt: list[int], caches: Any, num_read: int) -> PromptReader:
        """The reading of a prompt, shared with a request that reads the same one."""
        for other in self._reading:
            if other.reading.prompt == prompt:
                return other.reading
        with mx.stream(self.stream):
            caches = caches or make_prompt_cache(self.model)
        how: dict[str, Any] = {"step_size": self.prefill_step_size, "stream": self.stream}
        return PromptReader.of_model(self.model, prompt, Rollback(caches, num_read), **how)

    def next(self) -> tuple[list[Any], list[Any]]:
        """News: parts of prompts that were read, and tokens; nothing when all has ended."""
        tokens = self._next_token()
        progress = self._read_prompts()
        while self._failed:
            progress.append(self._failed.pop().progress(end_of_segment=False))
        return progress, tokens

    def _next_token(self) -> list[Any]:
        self._tokens = self._tokens or self._batch.run()
        try:
            row = next(self._tokens, None)
        except Exception as error:
            logging.exception("A batch failed.")
            for uid in list(self._rows):
                self._fail(uid, error)
            self._tokens, self._batch = None, self._new_batch()
            return []
        if row is None:
            self._tokens = None
        elif (served := self._rows.get(row.uid)) is not None:
            with self._alone(served):
                return [self._said(served, row)]
        return []

    def _said(self, served: _Served, row: RowToken) -> Any:
        stats = served.requested.stats = row.token.stats
        if len(served.tokens) == len(served.text.prompt):
            stats.prefill_seconds = served.seconds_before + served.reading.seconds
        served.tokens.append(row.token.token)
        held = None
        if row.finish_reason is not None:
            held = served.tokens[: row.num_cached]
            if row.prompt_cache is not None:
                mx.async_eval(states_of(row.prompt_cache))
            del self._rows[row.uid]
        if served.num_top > 0:
            logprobs: Any = row.token.logprobs
        else:
            with mx.stream(self._beside):  # which need not wait for the pass under way
                logprobs = np.array(row.token.logprobs.astype(mx.float32))  # NumPy has no bfloat16
        return GenerationBatch.Response(
            served.uid, row.token.token, logprobs, row.finish_reason, row.prompt_cache, held
        )

    def _read_prompts(self) -> list[Any]:
        """Let in the texts whose prompts are read; once a round, read a step of the others."""
        read = [served for served in self._reading if not served.reading.num_left]
        news = [self._let_in(served) for served in read]
        if self._rows and self._batch.num_rounds == self._read_in:
            return news
        self._read_in = self._batch.num_rounds
        left, readings = self.prefill_step_size, set()
        for served in list(self._reading):
            if left > 0 and id(served.reading) not in readings:
                readings.add(id(served.reading))
                left -= self._read_part(served, left, news)
        return news

    def _read_part(self, served: _Served, most: int, news: list[Any]) -> int:
        """Read on in a prompt, up to the next end of a segment; returns how many tokens."""
        reading, size = served.reading, 0
        end = next(end for end in served.ends if end > reading.num_read)
        with self._alone(*(other for other in self._reading if other.reading is reading)):
            size = reading.read(min(most, end - reading.num_read))
            news.append(served.progress(end_of_segment=reading.num_read == end))
        return size

    def _let_in(self, served: _Served) -> Any:
        reading = served.reading
        held = reading.caches.caches
        text = replace(served.text, prompt_cache=held, num_read=reading.num_read)
        served.reading = reading.without_caches()  # the row has a copy
        self._reading.remove(served)
        self._rows[self._batch.insert(text)] = served
        return served.progress(end_of_segment=True, is_let_in=True)

    def extract_cache(self, uids: Sequence[int]) -> dict[int, tuple[list[Any], list[int]]]:
        """Copies of the caches of prompts that are being read, and their tokens."""
        readings = {served.uid: served.reading for served in self._reading if served.uid in uids}
        return {
            uid: (copy.deepcopy(one.caches.caches), list(one.prompt[: one.num_read]))
            for uid, one in readings.items()
        }

    def remove(self, uids: Sequence[int]) -> None:
        """Take requests out, wherever they are."""
        self._reading = [served for served in self._reading if served.uid not in uids]
        for row, served in list(self._rows.items()):
            if served.uid in uids:
                self._batch.remove(row)
                del self._rows[row]

    def _fail(self, row: int, error: Exception) -> None:
        if row in self._rows:
            self._end(self._rows.pop(row), error)

    def _end(self, served: _Served, error: Exception) -> None:
        """Tell a client why, and mlx-lm with the next news."""
        own = [getattr(processor, "error", None) for processor in served.text.logits_processors]
        served.requested.channel.put(next(filter(None, own), error))
        served.requested.channel.stop()
        self._failed.append(served)

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of all caches."""
        readings = {id(served.reading): served.reading for served in self._reading}
        read = sum(cache.nbytes for reading in readings.values() for cache in reading.caches.caches)
        return int(read + self._batch.num_cache_bytes)

    def close(self) -> None:
        """End all requests, and tell their clients."""
        for served in (*self._rows.values(), *self._reading):
            self._end(served, ServerEndingError())
        self._rows, self._reading = {}, []
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
