"""`specdec-mlx server` in this process: no start of an interpreter, and its inside can be seen."""

from __future__ import annotations

import importlib
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from queue import Queue
from typing import Any

import openai
import pytest

from specdec_mlx.mlx_lm_plugin.server import run_server

PROMPT = "the cat in the hat and the other cat in the hat"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
MODEL = "default_model"


@contextmanager
def serving(*flags: str) -> Iterator[openai.OpenAI]:
    """`specdec-mlx server` with these flags, in a thread; a client of it."""
    module: Any = importlib.import_module("mlx_lm.server")
    ready: Queue[ThreadingHTTPServer] = Queue()

    def serve(host: str, port: int, generator: Any, handler_class: Any) -> None:
        def handler(*args: Any, **kwargs: Any) -> Any:
            return handler_class(generator, *args, system_fingerprint="here", **kwargs)

        httpd = ThreadingHTTPServer((host, 0), handler)
        ready.put(httpd)
        httpd.serve_forever()
        generator.stop_and_join()
        httpd.server_close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_run_http_server", serve)
        # more clients may connect at once than the 5 that wait by default; others are refused
        patch.setattr(ThreadingHTTPServer, "request_queue_size", 64)
        thread = threading.Thread(target=run_server, args=(flags,), daemon=True)
        thread.start()
        httpd = ready.get(timeout=120)
        url = f"http://127.0.0.1:{httpd.server_port}/v1"
        try:
            yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        finally:
            httpd.shutdown()
            thread.join(timeout=60)


def post(client: openai.OpenAI, path: str, body: str | dict[str, Any]) -> tuple[int, str]:
    """Status and text of the answer to a request as it stands, which the client would not send."""
    request = urllib.request.Request(
        f"{client.base_url}{path}",
        (body if isinstance(body, str) else json.dumps(body)).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def posted(client: openai.OpenAI, **body: Any) -> socket.socket:
    """A connection on which a completion was asked for."""
    text = json.dumps({"prompt": PROMPT, **body})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    connection = socket.create_connection((client.base_url.host, client.base_url.port or 80))
    connection.sendall((head + text).encode())
    return connection


def read_events(connection: socket.socket, count: int) -> str:
    """What a stream has sent when so many events have come."""
    received = b""
    while received.count(b"data: ") < count:
        part = connection.recv(4096)
        assert part
        received += part
    return received.decode()


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
