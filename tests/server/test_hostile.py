"""Bodies that are too large, too slow, too deep or without an end: each is answered, and let go."""

from __future__ import annotations

import gc
import json
import socket
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_lm
import pytest
from transformers import PreTrainedTokenizerBase

from engines import PROMPT, Client, ask, running, submit, with_flags
from live import listening
from selection import in_one_test
from serving import until
from specdec_mlx.server import app, prompts, receiving
from specdec_mlx.server.engine import Engine
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.protocols import body
from specdec_mlx.server.protocols.body import read_body
from specdec_mlx.server.protocols.replies import ParsedBody
from specdec_mlx.server.requests import Failed, RequestError, TextRequest
from specdec_mlx.server.served_requests import Ticket
from tiny_model_folder import make_tokenizer, write_model_folder

SECONDS = 240  # after which a test that waits fails
CHAT = "/v1/chat/completions"
PATHS = [CHAT, "/v1/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"]
NOWHERE = "/v1/nowhere"


class Nobody(Engine):
    """An engine that serves no request."""

    def __init__(self) -> None:
        self.models: Any = SimpleNamespace(can_see=lambda request: False)

    def submit(self, request: TextRequest, put: Any) -> Any:
        put(Failed(RequestError("Nobody is here.")))
        return Ticket(request, put)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server of an engine that no request gets to."""
    with listening(app.make_app(Nobody(), ServerSettings()), lifespan="off") as port:
        yield port


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, so that the bodies of these tests are small."""
    monkeypatch.setattr(receiving, "MOST_BYTES", 2**16)
    monkeypatch.setattr(receiving, "LINGER", 0.5)


def opened(port: int, path: str, *headers: str, beginning: bytes = b"") -> socket.socket:
    """A connection on which a body was announced, and its `beginning` was sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""])
    connection.sendall(head.encode() + beginning)
    return connection


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    received = b""
    try:
        while part := connection.recv(2**16):
            received += part
    except ConnectionResetError:  # it was closed before all was read that had been sent
        pass
    return received


@in_one_test("path", PATHS)
def test_a_body_that_says_it_is_too_large_is_refused_before_it_comes(path: str, port: int) -> None:
    with opened(port, path, "Content-Length: 64000000") as connection:
        assert b" 413 " in connection.recv(100)
        connection.shutdown(socket.SHUT_WR)
        assert b"connection: close" in everything(connection)


@in_one_test(("path", "status"), [*((path, b" 413 ") for path in PATHS), (NOWHERE, b" 404 ")])
def test_a_body_without_an_end_is_let_go(path: str, status: bytes, port: int) -> None:
    """Also on a path that nobody reads bodies of: sending ends because the server hangs up."""
    with opened(port, path, "Transfer-Encoding: chunked") as connection:
        chunk = b"10000\r\n" + b"a" * 2**16 + b"\r\n"
        for _ in range(2):
            connection.sendall(chunk)
        assert status in connection.recv(100)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                connection.sendall(chunk)


@in_one_test("path", PATHS)
def test_a_body_that_does_not_come_is_given_up(
    path: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In silence, and byte by byte."""
    monkeypatch.setattr(receiving, "PATIENCE", 0.1)
    for sent in (b"", b'{"a"'):
        with opened(port, path, "Content-Length: 99") as connection:
            connection.sendall(sent)
            assert b" 408 " in connection.recv(100)


