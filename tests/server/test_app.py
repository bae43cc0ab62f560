"""The application over a stand-in for the engine: paths, connections, silences and errors."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from live import listening
from selection import in_one_test
from specdec_mlx.errors import ModelFolderError, UnknownNameError
from specdec_mlx.server import app, receiving
from specdec_mlx.server.flags import ServerSettings
from specdec_mlx.server.requests import (
    Ended,
    Event,
    Failed,
    PromptProgress,
    RequestError,
    ServerBusyError,
    ServerEndingError,
    TextPiece,
    TextRequest,
)
from specdec_mlx.server.status import Totals
from specdec_mlx.stats.account import SpeculationStats

SECONDS = 240  # after which a test that waits fails
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "go"}], "max_tokens": 9}
ENDED = Ended("stop", num_prompt=7, num_cached=2, num_written=3)
Put = Callable[[Event], None]


@dataclass(eq=False)
class Ticket:
    """A request at the stand-in."""

    request: TextRequest
    put: Put
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


@dataclass(eq=False)
class StandIn:
    """An engine that says what a test says: `answers` each request on a thread of its own."""

    tickets: list[Ticket] = field(default_factory=list)
    answer: Callable[[Ticket], Any] = lambda ticket: None
    running: int = 2
    waiting: int = 1
    is_alive: bool = True
    models: Any = None

    def submit(self, request: TextRequest, put: Put) -> Ticket:
        ticket = Ticket(request, put)
        self.tickets.append(ticket)
        threading.Thread(target=self.answer, args=(ticket,), daemon=True).start()
        return ticket

    def num_tokens(self, request: TextRequest) -> int:
        return len(request.messages[0]["content"])


def say(*events: Event) -> Callable[[Ticket], None]:
    """An answer of these events."""

    def answer(ticket: Ticket) -> None:
        for event in events:
            ticket.put(event)

    return answer


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[StandIn, int]]:
    engine: Any = StandIn()
    settings = ServerSettings(temp=0.5, allowed_origins=("http://here",))
    with listening(app.make_app(engine, settings), lifespan="off") as port:
        yield engine, port


@pytest.fixture
def engine(served: tuple[StandIn, int]) -> StandIn:
    engine = served[0]
    engine.tickets, engine.answer, engine.is_alive = [], say(TextPiece("Yes."), ENDED), True
    listed = [{"id": name, "created": 86400} for name in ("/folder/one", "two")]

    def find_entry(name: str) -> dict[str, Any]:
        for entry in listed:
            if entry["id"] == name:
                return entry
        raise ModelFolderError(f"There is no model {name!r} here.")

    engine.models = SimpleNamespace(
        listed=lambda: listed, find_entry=find_entry, can_see=lambda request: False
    )
    return engine


@pytest.fixture
def port(engine: StandIn, served: tuple[StandIn, int]) -> int:
    return served[1]


def ask(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, str, Any]:
    """Status, text and headers of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    connection.request(method, path, data, headers or {}, encode_chunked=bool(headers))
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    return reply.status, text, reply.headers


def post(port: int, path: str, body: Any) -> tuple[int, Any]:
    """Status and reply of a request as JSON."""
    status, text, _ = ask(port, "POST", path, body)
    return status, json.loads(text)


# Paths

PATHS = [
    ("GET", "/", 200, "tokens per pass"),
    ("HEAD", "/", 200, ""),
    ("HEAD", "/v1/", 200, ""),
    ("GET", "/health", 200, '{"status":"ok"}'),
    ("GET", "/health/?x=1", 200, '{"status":"ok"}'),
    ("GET", "/api/hello", 200, "hello"),
    ("HEAD", "/api/hello", 200, ""),
    ("GET", "/metrics", 200, "vllm:num_requests_running 2\n"),
    ("GET", "/v1/models", 200, '"object":"list"'),
    ("GET", "/v1/v1/models", 200, '"object":"list"'),
    ("GET", "/v1models", 404, ""),
    ("GET", "/models/", 200, '"id":"two"'),
    ("GET", "/v1/models/two", 200, '"object":"model"'),
    ("GET", "/v1/models/%2Ffolder%2Fone", 200, '"/folder/one"'),
    ("GET", "/v1/models/three", 404, "There is no model 'three'"),
    ("GET", "/nothing", 404, "There is no GET /nothing here."),
    ("GET", CHAT, 405, "There is no GET /chat/completions here."),
    ("GET", "/v1/responses", 426, "Responses are posted here"),
    ("POST", "/health", 405, "There is no POST"),
]


