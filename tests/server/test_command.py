"""How `specdec-mlx server` begins and ends, as a process: its exit codes and its words."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import command_line
import specdec_mlx as sd
from on_ranks import free_ports
from selection import cases
from serving import until
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
    program = Path(sys.executable)
    command: list[str | Path] = [program, *start]
    if start[0] != "-m":
        command = [program.parent / start[0], *start[1:]]
    run = subprocess.run(
        [*command, "--help"],
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert (run.returncode, run.stderr) == (0, "")


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
        "from specdec_mlx.server.command import run_server\n"
        "run_server([])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    words = (
        "The server needs uvicorn, which is not installed. Use: pip install 'specdec-mlx[server]'"
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith(words)