def test_a_slow_body_is_read_to_its_end(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has come gives the rest more time."""
    monkeypatch.setattr(receiving, "PATIENCE", 0.05)
    monkeypatch.setattr(receiving, "SLOWEST", 1)
    with opened(port, CHAT, "Content-Length: 2000", beginning=b"[" * 1000) as connection:
        assert not threading.Event().wait(0.2)
        connection.sendall(b"[" * 1000)
        assert b" 400 " in connection.recv(100)


def test_a_reply_after_the_whole_body_leaves_the_connection_open(port: int) -> None:
    with opened(port, CHAT, "Content-Length: 1") as connection:
        for _ in range(2):
            connection.sendall(b"5")
            assert b" 400 " in (reply := connection.recv(2**16))
            assert b"connection: close" not in reply
            connection.sendall(
                f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n".encode()
            )


# What is in a body

DEEP = [
    b"[" * 10_000 + b"]" * 10_000,
    b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"messages":' + b"[" * body.DEEPEST + b"]" * body.DEEPEST + b"}",
    b"[" * 10_000_000,
]


@in_one_test("raw", DEEP)
def test_a_deep_body_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError, match=r"^The body of the request"):
        read_body(raw)


def test_a_body_may_have_levels() -> None:
    levels = body.DEEPEST - 1
    raw = b'{"a":' + b"[" * levels + b'"x"' + b"]" * levels + b"}"
    assert read_body(bytearray(raw)) == json.loads(raw)


WIDE = [b"[],", b'"",', b"1,", b'{"a":1},', b'{"\\"":"\\\\"},']


@in_one_test("part", WIDE)
def test_a_body_of_very_many_values_is_refused(
    part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take far more memory than their text; a text of as many commas is a text."""
    monkeypatch.setattr(body, "SMALL", 100)
    monkeypatch.setattr(body, "MOST_VALUES", 1000)
    raw = b'{"prompt":[' + part * 1000 + b"1]}"
    with pytest.raises(RequestError, match="more than 1000 values"):
        read_body(raw)
    assert read_body(raw.replace(part * 1000, part * 100))
    text = json.dumps({"prompt": raw.decode()}).encode()
    assert read_body(text) == {"prompt": raw.decode()}


def test_an_open_string_of_many_quotes_takes_no_longer_than_another() -> None:
    """Each quote is looked at once, or this would take hours."""
    with pytest.raises(RequestError, match="no JSON"):
        read_body(b'{"a":"' + b'\\"' * 2**22)


# Texts that do not fit


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Any]:
    with running(folder, flags=with_flags()) as engine:
        yield engine


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Each text that is tokenized, with the name of the thread."""
    calls: list[tuple[str, str]] = []
    encode = PreTrainedTokenizerBase.encode

    def noted(self: Any, text: str, *args: Any, **options: Any) -> Any:
        calls.append((threading.current_thread().name, text))
        return encode(self, text, *args, **options)

    monkeypatch.setattr(PreTrainedTokenizerBase, "encode", noted)
    return calls


def fields_of(text: str) -> list[dict[str, Any]]:
    """The ways in which a request may bring a text that is tokenized."""
    said = {"messages": [{"role": "user", "content": text}]}
    return [said, {"prompt": text}, {"prompt": PROMPT, "prediction": text}]


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    engine: Any, tokenized: list[tuple[str, str]]
) -> None:
    """By its length alone, or by as much of it as is needed."""
    most = engine.models.loaded.longest_text
    longest = prompts.longest_token(engine.models.loaded.tokenizer)
    for num_chars in (most * longest + 1000, most * longest // 2):
        for fields in fields_of("a " * num_chars):
            tokenized.clear()
            with pytest.raises(RequestError, match="has at least") as told:
                ask(engine, **fields)
            assert told.value.code == "context_length_exceeded"
            assert told.value.num_tokens > told.value.most == most
            read = sum(len(text) for _, text in tokenized)
            assert read < 1.2 * (most + prompts.PIECE) + 1000


def test_a_request_that_is_refused_is_let_go(port: int) -> None:
    """Its body is not kept by the error, until Python looks for circles."""
    refs: list[weakref.ref[ParsedBody]] = []
    init = ParsedBody.__init__

    def noted(self: ParsedBody, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        refs.append(weakref.ref(self))

    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ParsedBody, "__init__", noted)
            data = b'{"prompt": "x"}'
            with opened(port, "/v1/completions", f"Content-Length: {len(data)}") as connection:
                connection.sendall(data)
                assert b" 400 " in connection.recv(100)
        until(lambda: refs[0]() is None, SECONDS)
    finally:
        gc.enable()


def test_a_text_that_fits_is_never_refused(engine: Any) -> None:
    tokenizer = engine.models.loaded.tokenizer
    uneven = "é" * prompts.PIECE + "the hat in the " * 2**13  # which its beginning does not tell
    for text in ("a ", "the ", "then and there", "é", "\n", uneven):
        text *= max(1, 2**17 // len(text))
        num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
        prompts.check_length(text, tokenizer, num_tokens)
        with pytest.raises(RequestError):
            prompts.check_length(text, tokenizer, num_tokens // 4)


def test_texts_are_written_while_another_ones_prompt_is_tokenized(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not on the engine's thread, and its tokens are those of a request that waits for its turn."""
    begun, may_end = threading.Event(), threading.Event()
    encode = PreTrainedTokenizerBase.encode
    slow = "the other hat is on the mat"
    expected = ask(engine, prompt=slow).text

    def encode_slowly(self: Any, text: str, *args: Any, **options: Any) -> Any:
        if text == slow:
            assert threading.current_thread().name != "engine"
            begun.set()
            assert may_end.wait(SECONDS)
        return encode(self, text, *args, **options)

    first: Client = submit(engine, prompt=PROMPT, max_tokens=200)
    first.until_text()
    monkeypatch.setattr(PreTrainedTokenizerBase, "encode", encode_slowly)
    second: Client = submit(engine, prompt=slow)
    assert begun.wait(SECONDS)
    assert first.wait().ended
    may_end.set()
    assert second.wait().text == expected


def test_what_was_prepared_for_a_model_is_prepared_again_for_the_next(tmp_path: Path) -> None:
    """A request that waits while models change is read by the tokenizer of the one that writes."""
    one, other = (write_model_folder(tmp_path / name) for name in ("one", "other"))
    asked: dict[str, Any] = {"prompt": "x and y and x and y", "max_tokens": 24}
    with running(one, flags=with_flags()) as engine:
        first: Client = submit(engine, prompt=PROMPT, max_tokens=200)
        first.until_text()
        second: Client = submit(engine, model=str(other))
        third: Client = submit(engine, **asked)
        until(lambda: engine.waiting == 2)
        make_tokenizer(swapped=True).save(str(one / "tokenizer.json"))
        first.wait()
        second.wait()
        text = third.wait().text
    model, tokenizer = mlx_lm.load(str(one))[:2]
    assert text == mlx_lm.generate(model, tokenizer, **asked)
