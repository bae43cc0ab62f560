"""Processes that are the ranks of one `mx.distributed` group, over this machine's loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

HERE = Path(__file__).parent
WORKER = HERE / "rank_worker.py"
TIMEOUT = 300.0
"""Seconds after which ranks count as hanging; a loaded machine takes a tenth of that to start."""


@contextmanager
def ranks(
    command: Sequence[str], folder: Path, num_ranks: int = 2, **environment: str
) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes, in the order of ranks, started as `mlx.launch --backend ring` starts them.

    command: arguments of Python. folder: for the list of hosts. None outlives the block.
    """
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in _free_ports(num_ranks)]))
    shared = {**os.environ, "MLX_HOSTFILE": str(hosts), "PYTHONUNBUFFERED": "1", **environment}
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**shared, "MLX_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def on_ranks(
    command: Sequence[str], folder: Path, num_ranks: int = 2, **environment: str
) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each rank; raises TimeoutExpired where one hangs."""
    with ranks(command, folder, num_ranks, **environment) as processes:
        ended = [(p.communicate(timeout=TIMEOUT), p) for p in processes]
        return [(p.returncode, out, err) for (out, err), p in ended]


def jobs_on_ranks(
    names: Sequence[str], folder: Path, num_ranks: int = 2
) -> list[dict[str, object]]:
    """What `rank_worker` found out in these jobs, on each rank: the name of a case -> a result."""
    found = []
    for status, out, err in on_ranks([str(WORKER), *names], folder, num_ranks):
        assert status == 0, err[-4000:]
        found.append(json.loads(out.splitlines()[-1]))
    return found


def _free_ports(num_ports: int) -> list[int]:
    """Ports that nobody listens on at present."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
