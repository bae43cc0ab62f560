"""Whatever happens in the middle of a pass, caches hold the emitted text, or are refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.mlx_lm_plugin.commands import terminated_as_interrupted
from specdec_mlx.target.rollback import check_usable
from specdec_mlx.target.strategies import STRATEGIES, Trim, leaves

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 14


@cache
def target(name: str = "llama") -> nn.Module:
    return tiny.build(name, mx.float32)


@cache
def plain(
    name: str, prompt: tuple[int, ...] = tuple(PROMPT), num_tokens: int = NUM_TOKENS
) -> list[int]:
    steps = generate_step(mx.array(prompt), target(name), max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


def interrupted(
    calls: list[int], before: bool, error: type[BaseException], call: Callable[..., Any]
) -> Callable[..., Any]:
    """A layer's call that raises when the count is down to 0, before or after it used its cache."""

    def layer_call(*args: Any, **kwargs: Any) -> Any:
        calls[0] -= 1
        if calls[0] == 0 and before:
            raise error("interrupted")
        result = call(*args, **kwargs)
        if calls[0] == 0:
            raise error("interrupted")
        return result

    return layer_call


@in_one_test(("error", "drafts"), [(KeyboardInterrupt, True), (RuntimeError, False)])
@pytest.mark.parametrize("name", ["llama", "mamba", "qwen3_next", "gemma3_text"])
def test_an_exception_in_a_layer_leaves_all_caches_at_prompt_and_handed_out(
    name: str, drafts: bool, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any layer of any pass, prefill included: the text goes on as if nothing had happened."""
    model = target(name)
    layers = list(getattr(model, "layers", None) or model.model.layers)
    coming = plain(name, num_tokens=NUM_TOKENS + 10)
    drafter = scripted.OracleDrafter(coming, VOCAB, wrong=0.4) if drafts else None
    for at, before in ((at, b) for at in range(1, 6 * len(layers) + 2) for b in (True, False)):
        calls, caches, tokens = [at], make_prompt_cache(model), []
        with monkeypatch.context() as patch:
            for kind in {type(layer) for layer in layers}:
                patch.setattr(kind, "__call__", interrupted(calls, before, error, kind.__call__))
            with pytest.raises(error, match="interrupted"):
                for item in sd.speculate(
                    model,
                    PROMPT,
                    drafter,
                    max_tokens=NUM_TOKENS,
                    prompt_cache=caches,
                    draft_length=3,
                    prefill_step_size=3,
                    probe=False,
                ):
                    tokens.append(item.token)
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


class FailsOnce(Trim):
    """Raises in the first rewind of the second layer."""

    name = "fails once"
    calls = 0

    def trim(self, cache: Any, back: int) -> int:
        self.calls += 1
        if self.calls == 2:
            raise KeyboardInterrupt("in the middle")
        return super().trim(cache, back)


def test_an_exception_in_the_middle_of_a_rewind_leaves_no_layer_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first layer has gone back, the second has not: both are put right."""
    monkeypatch.setitem(STRATEGIES, KVCache, FailsOnce())
    caches, tokens = make_prompt_cache(target()), []
    drafter = scripted.always_wrong(plain("llama", num_tokens=40), VOCAB)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        for item in sd.speculate(
            target(), PROMPT, drafter, max_tokens=14, prompt_cache=caches, draft_length=3
        ):
            tokens.append(item.token)
    assert {c.offset for c in caches} == {len(PROMPT) + len(tokens)}


class NeverBack(Trim):
    """Cannot go back at all."""

    name = "never back"

    def trim(self, cache: Any, back: int) -> int:
        return 0


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
    caches = make_prompt_cache(target())
    monkeypatch.setitem(STRATEGIES, KVCache, NeverBack())
    with pytest.raises(sd.errors.CacheRollbackError, match="gave back 0 of"):
        list(sd.speculate(target(), PROMPT, Stops(), prompt_cache=caches, draft_length=1))
    monkeypatch.undo()
    with pytest.raises(sd.errors.CacheRollbackError, match=r"KVCache that is not usable.*0 of"):
        list(sd.speculate(target(), [9], prompt_cache=[caches[0], *make_prompt_cache(target())]))
    check_usable(make_prompt_cache(target()))


def test_a_drafter_that_raises_at_the_end_too_is_noted() -> None:
    """The first error is raised, the one of `close` is a note on it."""
    with pytest.raises(ZeroDivisionError) as caught:
        list(sd.speculate(target(), PROMPT, Stops(at_end=True), draft_length=2))
    assert caught.value.__notes__ == ["ValueError at the end of the generation: in close"]


def test_a_command_that_is_terminated_cleans_up_first() -> None:
    """SIGTERM goes the way of Ctrl-C, which stays what it is, and ends with its usual status."""
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


def test_who_handles_interrupts_handles_termination() -> None:
    """And a handler that was there before stays."""
    with terminated_as_interrupted(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with terminated_as_interrupted():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)
