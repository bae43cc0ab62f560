"""The server's engine in a test: requests in, what a client would be told out."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
    """One who waits for events; `ticket` is there once the request was submitted."""

    ticket: Any = None
    events: list[Event] = field(default_factory=list)
    queue: queue.Queue[Event] = field(default_factory=queue.Queue)

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


def submit(engine: Engine, **fields: Any) -> Client:
    """Ask for a text: a short one, of the chat `ASKED` unless there is a prompt."""
    if "prompt" not in fields and "messages" not in fields:
        fields["messages"] = ASKED
    client = Client()
    client.ticket = engine.submit(TextRequest(**{"max_tokens": 24} | fields), client.queue.put)
    return client


def ask(engine: Engine, **fields: Any) -> Transcript:
    """The text that a request gets."""
    return submit(engine, **fields).wait()


def settled(engine: Engine) -> Engine:
    """The engine, once nothing is served: what is kept of a text is kept after its client's end."""
    deadline = time.monotonic() + SECONDS
    while engine.running or engine.waiting:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return engine


def with_flags(**flags: Any) -> Flags:
    """Flags of speculation that keep no tuning."""
    return replace(Flags(keeps_tuning=False), **flags)