@in_one_test(("method", "path", "status", "words"), PATHS)
def test_paths(method: str, path: str, status: int, words: str, port: int) -> None:
    found, text, headers = ask(port, method, path)
    assert (found, words in text) == (status, True), text
    assert status == 200 or json.loads(text)["error"]["type"] == "invalid_request_error"
    assert method != "HEAD" or int(headers["Content-Length"]) > 0


@in_one_test("path", ["/v1/chat/completions", "/completions", "/v1/messages/", "/responses?x=1"])
def test_a_method_that_is_none_is_refused_in_the_protocols_form(path: str, port: int) -> None:
    """With the ones that there are, as HTTP has it."""
    for method in ("PUT", "DELETE", "PATCH"):
        status, text, headers = ask(port, method, path)
        assert (status, "POST" in headers["Allow"]) == (405, True)
        assert (json.loads(text).get("type") == "error") is ("messages" in path)
        assert json.loads(text)["error"]["type"] == "invalid_request_error"


@in_one_test(
    "path", [CHAT, f"{CHAT}/", f"{CHAT}?beta=true", "/chat/completions", "/chat/completions/?a=b"]
)
def test_texts_are_asked_for_on_paths_as_clients_spell_them(path: str, port: int) -> None:
    status, reply = post(port, path, BODY)
    assert (status, reply["choices"][0]["message"]["content"]) == (200, "Yes.")


def test_an_engine_that_has_ended_is_not_healthy(port: int, engine: StandIn) -> None:
    engine.is_alive = False
    assert ask(port, "GET", "/health")[:2] == (503, '{"status":"unavailable"}')


def test_models_are_listed_in_each_protocols_form(port: int) -> None:
    version = {"anthropic-version": "2023-06-01"}
    listed = json.loads(ask(port, "GET", "/v1/models", None, version)[1])
    assert listed["data"][1] == {
        "type": "model",
        "id": "two",
        "display_name": "two",
        "created_at": "1970-01-02T00:00:00+00:00",
    }
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (
        False,
        "/folder/one",
        "two",
    )
    missing = json.loads(ask(port, "GET", "/v1/models/three", None, version)[1])
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
    listed = json.loads(ask(port, "GET", "/v1/models")[1])
    assert listed["data"][1]["created"] == 86400


def test_pages_of_allowed_origins_may_read(port: int) -> None:
    for origin, allowed in (("http://here", "http://here"), ("http://there", None)):
        _, _, headers = ask(port, "POST", CHAT, BODY, {"Origin": origin})
        assert headers.get("access-control-allow-origin") == allowed
        wanted = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        wanted["Access-Control-Request-Headers"] = "authorization"
        status, _, headers = ask(port, "OPTIONS", CHAT, None, wanted)
        assert (status == 200) is (allowed is not None)


# Bodies


def test_a_body_may_come_in_chunks(port: int) -> None:
    def chunks() -> Iterator[bytes]:
        for byte in json.dumps(BODY).encode():
            yield bytes([byte])

    chunked = {"Transfer-Encoding": "chunked"}
    assert ask(port, "POST", CHAT, chunks(), chunked)[0] == 200


def test_a_body_has_a_bound(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "MOST_BYTES", 100)
    status, reply = post(port, CHAT, {**BODY, "user": "x" * 100})
    assert (status, "more than 100 bytes" in reply["error"]["message"]) == (413, True)
    assert post(port, CHAT, BODY)[0] == 200


def test_what_the_request_leaves_out_is_the_servers(port: int, engine: StandIn) -> None:
    headers = {"Authorization": "Bearer k"}
    ask(port, "POST", CHAT, {**BODY, "temperature": None, "top_p": 0.25}, headers)
    ask(port, "POST", MESSAGES, BODY, {"x-api-key": "l"})
    requests = [ticket.request for ticket in engine.tickets]
    assert [r.sampling for r in requests] == [{"temp": 0.5, "top_p": 0.25}, {"temp": 0.5}]
    assert [r.key for r in requests] == ["Bearer k", "l"]


def test_tokens_are_counted_without_a_limit_of_the_answer(port: int) -> None:
    del (body := dict(BODY))["max_tokens"]
    assert post(port, f"{MESSAGES}/count_tokens?beta=true", body) == (200, {"input_tokens": 2})
    assert post(port, f"{MESSAGES}/count_tokens", {"messages": 5})[1]["type"] == "error"


# Connections


