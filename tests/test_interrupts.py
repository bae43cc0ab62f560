"""Whatever happens in the middle of a pass, the caches hold the text handed out, or are refused."""

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
from specdec_mlx.mlx_lm_plugin.ending import terminated_as_interrupted
from specdec_mlx.target.rollback import Rollback, check_usable, refuse
from specdec_mlx.target.strategies import STRATEGIES, Trim, leaves
from specdec_mlx.types import Draft

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 14
NAMES = ("llama", "mamba", "qwen3_next", "gemma3_text")


@cache
def target(name: str = "llama") -> nn.Module:
    return tiny.build(name, mx.float32)


@cache
def plain(
    name: str, prompt: tuple[int, ...] = tuple(PROMPT), num_tokens: int = NUM_TOKENS
) -> list[int]:
    steps = generate_step(mx.array(prompt), target(name), max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


def layers_of(model: nn.Module) -> list[nn.Module]:
    return list(getattr(model, "layers", None) or model.model.layers)


class Interrupt:
    """Raises in the call number `at` of any layer, before or after it has used its cache."""

    def __init__(self, at: int, before: bool, error: type[BaseException]) -> None:
        self.at, self.before, self.error, self.calls = at, before, error, 0

    def wrapped(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def layer_call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == self.at and self.before:
                raise self.error("interrupted")
            result = call(*args, **kwargs)
            if self.calls == self.at:
                raise self.error("interrupted")
            return result

        return layer_call


def drafter(name: str, kind: str) -> Any:
    if kind == "none":
        return None
    return scripted.OracleDrafter(plain(name, num_tokens=NUM_TOKENS + 10), VOCAB, wrong=0.4)


@in_one_test(("error", "kind"), [(KeyboardInterrupt, "half right"), (RuntimeError, "none")])
@pytest.mark.parametrize("name", NAMES)
def test_an_exception_in_a_layer_leaves_all_caches_at_prompt_and_handed_out(
    name: str, kind: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any layer of any pass, prefill included: the text goes on as if nothing had happened."""
    model = target(name)
    layers, drafts = layers_of(model), drafter(name, kind)
    points = range(1, 6 * len(layers) + 2)
    for at in points:
        for before in (True, False):
            interrupt = Interrupt(at, before, error)
            with monkeypatch.context() as patch:
                for kind_of_layer in {type(layer) for layer in layers}:
                    wrapped = interrupt.wrapped(kind_of_layer.__call__)
                    patch.setattr(kind_of_layer, "__call__", wrapped)
                caches = make_prompt_cache(model)
                tokens: list[int] = []
                with pytest.raises(error, match="interrupted"):
                    for item in sd.speculate(
                        model,
                        PROMPT,
                        drafts,
                        max_tokens=NUM_TOKENS,
                        prompt_cache=caches,
                        draft_length=3,
                        prefill_step_size=3,
                        probe=False,
                    ):
                        tokens.append(item.token)
            known = [*PROMPT, *tokens] if caches_are_filled(caches) else []
            rest = [9] if known else [*PROMPT, 9]
            again = sd.speculate(model, rest, max_tokens=6, prompt_cache=caches)
            assert [item.token for item in again] == plain(name, (*known, *rest), 6)


def caches_are_filled(caches: list[Any]) -> bool:
    """Whether the prompt was read: after an interrupted prefill they are as before the call."""
    return any(
        not cache.empty() if isinstance(cache, ArraysCache) else cache.offset > 0
        for cache in leaves(caches)
    )


class FailsOnce(Trim):
    """Raises in the first rewind of the second layer."""

    name = "fails once"

    def __init__(self) -> None:
        self.calls = 0

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
    caches = make_prompt_cache(target())
    tokens = []
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        for item in sd.speculate(
            target(),
            PROMPT,
            scripted.always_wrong(plain("llama", num_tokens=40), VOCAB),
            max_tokens=NUM_TOKENS,
            prompt_cache=caches,
            draft_length=3,
        ):
            tokens.append(item.token)
    assert {c.offset for c in caches} == {len(PROMPT) + len(tokens)}


class NeverBack(Trim):
    """Cannot go back at all."""

    name = "never back"

    def trim(self, cache: Any, back: int) -> int:
        return 0


def test_caches_that_cannot_be_brought_in_order_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exception says so in a note, and the next call with them names the class."""

    class Stops:
        """A drafter whose second draft fails, with a pass under way that has to be undone."""

        def begin(self, prompt: Sequence[int], context: Any) -> Any:
            return scripted.ScriptedSession(lambda emitted, limit: [1] if emitted < 3 else 1 / 0)

    caches = make_prompt_cache(target())
    monkeypatch.setitem(STRATEGIES, KVCache, NeverBack())
    with pytest.raises(sd.errors.CacheRollbackError, match="gave back 0 of"):
        list(sd.speculate(target(), PROMPT, Stops(), prompt_cache=caches, draft_length=1))
    monkeypatch.undo()
    with pytest.raises(sd.errors.CacheRollbackError, match="KVCache that is not usable"):
        list(sd.speculate(target(), [9], prompt_cache=caches))
    check_usable(make_prompt_cache(target()))


def test_refusing_names_the_reason() -> None:
    """The caches that were refused, and no others."""
    broken, whole = KVCache(), KVCache()
    refuse([broken], "it was left in the middle of a pass.")
    with pytest.raises(sd.errors.CacheRollbackError, match="in the middle of a pass"):
        check_usable([whole, broken])
    check_usable([whole])


def test_a_drafter_that_raises_at_the_end_too_is_noted() -> None:
    """The first error is raised, the one of `close` is a note on it."""

    class Session:
        def propose(self, limit: int) -> Draft:
            raise ZeroDivisionError("in propose")

        def observe(self, tokens: Sequence[int]) -> None: ...

        def close(self, length: int) -> None:
            raise ValueError("in close")

    class Drafter:
        def begin(self, prompt: Sequence[int], context: Any) -> Session:
            return Session()

    with pytest.raises(ZeroDivisionError, match="in propose") as caught:
        list(sd.speculate(target(), PROMPT, Drafter(), draft_length=2))
    assert caught.value.__notes__ == ["ValueError at the end of the generation: in close"]


def test_all_caches_go_forward_together_or_not_at_all() -> None:
    """`Rollback.forward` of a model that fails after its first layer."""

    def half(tokens: mx.array, cache: list[KVCache]) -> mx.array:
        ones = mx.ones((1, 1, tokens.shape[1], 4))
        cache[0].update_and_fetch(ones, ones)
        raise ZeroDivisionError

    rollback = Rollback([KVCache(), KVCache()])
    with pytest.raises(ZeroDivisionError):
        rollback.forward(half, mx.array([1, 2, 3]))
    assert rollback.position == 0
    assert all(cache.empty() for cache in rollback.caches)


def test_a_command_that_is_terminated_cleans_up_first() -> None:
    """SIGTERM goes the way of Ctrl-C, and ends the process with its usual status."""
    closed = []
    with pytest.raises(SystemExit) as ended, terminated_as_interrupted():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            closed.append(True)
    assert (ended.value.code, closed) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_who_handles_interrupts_handles_termination() -> None:
    """Once; Ctrl-C itself, and a handler that was there before, stay what they were."""
    with terminated_as_interrupted(), suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    with pytest.raises(KeyboardInterrupt), terminated_as_interrupted():
        raise KeyboardInterrupt
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with terminated_as_interrupted():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, before)
