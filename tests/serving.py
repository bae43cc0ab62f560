"""`specdec-mlx server` in this process: no start of an interpreter, and its inside can be seen."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import mlx.nn as nn
import openai

from specdec_mlx.mlx_lm_plugin.flags import Flags
from specdec_mlx.server.command import Signals, serve
from specdec_mlx.server.flags import ServerSettings, parse_settings
from specdec_mlx.server.loading import LoadedModel
from specdec_mlx.server.models import Models
from specdec_mlx.server.requests import TextRequest

PROMPT = "the cat in the hat and the other cat in the hat"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
MODEL = "default_model"


@contextmanager
def serving(*flags: str) -> Iterator[openai.OpenAI]:
    """`specdec-mlx server` with these flags, in a thread; a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    signals, failure = Signals(), list[BaseException]()

    def run() -> None:
        try:
            serve(parse_settings(["--port", str(port), *flags]), signals)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{port}/v1"

    def answers() -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=5):
            return True
        return not thread.is_alive()

    until(answers)
    if failure:
        raise failure[0]
    try:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    finally:
        signals.end()
        thread.join(timeout=60)


def chat(client: openai.OpenAI, messages: list[Any] = MESSAGES, **more: Any) -> Any:
    """A short greedy chat."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "temperature": 0.0} | more
    return client.chat.completions.create(messages=messages, **options)


def complete(client: openai.OpenAI, prompt: Any = PROMPT, **more: Any) -> Any:
    """A short greedy completion."""
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "temperature": 0.0} | more
    return client.completions.create(prompt=prompt, **options)


def text_of(reply: Any) -> str:
    choice = reply.choices[0]
    return str(choice.message.content if hasattr(choice, "message") else choice.text)


def said(chunks: list[Any], index: int = 0) -> tuple[str, str]:
    """Text and finish reason of a streamed choice."""
    parts = [part for chunk in chunks for part in chunk.choices if part.index == index]
    texts = [part.delta.content if hasattr(part, "delta") else part.text for part in parts]
    return "".join(text or "" for text in texts), parts[-1].finish_reason


def until(holds: Callable[[], Any], seconds: float = 240) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def drafter_of(flags: Flags, target: nn.Module, **asked: Any) -> Any:
    """Who drafts for a request to a server with these flags, for a loaded target."""
    known: Any = "target", None, target, None, {}, ()
    drafters = Models(ServerSettings(flags=flags)).drafters
    return drafters.choose(TextRequest(**asked), LoadedModel(*known))[0]
