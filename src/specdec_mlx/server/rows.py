"""Several texts of one model, written together as rows of one batch."""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterable
from contextlib import suppress
from functools import partial

import mlx.core as mx

from specdec_mlx.batch.generation import BatchGeneration
from specdec_mlx.batch.passes import reads_caches
from specdec_mlx.batch.schedule import BatchToken, OwnDrafting, Request, Schedule
from specdec_mlx.contracts import Drafter, all_drafters
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.errors import CacheRollbackError
from specdec_mlx.options import Options
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.models import Loaded
from specdec_mlx.server.prefixes import Prefixes
from specdec_mlx.server.under_way import AskedText


class BatchRows:
    """The texts of one batch, by the uids of its schedule."""

    def __init__(self, loaded: Loaded, settings: ServerSettings, prefixes: Prefixes) -> None:
        self.loaded, self.settings, self.prefixes = loaded, settings, prefixes
        self._insert_cache = partial(prefixes.insert_cache, loaded.place)
        self.texts: dict[int, AskedText] = {}
        self.batch = BatchGeneration(
            loaded.model,
            options=Options(
                prefill_step_size=settings.prefill_step_size, tokenizer=loaded.tokenizer
            ),
            schedule=Schedule(max(settings.decode_concurrency, settings.prompt_concurrency)),
            stop_tokens=frozenset(loaded.tokenizer.eos_token_ids),
            returns_caches=True,
            completes_caches=False,
            on_error=self._fail,
        )
        self._steps: Generator[BatchToken | None, None, None] | None = None

    @property
    def has_place(self) -> bool:
        """True if one more text may join."""
        return len(self.texts) < self.batch.schedule.max_texts

    def add(self, text: AskedText) -> None:
        """Let a text join, or go on, with what is known of it; an error ends it alone."""
        try:
            self._insert(text)
        except Exception as error:
            text.fail(error)

    def _insert(self, text: AskedText) -> None:
        caches, num_read = text.begin(self.prefixes)
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
                on_progress=partial(self._was_read, text),
            )
        )
        self.texts[uid] = text
        self._trim()

    def _trim(self) -> None:
        """Keep all caches together within the bytes that are allowed."""
        if (most := self.settings.prompt_cache_bytes) is not None:
            self.prefixes.trim_to(max(0, most - self.batch.num_cache_bytes))

    def step(self) -> None:
        """Read a part of a prompt, or write a token; an error ends the texts that it is of."""
        for uid, text in list(self.texts.items()):
            if text.ticket.is_cancelled:
                self._keep(text)
                self._give_up([uid], ConnectionError("The client has gone."))
        self._steps = self._steps or self.batch.steps()
        try:
            token = next(self._steps)
        except StopIteration:
            self._steps = None
            return
        except Exception as error:
            self._steps = None
            # which are begun anew
            waiting = {uid for uid, _ in self.batch.schedule.waiting}
            self._give_up([uid for uid in self.texts if uid not in waiting], error)
            return
        if token is not None and token.uid in self.texts:
            try:
                self._take(self.texts[token.uid], token)
            except Exception as error:
                self._give_up([token.uid], error)

    def _take(self, text: AskedText, row: BatchToken) -> None:
        text.is_batched = True
        if not text.may_end_early:
            text.take(row.token)
        if row.finish_reason is None and not text.state.ended:
            text.hand_over()
            return
        text.end()
        if row.prompt_cache is not None:
            self._insert_cache(text.tokens[: row.num_cached], row.prompt_cache)
        # not before, so that a fault in its end is told to its client
        del self.texts[row.uid]
        self.batch.schedule.remove(row.uid)

    def _was_read(self, text: AskedText, done: int, total: int) -> None:
        """Note how far a prompt is read, and keep states at the ends of its parts."""
        text.show_progress(done)
        if self.loaded.is_stateful and (done in text.prompt.ends or done == total - 1):
            self._keep(text)

    def _keep(self, text: AskedText) -> None:
        """Keep what was read of a prompt so far, or what the caches hold of its text."""
        schedule, tokens = self.batch.schedule, text.tokens[:-1]
        for reading in schedule.reading:
            reader = reading.reader
            if self.texts.get(reading.uid) is text and reader.num_read:
                held = list(reader.prompt[: reader.num_read])
                kept = copy.deepcopy(reader.caches.caches)
                self._insert_cache(held, kept, has_ended=False)
        for row, writing in enumerate(schedule.writing):
            if self.texts.get(writing.uid) is text:
                with suppress(CacheRollbackError), mx.stream(self.batch.options.stream):
                    alone = self.batch.passes.extract(row)
                    held = tokens[: alone.rewind_to(len(tokens))]
                    self._insert_cache(held, alone.caches, has_ended=False)

    def _fail(self, uid: int, error: Exception) -> None:
        if (text := self.texts.pop(uid, None)) is not None:
            text.fail(error)

    def _give_up(self, uids: Iterable[int], error: Exception) -> None:
        for uid in list(uids):
            self.batch.schedule.remove(uid)
            self._fail(uid, error)

    def close(self, error: Exception) -> None:
        """End all texts, for a reason."""
        for text in self.texts.values():
            text.fail(error)
        self.texts = {}
        if self._steps is not None:
            self._steps.close()
        self.batch.on_error = None  # or caches live on in a circle


def without_readers(drafter: Drafter | None) -> Drafter | None:
    """The drafter without parts that read the target's caches, which a batch does not give."""
    if isinstance(drafter, FirstOf):
        parts = [part for part in drafter.drafters if without_readers(part) is not None]
        return type(drafter)(*parts) if parts else None
    return None if any(map(reads_caches, all_drafters(drafter))) else drafter
