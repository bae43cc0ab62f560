"""The questions for other packages tell a right package from wrong ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from benchmarks.conformance import questions
from benchmarks.conformance.peers import PEERS, NotOfferedError, Peer, Written
from benchmarks.conformance.questions import NO, NOT_OFFERED, REFUSES, YES, answers, pooled
from selection import FULL

OURS = PEERS["specdec_mlx, look-up"]


def changing(**changes: Any) -> Peer:
    """Our look-up, with something changed in its answers."""
    return replace(OURS, **changes)


def a_token_late(model: Any, prompt: list[int], call: Any) -> Written:
    """Another token at the end."""
    written = OURS.write(model, prompt, call)
    return written._replace(tokens=[*written.tokens[:-1], (written.tokens[-1] + 1) % 6])


def biased(model: Any, prompt: list[int], call: Any) -> Written:
    """The likeliest token more often than its chance."""
    if call.seed % 4:
        return OURS.write(model, prompt, call)
    greedy = OURS.write(model, prompt, replace(call, temp=0.0))
    return greedy._replace(num_accepted=1)


def refusing(model: Any, prompt: list[int], call: Any) -> Written:
    raise ValueError("no such model")


def lacking(model: Any, prompt: list[int], call: Any) -> Written:
    raise NotOfferedError("no temperature")


def never_drafting(model: Any, prompt: list[int], call: Any) -> Written:
    return OURS.write(model, prompt, call)._replace(num_accepted=0)


def keeping_a_token_too_many(model: Any, prompt: list[int], call: Any) -> Written:
    """A cache that has read a token that is not in the text."""
    written = OURS.write(model, prompt, call)
    if call.cache is not None:
        model(mx.array([[3]]), cache=call.cache)
    return written


def word(peer: Peer, column: str) -> str:
    """The answer to one question."""
    (answer,) = dict(answers(peer, [column])).values()
    return answer.word


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "NUM_PROMPTS", 2)
    monkeypatch.setattr(questions, "NUM_DRAWS", 400)


def test_texts_are_compared_token_by_token() -> None:
    assert word(OURS, "greedy text equal") == YES
    assert word(changing(write=a_token_late), "greedy text equal") == NO
    assert word(changing(write=never_drafting), "greedy text equal") == "not exercised"
    assert word(changing(write=refusing), "hybrid") == REFUSES
    assert word(changing(write=lacking), "hybrid") == NOT_OFFERED


@FULL
def test_a_biased_sampler_is_found() -> None:
    assert word(OURS, "distribution exact") == YES
    assert word(changing(write=biased), "distribution exact") == NO


@pytest.mark.parametrize(
    "column", ["rewinds after a rejection", "closed in the middle", "exception in the middle"]
)
def test_caches_are_continued(column: str) -> None:
    assert word(OURS, column) == YES
    if column != "exception in the middle":
        assert word(changing(write=keeping_a_token_too_many), column) == NO


def test_rare_cells_are_joined() -> None:
    due, got = pooled(np.array([50.0, 1.0, 2.0, 40.0, 9.0]), np.arange(5.0))
    assert due.sum() == 102
    assert got.sum() == 10
    assert due.min() >= 10
