"""A server under bad requests, and how long it takes to end.

    python -m benchmarks.server_load bodies    # pace of a stream beside large bodies, and memory
    python -m benchmarks.server_load endings   # exit codes and processor time after a signal

The models are random llamas, written to a temporary folder. `bodies` streams a long text to one
client, alone and while another client sends bodies one after the other, three times in turn, and
says how many pieces came in a second of each. `endings` sends SIGINT and SIGTERM in four states,
five times each.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import psutil  # type: ignore[import-untyped]
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import load_tokenizer

from specdec_mlx import lab

MB = 10**6
CHAT = "/v1/chat/completions"
STATES = "idle", "streaming", "reading a prompt", "loading a model"
SIZE = {"hidden_size": 256, "num_hidden_layers": 8, "intermediate_size": 1024}
LARGE = {"hidden_size": 2048, "num_hidden_layers": 8, "intermediate_size": 8192}


def write_model(folder: Path, size: dict[str, int], num_positions: int) -> Path:
    """A random llama with the tokenizer of the lab's pair."""
    folder.mkdir(parents=True)
    source = lab.target_path()
    for path in source.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = {
        "model_type": "llama",
        "num_attention_heads": 8,
        "rms_norm_eps": 1e-5,
        **size,
        "vocab_size": len(load_tokenizer(source)),
        "max_position_embeddings": num_positions,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """A server as a process, on a port that answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specdec_mlx.server", "--model", str(model)]
    command += ["--port", str(port), "--no-tuning", "--log-level", "ERROR", *flags]
    server = subprocess.Popen(command)
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        yield port, server
    finally:
        server.kill()
        server.wait()


def posted(port: int, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """A connection on which a request was sent."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(head.encode() + data)
    return connection


def streaming(port: int) -> socket.socket:
    """A stream without an end, after its first pieces: the letter "a" again and again."""
    body = {"prompt": "import", "max_tokens": 10**6, "stream": True, "drafter": "none"}
    stream = posted(port, {**body, "logit_bias": {"97": 100}}, "/v1/completions")
    received = b""
    while received.count(b"data: ") < 10:
        received += stream.recv(2**16)
    return stream


# Bodies


def of_text(num_bytes: int) -> bytes:
    """A chat of so many bytes."""
    text = "a " * (num_bytes // 2)
    return json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 5}).encode()


BODIES: dict[str, Callable[[], bytes]] = {
    "1 MB of text": lambda: of_text(1 * MB),
    "20 MB of text": lambda: of_text(20 * MB),
    "50 MB of text": lambda: of_text(50 * MB),
    "64 MB of text": lambda: of_text(64 * MB),
    "10,000 levels": lambda: b'{"messages":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "20 MB of levels": lambda: b"[" * 20 * MB,
    "20 MB of small lists": lambda: b'{"messages":[' + b"[]," * (20 * MB // 3) + b"[]]}",
}
ENDLESS = "without an end"
PHASES = 3  # alone and beside bodies, in turn


def send(port: int, body: bytes) -> str:
    """Status of the reply to a body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request("POST", CHAT, body)
        return str(connection.getresponse().status)
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()


def send_endlessly(port: int, end: float) -> str:
    """Send a body that goes on until the server hangs up, or until a time."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        chunk = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        with suppress(OSError):
            while time.monotonic() < end:
                connection.sendall(chunk)
            return "unfinished"
        return "closed"


def bodies(seconds: float, num_positions: int) -> None:
    """Print the pace of a stream beside each kind of body, and how memory grew."""
    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "model", SIZE, num_positions)
        with serving(model) as (port, server):
            memory = psutil.Process(server.pid)
            print(f"| bodies, {PHASES} times {seconds:.0f} s | statuses | pace | memory |")
            print("|---|---|---|---|")
            for name in (*BODIES, ENDLESS):
                num_bytes = len(BODIES[name]()) if name in BODIES else 0
                statuses, ratios = set[str](), list[float]()
                with streaming(port) as stream, closing(Pieces(stream)) as pieces:
                    rss = most = memory.memory_info().rss
                    for _ in range(PHASES):
                        before = pieces.rate(seconds / 2)
                        with Sender(port, name, seconds) as sender:
                            begun, first = time.monotonic(), pieces.number
                            while sender.process.poll() is None:
                                most = max(most, memory.memory_info().rss)
                                time.sleep(0.01)
                            beside = (pieces.number - first) / (time.monotonic() - begun)
                            statuses |= set(sender.replies())
                        # a stream slows down as its context grows
                        ratios.append(2 * beside / (before + pieces.rate(seconds / 2)))
                words = f"{(most - rss) / MB:.0f} MB"
                if num_bytes >= MB:
                    words += f", {(most - rss) / num_bytes:.2f} of the body"
                kinds = ", ".join(sorted(statuses))
                print(f"| {name} | {kinds} | {median(ratios):.2f} | {words} |", flush=True)


