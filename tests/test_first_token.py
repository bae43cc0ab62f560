"""The first token comes as soon as plain decoding's: no drafter is asked for anything before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step

import scripted
import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx.types import DraftContext, Drafter, session_parts

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]


@cache
def target() -> nn.Module:
    return tiny.build("qwen2")


@cache
def draft_model() -> nn.Module:
    return tiny.build("qwen2", seed=7)


@cache
def plain(prompt: tuple[int, ...] = tuple(PROMPT), num_tokens: int = 24) -> list[int]:
    """What mlx-lm's own generation emits."""
    steps = generate_step(mx.array(prompt), target(), max_tokens=num_tokens)
    return [int(token) for token, _ in steps]


@dataclass(frozen=True, eq=False)
class Noting:
    """Passes everything on to another drafter, and notes when it is asked.

    handed_out: what the caller has so far. asked: how many tokens that were at each question.
    """

    drafter: Drafter
    handed_out: list[sd.responses.Token] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.drafter.begin(prompt, context)
        for _, part in session_parts(session, ""):
            for method in ("propose", "propose_while"):
                if hasattr(part, method):
                    setattr(part, method, self.noted(getattr(part, method)))
        return session

    def noted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            self.asked.append(len(self.handed_out))
            return method(*args)

        return ask

    def run(self, prompt: Sequence[int] = PROMPT, **options: Any) -> list[sd.responses.Token]:
        for item in sd.speculate(target(), prompt, self, **options):
            self.handed_out.append(item)
        return self.handed_out


def oracle() -> scripted.OracleDrafter:
    """Right about everything, and not cheap."""
    return scripted.OracleDrafter(plain(), VOCAB)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt lookup": lambda: sd.PromptLookupDrafter(min_ngram=1),
    "n-gram": sd.NGramDrafter,
    "oracle": oracle,
    "draft model": lambda: sd.ModelDrafter(draft_model()),
    "look-up, then model": lambda: sd.FirstOf(
        sd.PromptLookupDrafter(min_ngram=1), sd.ModelDrafter(draft_model())
    ),
}
any_drafter = pytest.mark.parametrize("name", DRAFTERS)


@any_drafter
def test_no_drafter_is_asked_before_the_first_token(name: str) -> None:
    """Not for a draft, not for its pace; and from the second token on it is."""
    for length, temp in product([4, "auto", "heuristic"], [0.0, 1.0]):
        drafter = Noting(DRAFTERS[name]())
        drafter.run(max_tokens=20, draft_length=length, sampler=sd.Sampling(temp=temp), seed=3)
        assert len(drafter.handed_out) == 20
        assert 0 not in drafter.asked
        if length == 4:
            assert drafter.asked[0] == 1


class Watched:
    """Counts the passes of one model, and how many tokens were handed out at each."""

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
        for item in sd.speculate(target(), PROMPT, drafter, **options):
            self.handed_out.append(item.token)


@pytest.mark.parametrize("length", [4, "auto", "heuristic"])
@pytest.mark.parametrize("name", ["draft model", "look-up, then model"])
def test_no_draft_model_runs_before_the_first_token(
    name: str, length: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the prompt after it; for a single token it is not run at all."""
    model = Watched(draft_model(), monkeypatch)
    model.run(DRAFTERS[name](), max_tokens=1, draft_length=length)
    assert model.passes == []
    model.handed_out.clear()
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


@in_one_test("name", ["oracle", "itself"])
def test_the_second_token_comes_with_drafts(name: str) -> None:
    """One plain pass, and then drafts in every round: all are accepted here."""
    drafter = oracle() if name == "oracle" else sd.ModelDrafter(target())
    tokens = list(sd.speculate(target(), PROMPT, drafter, max_tokens=11, draft_length=4))
    assert [t.token for t in tokens] == plain()[:11]
    assert [t.origin for t in tokens] == ["plain", *[*["draft"] * 4, "bonus"] * 2]
    assert tokens[-1].stats.rounds == [(0, 0), (4, 4), (4, 4)]


def test_the_first_token_is_shown_to_the_drafter_before_it_is_asked() -> None:
    """By itself, and once."""
    shown: list[list[int]] = []

    class Session(scripted.ScriptedSession):
        def observe(self, tokens: Sequence[int]) -> None:
            shown.append(list(tokens))

    class Drafter:
        def begin(self, prompt: Sequence[int], context: DraftContext) -> Session:
            return Session(lambda emitted, limit: plain()[1 : limit + 1])

    items = sd.speculate(target(), PROMPT, Drafter(), max_tokens=6, draft_length=4)
    assert [t.token for t in items] == plain()[:6]
    assert shown == [plain()[:1], plain()[1:6]]
