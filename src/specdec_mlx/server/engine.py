"""The one thread that owns the models: requests come by a queue, events go to who asked.

A request that is alone is written by the loop, with all that drafts. When another one comes it goes
on as a row of one batch, if the model's texts can be rows; else one is served after the other.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from threading import Event as Flag
from threading import Thread
from weakref import WeakSet

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.choosing.choice import waits_for_model
from specdec_mlx.drafters.first_of import FirstOf
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.loop import speculate
from specdec_mlx.sequence import split_cache
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.loading import LoadedModel
from specdec_mlx.server.models import Models
from specdec_mlx.server.prefixes import Prefixes
from specdec_mlx.server.prompt_echo import echo_prompt
from specdec_mlx.server.prompts import read_prompt
from specdec_mlx.server.ranks import PATIENCE, ServerRanks
from specdec_mlx.server.requests import Event, ServerEndingError, TextRequest
from specdec_mlx.server.served_requests import GONE, ServedText, Ticket, prepare
from specdec_mlx.server.writers import SingleWriter, Writer, shared_options

WARM_TOKENS = 8  # of each text that is written before the port opens
# Seconds for the pass that is under way when the process ends, or a model that is being loaded, and
# for clients to take the last of their replies
GRACE = 5


class Order(Enum):
    """What the engine does next, where it is not to serve a request."""

    WAIT, UNLOAD, END = range(3)


class Engine:
    def __init__(self, models: Models, settings: ServerSettings) -> None:
        self.models, self.settings = models, settings
        self.ranks = ServerRanks()
        num_models = 1 if settings.flags.choice.model.name is None else 2
        self.prefixes = Prefixes(
            num_models * settings.prompt_cache_size, settings.prompt_cache_bytes
        )
        # of drafters, which the first rank alone has
        self.draft_caches = self.prefixes
        if self.ranks.are_several:
            self.draft_caches = Prefixes(settings.prompt_cache_size)
        self.running = 0
        self._waiting: deque[Ticket] = deque()
        # Requests that a client waits for. They fail when the server ends.
        self._tickets = WeakSet[Ticket]()
        self._unloading: deque[Future[None]] = deque()
        self._served_at = time.monotonic()  # the last request
        self._has_news, self._has_ended, self._is_ending = Flag(), Flag(), False
        self._is_ready: Future[None] = Future()
        self._thread = Thread(target=self._run, name="engine", daemon=True)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._is_ending

    def start(self) -> None:
        """Load the model, if one was given, and write a text; raises what loading raises."""
        self._thread.start()
        self._is_ready.result()

    def submit(self, request: TextRequest, put: Callable[[Event], None]) -> Ticket:
        """Queue a request; `put` is called on the engine's thread, the last time with an end.

        Raises RequestError and ModelFolderError for the name of no model.
        """
        ticket = Ticket(request, put, self.models.names_of(request))
        self._tickets.add(ticket)
        loaded = self.models.loaded
        if loaded is not None and loaded.fits(ticket.names, has_pictures=bool(request.pictures)):
            # Tokenizing and compiling take seconds. In a thread they do not stop the texts that are
            # written.
            Thread(target=self._prepare, args=(ticket, loaded), daemon=True).start()
        else:
            self._queue(ticket)
        return ticket

    def _prepare(self, ticket: Ticket, loaded: LoadedModel) -> None:
        """Prepare a request beside the texts that are written, and queue it."""
        try:
            ticket.preparation = prepare(ticket.request, loaded, self.settings)
        except Exception as error:
            # Only an error of the request itself is sent to the client.
            if self.models.loaded is loaded:
                ticket.fail(error)
                return
            # the model was freed meanwhile: the request is prepared again in its turn
        self._queue(ticket)

    def _queue(self, ticket: Ticket) -> None:
        self._waiting.append(ticket)
        self._has_news.set()
        # Looked up after the request is in the queue: an engine that ends meanwhile has not seen
        # it.
        if not self.is_alive:
            ticket.fail(ServerEndingError())

    def num_tokens(self, request: TextRequest) -> int:
        """Tokens of a request's prompt; raises RequestError. Any thread may ask."""
        loaded, tokenizer = self.models.loaded_for(request), self.models.tokenizer_for(request)
        sight = None if loaded is None else loaded.sight
        return len(read_prompt(request, tokenizer, self.settings, sight=sight).tokens)

    def unload(self) -> Future[None]:
        """Free the models once the texts under way have ended; done when they are.

        The next request loads its model again. Raises ServerEndingError.
        """
        if not self.is_alive:
            raise ServerEndingError
        done = Future[None]()
        self._unloading.append(done)
        self._has_news.set()
        return done

    def stop(self) -> None:
        """End all texts, whatever is done at the moment, and wait until nothing is served.

        On other ranks than the first: wait for the first one's.
        """
        self._begin_to_end()
        if self._thread.is_alive():
            self._has_ended.wait()

    def end(self) -> None:
        """End all texts because the process ends. What was learned is kept.

        Clients are told at once. A pass that takes longer than `GRACE` is not waited for.
        """
        self._begin_to_end()
        self._fail_all()
        if self.ranks.are_several:  # which wait for each other, and end as Python ends
            self._has_ended.wait()
        elif not self._has_ended.wait(GRACE):
            self.keep()

    def keep(self) -> None:
        """Write what was learned to its files."""
        try:
            self.models.keep()
        except Exception as error:
            logging.error("What was learned is not kept.", exc_info=error)

    def _begin_to_end(self) -> None:
        self._is_ending = self.ranks.is_first
        self._has_news.set()

    def _fail_all(self) -> None:
        # A copy, because other threads add requests.
        for ticket in list(self._tickets):
            ticket.fail(ServerEndingError())

    def _run(self) -> None:
        try:
            try:
                maybe_set_recommended_wired_limit()
                if self.settings.model is not None:
                    self._warm_up(self.models.load_default())
                self._is_ready.set_result(None)
            except BaseException as error:
                self._is_ready.set_exception(error)
                return
            while (ticket := self._next()) is not None:
                self._serve(ticket)
        finally:
            # Set first, so that `_queue` fails requests that come from now on.
            self._is_ending = True
            self._fail_all()
            while self._unloading:
                self._unloading.popleft().set_exception(ServerEndingError())
            self.keep()
            self.models.reset()
            self._forget()
            mx.clear_streams()
            self._has_ended.set()
            # MLX frees the functions that it compiled for a thread once that has ended, and needs
            # Python for it: a process that ends meanwhile aborts. So the thread stays.
            Flag().wait()

    def _forget(self) -> None:
        self.prefixes.trim_to(0)
        self.draft_caches.trim_to(0)

    def _next(self) -> Ticket | None:
        """The request that has waited the longest, on all ranks; None where the server ends."""
        while True:
            ticket, order = self._order() if self.ranks.is_first else (None, Order.WAIT)
            request = self.ranks.from_first(ticket.request if ticket else order)
            if isinstance(request, TextRequest):
                return ticket or Ticket(request, lambda event: None)
            if request is Order.END:
                return None
            if request is Order.UNLOAD:
                logging.info("The model's memory is given back. The next request loads it again.")
                self._forget()
                self.models.unload()
                while self._unloading:
                    self._unloading.popleft().set_result(None)

    def _order(self) -> tuple[Ticket | None, Order]:
        """Wait for a request or an order, on the first rank."""
        # Cleared before the queues are read, so that later news end the wait.
        self._has_news.clear()
        if not (self._waiting or self._unloading or self._is_ending):
            self._has_news.wait(PATIENCE if self.ranks.are_several else self._idle_for())
        if self._is_ending:
            return None, Order.END
        if self._unloading or self._idle_for() == 0:
            return None, Order.UNLOAD
        ticket = self._first_waiting()
        if ticket is not None:
            self._waiting.popleft()
        return ticket, Order.WAIT

    def _idle_for(self) -> float | None:
        """Seconds until the models are freed because no request came; None: they stay."""
        keep_alive = self.settings.keep_alive
        if keep_alive is None or self.models.loaded is None or self._waiting:
            return None
        return max(0.0, self._served_at + keep_alive - time.monotonic())

    def _first_waiting(self) -> Ticket | None:
        """The first request of a client that is still there; it waits on."""
        while self._waiting and self._waiting[0].is_cancelled:
            self._waiting.popleft().fail(ConnectionError(GONE))
        return self._waiting[0] if self._waiting else None

    def _serve(self, ticket: Ticket) -> None:
        """Serve a request, and those who join."""
        if (text := self._prepared(ticket)) is None:
            return
        writer: Writer = SingleWriter(text, self.settings)
        try:
            while writer.texts:
                while self._waiting and writer.has_place and self._next_is_row():
                    if (joining := self._prepared(self._waiting.popleft())) is not None:
                        writer = writer.join(joining)
                self.running = len(writer.texts)
                writer.step()
                if self._is_ending:
                    break
            writer.close(ServerEndingError())
        except Exception as error:
            writer.close(error)
        self.running = 0
        self._served_at = time.monotonic()

    def _prepared(self, ticket: Ticket) -> ServedText | None:
        """The text of a request, before its first token; None if there is nothing to write."""
        try:
            loaded = self.models.load(ticket.request)
            # The ticket lives as long as its client. It must not keep a freed model.
            preparation, ticket.preparation = ticket.preparation, None
            if preparation is None or preparation.loaded is not loaded:
                preparation = prepare(ticket.request, loaded, self.settings)
            text = ServedText(ticket, preparation, self.models, self.prefixes, self.draft_caches)
            if ticket.request.echo:
                ticket.send([echo_prompt(text, self.settings.prefill_step_size)])
            if not text.has_ended:
                return text
            text.end()
        except Exception as error:
            ticket.fail(error)
        return None

    def _next_is_row(self) -> bool:
        """True if the next request is for the loaded model, also by what its name means now.

        To load another model, or this one with what sees pictures, would free the model whose texts
        are written.
        """
        ticket, loaded = self._first_waiting(), self.models.loaded
        if ticket is None or loaded is None or ticket.names != loaded.names:
            return False
        if self._unloading or ticket.request.pictures:
            return False
        with suppress(ValueError):  # its client is told when its turn comes
            return self.models.loaded_for(ticket.request) is loaded
        return False

    def _warm_up(self, loaded: LoadedModel) -> None:
        """Measure what is measured once for each model, and compile what is compiled."""
        options = shared_options(loaded, self.settings)
        # raises for what cannot be quantized so
        split_cache(loaded.model, None, options)
        tokens = list(loaded.tokenizer.encode("a b a b a b a b")) or [0]
        made = loaded.drafters.items()
        heavy = [part for spec, part in made if part is not None and waits_for_model(spec)]
        # compiling is not to be taken for its pace
        tuning = Tuning.for_model(loaded.model)
        short = replace(options, max_tokens=WARM_TOKENS, num_draft_tokens=4, tuning=tuning)
        try:
            for drafter in (None, FirstOf(PromptLookupDrafter(), *heavy)):
                for _ in speculate(loaded.model, tokens, drafter, short):
                    pass
        except Exception as error:
            logging.warning(f"No text could be written at the start: {error}")
