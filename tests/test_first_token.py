"""The first token comes as soon as plain decoding's: no drafter is asked for anything before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import scripted
import specdec_mlx as sd
import tiny
from scripted import PROMPT, plain, target
from selection import in_one_test
from specdec_mlx.contracts import DraftContext, Drafter, session_parts


@cache
def draft_model() -> nn.Module:
    return tiny.build("qwen2", seed=7)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt lookup": lambda: sd.PromptLookupDrafter(min_ngram=1),
    "n-gram": sd.NGramDrafter,
    "oracle": lambda: scripted.OracleDrafter(plain(), 128),
    "draft model": lambda: sd.ModelDrafter(draft_model()),
    "look-up, then model": lambda: sd.FirstOf(
        sd.PromptLookupDrafter(min_ngram=1), sd.ModelDrafter(draft_model())
    ),
}


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


def passes_of(
    drafter: Noting, monkeypatch: pytest.MonkeyPatch, **options: Any
) -> list[tuple[nn.Module, int, int]]:
    """Passes of a text: of which model, after how many tokens, over how many positions."""
    passes = []
    kind = type(target())
    call = kind.__call__

    def noting(model: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        passes.append((model, len(drafter.handed_out), tokens.size))
        return call(model, tokens, *args, **kwargs)  # type: ignore[no-any-return]

    with monkeypatch.context() as patch:
        patch.setattr(kind, "__call__", noting)
        for item in sd.speculate(target(), PROMPT, drafter, seed=3, **options):
            drafter.handed_out.append(item.token)
    return passes


@pytest.mark.parametrize("name", DRAFTERS)
@in_one_test(("temp", "length"), product([0.0, 1.0], [4, "auto", "heuristic"]))
def test_no_drafter_is_asked_and_no_draft_model_runs_before_the_first_token(
    name: str, temp: float, length: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target reads the prompt but for its last token, and that one. The drafter is shown the
    first token by itself, and then asked; for a single token a draft model reads nothing at all.
    """
    options: dict[str, Any] = {"sampler": sd.Sampling(temp=temp), "draft_length": length}
    passes = passes_of(Noting(DRAFTERS[name]()), monkeypatch, max_tokens=1, **options)
    assert all(model is target() for model, _, _ in passes)
    drafter = Noting(DRAFTERS[name]())
    passes = passes_of(drafter, monkeypatch, max_tokens=20, **options)
    assert [token for tokens in drafter.shown for token in tokens] == drafter.handed_out
    assert len(drafter.handed_out) == 20
    assert drafter.handed_out == plain(20) or temp > 0
    first = [(model is target(), size) for model, before, size in passes if before == 0]
    assert first == [(True, len(PROMPT) - 1), (True, 1)]
    assert 0 not in drafter.asked
    if length == 4:
        assert drafter.asked[0] == 1
        assert drafter.shown[0] == drafter.handed_out[:1]
        before = [before for model, before, _ in passes if model is not target()]
        assert min(before, default=1) == 1
        assert bool(before) == ("model" in name)
