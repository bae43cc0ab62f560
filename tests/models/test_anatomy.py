"""The parts of a model: one watched pass finds them, once, for all that ask."""

from __future__ import annotations

import gc
import math
import weakref
from contextlib import suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import tiny
from specdec_mlx.contracts import Features
from specdec_mlx.drafters.heads.drafter import anatomy_for_head
from specdec_mlx.lab.papers.early_exit import final_norm
from specdec_mlx.models import anatomy as watching
from specdec_mlx.models.anatomy import StateReader, anatomy_of, vocab_size_of

EVERYTHING = Features(layers=(0, 1), head_input=True)


def test_one_pass_is_watched_for_all_that_is_asked_of_a_model(monkeypatch: pytest.MonkeyPatch):
    """The size of its vocabulary, the ends that heads share, its final norm and its layers."""
    watched: list[Any] = []
    watch = watching.watching
    monkeypatch.setattr(watching, "watching", lambda *about: watched.append(about) or watch(*about))
    model = tiny.build("llama")
    assert vocab_size_of(model) == anatomy_for_head(model).vocab_size
    assert anatomy_for_head(model).embedding is model.model.embed_tokens
    assert final_norm(model) is model.model.norm
    tapped = StateReader(model, EVERYTHING)
    assert len(watched) == 1
    tapped.read(lambda: model(mx.array([[1, 2]]))[0])
    assert tapped.features is not None
    assert tapped.features.layers.keys() == {0, 1}
    assert len(watched) == 2


def test_of_a_model_that_was_quantized_in_place_the_new_parts_are_found():
    model = tiny.build("llama", hidden_size=64)
    before = anatomy_of(model)
    nn.quantize(model, 32)
    now = anatomy_of(model)
    assert before.embedding is not now.embedding
    assert now.embedding is model.model.embed_tokens
    tapped = StateReader(model, EVERYTHING)
    tapped.read(lambda: model(mx.array([[1, 2]]))[0])
    assert anatomy_of(model) is now


def test_what_is_known_of_a_model_does_not_keep_it():
    model = tiny.build("llama")
    anatomy_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_an_interrupt_leaves_modules_that_are_called_and_watched(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C after some of the modules were swapped, or put back."""
    model = tiny.build("llama")
    modules, tokens = [module for module in model.modules() if module is not model], mx.array([[1]])
    kinds, assign = [*map(type, modules)], watching._set

    def watch(swaps: float) -> list[Any]:
        """Calls that were seen, with an interrupt after a number of swaps."""

        def interrupted(*how: Any) -> None:
            nonlocal swaps
            swaps -= 1
            if swaps == 0:
                raise KeyboardInterrupt
            assign(*how)

        monkeypatch.setattr(watching, "_set", interrupted)
        calls: list[Any] = []
        with suppress(KeyboardInterrupt), watching.watching(modules, calls.append):
            model(tokens)
        return calls

    num_calls = len(watch(math.inf))
    for swaps in range(1, 2 * len(modules) + 1):
        watch(swaps)
        model(tokens)
        assert len(watch(math.inf)) == num_calls
        assert [*map(type, modules)] == kinds
