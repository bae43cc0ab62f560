"""Several ranks of `mx.distributed`: the text of one machine on each of them, and none hangs.

Most jobs of `rank_worker.py` run in one pair of processes, whose start costs more than they do.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

import on_ranks
from on_ranks import SENTENCES, WORKER, jobs_on_ranks
from selection import FULL, cases
from specdec_mlx import lab
from specdec_mlx.draft_length.store import tuning_path

JOBS = [
    (("texts",), 2),
    (("failures", "leaving", "arguments", "refused", "every_rank", "every_rank_fails"), 2),
    (("families", "pipelined", "many_texts"), 2),
    (("pipelined",), 3),
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


@FULL
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
