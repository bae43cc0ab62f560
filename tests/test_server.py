"""`specdec-mlx server` as a process on the loopback, driven by the openai client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import mlx.core as mx
import mlx_lm
import openai
import pytest
from mlx_lm.generate import generate_step, make_stop_sequences
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.server import GenerationContext, Response

import specdec_mlx as sd
from command_line import both_ways, run
from selection import FULL, cases, in_one_test
from specdec_mlx.mlx_lm_plugin.channel import Channel
from tiny_model_folder import write_model_folder

PROMPT = "the cat in the hat and the other cat in the hat"
MODEL = "default_model"

POSITIONS, ENDLESS = 2**20, 800_000
"""Of the model here, and tokens that nobody waits for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model_folder(root / "swapped", swapped=True)
    return write_model_folder(root / "model", max_position_embeddings=POSITIONS)


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[Any, Any]:
    """The same model and tokenizer here."""
    return mlx_lm.load(str(folder))


Popen = subprocess.Popen[bytes]


class Server:
    """A server under way. pid: of its process. url: where it listens. log: its output."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.pid, self.port, self.log = process.pid, port, log
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def complete(self, prompt: str = PROMPT, max_tokens: int = 60, **more: Any) -> Any:
        return self.client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, **asked(more)
        )

    def chat(self, messages: list[dict[str, str]], max_tokens: int = 40, **more: Any) -> Any:
        return self.client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=max_tokens, **asked(more)
        )


def asked(more: dict[str, Any]) -> dict[str, Any]:
    """Arguments that the client knows, and the others as a body of their own."""
    known = {"stream", "stream_options", "temperature", "seed", "stop"}
    extra = {name: value for name, value in more.items() if name not in known}
    return {name: more[name] for name in more.keys() & known} | {"extra_body": extra}


@contextmanager
def serving(folder: Path, *flags: str, ends: list[Popen] | None = None) -> Iterator[Server]:
    """Start a server on a free port, wait for it, and stop it; `ends` is given its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder.parent / f"server-{port}.log"
    command = [sys.executable, "-m", "specdec_mlx", "server", "--model", str(folder)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", str(port), *flags], stdout=output, stderr=subprocess.STDOUT
        )
        try:
            server = Server(process, port, log)
            if ends is not None:
                ends.append(process)
            wait_for(server, process)
            yield server
        finally:
            process.terminate()
            process.wait(timeout=30)


