"""Two ways to write texts: one text by the loop, or several together as the rows of a batch.

The loop writes a text that is alone, because a batch of one text takes up to three times as much
host time, and has neither trees nor the target's keys and values. When another text comes, both go
on as rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generation_stream

from specdec_mlx.batch.passes import reads_caches
from specdec_mlx.batch.rounds import BatchGeneration
from specdec_mlx.batch.schedule import BatchToken, OwnDrafting, Request, Schedule
from specdec_mlx.contracts import Drafter, all_drafters
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.loop import Generation, Token, assemble
from specdec_mlx.models.anatomy import group_of
from specdec_mlx.options import Options
from specdec_mlx.sequence import split_cache
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.loading import LoadedModel
from specdec_mlx.server.requests import ServerEndingError
from specdec_mlx.server.served_requests import ServedText


def shared_options(loaded: LoadedModel, settings: ServerSettings) -> Options:
    """The options that all texts of a model have in common.

    On several ranks texts are on the stream on which the ranks talk to each other.
    """
    are_several = mx.distributed.init().size() > 1
    names = "prefill_step_size", "kv_bits", "kv_group_size", "quantized_kv_start"
    by_flags: dict[str, Any] = {name: getattr(settings, name) for name in names}
    return Options(
        **by_flags,
        tokenizer=loaded.tokenizer,
        kernels=settings.flags.kernels,
        stream=mx.default_stream(mx.default_device()) if are_several else generation_stream,
    )


def options_of(text: ServedText, store: Callable[[ServedText], None]) -> dict[str, Any]:
    """The options of one text, by the names that the loop and a row of a batch have for them.

    Args:
        store: stores the caches of a prompt that is read in part.
    """
    return {
        "max_tokens": text.max_tokens,
        "sampler": text.sampling,
        "seed": text.request.seed,
        "logits_processors": text.processors,
        "prefill_stops": text.prompt.prefill_stops,
        "prompt_progress_callback": partial(text.was_read, store),
    }


class SingleWriter:
    def __init__(self, text: ServedText, settings: ServerSettings) -> None:
        self.texts, self.settings = [text], settings
        self.generation: Generation | None = None
        self._tokens = self._write(text)

    @property
    def has_place(self) -> bool:
        """True if the texts of the model can be rows."""
        return self.texts[0].loaded.has_rows

    def join(self, text: ServedText) -> BatchWriter:
        """Write both as rows of a batch; this text goes on from its caches."""
        (before,) = self.texts
        batch = BatchWriter(text.loaded, self.settings)
        try:
            # Stores the caches, which `batch.join` fetches again.
            self._leave(before)
        except Exception as error:
            before.fail(error)
        else:
            batch.join(before)
        return batch.join(text)

    def _write(self, text: ServedText) -> Generator[Token | None, None, None]:
        """The tokens of the text; None where a part of its prompt was read."""
        model = text.loaded.model
        caches, num_read = text.fetch_caches()
        shared = shared_options(text.loaded, self.settings)
        target_caches = split_cache(model, caches, shared)[0]
        options = replace(
            shared,
            **options_of(text, self._store),
            rule=text.rule,
            num_draft_tokens=text.num_draft_tokens,
            prompt_cache=target_caches,
            input_embeddings=text.embeddings(target_caches),
        )
        generation = self.generation = assemble(
            model,
            text.prompt.tokens,
            text.drafter,
            options,
            target_caches,
            group=group_of(model),
            num_read=num_read,
            of_batch={"num_unseen": num_read},
        )
        if not generation.drafting.is_shared:  # ranks must all read alike
            try:
                generation.begin()
                while generation.reader.read():
                    yield None
            except BaseException:
                generation.drafting.close(0)
                raise
        yield from generation.generate()

    def step(self) -> None:
        (text,) = self.texts
        try:
            # on other ranks than the first it may end before its end
            token = next(self._tokens, ServerEndingError())
            if isinstance(token, Exception):
                raise token
            if token is None or not text.take(token):
                text.ticket.check()
                return
            text.end()
            self.texts = []
            self._leave(text)
        except Exception as error:
            self.close(error)

    def close(self, error: Exception) -> None:
        """End the text. Its caches are stored unless it failed."""
        texts, self.texts = self.texts, []
        for text in texts:
            text.fail(error)
            self._leave(text, stores=isinstance(error, ConnectionError | ServerEndingError))

    def _leave(self, text: ServedText, *, stores: bool = True) -> None:
        """Stop where the text is, and store its caches."""
        try:
            self._tokens.close()
        except CacheRollbackError as error:
            logging.warning(f"The caches of a text are not kept: {error}")
            return
        if (generation := self.generation) is None or not stores:
            return
        target, is_read = generation.target.rollback, generation.is_prefilled
        if target.position and (is_read or self.settings.kv_bits is None):
            text.store_caches(target.position, target.caches, has_ended=is_read)

    def _store(self, text: ServedText) -> None:
        """Store a copy of what the caches hold of the prompt."""
        assert self.generation is not None
        target = self.generation.target.rollback
        text.store_caches(target.position, copy.deepcopy(target.caches))


class BatchWriter:
    def __init__(self, loaded: LoadedModel, settings: ServerSettings) -> None:
        self.settings = settings
        self.texts = dict[int, ServedText]()
        self.batch = BatchGeneration(
            loaded.model,
            options=shared_options(loaded, settings),
            schedule=Schedule(max(settings.decode_concurrency, settings.prompt_concurrency)),
            stop_tokens=frozenset(loaded.tokenizer.eos_token_ids),
            returns_caches=True,
            completes_caches=False,
            on_error=self._fail,
        )
        self._steps: Generator[BatchToken | None, None, None] | None = None

    @property
    def has_place(self) -> bool:
        """True if the batch has a row for one more text."""
        return len(self.texts) < self.batch.schedule.max_texts

    def join(self, text: ServedText) -> BatchWriter:
        """Write a text, which begins or goes on, as one more row."""
        length = None if text.num_draft_tokens == "auto" else text.num_draft_tokens
        try:
            caches, num_read = text.fetch_caches()
            row = Request(
                text.tokens,
                **options_of(text, self._store),
                prompt_cache=caches,
                num_read=num_read,
                num_said=len(text.generated),
                drafting=OwnDrafting(without_readers(text.drafter), text.rule, length),
                is_end=text.take if text.may_end_early else None,
                stats=text.stats,
            )
        except Exception as error:
            text.fail(error)
            return self
        self.texts[self.batch.insert(row)] = text
        if (most := self.settings.prompt_cache_bytes) is not None:  # of all caches together
            text.prefixes.trim_to(max(0, most - self.batch.num_cache_bytes))
        return self

    def step(self) -> None:
        """Read a part of a prompt, or write a token."""
        # A copy, because `_fail` removes texts.
        for uid, text in list(self.texts.items()):
            try:
                text.ticket.check()
            except ConnectionError as error:
                # A client that hung up often sends the same conversation again.
                self._store(text)
                self._fail(uid, error)
        self._steps = self._steps or self.batch.steps()
        try:
            row = next(self._steps)
        except StopIteration:
            self._steps = None
        except Exception as error:
            self._steps = None
            waiting = {uid for uid, _ in self.batch.schedule.waiting}  # they are begun anew
            for uid in self.texts.keys() - waiting:
                self._fail(uid, error)
        else:
            # The batch may yield a token of a text that has just left.
            if row is not None and row.uid in self.texts:
                self._take(row)

    def _take(self, row: BatchToken) -> None:
        text = self.texts[row.uid]
        try:
            if not text.may_end_early:  # else the batch has called `take`
                text.take(row.token)
            if row.finish_reason is not None:
                text.is_batched = True
                text.end()
                if row.prompt_cache is not None:
                    text.store_caches(row.num_cached, row.prompt_cache, has_ended=True)
                # Only now: `_fail` finds the text of an error above.
                del self.texts[row.uid]
        except Exception as error:
            self._fail(row.uid, error)

    def close(self, error: Exception) -> None:
        for uid in list(self.texts):
            self._fail(uid, error)
        if self._steps is not None:
            self._steps.close()
        self.batch.on_error = None  # or caches live on in a circle

    def _fail(self, uid: int, error: Exception) -> None:
        self.batch.schedule.remove(uid)
        if (text := self.texts.pop(uid, None)) is not None:
            text.fail(error)

    def _store(self, text: ServedText) -> None:
        """Store copies of what the caches hold of a prompt so far, or of a text."""
        schedule, num_known = self.batch.schedule, len(text.keys) - 1
        for reading in schedule.reading:
            if self.texts.get(reading.uid) is text and (num_read := reading.reader.num_read):
                text.store_caches(num_read, copy.deepcopy(reading.reader.caches.caches))
        for row, writing in enumerate(schedule.writing):
            if self.texts.get(writing.uid) is text:
                with suppress(CacheRollbackError), mx.stream(self.batch.options.stream):
                    alone = self.batch.passes.extract(row)
                    text.store_caches(alone.rewind_to(num_known), alone.caches)


Writer = SingleWriter | BatchWriter
"""Texts that are written. Nobody but `SingleWriter.join` tells the two ways apart."""


def without_readers(drafter: Drafter | None) -> Drafter | None:
    """The drafter without parts that read the target's caches, which a batch does not give."""
    if isinstance(drafter, FirstOf):
        parts = [part for part in drafter.drafters if without_readers(part) is not None]
        return type(drafter)(*parts) if parts else None
    return None if any(map(reads_caches, all_drafters(drafter))) else drafter