class Pieces:
    """Counts the pieces of a stream in a thread, so that the server never waits for its client."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream, self.number, self.is_open = stream, 0, True
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        self.stream.settimeout(0.5)
        while self.is_open:
            with suppress(TimeoutError):
                self.number += self.stream.recv(2**16).count(b"data: ")

    def rate(self, seconds: float) -> float:
        """Pieces in a second, from now on for so long."""
        first = self.number
        time.sleep(seconds)
        return (self.number - first) / seconds

    def close(self) -> None:
        """Stop counting."""
        self.is_open = False
        self.thread.join()


class Sender:
    """A process that sends one body after the other for some seconds; the last is waited for."""

    def __init__(self, port: int, name: str, seconds: float) -> None:
        code = f"from benchmarks.server_load import repeat; repeat({port}, {name!r}, {seconds})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> Sender:
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdout.readline()  # it has its body, and begins when it is told
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()

    def replies(self) -> list[str]:
        """Statuses of the replies."""
        assert self.process.stdout is not None
        return self.process.stdout.read().split()


def repeat(port: int, name: str, seconds: float) -> None:
    """Send bodies of a kind, after a line from the standard input; print the statuses."""
    body = BODIES[name]() if name in BODIES else b""
    print("ready", flush=True)
    sys.stdin.readline()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        print(send(port, body) if body else send_endlessly(port, end), flush=True)


# Endings


def endings(times: int) -> None:
    """Print exit codes, and seconds of processor and clock from a signal to the end."""
    with tempfile.TemporaryDirectory() as place:
        model = write_model(Path(place) / "model", SIZE, 10**6)
        large = write_model(Path(place) / "large", LARGE, 10**6)
        print("| state | signal | exit codes | most seconds of processor | most seconds |")
        print("|---|---|---|---|---|")
        for state in STATES:
            for number in (signal.SIGINT, signal.SIGTERM):
                ends = [ending(model, large, state, number) for _ in range(times)]
                codes = ", ".join(sorted({str(code) for code, _, _ in ends}))
                spent, took = (max(end[i] for end in ends) for i in (1, 2))
                print(
                    f"| {state} | {number.name} | {codes} | {spent:.2f} | {took:.2f} |", flush=True
                )


def ending(
    model: Path, large: Path, state: str, number: signal.Signals
) -> tuple[int, float, float]:
    """Exit code, and seconds of processor and clock, of one server that gets a signal."""
    with serving(model, "--max-tokens", "1000000") as (port, server):
        if state == "streaming":
            streaming(port)
        elif state == "reading a prompt":
            text = "import os and sys " * 10_000
            posted(port, {"prompt": text, "stream": True}, "/v1/completions").recv(100)
        elif state == "loading a model":
            posted(port, {"model": str(large), "messages": [{"role": "user", "content": "go"}]})
            time.sleep(0.3)
        process = psutil.Process(server.pid)
        before = sum(process.cpu_times()[:2])
        children, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        os.kill(server.pid, number)
        code, took = server.wait(), time.monotonic() - begun
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        whole = after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime
        return code, whole - before, took


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two."""
    parser = argparse.ArgumentParser(prog="benchmarks.server_load", description=__doc__)
    parser.add_argument("what", choices=("bodies", "endings"))
    parser.add_argument("--seconds", type=float, default=10.0, help="of each kind of bodies")
    parser.add_argument("--positions", type=int, default=2**17, help="of the model")
    parser.add_argument("--times", type=int, default=5, help="each ending is measured")
    args = parser.parse_args(arguments)
    if args.what == "bodies":
        bodies(args.seconds, args.positions)
    else:
        endings(args.times)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