def wait_for(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, server.log.read_text()
        try:
            urllib.request.urlopen(f"{server.url}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(server.log.read_text())


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(folder, "--draft-length", "4", "--stats") as running:
        yield running


@pytest.fixture(scope="module")
def with_draft_model(folder: Path) -> Iterator[Server]:
    """The model as its own draft model; and a drafter with options of the server's own."""
    flags = ("--draft-model", str(folder), "--drafter", "prompt-lookup:min_ngram=8,max_ngram=8")
    with serving(folder, *flags, "--draft-length", "3") as running:
        yield running


def plain(pair: tuple[Any, Any], prompt: list[int], max_tokens: int, **options: Any) -> str:
    """What mlx-lm itself writes after a prompt, without its end token."""
    model, tokenizer = pair
    tokens = []
    steps = generate_step(mx.array(prompt), model, max_tokens=max_tokens, **options)
    for token, _ in steps:
        if token in tokenizer.eos_token_ids:
            break
        tokens.append(token)
    return str(tokenizer.decode(tokens))


def speculation(reply: Any) -> dict[str, Any]:
    """Our part of a reply's usage."""
    return dict(reply.usage.speculation)


def test_a_completion_is_mlx_lms_text_in_fewer_passes(
    server: Server, pair: tuple[Any, Any]
) -> None:
    """Without a second model; the account is in `usage`, and with --stats in the log."""
    reply = server.complete()
    assert reply.choices[0].text == plain(pair, pair[1].encode(PROMPT), 60)
    account = speculation(reply)
    assert account["drafter"] == "auto"
    assert account["batched"] is False
    assert account["emitted"] == reply.usage.completion_tokens == 60
    assert account["target_passes"] + account["accepted"] == 60 + account["cut"]
    assert account["accepted"] > 0
    assert "Speculation: 60 tokens in" in server.log.read_text()


@in_one_test("usage", [True, False])
def test_a_stream_says_it_in_its_last_chunk(
    usage: bool, server: Server, pair: tuple[Any, Any]
) -> None:
    """Whether or not the client asked for the usage."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    messages = [{"role": "user", "content": PROMPT}]
    chunks = list(server.chat(messages, stream=True, **options))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    prompt = pair[1].apply_chat_template(messages, add_generation_prompt=True)
    assert text == plain(pair, prompt, 40)
    account = speculation(chunks[-1]) if usage else chunks[-1].speculation
    assert account["emitted"] == 40


@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_every_turn_is_that_of_a_fresh_run_of_the_conversation(
    penalty: float, server: Server, pair: tuple[Any, Any]
) -> None:
    """Six conversations by turns; later turns read earlier ones from the cache."""
    processors = make_logits_processors(repetition_penalty=penalty or None)
    conversations: list[list[dict[str, str]]] = [[] for _ in range(6)]
    for turn in ("the cat in the hat", "another hat", "the end in the hat"):
        for who, messages in enumerate(conversations):
            messages.append({"role": "user", "content": f"{turn} {who}"})
            reply = server.chat(messages, repetition_penalty=penalty)
            prompt = pair[1].apply_chat_template(messages, add_generation_prompt=True)
            answer = reply.choices[0].message.content
            assert answer == plain(pair, prompt, 40, logits_processors=processors)
            assert speculation(reply)["batched"] is False
            if len(messages) > 1:
                assert reply.usage.prompt_tokens_details.cached_tokens > 40
            messages.append({"role": "assistant", "content": answer})


def test_the_very_same_prompt_again_is_answered_again(
    server: Server, pair: tuple[Any, Any]
) -> None:
    """Also one that ends where a cache ends: at least one token is left to feed."""
    first = server.complete(PROMPT, 20).choices[0].text
    expected = plain(pair, pair[1].encode(PROMPT + first), 20)
    for _ in range(2):
        assert server.complete(PROMPT + first, 20).choices[0].text == expected


def test_several_at_once_get_what_each_would_get_alone(
    server: Server, pair: tuple[Any, Any]
) -> None:
    """One begins alone and goes on in a batch with those that came; none waits for it to end."""
    prompts = [f"{i} {PROMPT}" for i in range(8)]
    expected = [plain(pair, pair[1].encode(prompt), 200) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda prompt: server.complete(prompt, 200), prompts))
    assert [reply.choices[0].text for reply in replies] == expected
    assert [reply.usage.completion_tokens for reply in replies] == [200] * 8
    assert sum(speculation(reply)["batched"] for reply in replies) >= 6
    alone = server.complete(prompts[0], 200)
    assert alone.choices[0].text == expected[0]
    assert speculation(alone)["batched"] is False


def test_a_stream_goes_on_without_a_seam_when_others_come(
    server: Server, pair: tuple[Any, Any]
) -> None:
    """The same text, chunk by chunk, with the stop word where it is in the plain text."""
    expected = plain(pair, pair[1].encode(PROMPT), 1200)
    stop = expected[-9:]
    cut = expected[: expected.index(stop)]
    with ThreadPoolExecutor(4) as pool:
        stream = server.complete(PROMPT, 1200, stream=True, stop=[stop])
        chunks = [next(stream)]
        others = [pool.submit(server.complete, f"{i} {PROMPT}", 60) for i in range(3)]
        chunks += list(stream)
        for i, other in enumerate(others):
            assert other.result().choices[0].text == plain(
                pair, pair[1].encode(f"{i} {PROMPT}"), 60
            )
    assert "".join(chunk.choices[0].text for chunk in chunks) == cut
    assert chunks[-1].choices[0].finish_reason == "stop"
    account = chunks[-1].speculation
    assert account["batched"] is True
    assert 0 < account["emitted"] < 1200


def test_requests_may_choose_drafter_length_and_rule(server: Server) -> None:
    """Each is seen in the account; the text stays the same."""
    text = server.complete().choices[0].text
    none = server.complete(drafter="none")
    ngram = server.complete(drafter="ngram", draft_length=2)
    several = server.complete(drafter=["ngram", "prompt-lookup"], draft_length=6)
    for reply in (none, ngram, several):
        assert reply.choices[0].text == text
    assert speculation(none)["drafter"] == "none"
    assert speculation(none).get("drafted", 0) == 0
    assert speculation(ngram)["drafter"] == "ngram"
    assert len(speculation(ngram)["acceptance_by_position"]) == 2
    assert speculation(several)["drafter"] == "ngram+prompt-lookup"
    assert server.complete(num_draft_tokens=1).usage.speculation["drafted"] > 0


def posted(server: Server, **body: Any) -> socket.socket:
    """A connection on which a completion was asked for."""
    text = json.dumps({"prompt": PROMPT, **body})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", server.port))
    client.sendall((head + text).encode())
    return client


@pytest.mark.parametrize(("n", "prompt"), cases([(1, PROMPT), (3, PROMPT * 400)], (1, PROMPT)))
def test_a_client_that_hangs_up_ends_what_is_not_streamed(
    prompt: str, n: int, server: Server
) -> None:
    """Alone and as rows, while it is written and while its prompt is read."""
    with posted(server, prompt=prompt, max_tokens=ENDLESS, n=n):
        time.sleep(0.5)
    assert server.complete("and now", 5).usage.completion_tokens == 5
    deadline = time.monotonic() + 60
    while speculation(server.complete("and then", 5))["batched"]:
        assert time.monotonic() < deadline


MANY = {"max_tokens": 100_000}

STATES: dict[str, list[dict[str, Any]]] = {
    "idle": [],
    "lone": [MANY],
    "lone streaming": [MANY | {"stream": True}],
    "batched": [MANY, MANY | {"prompt": "another"}, MANY | {"prompt": "more", "stream": True}],
    "the prompt of one is read": [{"prompt": "a" * 100_000}],
    "prompts are read": [{"prompt": "a" * 100_000}, {"prompt": "b" * 100_000}],
}


@pytest.mark.parametrize(
    ("state", "number"),
    [
        ("lone streaming", signal.SIGTERM),
        ("batched", signal.SIGINT),
        *(
            pytest.param(state, signal.SIGTERM, marks=FULL)
            for state in STATES
            if state != "lone streaming"
        ),
    ],
)
def test_a_signal_ends_the_server_whatever_it_does(
    state: str, number: signal.Signals, folder: Path
) -> None:
    """With exit code 0; what was written by then is in the memory."""
    file, processes = folder.parent / f"{state} {number}.memory", []
    flags = ("--memory", str(file), "--prefill-step-size", "64", "--request-models", "given")
    with serving(folder, *flags, ends=processes) as server:
        open_ = [posted(server, **body) for body in STATES[state]]
        time.sleep(1.5)
        processes[0].send_signal(number)
        assert processes[0].wait(timeout=15) == 0
        for client in open_:
            client.close()
    assert "Traceback" not in server.log.read_text()
    if "max_tokens" in "".join(map(str, STATES[state])):
        assert len(sd.Memory.load(file)) > 20


def test_a_client_that_hangs_up_leaves_nothing_behind(server: Server) -> None:
    """Its generation ends, so that the next request is alone; and no traceback."""
    with posted(server, stream=True, max_tokens=ENDLESS) as client:
        assert client.recv(1000).startswith(b"HTTP/1.0 200")
        client.recv(1000)
    started = time.monotonic()
    reply = server.complete("and now", 5)
    assert time.monotonic() - started < 30
    assert reply.usage.completion_tokens == 5
    assert speculation(server.complete("and then", 5))["batched"] is False
    assert "Client hung up" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


@FULL
def test_a_draft_model_serves_requests_too(with_draft_model: Server, pair: tuple[Any, Any]) -> None:
    """Behind the drafters given, tried in order; named alone; and compared by content."""
    server = with_draft_model
    expected = plain(pair, pair[1].encode(PROMPT), 60)
    reply = server.complete()
    assert reply.choices[0].text == expected
    assert speculation(reply)["drafter"] == "prompt-lookup+model"
    alone = server.complete(drafter="model")
    assert alone.choices[0].text == expected
    assert speculation(alone)["accepted"] == speculation(alone)["drafted"] == 45
    assert speculation(server.complete(drafter="prompt-lookup"))["drafted"] < 45


@FULL
def test_the_rule_of_a_request_counts(with_draft_model: Server) -> None:
    """A perfect draft model is accepted whole by rejection, and not by match."""
    options: dict[str, Any] = {"drafter": "model", "temperature": 1.0, "seed": 5}
    whole = speculation(with_draft_model.complete(rule="rejection", **options))
    assert whole["accepted"] == whole["drafted"] > 0
    part = speculation(with_draft_model.complete(rule="match", **options))
    assert part["accepted"] < part["drafted"]


@both_ways
def test_a_draft_model_with_another_tokenizer_may_be_refused_at_once(folder: Path) -> None:
    """Before the server starts."""
    same = ("--drafter", "model:tokenizers=same")
    flags = ("--draft-model", folder.parent / "swapped", *same, "--port", "1")
    done = run("server", "--model", folder, *flags)
    assert done.returncode == 2
    assert "token 'x' has id" in done.stderr


def drained(queue: Queue[Any]) -> list[Any]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


def context(prompt: list[int]) -> GenerationContext:
    return GenerationContext(False, False, lambda *a: {}, None, "normal", prompt)  # type: ignore[arg-type]


def test_a_channel_hides_the_seam(pair: tuple[Any, Any]) -> None:
    """Text, stop sequences and the client's stop reach across it; its end is not the end."""
    tokenizer = pair[1]
    tokens = tokenizer.encode("één the cat")  # each é is two tokens
    queue: Queue[Any] = Queue()
    channel = Channel(queue)
    channel.put(context([1]))
    channel.put((1, 2))
    detokenizer = tokenizer.detokenizer
    for token in tokens[:3]:
        detokenizer.add_token(token)
        channel.put(Response(detokenizer.last_segment, token, 0.0, None, ()))
    channel.pausing = True
    channel.put(None)
    assert channel.alive
    stops = make_stop_sequences(tokenizer, ["én the"])
    channel.resume(tokenizer.detokenizer, stops.matcher())
    later = context([1, *tokens[:3]])
    channel.put(later)
    channel.put((3, 4))
    fresh = tokenizer.detokenizer
    for token in tokens[3:]:
        fresh.add_token(token)
        channel.put(Response(fresh.last_segment, token, 0.0, None, ()))
    first, progress, *responses, end = drained(queue)
    assert (first.prompt, progress, end) == ([1], (1, 2), None)
    assert "".join(r.text for r in responses if r.finish_reason is None) == "één"
    assert responses[-1].finish_reason == "stop"
    assert later._should_stop
    assert not channel.alive


def test_a_channel_passes_on_that_the_client_is_gone(pair: tuple[Any, Any]) -> None:
    """The client stops its own context; the one in force is stopped with it."""
    channel = Channel(Queue())
    mine, later = context([1]), context([1, 2])
    channel.put(mine)
    channel.resume(pair[1].detokenizer, make_stop_sequences(pair[1], []).matcher())
    channel.put(later)
    mine.stop()
    channel.put(Response("a", 70, 0.0, None, ()))
    assert later._should_stop
    assert not channel.alive


def test_what_was_written_is_remembered_by_a_server_that_is_terminated(folder: Path) -> None:
    """A service manager stops it with SIGTERM: the memory is saved as after Ctrl-C."""
    file = folder.parent / "terminated.memory"
    with serving(folder, "--memory", str(file)) as server:
        server.complete(max_tokens=40)
        held = len(sd.Memory.load(file)) if file.exists() else 0
    assert held < len(sd.Memory.load(file)) <= 41
