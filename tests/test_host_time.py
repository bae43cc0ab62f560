"""What a round does on the host does not grow with the context: counted, not timed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.sample_utils import make_logits_processors

from specdec_mlx import loop
from specdec_mlx.bench import host_time
from specdec_mlx.bench.host_time import Kind, Table, generate, kinds, prompt_of, round_seconds
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.loop import speculate
from specdec_mlx.sampling.mlx_lm_samplers import max_window
from specdec_mlx.target import verifier

K = 4
OPERATIONS = [
    *((mx, name) for name in ("concatenate", "stack", "take_along_axis", "eval", "async_eval")),
    *((module, "to_ids") for module in (loop, verifier)),
]
by_name = pytest.mark.parametrize("name", [kind.name for kind in kinds(K)])


def kind_of(name: str) -> Kind:
    return next(kind for kind in kinds(K) if kind.name == name)


def counts(kind: Kind, context: int, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """For rounds 3 to 13: calls by operation, and elements of their results, caches left out.

    The context is such that no cache grows meanwhile: they do so every 256 tokens, by copying.
    """
    current: Counter[str] = Counter()

    def counted(name: str, call: Any) -> Any:
        def wrapper(*args: Any, **options: Any) -> Any:
            result = call(*args, **options)
            current[name] += 1
            current[f"{name}, elements"] += 0 if result is None else result.size
            return result

        return wrapper

    rounds = []
    stream = generate(kind, context, 1000, K)
    for number, _ in stream:
        if number == 3 and not rounds:
            for module, name in OPERATIONS:
                monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
        if number >= 3 and number - 3 == len(rounds):
            rounds.append(Counter(current))
            current.clear()
        if number == 13:
            break
    stream.close()  # type: ignore[attr-defined]
    monkeypatch.undo()
    return rounds[1:]


@by_name
def test_nothing_grows_with_the_context(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations on as many elements at 520 tokens as at 8,200."""
    short, long = (counts(kind_of(name), context, monkeypatch) for context in (520, 8200))
    assert len(short) == 10
    assert short == long
    assert min(short[0][call] for call in ("to_ids", "eval", "async_eval")) > 0
    assert short[0]["eval"] + short[0]["async_eval"] <= 2


def test_the_count_sees_a_processor_that_gets_the_whole_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A callable of the caller's may look at all tokens, and so gets them: that does grow."""

    def whole(tokens: mx.array, logits: mx.array) -> mx.array:
        return logits

    whole.pure = True  # type: ignore[attr-defined]
    kind = Kind("whole", None, [whole])
    short, long = (counts(kind, context, monkeypatch) for context in (520, 8200))
    assert max(r["concatenate, elements"] for r in short) < 2000
    assert min(r["concatenate, elements"] for r in long) > 8200


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetition_penalty": 1.1}, 20),
        ({"repetition_penalty": 1.1, "presence_penalty": 1.0, "presence_context_size": 50}, 50),
        ({"logit_bias": {3: 1.0}}, 1),
        ({"logit_bias": {3: 1.0}, "frequency_penalty": 1.0, "frequency_context_size": 7}, 7),
        ({"repetition_penalty": 1.1, "repetition_context_size": 0}, None),
    ],
)
def test_windows_are_read_back(options: dict[str, Any], expected: int | None) -> None:
    """As large as the farthest look back; a size of 0 means all tokens to mlx-lm."""
    processors = make_logits_processors(**options)
    assert max_window(processors) == expected
    assert max_window([*processors, lambda tokens, logits: logits]) is None
    assert max_window([]) is None


@pytest.mark.parametrize("drafter", [None, PromptLookupDrafter(min_ngram=1)])
def test_penalties_see_as_far_back_as_they_look(drafter: PromptLookupDrafter | None) -> None:
    """A penalty in its window gives the text that it gives over the whole history."""
    model = Table(16)
    model.table = mx.random.normal((16, 16), key=mx.random.key(0))
    for size in (1, 5, 20):
        penalties = make_logits_processors(repetition_penalty=1.8, repetition_context_size=size)

        def over_all(tokens: mx.array, logits: mx.array, penalties: Any = penalties) -> mx.array:
            for penalty in penalties:
                logits = penalty(tokens, logits)
            return logits

        over_all.pure = True  # type: ignore[attr-defined]
        texts = [
            [
                token.token
                for token in speculate(
                    model,
                    [1, 2, 3, 1, 2],
                    drafter,
                    max_tokens=60,
                    draft_length=K,
                    logits_processors=processors,
                    probe=False,
                )
            ]
            for processors in (penalties, [over_all])
        ]
        assert texts[0] == texts[1]
        assert len(set(texts[0])) > 2


@by_name
def test_rounds_are_what_they_are_called(name: str) -> None:
    """Plain rounds have no draft; drafting rounds accept all of one. The prompt is its length."""
    assert len(prompt_of(1000)) == 1000
    tokens = [token for _, token in generate(kind_of(name), 600, 50, K)]
    stats = tokens[-1].stats
    assert [t.token for t in tokens] == [i % host_time.VOCAB_SIZE for i in range(50)]
    if name.startswith("plain"):
        assert stats.drafted == 0
    else:
        assert stats.accepted == stats.drafted == 39  # the last token comes with the verdict
    assert len(round_seconds(kind_of(name), 600, 5, K)) in (5, 6)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    host_time.main(["--context", "600", "--rounds", "3"])
    printed = capsys.readouterr().out
    assert "600 tokens" in printed
    for kind in kinds(K):
        assert f"| {kind.name} " in printed
