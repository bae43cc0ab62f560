"""Several ranks of `mx.distributed`: the text of one machine on each of them, and none hangs.

Most jobs of `rank_worker.py` run in one pair of processes, whose start costs more than they do;
each test reads what one of them has found out.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from on_ranks import WORKER, free_ports, jobs_on_ranks, on_ranks, ranks, wait_for
from selection import FULL, in_one_test
from specdec_mlx import generate, lab
from specdec_mlx.draft_length.store import tuning_path
from specdec_mlx.rounds.ranks import ranks_of
from specdec_mlx.target.ranks import group_of

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


def agree(results: list[Any], job: str) -> None:
    """Every rank has found in this job what there should be."""
    for rank, jobs in enumerate(results):
        assert jobs[job], "a job without cases shows nothing"
        for case, (got, expected) in jobs[job].items():
            assert got == expected, f"rank {rank}, {case}"


@in_one_test("job", JOBS)
def test_ranks_do_alike_what_one_machine_does(found: list[Any], job: str) -> None:
    """Texts, ends, errors and caches of two ranks; see `rank_worker.py`."""
    agree(found, job)


@FULL
def test_further_jobs_are_done_alike(tmp_path: Path) -> None:
    """Drawn drafts, heads, drafters on every rank, families and pipelined targets."""
    results = jobs_on_ranks(FURTHER_JOBS, tmp_path)
    for job in FURTHER_JOBS:
        agree(results, job)


@FULL
@pytest.mark.parametrize("job", ["many_texts", "more_families"])
def test_twenty_prompts_and_every_family_are_as_on_one_machine(job: str, tmp_path: Path) -> None:
    """Greedy and sampled texts of 20 prompts, and of a tiny model of each family with `shard`."""
    agree(jobs_on_ranks([job], tmp_path), job)


@FULL
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_more_ranks_are_as_two(num_ranks: int, tmp_path: Path) -> None:
    """Tokens and ends on three and four ranks, of a target that is pipelined over them."""
    agree(jobs_on_ranks(["many_ranks"], tmp_path, num_ranks), "many_ranks")


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    """They end by themselves, with an error, and do not wait for the dead one."""
    (alive, _, said), (dead, *_) = on_ranks([WORKER, "dies"], tmp_path)
    assert dead == 17
    assert alive == 1
    assert "RuntimeError" in said


def test_what_is_learned_is_kept_for_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass costs otherwise on two machines than on one: they have files of their own."""
    alone = tuning_path("model")
    monkeypatch.setattr(mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2))
    assert tuning_path("model") != alone


class Split(nn.Module):
    """A model after `pipeline`, as far as it says among how many it is spread."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.pipeline_size = size


def test_a_pipelined_model_is_spread_over_the_ranks() -> None:
    """Its layers name no group, but it says how many share them; whole models meet nobody."""
    assert group_of(Split(2)) is not None
    assert group_of(Split(1)) is None
    assert ranks_of(lab.load_pair().target, None) is None


@FULL
def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    """`generate` spreads the model over the ranks, and prints once."""
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
