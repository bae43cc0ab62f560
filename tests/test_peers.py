"""Other packages as contenders: clear without them, identical and rightly counted with them.

The packages are no dependency of ours; where one is not installed, its tests are left out.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import mlx.nn as nn
import pytest

from benchmarks.peers import (
    MLX_DSPARK,
    MLX_OPTIQ,
    PEERS,
    _Rounds,
    make_peer,
)
from specdec_mlx.bench import run
from specdec_mlx.bench.contenders import make_contenders
from specdec_mlx.bench.prompts import Prompt
from specdec_mlx.bench.summary import ALL
from specdec_mlx.bench.timing import Settings, time_generation
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.models import load_model
from tiny_model_folder import write_model_folder

MODULES = {MLX_DSPARK: "mlx_dspark", MLX_OPTIQ: "optiq"}
SETTINGS = Settings(max_tokens=40)
peers = pytest.mark.parametrize("name", PEERS)


@cache
def loaded() -> tuple[nn.Module, Any]:
    return load_model(write_model_folder(Path(mkdtemp())))


def tasks() -> list[Any]:
    texts = ["the cat and the hat and the cat and the", "on and on and on", "x"]
    return run.make_tasks(loaded()[1], [Prompt(text, "chat", text) for text in texts])


@peers
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, before anything is run."""
    monkeypatch.setitem(sys.modules, MODULES[name], None)
    with pytest.raises(MissingPackageError, match=f"pip install {name}"):
        make_peer(name, *loaded())


@peers
def test_texts_are_plain_decodings(name: str) -> None:
    """Greedy texts are identical, some drafts are accepted and some are not."""
    pytest.importorskip(MODULES[name])
    model, tokenizer = loaded()
    contenders = [*make_contenders(model, [], []), make_peer(name, model, tokenizer)]
    record = run.run_bench(model, tasks(), contenders, SETTINGS, measure_cost=False)
    (result,) = (r for r in record.results if (r.drafter, r.category) == (name, ALL))
    assert result.identical == result.texts == 3
    assert 0 < result.accepted < result.drafted
    assert result.tokens_per_pass > 1
    assert result.host_ms_per_round is None


@peers
@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_counts_add_up(name: str, max_tokens: int) -> None:
    """Every token is a draft's or a pass's own, but for one that a cut round did not get to."""
    pytest.importorskip(MODULES[name])
    settings = Settings(max_tokens)
    for task in tasks():
        sample = time_generation(make_peer(name, *loaded()), task, settings, 0)
        assert len(sample.tokens) == max_tokens
        assert sample.passes + sample.accepted - len(sample.tokens) in (0, 1)
        assert sample.drafting_rounds <= sample.passes
        assert sample.accepted <= sample.drafted
        assert sample.first_seconds > 0
        assert (sample.decode_seconds > 0) == (max_tokens > 1)


def test_rounds_of_callbacks_become_tokens() -> None:
    """Each round is its accepted tokens and one more, at the round's time; the last one is cut."""

    class Target:
        def verify(self) -> str:
            return "logits"

    target = Target()
    rounds = _Rounds(target)
    assert target.verify() == target.verify() == "logits"
    first_at = rounds.first_at
    rounds.add(drafted=4, accepted=2, cap=4)
    rounds.add(drafted=0, accepted=0)
    rounds.add(drafted=3, accepted=3)
    emitted = list(rounds.emitted(list(range(7))))
    assert [e.token for e in emitted] == list(range(7))
    assert [e.from_draft for e in emitted] == [False, True, True, False, False, True, True]
    assert [e.at for e in emitted[:2]] == [first_at, rounds.rounds[0][2]]
    assert [e.counts for e in emitted[::3]] == [(1, 0, 0, None), (2, 4, 1, None), (4, 7, 2, None)]
