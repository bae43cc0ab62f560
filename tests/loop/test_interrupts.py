"""Whatever happens in the middle of a pass, caches hold the emitted text, or are refused."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
from specdec_mlx import loop
from specdec_mlx.caches import STRATEGIES, Trim, check_usable
from specdec_mlx.mlx_lm_plugin.commands import terminated_as_interrupted

PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]


class Failing(Trim):
    """Cannot go back; or raises at the second layer."""

    name = "failing"
    calls = 0

    def __init__(self, raises: bool) -> None:
        self.raises = raises

    def trim(self, cache: Any, back: int) -> int:
        self.calls += 1
        if self.raises and self.calls == 2:
            raise KeyboardInterrupt("in the middle")
        return super().trim(cache, back) if self.raises else 0


def test_an_exception_in_the_middle_of_a_rewind_leaves_no_layer_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(STRATEGIES, KVCache, Failing(raises=True))
    model, tokens = tiny.build("llama"), []
    caches = make_prompt_cache(model)
    text = [token.token for token in sd.speculate(model, PROMPT, max_tokens=40)]
    drafter = scripted.always_wrong(text, vocab_size=128)
    with pytest.raises(KeyboardInterrupt, match="in the middle"):
        for item in sd.speculate(model, PROMPT, drafter, prompt_cache=caches, num_draft_tokens=3):
            tokens.append(item.token)
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
    model = tiny.build("llama")
    caches = make_prompt_cache(model)
    monkeypatch.setitem(STRATEGIES, KVCache, Failing(raises=False))
    with pytest.raises(sd.errors.CacheRollbackError, match="gave back 0 of"):
        list(sd.speculate(model, PROMPT, Stops(), prompt_cache=caches, num_draft_tokens=1))
    monkeypatch.undo()
    with pytest.raises(sd.errors.CacheRollbackError, match=r"KVCache that is not usable.*0 of"):
        list(sd.speculate(model, [9], prompt_cache=[caches[0], *make_prompt_cache(model)]))
    check_usable(make_prompt_cache(model))


def test_a_drafter_that_raises_at_the_end_too_is_noted() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(sd.speculate(tiny.build("llama"), PROMPT, Stops(at_end=True), num_draft_tokens=2))
    assert caught.value.__notes__ == ["ValueError at the end of the generation: in close"]


def test_a_command_that_is_terminated_cleans_up_first() -> None:
    """SIGTERM goes the way of Ctrl-C, which stays what it is, and ends with its usual status; a
    handler of it that was there before stays."""
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


def test_an_interrupt_before_the_caches_are_in_order_has_them_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last token was handed out, and is not in the caches yet."""

    def interrupted(*closings: Any) -> None:
        raise KeyboardInterrupt

    model = tiny.build("llama")
    caches = make_prompt_cache(model)
    monkeypatch.setattr(loop, "close_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(sd.speculate(model, PROMPT, max_tokens=4, prompt_cache=caches))
    monkeypatch.undo()
    with pytest.raises(sd.errors.CacheRollbackError, match="a generation was interrupted"):
        sd.speculate(model, [9], prompt_cache=caches)
