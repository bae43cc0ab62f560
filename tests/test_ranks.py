"""Several ranks of `mx.distributed`: the text of one machine on each of them, and none hangs.

Most jobs of `rank_worker.py` run in one pair of processes, whose start costs more than they do;
each test reads what one of them has found out.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import pytest

from selection import FULL, in_one_test
from specdec_mlx import generate, lab
from specdec_mlx.draft_length.store import tuning_path
from specdec_mlx.rounds.ranks import ranks_of
from specdec_mlx.target.ranks import group_of

WORKER = str(Path(__file__).parent / "rank_worker.py")
TIMEOUT = 1200.0
"""Seconds after which ranks count as hanging: ten times what the longest job takes by itself."""

TURN = Path(tempfile.gettempdir()) / "specdec-mlx-ranks.lock"
"""Held while ranks run. They wait for each other by looking again and again: on a machine with two
cores two groups at once take longer than one after the other."""


class Rank(NamedTuple):
    """One process. out, err: the files that it writes to."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path


@contextmanager
def ranks(
    command: Sequence[str], folder: Path, num_ranks: int = 2, **environment: str
) -> Iterator[list[Rank]]:
    """The processes in the order of ranks, started as `mlx.launch --backend ring` starts them."""
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(num_ranks)]))
    shared = {**os.environ, "MLX_HOSTFILE": str(hosts), "SPECDEC_MLX_CACHE": str(folder / "cache")}
    with ExitStack() as stack:
        fcntl.flock(stack.enter_context(TURN.open("a")), fcntl.LOCK_EX)
        started = []
        for rank in range(num_ranks):
            out, err = folder / f"{rank}.out", folder / f"{rank}.err"
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**shared, **environment, "MLX_RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=stack.enter_context(out.open("wb")),
                stderr=stack.enter_context(err.open("wb")),
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(Rank(process, out, err))
        yield started


def on_ranks(
    command: Sequence[str], folder: Path, num_ranks: int = 2, **environment: str
) -> list[tuple[int, str, str]]:
    """Exit status, stdout and stderr of each rank; raises TimeoutExpired where one hangs."""
    with ranks(command, folder, num_ranks, **environment) as started:
        statuses = [rank.process.wait(timeout=TIMEOUT) for rank in started]
        texts = [(rank.out.read_text(), rank.err.read_text()) for rank in started]
        return [(status, *said) for status, said in zip(statuses, texts, strict=True)]


def jobs_on_ranks(names: Sequence[str], folder: Path, num_ranks: int = 2) -> list[Any]:
    """On each rank, what `rank_worker` found out in these jobs: name -> case -> [got, expected]."""
    ended = on_ranks([WORKER, *names], folder, num_ranks)
    for status, _, err in ended:
        assert status == 0, err[-4000:]
    return [json.loads(out.splitlines()[-1]) for _, out, _ in ended]


def free_ports(num_ports: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def wait_for(port: int, started: Sequence[Rank]) -> None:
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until:
        for rank in started:
            assert rank.process.poll() is None, rank.err.read_text()[-4000:]
        with socket.socket() as each:
            if each.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise TimeoutError(f"nobody listens on port {port}")


JOBS = ("texts", "failures", "leaving", "recurrent", "arguments")
FURTHER_JOBS = ("block", "heads", "every_rank", "every_rank_fails", "families", "pipelined")
SENTENCES = (
    "The following statements are executed in the order in which they are written. An assignment "
    "statement evaluates the expression list and assigns the result. The following statements are "
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Results of two ranks in all jobs that always run, once for all of xdist's workers."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    kept = folder / "found-on-ranks.json"
    with (folder / "found-on-ranks.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            results = jobs_on_ranks(JOBS, tmp_path_factory.mktemp("ranks"))
            kept.write_text(json.dumps(results))
    return list(json.loads(kept.read_text()))


def agree(results: list[Any], *jobs: str) -> None:
    for (rank, found), job in product(enumerate(results), jobs):
        assert found[job], "a job without cases shows nothing"
        for case, (got, expected) in found[job].items():
            assert got == expected, f"rank {rank}, {job}: {case}"


@in_one_test("job", JOBS)
def test_ranks_do_alike_what_one_machine_does(found: list[Any], job: str) -> None:
    """Texts, ends, errors and caches of two ranks; see `rank_worker.py`."""
    agree(found, job)


@FULL
@pytest.mark.parametrize(
    ("num_ranks", "jobs"),
    [(2, FURTHER_JOBS), (2, ["many_texts"]), (2, ["more_families"])]
    + [(num_ranks, ["many_ranks"]) for num_ranks in (3, 4)],
)
def test_further_jobs_are_done_alike(num_ranks: int, jobs: list[str], tmp_path: Path) -> None:
    """Drawn drafts, heads, drafters on every rank, families and pipelined targets; 20 prompts; and
    a target that is pipelined over three and four ranks."""
    agree(jobs_on_ranks(jobs, tmp_path, num_ranks), *jobs)


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    (alive, _, said), (dead, *_) = on_ranks([WORKER, "dies"], tmp_path)
    assert dead == 17
    assert alive == 1
    assert "RuntimeError" in said


def test_what_is_learned_is_kept_for_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tuning_path("model")
    monkeypatch.setattr(mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2))
    assert tuning_path("model") != alone


def test_a_pipelined_model_is_spread_over_the_ranks() -> None:
    for size in (2, 1):
        model = nn.Module()
        model.pipeline_size = size
        assert (group_of(model) is not None) == (size == 2)
    assert ranks_of(lab.load_pair().target, None) is None


@FULL
def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    arguments = ["--model", str(lab.target_path()), "--prompt", SENTENCES, "--max-tokens", "24"]
    command = ["-m", "specdec_mlx", "generate", *arguments, "--ignore-chat-template"]
    (first, said, error), (second, silence, _) = on_ranks(command, tmp_path)
    assert (first, second) == (0, 0), error
    assert "Speculation:" in said
    assert silence == ""


def complete(port: int, prompt: str, cut_after: int | None) -> str:
    """The server's text; or what of a stream is read before its client hangs up."""
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": cut_after is not None}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        if cut_after is not None:
            return "".join(reply.readline().decode() for _ in range(cut_after))
        return str(json.loads(reply.read())["choices"][0]["text"])


@FULL
def test_the_server_answers_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    """One client and then two at a time, some of which hang up in mid-stream: no text is wrong."""
    pair = lab.load_pair()
    (port,) = free_ports(1)
    flags = ["--model", str(lab.target_path()), "--draft-model", str(lab.draft_path())]
    flags += ["--drafter", "prompt-lookup", "--port", str(port)]
    requests = [(SENTENCES[i : 60 + 7 * i % 90], (None, None, 3)[i % 3]) for i in range(24)]
    got: list[tuple[str, str]] = []

    def client(own: list[tuple[str, int | None]]) -> None:
        for prompt, cut_after in own:
            text = complete(port, prompt, cut_after)
            if cut_after is None:
                got.append((prompt, text))

    with ranks(["-m", "specdec_mlx", "server", *flags], tmp_path) as started:
        wait_for(port, started)
        client(requests[:12])
        threads = [threading.Thread(target=client, args=(requests[12 + i :: 2],)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 16, [rank.err.read_text()[-2000:] for rank in started]
    for prompt, text in got:
        assert text == str(generate(pair.target, pair.tokenizer, prompt, max_tokens=24)), prompt
