"""Many clients of every protocol at once, some that hang up, and bodies with something wrong.

Every text is the one that its request has alone; no wrong body is answered with a 5xx or without a
message; the memory does not grow; and then the server answers as before.
"""

from __future__ import annotations

import copy
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from selection import FULL
from tiny_model_folder import write_model_folder

WORDS = re.findall(r"\w+", "the cat in the hat and the other cat sat on a mat near the inn and ran")
CONTEXT = 512
"""Positions of the model, so that a body without `max_tokens` is soon answered."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
PROTOCOLS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
TOOL_SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@dataclass(frozen=True)
class Server:
    """A server that runs as a process."""

    port: int
    process: psutil.Process

    def ask(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, str]:
        """Status and content of the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=240)
        try:
            connection.request("POST", path, data, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            return reply.status, reply.read().decode()
        finally:
            connection.close()

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


@contextmanager
def running(folder: Path, *flags: str) -> Iterator[Server]:
    """The server with these flags; it ends with status 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specdec_mlx.server", "--model", str(folder)]
    with subprocess.Popen([*command, "--port", str(port), *flags]) as process:
        server = Server(port, psutil.Process(process.pid))
        try:
            deadline = time.monotonic() + 240
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                try:
                    if server.get("/health")[0] == 200:
                        break
                except OSError:
                    time.sleep(0.1)
            yield server
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("soak") / "model"
    write_model_folder(folder, max_position_embeddings=CONTEXT)
    with running(folder, "--num-draft-tokens", "4", "--no-tuning") as started:
        yield started


# Requests, and the text of an answer --------------------------------------------------------------


def body_of(path: str, number: int) -> dict[str, Any]:
    """One of many requests in a protocol."""
    coins = random.Random(number)
    prompt = " ".join(coins.choices(WORDS, k=coins.randrange(3, 40)))
    most = coins.randrange(5, 40)
    body: dict[str, Any] = {"model": "any", "stream": coins.random() < 0.5, "temperature": 0}
    if coins.random() < 0.3:
        body |= {"temperature": 0.8, "seed": number} if path in (CHAT, COMPLETIONS) else {}
    if coins.random() < 0.3 and path != RESPONSES:
        body["stop_sequences" if path == MESSAGES else "stop"] = [coins.choice(["th", "e", "an"])]
    turns = [{"role": "user", "content": prompt}]
    if coins.random() < 0.4:
        more = " ".join(coins.choices(WORDS, k=9))
        turns += [{"role": "assistant", "content": more}, {"role": "user", "content": "on"}]
    if path == COMPLETIONS:
        return body | {"prompt": prompt, "max_tokens": most}
    if path == RESPONSES:
        tools = [{"type": "function", "name": "f", "parameters": TOOL_SCHEMA}]
        return body | {"input": turns, "max_output_tokens": most, "tools": tools}
    if path == MESSAGES:
        tools = [{"name": "f", "input_schema": TOOL_SCHEMA}]
        return body | {"messages": turns, "max_tokens": most, "tools": tools}
    function = {"name": "f", "parameters": TOOL_SCHEMA}
    tools = [{"type": "function", "function": function}]
    return body | {"messages": turns, "max_tokens": most, "tools": tools}


def text_of(path: str, answer: str) -> str:
    """The text of an answer, streamed or not."""
    if not answer.startswith("{"):
        lines = (line for line in answer.splitlines() if line.startswith("data: {"))
        return "".join(piece(path, json.loads(line[len("data: ") :])) for line in lines)
    whole = json.loads(answer)
    if path == MESSAGES:
        return "".join(block.get("text", "") for block in whole["content"])
    if path == RESPONSES:
        parts = (part for item in whole["output"] for part in item.get("content", []))
        return "".join(part.get("text", "") for part in parts)
    choice = whole["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"] or ""


def piece(path: str, event: dict[str, Any]) -> str:
    """The text in one event of a stream."""
    assert "error" not in event, event
    if path == MESSAGES:
        assert event["type"] != "error", event
        return event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
    if path == RESPONSES:
        assert event["type"] != "response.failed", event
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    parts = event.get("choices", [])
    texts = (p["text"] if path == COMPLETIONS else p["delta"].get("content") for p in parts)
    return "".join(text or "" for text in texts)


def answered(server: Server, path: str, number: int) -> str:
    status, answer = server.ask(path, body_of(path, number))
    assert status == 200, answer
    return text_of(path, answer)


def hang_up(server: Server, path: str, number: int) -> None:
    """Ask for a long text, as a stream or not, and close at some time before its end."""
    coins = random.Random(number)
    most = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = body_of(path, number) | {most: 400, "stream": coins.random() < 0.8}
    body = {name: value for name, value in body.items() if not name.startswith("stop")}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        for _ in range(coins.randrange(4) if body["stream"] else 0):
            connection.recv(512)


def soak(server: Server, num_requests: int, num_hang_ups: int, num_distinct: int) -> None:
    """Ask with 8 clients, and compare; hang up in between."""
    asked = [(path, number) for number in range(num_distinct) for path in PROTOCOLS]
    alone = {one: answered(server, *one) for one in asked}
    assert len(set(alone.values())) > num_distinct
    coins = random.Random(num_requests)
    jobs = [coins.choice(asked) for _ in range(num_requests)]
    with ThreadPoolExecutor(8) as clients, ThreadPoolExecutor(2) as others:
        gone = [others.submit(hang_up, server, PROTOCOLS[i % 4], i) for i in range(num_hang_ups)]
        answers = list(clients.map(lambda one: answered(server, *one), jobs))
        for one in gone:
            one.result()
    wrong = [(one, text) for one, text in zip(jobs, answers, strict=True) if text != alone[one]]
    assert not wrong, f"{len(wrong)} of {len(jobs)}: {wrong[0]}, alone {alone[wrong[0][0]]!r}"


# Bodies with something wrong ----------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 10**12, -(10**12), 1e308, "", "x", "\ud800", "\x00", [], {}),
    *(
        [[]],
        [None],
        [1, "x"],
        {"type": "x"},
        {"role": "user"},
        {"a": {"b": [{}]}},
        "auto",
        "9" * 40,
    ),
    *("auto", [{"role": "tool"}], [{"type": "text"}], [{"type": "image_url", "image_url": 3}]),
]


def spoiled(path: str, number: int) -> bytes:
    """A body in which one to three things are odd, or which is no JSON object at all."""
    coins = random.Random(f"{path} {number}")
    body = rich_body(path, number)
    for _ in range(coins.randrange(1, 4)):
        holder, key = coins.choice(list(places_in(body)))
        if coins.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(coins.choice(ODD))
    data = json.dumps(body).encode()
    match coins.randrange(12):
        case 0:
            return data[: coins.randrange(len(data))]
        case 1:
            return coins.choice([b"", b"[]", b"3", b'"x"', b"null", b"\xff\xfe", b"NaN", b"{}"])
        case 2:
            return b"[" * 20_000
    return data


def rich_body(path: str, number: int) -> dict[str, Any]:
    """A body with many more fields, all of them right."""
    body = body_of(path, number)
    body["metadata"] = {"user_id": "u"}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
    if path == CHAT:
        body["messages"][:0] = [
            {"role": "developer", "content": [{"type": "text", "text": "Be short."}]},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "done"},
        ]
        body |= {"tool_choice": "auto", "stream_options": {"include_usage": True}, "logprobs": True}
        body |= {"top_logprobs": 2, "parallel_tool_calls": False, "reasoning_effort": "none"}
        body |= {"prediction": {"type": "content", "content": "the cat"}, "logit_bias": {"5": 1}}
    elif path == COMPLETIONS:
        body |= {"logprobs": 2, "echo": True, "n": 1, "logit_bias": {"5": 1}, "user": "u"}
    elif path == MESSAGES:
        used = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": "b"}}
        result = {
            "type": "tool_result",
            "tool_use_id": "c",
            "content": [{"type": "text", "text": "r"}],
        }
        body["messages"][:0] = [
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result, {"type": "text", "text": "on"}]},
            {"role": "assistant", "content": "well"},
        ]
        body |= {"system": [{"type": "text", "text": "Be short."}], "tool_choice": {"type": "auto"}}
        body |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}
    else:
        body["input"][:0] = [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "b"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a": "b"}'},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        ]
        body |= {"instructions": "Be short.", "tool_choice": "auto", "reasoning": {"effort": "low"}}
        body |= {"text": {"format": {"type": "text"}}, "store": False, "include": []}
    return body


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every holder and key in a body."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places_in(value[key])


def assert_refused_in_words(server: Server, path: str, number: int) -> int:
    """A wrong body has an answer below 500, and if it is refused, the protocol's form of an error
    with a message. Returns the status."""
    body = spoiled(path, number)
    status, answer = server.ask(path, body)
    assert status < 500, (path, number, body[:600], answer)
    if status >= 400:
        error = json.loads(answer)
        assert path != MESSAGES or error["type"] == "error"
        assert error["error"]["message"], (path, number, body[:600], answer)
    return status


def fuzz(server: Server, num_bodies: int) -> None:
    """Send wrong bodies of every protocol, from 4 clients."""
    jobs = [(path, number) for number in range(num_bodies) for path in PROTOCOLS]
    with ThreadPoolExecutor(4) as clients:
        statuses = list(clients.map(lambda one: assert_refused_in_words(server, *one), jobs))
    assert statuses.count(200) > len(jobs) / 20, "what may be left out is taken"
    assert sum(status >= 400 for status in statuses) > len(jobs) / 4


def idle(server: Server) -> bool:
    """No request is under way."""
    lines = server.get("/metrics")[1].splitlines()
    counts = [line.split()[-1] for line in lines if line.startswith("vllm:num_requests_")]
    assert len(counts) == 2
    return set(counts) == {"0"}


def assert_healthy(server: Server) -> None:
    """All texts that were left have ended, and a request is answered."""
    deadline = time.monotonic() + 60
    while not idle(server):
        assert time.monotonic() < deadline, "texts go on that nobody reads"
        time.sleep(0.1)
    assert server.get("/health")[0] == 200
    assert [answered(server, path, 3) for path in PROTOCOLS]


def test_eight_clients_get_the_texts_they_get_alone(server: Server) -> None:
    """While others hang up, and send what is wrong."""
    before = [answered(server, path, 3) for path in PROTOCOLS]
    soak(server, num_requests=32, num_hang_ups=8, num_distinct=3)
    fuzz(server, num_bodies=15)
    assert_healthy(server)
    assert [answered(server, path, 3) for path in PROTOCOLS] == before


@FULL
def test_hundreds_of_requests_leave_the_memory_as_it_was(server: Server) -> None:
    """With clients that hang up and wrong bodies of every protocol.

    At first the kept prefixes and the allocator's pools fill. Later the pools still grow now and
    then, by several megabytes at once. A leak grows in every round, so one round that grows by less
    than 4 KB a request shows that there is none.
    """
    before = [answered(server, path, 3) for path in PROTOCOLS]
    growth = []
    resident = 0
    while len(growth) < 3 or growth[-1] >= 4e6:
        soak(server, num_requests=200, num_hang_ups=20, num_distinct=10)
        fuzz(server, num_bodies=200)
        assert_healthy(server)
        now = server.process.memory_info().rss
        growth.append(now - resident)
        resident = now
        assert len(growth) < 10 or growth[-1] < 4e6, growth
    assert [answered(server, path, 3) for path in PROTOCOLS] == before
