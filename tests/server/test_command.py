"""How `specdec-mlx server` begins and ends, as a process: its exit codes and its words."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import command_line
import specdec_mlx as sd
from on_ranks import free_ports
from selection import cases
from serving import chat, serving, until
from specdec_mlx.server import command
from specdec_mlx.server.command import Signals, address_of
from tiny_model_folder import write_model_folder

SECONDS = 240  # after which a test that waits fails
MANY = {"prompt": "the cat in the hat", "max_tokens": 100_000, "stream": True}
LONG = {"prompt": "a" * 100_000, "max_tokens": 5, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    return write_model_folder(folder, max_position_embeddings=2**17)


@contextmanager
def started(*flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a process; what it says is in its output."""
    server = subprocess.Popen(
        [sys.executable, "-m", "specdec_mlx.server", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def is_taken(port: int) -> bool:
    """True once a server has the port, whether it answers or not."""
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def connected(port: int, server: subprocess.Popen[bytes]) -> socket.socket:
    """A connection, once the port answers."""
    made: list[socket.socket] = []

    def answers() -> bool:
        assert server.poll() is None
        try:
            made.append(socket.create_connection(("127.0.0.1", port), timeout=SECONDS))
        except OSError:
            return False
        return True

    until(answers)
    return made[0]


def posted(port: int, server: subprocess.Popen[bytes], body: dict[str, object]) -> socket.socket:
    """A connection on which a completion was asked for."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Length: {len(data)}\r\n\r\n"
    connection = connected(port, server)
    connection.sendall(head.encode() + data)
    return connection


STATES: dict[str, list[dict[str, object]]] = {
    "loading": [],
    "idle": [],
    "one text is written": [MANY],
    "two texts are written": [MANY, MANY],
    "a prompt is read": [LONG],
    "two prompts are read": [LONG, LONG],
}


ENDINGS = [*((state, signal.SIGTERM) for state in STATES), ("idle", signal.SIGINT)]


@pytest.mark.parametrize(
    ("state", "number"), cases(ENDINGS, ENDINGS[-1], ("one text is written", signal.SIGTERM))
)
def test_a_signal_ends_the_server_whatever_it_does(
    state: str, number: signal.Signals, folder: Path, tmp_path: Path
) -> None:
    """With exit code 0; clients are told, and the memory has what was written by then."""
    (port,) = free_ports(1)
    memory = tmp_path / "written.memory"
    flags = "--model", str(folder), "--port", str(port), "--no-tuning", "--memory", str(memory)
    with started(*flags, "--prefill-step-size", "64") as server:
        if state == "loading":
            until(lambda: is_taken(port))
        else:
            connected(port, server).close()
        connections = [posted(port, server, body) for body in STATES[state]]
        received = [b"" for _ in connections]
        for i, connection in enumerate(connections):
            words, count = (b"data: ", 30) if "written" in state else (b"200 OK", 1)
            while received[i].count(words) < count:
                received[i] += connection.recv(4096)
        server.send_signal(number)
        for i, connection in enumerate(connections):
            while part := connection.recv(2**16):
                received[i] += part
        output = server.communicate(timeout=SECONDS)[0].decode()
        assert server.returncode == 0, output
    assert "Traceback" not in output
    assert "terminate called" not in output
    for answer in received:
        assert b"The server is ending." in answer
    if "written" in state:
        assert len(sd.Memory.load(memory)) > 20


def test_a_second_signal_ends_the_process_whatever_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is kept is written first. A signal to a group of processes may come twice at once."""
    done: list[str] = []
    monkeypatch.setattr(command, "LONGEST_END", 1e6)
    monkeypatch.setattr(os, "_exit", lambda code: done.append(f"exit {code}"))
    signals = Signals()
    signals.end, signals.keep = lambda: done.append("end"), lambda: done.append("keep")
    with signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert done == ["end"]
        monkeypatch.setattr(command, "AT_ONCE", 0.0)
        signal.raise_signal(signal.SIGINT)
        assert done == ["end", "keep", "exit 0"]


@pytest.mark.parametrize("keeps", [lambda: None, lambda: threading.Event().wait()])
def test_the_process_ends_though_nothing_ends_in_it(
    keeps: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A while after the first signal, also where nothing can be kept."""
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    monkeypatch.setattr(command, "LONGEST_END", 0.01)
    monkeypatch.setattr(command, "KEEPING", 0.01)
    signals = Signals()
    signals.end, signals.keep = lambda: None, keeps
    with signals:
        signal.raise_signal(signal.SIGTERM)
        assert ended.wait(SECONDS)


STARTS = [["-m", "specdec_mlx.server"], ["-m", "specdec_mlx", "server"], ["specdec-mlx", "server"]]
KILL = "import os, time\nos.kill(os.getpid(), {number})\ntime.sleep(30)\n"
AT_EXIT = "import atexit, os\natexit.register(os.kill, os.getpid(), {number})\n"
EARLY = {"mlx/core": KILL, "sitecustomize": AT_EXIT}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("start", STARTS, ids=" ".join)
@pytest.mark.parametrize("module", cases(EARLY, "mlx/core"))
def test_a_signal_ends_the_command_from_its_first_import_to_its_last_line(
    module: str, start: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    """With exit code 0: in place of a module that takes a while is one that has the signal sent."""
    stub = tmp_path / f"{module}.py"
    stub.parent.mkdir(exist_ok=True)
    (stub.parent / "__init__.py").touch()
    stub.write_text(EARLY[module].format(number=int(number)))
    flags = ["--help"]
    if module == "mlx/core":  # which is imported once the flags are right
        flags = ["--port", str(free_ports(1)[0]), "--log-level", "ERROR"]
    program = Path(sys.executable)
    command: list[str | Path] = [program, *start]
    if start[0] != "-m":
        command = [program.parent / start[0], *start[1:]]
    run = subprocess.run(
        [*command, *flags],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (run.returncode, run.stderr) == (0, "")


POISON = "raise SystemExit('{name} was imported')"
WRONG = {
    "--no-such-flag": "unrecognized arguments: --no-such-flag",
    "--port x": "--port: 'x': expected an int from 0 to 65535.",
    "--temp -1": "argument --temp: '-1'",
    "--top-p nan": "argument --top-p: 'nan'",
    "--drafter eagle": "Unknown drafter 'eagle'",
    "--rule nothing": "Unknown rule 'nothing'",
    "--num-draft-tokens x": "'x': expected an int >= 0",
    "--request-models given": "needs --model",
    "--adapter-path nowhere": "no folder with an adapter_config.json",
    "--prefill-step-size 0": "expected an int >= 1",
    "--memory-for user": "needs --memory process",
}


def test_help_wrong_flags_and_a_taken_port_are_answered_without_mlx(tmp_path: Path) -> None:
    """Nor is anything imported that takes as long. With right flags, a line says what is loaded
    before MLX is imported.
    """
    for name in ("mlx", "mlx_lm", "transformers"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(POISON.format(name=name), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(sd.__file__).parent.parent}"}

    def answer(*flags: str, module: str = "specdec_mlx.server") -> tuple[int, str, str]:
        command = [sys.executable, "-m", *module.split(), *flags]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
        return done.returncode, done.stdout, done.stderr

    for flag in ("--help", "--help-all"):
        status, said, wrong = answer(flag, module="specdec_mlx server")
        assert (status, wrong) == (0, "")
        assert "--draft-model" in said
    for typed, words in WRONG.items():
        status, said, wrong = answer(*typed.split())
        assert (status, said) == (2, ""), wrong
        assert words in wrong
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        status, _, wrong = answer("--port", port, "--model", "m")
        assert status == 1
        assert wrong.startswith(f"specdec-mlx server: Port {port} of 127.0.0.1 is not free (")
    status, _, wrong = answer("--port", port, "--model", "some/model")
    first, second = wrong.splitlines()
    assert first.endswith("Loading some/model ...")
    assert second == "mlx was imported"


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:80/v1"),
        ("mac.local", "http://mac.local:80/v1"),
        ("0.0.0.0", "http://127.0.0.1:80/v1"),
        ("::1", "http://[::1]:80/v1"),
    ],
)
def test_the_address_can_be_copied(host: str, address: str) -> None:
    assert address_of(host, 80) == address


def test_the_log_has_the_address_and_a_line_for_each_request(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And no other line of the server's while requests are served."""
    caplog.set_level("INFO")
    with serving("--model", str(folder), "--no-tuning") as client:
        said = [record.getMessage() for record in caplog.records]
        assert any(line.startswith(f"Ready: {str(client.base_url).rstrip('/')} (") for line in said)
        caplog.clear()
        for _ in range(2):
            chat(client, max_tokens=5)
        lines = [r.getMessage() for r in caplog.records if r.name.startswith(("root", "uvicorn"))]
    first, second = (line.removeprefix(f"{folder}: ") for line in lines)
    assert re.fullmatch(r"\d+ tokens read, 0 reused, 5 written, [\d.]+ a pass, [\d.]+ s", first)
    assert re.fullmatch(
        r"1 tokens read, [1-9]\d* reused, 5 written, [\d.]+ a pass, [\d.]+ s", second
    )


def test_a_name_writes_no_line_of_its_own_into_the_log(folder: Path) -> None:
    (port,) = free_ports(1)
    with started("--model", str(folder), "--port", str(port), "--no-tuning") as server:
        with posted(port, server, MANY | {"model": "\x1b[2J\nForged"}) as connection:
            connection.recv(4096)
        assert server.stdout is not None
        line = next(line for line in server.stdout if b"hung up" in line)
    assert rb"INFO - \x1b[2J\nForged: client hung up" in line


def test_a_port_that_is_taken_is_named_before_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = command_line.run("server", "--model", "/nowhere", "--port", port)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "specdec-mlx" in line]
    assert line.startswith(f"specdec-mlx server: Port {port} of 127.0.0.1 is not free (")


def test_without_the_extra_the_command_names_it(tmp_path: Path) -> None:
    """In one line, of whatever package is missing."""
    script = (
        "import sys; sys.modules['uvicorn'] = None\n"
        "from specdec_mlx.server.command import run\n"
        "run([])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    words = (
        "The server needs uvicorn, which is not installed. Use: pip install 'specdec-mlx[server]'"
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith(words)
