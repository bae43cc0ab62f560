"""The first token comes as soon as plain decoding's: no drafter is asked for anything before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

DRAFTERS: dict[str, Callable[[nn.Module], Drafter]] = {
    "prompt lookup": lambda model: sd.PromptLookupDrafter(min_ngram=1),
    "oracle": lambda model: scripted.OracleDrafter(plain(), 128),
    "draft model": sd.ModelDrafter,
    "look-up, then model": lambda model: sd.FirstOf(
        sd.PromptLookupDrafter(min_ngram=1), sd.ModelDrafter(model)
    ),
}


class Noting:
    """Another drafter; notes when it is asked, and what it is shown."""

    def __init__(self, drafter: Drafter, events: list[Any]) -> None:
        self.drafter, self.events = drafter, events

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        session = self.drafter.begin(prompt, context)
        for _, part in session_parts(session, ""):
            for method in {"propose", "propose_while"} & set(dir(part)):
                setattr(part, method, self.noting(getattr(part, method), "ask"))
        session.observe = self.noting(session.observe, "show")  # type: ignore[method-assign]
        return session

    def noting(self, call: Callable[..., Any], event: str) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.events.append((event, *(args[0] if event == "show" else ())))
            return call(*args)

        return noted


@pytest.mark.parametrize("name", DRAFTERS)
@in_one_test(("temp", "length"), product([0.0, 1.0], [4, "auto", "heuristic"]))
def test_no_drafter_is_asked_and_no_draft_model_runs_before_the_first_token(
    name: str, temp: float, length: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target reads the prompt but for its last token, and that one. The drafter is shown the
    first token by itself, and then asked; for a single token a draft model reads nothing at all.
    """
    events: list[Any] = []
    kind, draft_model = type(target()), tiny.build("qwen2", seed=7)
    call = kind.__call__

    def noting(model: nn.Module, tokens: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        events.append(("target" if model is target() else "draft", tokens.size))
        return call(model, tokens, *args, **kwargs)  # type: ignore[no-any-return]

    monkeypatch.setattr(kind, "__call__", noting)
    for num_tokens in (1, 20):
        events.clear()
        drafter, handed_out = Noting(DRAFTERS[name](draft_model), events), []
        options: dict[str, Any] = {"draft_length": length, "max_tokens": num_tokens, "seed": 3}
        options["sampler"] = sd.Sampling(temp=temp)
        for item in sd.speculate(target(), PROMPT, drafter, **options):
            handed_out.append(item.token)
            events.append(("token",))
        assert [token for event, *ids in events if event == "show" for token in ids] == handed_out
        kinds = [event for event, *_ in events]
        assert num_tokens > 1 or "draft" not in kinds
    assert len(handed_out) == 20
    start = [event for event in events[: kinds.index("token")] if event[0] != "show"]
    assert start == [("target", len(PROMPT) - 1), ("target", 1)]
    if length == 4:
        told = [event for event in events if event[0] in ("draft", "ask", "show")]
        assert told[:2] == [("show", handed_out[0]), ("ask",)]
        assert ("draft" in kinds) == ("model" in name)
