"""`specdec-mlx server` beside mlx-lm's own texts, clients that hang up, and signals."""

from __future__ import annotations

import logging
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import mlx_lm
import openai
import pytest
from mlx_lm.generate import make_stop_sequences
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.server import GenerationContext, Response

import specdec_mlx as sd
from on_ranks import free_ports
from selection import cases, in_one_test
from serving import (
    PROMPT,
    chat,
    complete,
    posted,
    read_events,
    said,
    serving,
    text_of,
    until,
)
from specdec_mlx.mlx_lm_plugin.requests import Channel
from tiny_model_folder import write_model_folder

ENDLESS = 800_000  # tokens that nobody waits for


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    return write_model_folder(root / "model", max_position_embeddings=2**20)


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Any, Any]:
    """The model and tokenizer here."""
    return mlx_lm.load(str(folder))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    flags = ("--draft-length", "4", "--stats", "--prefill-step-size", "256")
    with serving("--model", str(folder), *flags) as running:
        yield running


def plain(pair: tuple[Any, Any], prompt: str | list[Any], max_tokens: int, **options: Any) -> str:
    """mlx-lm's own text after a prompt or messages."""
    if not isinstance(prompt, str):
        prompt = pair[1].apply_chat_template(prompt, add_generation_prompt=True)
    return str(mlx_lm.generate(*pair, prompt, max_tokens=max_tokens, **options))


def test_a_completion_is_mlx_lms_text_in_fewer_passes(
    client: openai.OpenAI, pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The account is in `usage`, and with --stats in the log; of a stream, in its last chunk, and
    in its usage, if that is asked for. The end of a cache is no end.
    """
    caplog.set_level(logging.INFO)
    reply = complete(client)
    assert text_of(reply) == plain(pair, PROMPT, 60)
    account = reply.usage.speculation
    assert (account["drafter"], account["batched"]) == ("auto", False)
    assert account["emitted"] == reply.usage.completion_tokens == 60
    assert account["target_passes"] + account["accepted"] == 60 + account["cut"]
    assert account["accepted"] > 0
    until(lambda: "Speculation: 60 tokens in" in caplog.text)
    chunks = list(complete(client, stream=True))
    with_usage = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert said(chunks)[0] == said(with_usage)[0] == text_of(reply)
    assert chunks[-1].speculation["emitted"] == 60
    assert with_usage[-1].usage.speculation["emitted"] == 60
    longer = PROMPT + text_of(reply)
    for _ in range(2):  # at least one token is left to feed
        assert text_of(complete(client, longer, max_tokens=20)) == plain(pair, longer, 20)


def test_every_turn_is_that_of_a_fresh_run_of_the_conversation(
    client: openai.OpenAI, pair: tuple[Any, Any]
) -> None:
    """Conversations by turns, with a penalty and without; later turns read from the cache."""
    conversations: dict[float, list[Any]] = {0.0: [], 1.5: []}
    for turn in ("the cat in the hat", "another hat", "the end in the hat"):
        for penalty, messages in conversations.items():
            messages.append({"role": "user", "content": f"{turn} {penalty}"})
            reply = chat(client, messages, extra_body={"repetition_penalty": penalty})
            processors = make_logits_processors(repetition_penalty=penalty or None)
            assert text_of(reply) == plain(pair, messages, 60, logits_processors=processors)
            assert reply.usage.speculation["batched"] is False
            if len(messages) > 1:
                assert reply.usage.prompt_tokens_details.cached_tokens > 40
            messages.append({"role": "assistant", "content": text_of(reply)})


def test_requests_may_choose_drafter_length_and_rule(folder: Path) -> None:
    """Each is seen in the account, also of a draft model after the drafters given; not in texts."""
    flags = ("--draft-model", str(folder), "--drafter", "prompt-lookup:min_ngram=8,max_ngram=8")
    with serving("--model", str(folder), *flags, "--draft-length", "3") as client:
        expected = text_of(complete(client))

        def account(**body: Any) -> dict[str, Any]:
            reply = complete(client, extra_body=body)
            assert text_of(reply) == expected
            return dict(reply.usage.speculation)

        assert account()["drafter"] == "prompt-lookup+model"
        assert account(drafter="none").get("drafted", 0) == 0
        assert len(account(drafter="ngram", draft_length=2)["acceptance_by_position"]) == 2
        several = account(drafter=["ngram", "prompt-lookup"], draft_length=6)
        assert several["drafter"] == "ngram+prompt-lookup"
        assert account(drafter="ngram", num_draft_tokens=1)["drafted"] > 0
        longest = account(drafter="model", draft_length=100_000)["acceptance_by_position"]
        assert 4 < len(longest) <= 64
        alone = account(drafter="model")
        assert alone["accepted"] == alone["drafted"] == 45

        drawn = [
            complete(client, temperature=1, seed=5, extra_body={"drafter": "model", "rule": rule})
            for rule in ("rejection", "match")
        ]
        whole, part = (reply.usage.speculation for reply in drawn)
        assert whole["accepted"] == whole["drafted"] > 0
        assert part["accepted"] < part["drafted"]


@in_one_test("body", [{"stream": True}, {}, {"n": 3, "prompt": PROMPT * 100}])
def test_a_client_that_hangs_up_leaves_nothing_behind(
    body: dict[str, Any],
    client: openai.OpenAI,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its generation ends, so that the next request is alone; and no traceback.

    In a stream, before a reply, and while the prompt of several choices is read.
    """
    caplog.set_level(logging.INFO)
    caplog.clear()
    with posted(client, max_tokens=ENDLESS, **body) as connection:
        if "stream" in body:
            read_events(connection, 3)
        else:
            until(lambda: "Prompt processing progress" in caplog.text)
    assert complete(client, "and now", max_tokens=5).usage.completion_tokens == 5
    then = {"prompt": "and then", "max_tokens": 5}
    until(lambda: not complete(client, **then).usage.speculation["batched"])
    until(lambda: "Client hung up" in caplog.text)
    assert "Traceback" not in caplog.text + capsys.readouterr().err


@contextmanager
def process(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[bytes], Any, Path]]:
    """A server as a process, a client of it, and its log."""
    (port,) = free_ports(1)
    url, log = f"http://127.0.0.1:{port}", folder.parent / f"{port}.log"
    command = [sys.executable, "-m", "specdec_mlx", "server", "--model", str(folder)]
    with log.open("wb") as output:
        server = subprocess.Popen(
            [*command, "--port", str(port), *flags], stdout=output, stderr=output
        )

    def is_ready() -> bool:
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            return False
        return True

    try:
        until(is_ready)
        yield server, openai.OpenAI(base_url=url, api_key="none"), log
    finally:
        server.kill()
        server.wait()


