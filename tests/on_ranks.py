"""Processes that are the ranks of one `mx.distributed` group, over this machine's loopback."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

WORKER = str(Path(__file__).parent / "rank_worker.py")
TIMEOUT = 1200.0
"""Seconds after which ranks count as hanging: ten times what the longest job takes by itself."""

SENTENCES = (
    "The following statements are executed in the order in which they are written. An assignment "
    "statement evaluates the expression list and assigns the result. The following statements are "
)
"""The lab pair can go on from here, and from every place in between."""

TURN = Path(tempfile.gettempdir()) / "specdec-mlx-ranks.lock"
"""Held while ranks run. They wait for each other by looking again and again: on a machine with two
cores two groups at once take longer than one after the other."""


class Rank(NamedTuple):
    """One process. out, err: the files that it writes to."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path


@contextmanager
def ranks(command: Sequence[str], folder: Path, num_ranks: int = 2) -> Iterator[list[Rank]]:
    """The processes in the order of ranks, started as `mlx.launch --backend ring` starts them."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(num_ranks)]))
    places = {"MLX_HOSTFILE": str(hosts), "SPECDEC_MLX_CACHE": str(folder / "cache")}
    with ExitStack() as stack:
        fcntl.flock(stack.enter_context(TURN.open("a")), fcntl.LOCK_EX)
        started = []
        for rank in range(num_ranks):
            out, err = folder / f"{rank}.out", folder / f"{rank}.err"
            process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | places | {"MLX_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(out.open("wb")),
                stderr=stack.enter_context(err.open("wb")),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(Rank(process, out, err))
        yield started


def on_ranks(
    command: Sequence[str], folder: Path, num_ranks: int = 2
) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each rank; raises TimeoutExpired where one hangs."""
    with ranks(command, folder, num_ranks) as started:
        statuses = [rank.process.wait(TIMEOUT) for rank in started]
    texts = [(rank.out.read_text(), rank.err.read_text()) for rank in started]
    return [(status, *text) for status, text in zip(statuses, texts, strict=True)]


def jobs_on_ranks(names: Sequence[str], folder: Path, num_ranks: int = 2) -> list[Any]:
    """On each rank, what `rank_worker` found in these jobs: (case, got, expected)."""
    ended = on_ranks([WORKER, *names], folder, num_ranks)
    for status, _, err in ended:
        assert status == 0, err[-4000:]
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def free_ports(num_ports: int) -> list[int]:
    """Ports that nobody listens on at present."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def is_heard(port: int, started: Sequence[Rank]) -> bool:
    """True if somebody listens there; fails where a rank has ended."""
    for rank in started:
        assert rank.process.poll() is None, rank.err.read_text()[-4000:]
    with socket.socket() as each:
        return each.connect_ex(("127.0.0.1", port)) == 0
