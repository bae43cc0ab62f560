"""Whatever happens in the middle of a pass, caches hold the emitted text, or are refused."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import ArraysCache, make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
from lossless import plain_text
from selection import cases, in_one_test
from specdec_mlx.mlx_lm_plugin.commands import terminated_as_interrupted
from specdec_mlx.target.rollback import check_usable
from specdec_mlx.target.strategies import Trim, leaves

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 14


@cache
def target(name: str = "llama") -> nn.Module:
    return tiny.build(name)


@cache
def plain(
    name: str, prompt: tuple[int, ...] = tuple(PROMPT), num_tokens: int = NUM_TOKENS + 10
) -> list[int]:
    return plain_text(target(name), prompt, num_tokens).tokens


def until(error: type[BaseException], words: str, model: nn.Module, **options: Any) -> list[int]:
    """The tokens that were handed out before this error."""
    options = {"max_tokens": NUM_TOKENS, "draft_length": 3, "probe": False} | options
    tokens: list[int] = []
    with pytest.raises(error, match=words):
        for item in sd.speculate(model, PROMPT, **options):
            tokens.append(item.token)
    return tokens


def interrupted(
    at: int, before: bool, error: type[BaseException], call: Callable[..., Any]
) -> Callable[..., Any]:
    """A layer's call, the `at`th of which raises, before or after it used its cache."""
    calls = itertools.count(1)

    def layer_call(*args: Any, **kwargs: Any) -> Any:
        is_it = next(calls) == at
        result = None if is_it and before else call(*args, **kwargs)
        if is_it:
            raise error("interrupted")
        return result

    return layer_call


@in_one_test(("error", "drafts"), [(KeyboardInterrupt, True), (RuntimeError, False)])
@pytest.mark.parametrize(
    "name", cases(["llama", "mamba", "qwen3_next", "gemma3_text"], "llama", "mamba")
)
def test_an_exception_in_a_layer_leaves_all_caches_at_prompt_and_handed_out(
    name: str, drafts: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any layer of any pass, prefill included: the text goes on as if nothing had happened."""
    model = target(name)
    layers = list(getattr(model, "layers", None) or model.model.layers)
    (kind,) = {type(layer) for layer in layers}
    drafter = scripted.OracleDrafter(plain(name), VOCAB, wrong=0.4) if drafts else None
    for at, before in itertools.product(range(1, 6 * len(layers) + 2), (True, False)):
        caches = make_prompt_cache(model)
        options = {"drafter": drafter, "prompt_cache": caches, "prefill_step_size": 3}
        with monkeypatch.context() as patch:
            patch.setattr(kind, "__call__", interrupted(at, before, error, kind.__call__))
            tokens = until(error, "interrupted", model, **options)
        known = [*PROMPT, *tokens] if are_filled(caches) else []
        rest = [9] if known else [*PROMPT, 9]
        again = sd.speculate(model, rest, max_tokens=6, prompt_cache=caches)
        assert [item.token for item in again] == plain(name, (*known, *rest), 6)


def are_filled(caches: list[Any]) -> bool:
    """True if the prompt was read: after an interrupted prefill they are as before the call."""
    return any(
        not cache.empty() if isinstance(cache, ArraysCache) else cache.offset > 0
        for cache in leaves(caches)
    )


def test_an_exception_in_the_middle_of_a_rewind_leaves_no_layer_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer has gone back, the second has not: both are put right."""
    trim, calls = Trim.trim, itertools.count(1)

    def fails_once(self: Trim, cache: Any, back: int) -> int:
        if next(calls) == 2:
            raise KeyboardInterrupt("in the middle")
        return trim(self, cache, back)

    monkeypatch.setattr(Trim, "trim", fails_once)
    caches, drafter = make_prompt_cache(target()), scripted.always_wrong(plain("llama"), VOCAB)
    options = {"drafter": drafter, "prompt_cache": caches}
    tokens = until(KeyboardInterrupt, "in the middle", target(), **options)
    assert {c.offset for c in caches} == {len(PROMPT) + len(tokens)}


class Stops(scripted.ScriptedSession):
    """A drafter, and its session, whose second draft fails; `close` too, if it says so."""

    def __init__(self, *, at_end: bool = False) -> None:
        super().__init__(lambda emitted, limit: [1] if emitted < 3 else 1 / 0)
        self.at_end = at_end

    def begin(self, prompt: Sequence[int], context: Any) -> Stops:
        return self

    def close(self, length: int) -> None:
        if self.at_end:
            raise ValueError("in close")


def test_caches_that_cannot_be_brought_in_order_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a pass under way to be undone; the next call with them names the class, and why."""
    caches, refused = make_prompt_cache(target()), sd.errors.CacheRollbackError
    with monkeypatch.context() as patch:
        patch.setattr(Trim, "trim", lambda self, cache, back: 0)
        options = {"drafter": Stops(), "prompt_cache": caches, "draft_length": 1}
        until(refused, "gave back 0 of", target(), **options)
    mixed = [caches[0], *make_prompt_cache(target())]
    until(refused, r"KVCache that is not usable.*0 of", target(), prompt_cache=mixed)
    check_usable(make_prompt_cache(target()))


def test_a_drafter_that_raises_at_the_end_too_is_noted() -> None:
    """The first error is raised, the one of `close` is a note on it."""
    with pytest.raises(ZeroDivisionError) as caught:
        list(sd.speculate(target(), PROMPT, Stops(at_end=True), draft_length=2))
    assert caught.value.__notes__ == ["ValueError at the end of the generation: in close"]


def test_a_command_that_is_terminated_cleans_up_first() -> None:
    """SIGTERM goes the way of Ctrl-C, which stays what it is, and ends with its usual status; who
    handles the one handles the other, and a handler that was there before stays."""
    closed = []
    with pytest.raises(SystemExit) as ended, terminated_as_interrupted():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            closed.append(True)
    assert (ended.value.code, closed) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        raise KeyboardInterrupt
    with terminated_as_interrupted(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with terminated_as_interrupted():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)