MANY = {"max_tokens": 100_000, "stream": True}

STATES: dict[str, tuple[signal.Signals, list[dict[str, Any]]]] = {
    "idle": (signal.SIGTERM, []),
    "lone": (signal.SIGTERM, [MANY]),
    "batched": (signal.SIGTERM, [MANY, MANY | {"prompt": "another"}]),
    "batched and interrupted": (signal.SIGINT, [MANY, MANY | {"prompt": "another"}]),
    "the prompt of one is read": (signal.SIGTERM, [{"prompt": "a" * 100_000}]),
    "prompts are read": (signal.SIGTERM, [{"prompt": "a" * 100_000}, {"prompt": "b" * 99_000}]),
}


@pytest.mark.parametrize("state", cases(STATES, "batched"))
def test_a_signal_ends_the_server_whatever_it_does(state: str, folder: Path) -> None:
    """With exit code 0; the memory has what was written by then."""
    number, requests = STATES[state]
    file = folder.parent / f"{state}.memory"
    flags = ("--memory", str(file), "--prefill-step-size", "64", "--request-models", "given")
    with process(folder, *flags) as (server, client, log):
        connections = [posted(client, **body) for body in requests]
        until(lambda: not requests or re.search(r"progress: \d+/\d+", log.read_text()))
        for connection, body in zip(connections, requests, strict=True):
            if "stream" in body:
                read_events(connection, 30)
        server.send_signal(number)
        assert server.wait(timeout=240) == 0
        for connection in connections:
            connection.close()
    assert "Traceback" not in log.read_text()
    if MANY in requests:
        assert len(sd.Memory.load(file)) > 20


def context(prompt: list[int]) -> GenerationContext:
    return GenerationContext(False, False, lambda *a: {}, None, "normal", prompt)  # type: ignore[arg-type]


def test_a_channel_hides_the_seam(pair: tuple[Any, Any]) -> None:
    """Text, stop sequences and the client's stop reach across it; its end is not the end."""
    tokenizer, queue = pair[1], Queue[Any]()
    tokens = tokenizer.encode("één the cat")  # each é is two tokens
    channel, later = Channel(queue), context([1, *tokens[:3]])

    def speak(part: list[int]) -> None:
        detokenizer = tokenizer.detokenizer
        for token in part:
            detokenizer.add_token(token)
            channel.put(Response(detokenizer.last_segment, token, 0.0, None, ()))

    for item in (context([1]), (1, 2)):
        channel.put(item)
    speak(tokens[:3])
    channel.pausing = True
    channel.put(None)
    assert channel.alive
    channel.resume(tokenizer.detokenizer, make_stop_sequences(tokenizer, ["én the"]).matcher())
    for item in (later, (3, 4)):
        channel.put(item)
    speak(tokens[3:])
    first, progress, *responses, end = [queue.get_nowait() for _ in range(queue.qsize())]
    assert (first.prompt, progress, end) == ([1], (1, 2), None)
    assert "".join(r.text for r in responses if r.finish_reason is None) == "één"
    assert responses[-1].finish_reason == "stop"
    assert later._should_stop
    assert not channel.alive


def test_a_channel_passes_on_that_the_client_is_gone(pair: tuple[Any, Any]) -> None:
    """The client stops its own context; the one in force is stopped with it."""
    channel, mine, later = Channel(Queue()), context([1]), context([1, 2])
    channel.put(mine)
    channel.resume(pair[1].detokenizer, make_stop_sequences(pair[1], []).matcher())
    channel.put(later)
    mine.stop()
    channel.put(Response("a", 70, 0.0, None, ()))
    assert later._should_stop
    assert not channel.alive
