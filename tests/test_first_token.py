"""The first token comes as soon as plain decoding's: no drafter is asked for anything before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

import scripted
import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.contracts import DraftContext, Drafter, session_parts

PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]


@cache
def target() -> nn.Module:
    return tiny.build("qwen2")


@cache
def draft_model() -> nn.Module:
    return tiny.build("qwen2", seed=7)


@cache
def plain() -> list[int]:
    return [int(token) for token, _ in generate_step(mx.array(PROMPT), target(), max_tokens=24)]


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt lookup": lambda: sd.PromptLookupDrafter(min_ngram=1),
    "n-gram": sd.NGramDrafter,
    "oracle": lambda: scripted.OracleDrafter(plain(), 128),
    "draft model": lambda: sd.ModelDrafter(draft_model()),
    "look-up, then model": lambda: sd.FirstOf(
        sd.PromptLookupDrafter(min_ngram=1), sd.ModelDrafter(draft_model())
    ),
}
any_drafter = pytest.mark.parametrize("name", DRAFTERS)
any_length = in_one_test("length", [4, "auto", "heuristic"])


class Noting:
    """Another drafter; notes what it is shown, and how many tokens are out when it is asked."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.handed_out: list[int] = []
        self.asked: list[int] = []
        self.shown: list[list[int]] = []

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.drafter.begin(prompt, context)
        for _, part in session_parts(session, ""):
            for method in {"propose", "propose_while"} & set(dir(part)):
                setattr(part, method, partial(self.ask, getattr(part, method)))
        session.observe = partial(self.show, session.observe)  # type: ignore[method-assign]
        return session

    def ask(self, method: Callable[..., Any], *args: Any) -> Any:
        self.asked.append(len(self.handed_out))
        return method(*args)

    def show(self, observe: Callable[..., None], tokens: Sequence[int]) -> None:
        self.shown.append(list(tokens))
        observe(tokens)


@any_drafter
@any_length
@in_one_test("temp", [0.0, 1.0])
def test_no_drafter_is_asked_before_the_first_token(
    name: str, length: int | str, temp: float
) -> None:
    """Not for a draft, not for its pace; it is shown the token by itself, and then asked."""
    drafter = Noting(DRAFTERS[name]())
    options: dict[str, Any] = {"sampler": sd.Sampling(temp=temp), "seed": 3, "draft_length": length}
    for item in sd.speculate(target(), PROMPT, drafter, max_tokens=20, **options):
        drafter.handed_out.append(item.token)
    assert [token for tokens in drafter.shown for token in tokens] == drafter.handed_out
    assert len(drafter.handed_out) == 20
    assert 0 not in drafter.asked
    if length == 4:
        assert drafter.asked[0] == 1
        assert drafter.shown[0] == drafter.handed_out[:1]


def watched(
    drafter: Drafter, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[list[int], list[tuple[nn.Module, int, int]]]:
    """A text, and its passes: of which model, after how many tokens, over how many positions."""
    handed_out: list[int] = []
    passes = []
    kind = type(target())
    call = kind.__call__

    def noting(model: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        passes.append((model, len(handed_out), tokens.size))
        return call(model, tokens, *args, **kwargs)  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", noting)
        for item in sd.speculate(target(), PROMPT, drafter, **options):
            handed_out.append(item.token)
    return handed_out, passes


@any_drafter
@any_length
def test_only_the_target_runs_before_the_first_token(
    name: str, length: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the prompt but for its last token, and that one; a draft model reads it afterwards,
    and for a single token not at all.
    """
    drafter = DRAFTERS[name]()
    _, passes = watched(drafter, monkeypatch, max_tokens=1, draft_length=length)
    assert all(model is target() for model, _, _ in passes)
    text, passes = watched(drafter, monkeypatch, max_tokens=20, draft_length=length)
    assert text == plain()[:20]
    first = [(model is target(), size) for model, before, size in passes if before == 0]
    assert first == [(True, len(PROMPT) - 1), (True, 1)]
    if length == 4 and "model" in name:
        assert min(before for model, before, _ in passes if model is draft_model()) == 1
