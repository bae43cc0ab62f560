"""Several ranks of `mx.distributed`: the text of one machine on each of them, and none hangs.

Most jobs of `rank_worker.py` run in one pair of processes, whose start costs more than they do.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import openai
import pytest

import on_ranks
from on_ranks import SENTENCES, WORKER, jobs_on_ranks
from selection import FULL, cases
from serving import complete, text_of, until
from specdec_mlx import generate, lab
from specdec_mlx.draft_length.store import tuning_path

JOBS = [
    (("texts", "failures", "leaving", "arguments"), 2),
    (("refused", "every_rank", "every_rank_fails", "families", "pipelined", "many_texts"), 2),
    *((("pipelined",), num_ranks) for num_ranks in (3, 4)),
]


@pytest.mark.parametrize(("jobs", "num_ranks"), cases(JOBS, JOBS[0]))
def test_ranks_do_alike_what_one_machine_does(
    jobs: tuple[str, ...], num_ranks: int, tmp_path: Path
) -> None:
    """Texts, ends, errors and caches: every rank has found in each job what there should be."""
    for rank, found in enumerate(jobs_on_ranks(jobs, tmp_path, num_ranks)):
        assert {*jobs} <= {case for case, *_ in found}
        for case, got, expected in found:
            assert got == expected, f"rank {rank}, {case}"


def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path: Path) -> None:
    """They end by themselves, with an error, and do not wait for the dead one."""
    (alive, _, said), (dead, *_) = on_ranks.on_ranks([WORKER, "dies"], tmp_path)
    assert dead == 17
    assert alive == 1
    assert "RuntimeError" in said


def test_what_is_learned_is_kept_for_each_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass costs otherwise on two machines than on one: they have files of their own."""
    alone = tuning_path("model")
    monkeypatch.setattr(mx.distributed, "init", lambda: SimpleNamespace(size=lambda: 2))
    assert tuning_path("model") != alone


@FULL
def test_only_the_first_rank_speaks(tmp_path: Path) -> None:
    """`generate` spreads the model over the ranks, and prints once."""
    arguments = ["--model", str(lab.target_path()), "--prompt", SENTENCES, "--max-tokens", "24"]
    command = ["-m", "specdec_mlx", "generate", *arguments, "--ignore-chat-template"]
    (first, said, error), (second, silence, _) = on_ranks.on_ranks(command, tmp_path)
    assert (first, second) == (0, 0), error
    assert "Speculation:" in said
    assert silence == ""


@FULL
def test_the_server_answers_on_two_ranks_as_on_one(tmp_path: Path) -> None:
    """One client and then two at a time, some of which hang up in mid-stream: no text is wrong."""
    (port,) = on_ranks.free_ports(1)
    flags = ["--model", str(lab.target_path()), "--draft-model", str(lab.draft_path())]
    flags += ["--drafter", "prompt-lookup", "--port", str(port)]
    requests = [(SENTENCES[i : 60 + 7 * i % 90], i % 3 == 2) for i in range(24)]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    got: list[tuple[str, str]] = []

    def ask(own: list[tuple[str, bool]]) -> None:
        for prompt, hangs_up in own:
            reply = complete(client, prompt, max_tokens=24, stream=hangs_up)
            if hangs_up:
                next(reply)
                reply.close()
            else:
                got.append((prompt, text_of(reply)))

    with on_ranks.ranks(["-m", "specdec_mlx", "server", *flags], tmp_path) as started:
        until(lambda: on_ranks.is_heard(port, started), on_ranks.TIMEOUT)
        ask(requests[:12])
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ask, (requests[12::2], requests[13::2])))
    assert len(got) == 16
    pair = lab.load_pair()
    for prompt, text in got:
        assert text == str(generate(pair.target, pair.tokenizer, prompt, max_tokens=24)), prompt
