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
    """The tokens of mlx-lm's own generation."""
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


class Watched:
    """Notes the passes of one model: tokens handed out before each, and its positions."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.handed_out: list[int] = []
        self.passes: list[tuple[int, int]] = []
        call = type(model).__call__

        def noting(instance: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            if instance is model:
                self.passes.append((len(self.handed_out), tokens.size))
            return call(instance, tokens, *args, **kwargs)  # type: ignore[no-any-return]

        monkeypatch.setattr(type(model), "__call__", noting)

    def run(self, drafter: Drafter, **options: Any) -> None:
        self.handed_out.clear()
        for item in sd.speculate(target(), PROMPT, drafter, **options):
            self.handed_out.append(item.token)


@any_length
@in_one_test("name", ["draft model", "look-up, then model"])
def test_no_draft_model_runs_before_the_first_token(
    name: str, length: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the prompt after it; for a single token it is not run at all."""
    with monkeypatch.context() as patch:
        model = Watched(draft_model(), patch)
        model.run(DRAFTERS[name](), max_tokens=1, draft_length=length)
        assert model.passes == []
        model.run(DRAFTERS[name](), max_tokens=20, draft_length=length)
    assert model.handed_out == plain()[:20]
    assert 0 not in [before for before, _ in model.passes]
    if length == 4:
        assert model.passes[0][0] == 1


@any_drafter
def test_the_target_has_read_the_prompt_and_nothing_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the first token is handed out: the prompt but for its last token, and that one."""
    options: dict[str, Any] = {"draft_length": 4, "max_tokens": 8}
    list(sd.speculate(target(), PROMPT, DRAFTERS[name](), **options))  # measures the model
    model = Watched(target(), monkeypatch)
    model.run(DRAFTERS[name](), **options)
    assert [size for before, size in model.passes if before == 0] == [len(PROMPT) - 1, 1]


@in_one_test("drafter", [DRAFTERS["oracle"], lambda: sd.ModelDrafter(target())])
def test_the_second_token_comes_with_drafts(drafter: Callable[[], Drafter]) -> None:
    """One plain pass, and then drafts in every round: all are accepted here."""
    tokens = list(sd.speculate(target(), PROMPT, drafter(), max_tokens=11, draft_length=4))
    assert [t.token for t in tokens] == plain()[:11]
    assert [t.origin for t in tokens] == ["plain", *[*["draft"] * 4, "bonus"] * 2]
    assert tokens[-1].stats.rounds == [(0, 0), (4, 4), (4, 4)]
