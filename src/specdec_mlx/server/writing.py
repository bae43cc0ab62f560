"""Ways to write texts: one text by the loop, or several together as the rows of a batch.

A text that is alone is written by the loop. A batch of one text takes three times the loop's host
time, and it has neither trees nor the target's keys and values. When another text comes, both go on
as rows.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Generator
from contextlib import suppress
from dataclasses import replace
from functools import partial

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
from specdec_mlx.server.models import Loaded
from specdec_mlx.server.requests import ServerEndingError
from specdec_mlx.server.tickets import AskedText


def options_for(loaded: Loaded, settings: ServerSettings) -> Options:
    """The options that all texts have in common.

    On several ranks texts are on the stream on which these talk to each other.
    """
    are_several = mx.distributed.init().size() > 1
    return Options(
        prefill_step_size=settings.prefill_step_size,
        kv_bits=settings.kv_bits,
        kv_group_size=settings.kv_group_size,
        quantized_kv_start=settings.quantized_kv_start,
        tokenizer=loaded.tokenizer,
        stream=mx.default_stream(mx.default_device()) if are_several else generation_stream,
    )


class WritingAlone:
    """One text, written by the loop."""

    def __init__(self, text: AskedText, settings: ServerSettings) -> None:
        self.text, self.texts = text, [text]
        self.loaded, self.settings = text.loaded, settings
        self.generation: Generation | None = None
        self._tokens = self._written()

    @property
    def has_place(self) -> bool:
        """True if another text may join: the texts of the model can be rows."""
        return self.loaded.has_rows

    def with_another(self, text: AskedText) -> WritingTogether:
        """Both as rows of a batch; this text goes on from its caches."""
        batch = WritingTogether(self.loaded, self.settings)
        try:
            self._leave()
            batch.with_another(self.text)
        except Exception as error:
            self.text.fail(error)
        return batch.with_another(text)

    def _written(self) -> Generator[Token | None, None, None]:
        """The tokens of the text; None where a part of its prompt was read."""
        text, model = self.text, self.loaded.model
        caches, num_read = text.begin()
        shared = options_for(self.loaded, self.settings)
        own = split_cache(model, caches, shared)[0]
        options = replace(
            shared,
            max_tokens=text.max_tokens,
            sampler=text.sampling,
            seed=text.request.seed,
            rule=text.rule,
            num_draft_tokens=text.num_draft_tokens,
            logits_processors=text.processors,
            prefill_stops=text.prompt.ends,
            prompt_cache=own,
            input_embeddings=text.embeddings(own),
            prompt_progress_callback=partial(text.was_read, self.keep),
        )
        generation = self.generation = assemble(
            model,
            text.prompt.tokens,
            text.drafter,
            options,
            own,
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
        """Read a part of the prompt, or write a token."""
        try:
            # on other ranks than the first it may end before its end
            token = next(self._tokens, ServerEndingError())
            if isinstance(token, Exception):
                raise token
            if token is not None and self.text.give(token):
                self.texts = []
                self._leave()
            else:
                self.text.ticket.check()
        except Exception as error:
            self.close(error)

    def keep(self, text: AskedText) -> None:
        """Keep a copy of what the caches hold of the prompt."""
        assert self.generation is not None
        held = self.generation.target.rollback
        text.keep(held.position, copy.deepcopy(held.caches))

    def close(self, error: Exception) -> None:
        """End the text. Its caches are kept unless it failed."""
        texts, self.texts = self.texts, []
        for text in texts:
            text.fail(error)
        self._leave(keeps=isinstance(error, ConnectionError | ServerEndingError) and bool(texts))

    def _leave(self, *, keeps: bool = True) -> None:
        """Stop where the text is, and keep its caches."""
        try:
            self._tokens.close()
        except CacheRollbackError as error:
            logging.warning(f"The caches of a text are not kept: {error}")
            return
        if (generation := self.generation) is None or not keeps:
            return
        held, is_read = generation.target.rollback, generation.is_prefilled
        if held.position and (is_read or self.settings.kv_bits is None):
            self.text.keep(held.position, held.caches, has_ended=is_read)


class WritingTogether:
    """Several texts, written as the rows of one batch. texts: by their numbers there."""

    def __init__(self, loaded: Loaded, settings: ServerSettings) -> None:
        self.settings = settings
        self.texts = dict[int, AskedText]()
        self.batch = BatchGeneration(
            loaded.model,
            options=options_for(loaded, settings),
            schedule=Schedule(max(settings.decode_concurrency, settings.prompt_concurrency)),
            stop_tokens=frozenset(loaded.tokenizer.eos_token_ids),
            returns_caches=True,
            completes_caches=False,
            on_error=self._give_up,
        )
        self._steps: Generator[BatchToken | None, None, None] | None = None

    @property
    def has_place(self) -> bool:
        """True if one more text may join."""
        return len(self.texts) < self.batch.schedule.max_texts

    def with_another(self, text: AskedText) -> WritingTogether:
        """These rows and another one, which begins or goes on; an error ends that text alone."""
        try:
            caches, num_read = text.begin()
            length = None if text.num_draft_tokens == "auto" else text.num_draft_tokens
            drafting = OwnDrafting(without_readers(text.drafter), text.rule, length)
            uid = self.batch.insert(
                Request(
                    text.tokens,
                    text.max_tokens,
                    text.sampling,
                    text.request.seed,
                    text.processors,
                    prompt_cache=caches,
                    num_read=num_read,
                    num_said=len(text.written),
                    drafting=drafting,
                    is_end=text.take if text.may_end_early else None,
                    stats=text.stats,
                    stops=text.prompt.ends,
                    on_progress=partial(text.was_read, self.keep),
                )
            )
        except Exception as error:
            text.fail(error)
            return self
        self.texts[uid] = text
        if (most := self.settings.prompt_cache_bytes) is not None:  # of all caches together
            text.prefixes.trim_to(max(0, most - self.batch.num_cache_bytes))
        return self

    def step(self) -> None:
        """Read a part of a prompt, or write a token."""
        for uid, text in list(self.texts.items()):
            try:
                text.ticket.check()
            except ConnectionError as error:
                self.keep(text)
                self._give_up(uid, error)
        self._steps = self._steps or self.batch.steps()
        try:
            row = next(self._steps)
        except StopIteration:
            self._steps = None
        except Exception as error:
            self._steps = None
            waiting = {uid for uid, _ in self.batch.schedule.waiting}  # they are begun anew
            for uid in self.texts.keys() - waiting:
                self._give_up(uid, error)
        else:
            if row is not None and row.uid in self.texts:
                self._give(row)

    def _give(self, row: BatchToken) -> None:
        text = self.texts[row.uid]
        text.is_batched = True
        try:
            if text.give(row.token):
                if row.prompt_cache is not None:
                    text.keep(row.num_cached, row.prompt_cache, has_ended=True)
                del self.texts[row.uid]
                self.batch.schedule.remove(row.uid)
        except Exception as error:
            self._give_up(row.uid, error)

    def keep(self, text: AskedText) -> None:
        """Keep what was read of a prompt so far, or what the caches hold of its text."""
        schedule, num_known = self.batch.schedule, len(text.keys) - 1
        for reading in schedule.reading:
            if self.texts.get(reading.uid) is text and (num_read := reading.reader.num_read):
                text.keep(num_read, copy.deepcopy(reading.reader.caches.caches))
        for row, writing in enumerate(schedule.writing):
            if self.texts.get(writing.uid) is text:
                with suppress(CacheRollbackError), mx.stream(self.batch.options.stream):
                    alone = self.batch.passes.extract(row)
                    text.keep(alone.rewind_to(num_known), alone.caches)

    def _give_up(self, uid: int, error: Exception) -> None:
        self.batch.schedule.remove(uid)
        if (text := self.texts.pop(uid, None)) is not None:
            text.fail(error)

    def close(self, error: Exception) -> None:
        """End all texts, for a reason."""
        for uid in list(self.texts):
            self._give_up(uid, error)
        if self._steps is not None:
            self._steps.close()
        self.batch.on_error = None  # or caches live on in a circle


Writing = WritingAlone | WritingTogether
"""Texts that are written, by a way that was chosen once."""


def without_readers(drafter: Drafter | None) -> Drafter | None:
    """The drafter without parts that read the target's caches, which a batch does not give."""
    if isinstance(drafter, FirstOf):
        parts = [part for part in drafter.drafters if without_readers(part) is not None]
        return type(drafter)(*parts) if parts else None
    return None if any(map(reads_caches, all_drafters(drafter))) else drafter
