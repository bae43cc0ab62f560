"""The target of a generation: what it is asked changes nothing, and its methods are its class's."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

import tiny
from specdec_mlx.caches import Rollback
from specdec_mlx.contracts import Draft
from specdec_mlx.options import Options
from specdec_mlx.target import Verifier

PROMPT = [5, 9, 2, 7]


def verifier(name: str, end_token: int = 3) -> Verifier:
    model = tiny.build(name)
    options = Options(tokenizer=SimpleNamespace(eos_token_ids=[end_token]))
    caches = Rollback(make_prompt_cache(model))
    return Verifier(model, caches, options)


def test_to_ask_how_wide_a_pass_may_be_changes_nothing():
    """Recurrences go in steps from the first pass on that verifies, and not for the question."""
    target = verifier("mamba2")
    target.feed(mx.array(PROMPT))
    before = dict(vars(target.rollback))
    assert target.measure_width()
    assert vars(target.rollback) == before
    assert target.rollback.states is None
    target.launch(PROMPT[-1:], Draft([4, 6]), 0).read()
    assert target.rollback.states is not None


def test_a_draft_ends_with_the_text_whether_a_drafter_asked_for_a_context_or_not():
    target = verifier("llama", end_token=6)
    assert list(target.checked(Draft([4, 6, 8])).tokens) == [4, 6]
    target.draft_context(None, None)
    assert list(target.checked(Draft([4, 6, 8])).tokens) == [4, 6]


def test_methods_of_a_target_are_those_of_its_class():
    """So that a subclass, a patch or a search for a definition finds the one that is called."""
    members = vars(verifier("llama")).values()
    assert not [value for value in members if inspect.ismethod(value)]
