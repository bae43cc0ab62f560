"""The server's engine in a test: requests in, what a client would be told out."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serving import until
from specdec_mlx.mlx_lm_plugin.flags import Flags
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.models import Models
from specdec_mlx.server.requests import (
    Ended,
    Event,
    Failed,
    PromptProgress,
    TextRequest,
    Transcript,
)

SECONDS = 240  # after which a test that waits fails
PROMPT = "the cat in the hat and the other cat in the hat"
ASKED = [{"role": "user", "content": PROMPT}]


@dataclass(eq=False)
class Client:
    """One who waits for events; `ticket` is there once the request was submitted.

    Attributes:
        pause_at: the engine waits at the event of this number, until `resume` is set.
    """

    ticket: Any = None
    events: list[Event] = field(default_factory=list)
    queue: queue.Queue[Event] = field(default_factory=queue.Queue)
    pause_at: int = 0
    num_put: int = 0
    resume: threading.Event = field(default_factory=threading.Event)

    def put(self, event: Event) -> None:
        """Take an event on the engine's thread."""
        self.queue.put(event)
        self.num_put += 1
        if self.num_put == self.pause_at:
            assert self.resume.wait(SECONDS)

    def next(self) -> Event:
        """The next event."""
        event = self.queue.get(timeout=SECONDS)
        self.events.append(event)
        return event

    def until_text(self) -> None:
        """Wait for the first event that is not of the reading."""
        while isinstance(self.next(), PromptProgress):
            pass

    def wait(self) -> Transcript:
        """Wait for the end; the text. Raises the error of one that failed."""
        while not (self.events and isinstance(self.events[-1], Ended | Failed)):
            self.next()
        written = Transcript()
        for event in self.events:
            written.add(event)
        return written


@contextmanager
def running(folder: Path | str | None, **settings: Any) -> Iterator[Engine]:
    """An engine with a model, which is stopped at the end."""
    given = ServerSettings(model=None if folder is None else str(folder), **settings)
    engine = Engine(Models(given), given)
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def submit(engine: Engine, pause_at: int = 0, **fields: Any) -> Client:
    """Ask for a text: a short one, of the chat `ASKED` unless there is a prompt."""
    if "prompt" not in fields and "messages" not in fields:
        fields["messages"] = ASKED
    client = Client(pause_at=pause_at)
    client.ticket = engine.submit(TextRequest(**{"max_tokens": 24} | fields), client.put)
    return client


@contextmanager
def queued_together(engine: Engine, paused: Client | None = None) -> Iterator[None]:
    """The engine waits until all requests that are submitted meanwhile stand in its queue.

    Else a slow machine may end the first text before the last request comes.
    paused: a client whose text the engine waits in; by default a short text of its own.
    """
    paused = paused or submit(engine, pause_at=1, max_tokens=1)
    until(lambda: paused.num_put == paused.pause_at)
    before = set(engine._tickets)
    yield
    others = set(engine._tickets) - before
    until(lambda: others <= set(engine._waiting))
    paused.resume.set()


def ask(engine: Engine, **fields: Any) -> Transcript:
    """The text that a request gets."""
    return submit(engine, **fields).wait()


def settled(engine: Engine) -> Engine:
    """The engine, once nothing is served: what is kept of a text is kept after its client's end."""
    until(lambda: not (engine.running or engine.waiting))
    return engine


def with_flags(**flags: Any) -> Flags:
    """Flags of speculation that keep no tuning."""
    return replace(Flags(keeps_tuning=False), **flags)