def opened(port: int, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """A connection on which a text was asked for."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(head.encode() + data)
    return connection


def read_until(connection: socket.socket, words: bytes) -> bytes:
    """What has come once some words have."""
    received = b""
    while words not in received:
        part = connection.recv(4096)
        assert part, received
        received += part
    return received


@in_one_test("body", [{}, {"stream": True}, {"stream": True, "n": 3}])
def test_a_text_ends_with_its_connection(body: Any, port: int, engine: StandIn) -> None:
    """In a silence too, before its first token and after it."""
    for events in ([], [PromptProgress(1, 9, 0)], [TextPiece("a")]):
        engine.tickets, engine.answer = [], say(*events)
        with opened(port, {**BODY, **body}) as connection:
            if body and events:
                read_until(connection, b"assistant")
            while len(engine.tickets) < body.get("n", 1):
                pass
        for ticket in engine.tickets:
            assert ticket.cancelled.wait(SECONDS)


def test_a_stream_says_in_each_silence_that_it_lives(
    port: int, engine: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first event, while a prompt is read, and while nothing is said."""
    monkeypatch.setattr(app, "SILENCE", 0.05)
    engine.answer = say()
    with opened(port, {**BODY, "stream": True}) as connection:
        read_until(connection, b": keepalive\n\n")
        (ticket,) = engine.tickets
        for done in range(3):
            ticket.put(PromptProgress(done, 9, 0))
            read_until(connection, b": keepalive\n\n")
        ticket.put(TextPiece("a"))
        read_until(connection, b'"a"')
        read_until(connection, b": keepalive\n\n")
        ticket.put(ENDED)
        assert b"[DONE]" in read_until(connection, b"0\r\n\r\n")
    with opened(port, {**BODY, "stream": True}, MESSAGES) as connection:
        read_until(connection, b"event: ping")


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_reply_that_is_whole_is_not_woken_for_each_token(is_streamed: bool) -> None:
    """What a token costs: the task of a connection wakes for what it sends, and for no more."""

    async def num_woken() -> int:
        woken: list[Any] = []
        with pytest.MonkeyPatch.context() as patch:
            loop = asyncio.get_running_loop()
            patch.setattr(loop, "call_soon_threadsafe", woken.append)
            inbox = app.Inbox(is_streamed=is_streamed)
            for event in (PromptProgress(0, 7, 0), *[TextPiece("a")] * 5, ENDED):
                inbox.put(0, event)
                assert await inbox.take(0.0) == [(0, event)]
        return len(woken)

    assert asyncio.run(num_woken()) == (7 if is_streamed else 2)


def test_no_event_is_lost_between_threads(port: int, engine: StandIn) -> None:
    """Many small ones of several choices, as fast as they come."""
    numbers = [f"{i} " for i in range(2000)]
    engine.answer = say(*[TextPiece(number) for number in numbers], ENDED)
    for stream in False, True:
        _, text, _ = ask(port, "POST", CHAT, {**BODY, "n": 3, "stream": stream})
        if stream:
            lines = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
            choices = [line["choices"][0] for line in lines]
            texts = [
                "".join(c["delta"].get("content", "") for c in choices if c["index"] == i)
                for i in range(3)
            ]
        else:
            texts = [c["message"]["content"] for c in json.loads(text)["choices"]]
        assert texts == ["".join(numbers)] * 3


# Errors

ERRORS: list[tuple[Exception, int, str]] = [
    (RequestError("Wrong.", "context_length_exceeded"), 400, "context_length_exceeded"),
    (UnknownNameError("Unknown drafter."), 400, "Unknown drafter."),
    (ModelFolderError("There is no folder."), 404, "There is no folder."),
    (ServerEndingError(), 503, "The server is ending."),
    (ServerBusyError("Not compiled."), 503, "Not compiled. The machine is busy."),
    (RuntimeError("oh"), 500, "RuntimeError: oh"),
    (ValueError("ours"), 500, "ValueError: ours"),
    (ValueError(f"in {Path.home()}/x"), 500, "ValueError: in ~/x"),
    (FileNotFoundError(2, "No", "/a"), 500, "FileNotFoundError: The server's log says why."),
]


@in_one_test(("error", "status", "words"), ERRORS)
def test_an_error_before_the_first_event_has_its_status(
    error: Exception, status: int, words: str, port: int, engine: StandIn
) -> None:
    engine.answer = say(Failed(error))
    own = {COMPLETIONS: {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    for path in (CHAT, MESSAGES, *own):
        for stream in False, True:
            body = own.get(path, BODY) | {"stream": stream}
            found, text, headers = ask(port, "POST", path, body)
            assert (found, words in text or path == MESSAGES) == (status, True), text
            assert ("retry-after" in headers) == (status == 503)


def test_an_error_in_the_middle_ends_the_stream_and_the_other_choices(
    port: int, engine: StandIn
) -> None:
    first = threading.Event()

    def answer(ticket: Ticket) -> None:
        ticket.put(TextPiece("a"))
        if ticket is engine.tickets[0]:
            first.wait(SECONDS)
            ticket.put(Failed(RuntimeError("oh")))

    engine.answer = answer
    with opened(port, {**BODY, "stream": True, "n": 2}) as connection:
        read_until(connection, b'"a"')
        first.set()
        told = read_until(connection, b"0\r\n\r\n")
    assert b"RuntimeError: oh" in told
    assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert engine.tickets[1].cancelled.wait(SECONDS)


def test_an_engine_that_takes_no_request_is_an_error(port: int, engine: StandIn) -> None:
    """Of one choice after another that was taken, which ends."""
    with pytest.MonkeyPatch.context() as patch:
        submit = engine.submit

        def once(request: TextRequest, put: Put) -> Ticket:
            if engine.tickets:
                raise ServerEndingError
            return submit(request, put)

        patch.setattr(engine, "submit", once)
        engine.answer = say()
        assert post(port, CHAT, {**BODY, "n": 2})[0] == 503
    assert engine.tickets[0].cancelled.wait(SECONDS)


# Totals


def test_totals_count_what_was_written(port: int, engine: StandIn) -> None:
    """Draft tokens that a stop string cut off are none that were accepted."""

    def counts() -> dict[str, int]:
        lines = ask(port, "GET", "/metrics")[1].splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        return {name: int(value) for name, value in pairs}

    before = counts()
    stats = SpeculationStats(target_passes=2, drafted=8, accepted=5, rounds=[(4, 2), (4, 3)])
    stats.by_drafter["x"] = [8, 5]
    ended = Ended("stop", "s", 7, 2, num_written=5, accepted=3, rejected=5, stats=stats)
    engine.answer = say(TextPiece("Yes."), ended)
    ask(port, "POST", CHAT, BODY)
    engine.answer = say(TextPiece("Yes."), ENDED)
    ask(port, "POST", CHAT, {**BODY, "stream": True})
    after = counts()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    names = "request_success prompt_tokens prefix_cache_hits generation_tokens iterations"
    assert [grown[f"vllm:{name}_total"] for name in names.split()] == [2, 14, 4, 8, 5]
    drafts = "num_drafts num_draft_tokens num_accepted_tokens"
    assert [grown[f"vllm:spec_decode_{name}_total"] for name in drafts.split()] == [2, 8, 3]
    at = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="%d"}'
    assert [grown[at % place] for place in range(4)] == [2, 1, 0, 0]
    assert "<td>x<td>5 of 8 (62%)" in ask(port, "GET", "/")[1]


def test_a_request_is_one_line_of_the_log(
    port: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its model, tokens read, reused and written, tokens a pass, and seconds; of all its choices.
    How far a prompt is read is told once that has taken two seconds. A refusal is a line too.
    """
    caplog.set_level("INFO")
    now = [100.0]
    monkeypatch.setattr(app, "monotonic", lambda: now[0])
    stats = SpeculationStats(target_passes=2, accepted=4, cut=1)
    ended = replace(ENDED, model="m", stats=stats)

    def lines(*events: tuple[float, int, Event], choices: int = 1) -> list[str]:
        """What is logged for events, each at a time and of a choice."""
        now[0] = 100.0
        caplog.clear()
        asked: Any = SimpleNamespace(requests=[TextRequest()] * choices)
        answer = app.Answer(Any, Totals(), app.CHAT, asked)  # type: ignore[arg-type]
        for seconds, choice, event in events:
            now[0] = 100.0 + seconds
            answer.counted([(choice, event)])
        return [record.getMessage() for record in caplog.records]

    progress = [PromptProgress(done, 7, 2) for done in range(8)]
    assert lines((0.5, 0, progress[2]), (2.4, 0, progress[7]), (3.0, 0, ended)) == [
        "m: 5 tokens read, 2 reused, 3 written, 2.50 a pass, 3.0 s"
    ]
    told = lines(*((float(i), 0, one) for i, one in enumerate(progress[:5])), (9.0, 0, ended))
    assert told[:-1] == ["Prompt: 3 of 7 tokens", "Prompt: 4 of 7 tokens"]
    both = lines(
        (0.5, 0, progress[2]), (3.0, 1, progress[2]), (4.0, 0, ended), (5.0, 1, ended), choices=2
    )
    assert both == ["m: 10 tokens read, 4 reused, 6 written, 2.50 a pass, 5.0 s"]
    caplog.clear()
    post(port, CHAT, {**BODY, "temperature": -1})
    (line,) = [record.getMessage() for record in caplog.records if record.name == "root"]
    assert line.startswith("Refused with 400: temperature: expected ")
