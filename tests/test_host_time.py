"""What a round does on the host does not grow with the context: counted, not timed."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.sample_utils import make_logits_processors, make_sampler

from benchmarks import host_time
from benchmarks.host_time import (
    VOCAB_SIZE,
    Kind,
    Table,
    generate,
    kinds,
    prompt_of,
    round_seconds,
)
from scripted import ScriptedDrafter
from specdec_mlx import loop
from specdec_mlx.contracts import RoundRecord, key_of
from specdec_mlx.draft_length.auto import Auto
from specdec_mlx.draft_length.chances import Chances
from specdec_mlx.draft_length.parts import REST
from specdec_mlx.draft_length.policy import Fixed
from specdec_mlx.draft_length.store import Tuning
from specdec_mlx.drafters.default import default_drafter
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.loop import speculate
from specdec_mlx.rounds.clock import RoundClock
from specdec_mlx.sampling import noise
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.mlx_lm_samplers import max_window
from specdec_mlx.target import verifier
from specdec_mlx.target.rollback import Rollback

K = 4
OPERATIONS = [
    *((mx, name) for name in ("concatenate", "stack", "take_along_axis", "eval", "async_eval")),
    *((module, "to_ids") for module in (loop, verifier)),
]
by_name = pytest.mark.parametrize("name", [kind.name for kind in kinds(K)])


def kind_of(name: str) -> Kind:
    return next(kind for kind in kinds(K) if kind.name == name)


def counts(kind: Kind, context: int, monkeypatch: pytest.MonkeyPatch) -> list[Counter[str]]:
    """For rounds 3 to 13: calls by operation, and elements of their results, caches left out."""
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


def sampled_text(monkeypatch: pytest.MonkeyPatch, num_tokens: int) -> tuple[list[int], int]:
    """A plain text at temperature 1, and how many times noise was drawn for it."""
    model = Table(257)
    model.table = mx.random.normal((257, 257), key=mx.random.key(0))
    calls = []
    draw = mx.random.gumbel

    def counted(*args: Any, **options: Any) -> mx.array:
        calls.append(1)
        return draw(*args, **options)

    monkeypatch.setattr(mx.random, "gumbel", counted)
    stream = speculate(model, [1], None, max_tokens=num_tokens, sampler=Sampling(1.0), seed=3)
    tokens = [token.token for token in stream]
    monkeypatch.undo()
    return tokens, len(calls)


def test_a_sampled_text_draws_noise_once_for_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven times for 95 tokens, and the text is the one of as many draws as tokens."""
    together, num_draws = sampled_text(monkeypatch, 95)
    monkeypatch.setattr(noise, "MOST_ROWS", 1)
    one_by_one, num_single = sampled_text(monkeypatch, 95)
    assert (num_draws, num_single) == (7, 95)
    assert together == one_by_one
    assert len(set(together)) > 10


def paused_rounds(monkeypatch: pytest.MonkeyPatch, draft_length: int | str) -> Counter[str]:
    """What is looked at in 40 plain rounds of a text with a draft model that is not asked."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return call(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    tuning = Tuning()
    drafter = ScriptedDrafter(lambda start, limit: [0] * limit)
    tuning.of(key_of(drafter)).account.budget = -2.0
    stream = speculate(
        Table(16),
        [1],
        drafter,
        max_tokens=60,
        draft_length=draft_length,
        tuning=tuning,
        probe=False,
    )
    for _ in range(10):
        next(stream)
    for owner, name in [(Chances, "learn"), (Chances, "of_draft"), (Rollback, "widest_pass")]:
        count(owner, name)
    count(Auto if draft_length == "auto" else Fixed, "limit")
    last = [next(stream) for _ in range(40)][-1]
    stream.close()
    monkeypatch.undo()
    assert last.stats.drafted == 0
    return calls


@pytest.mark.parametrize("draft_length", [0, "auto"])
def test_a_paused_draft_model_costs_a_question_a_round(
    draft_length: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is asked whether to draft; no cache is asked, and chances are worked out in one
    round of eight.
    """
    calls = paused_rounds(monkeypatch, draft_length)
    assert calls.pop("of_draft", 0) <= 40 / REST + 1
    assert calls == {"limit": 40}


def graph_sizes(steps: Iterator[Any], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Nodes of the graphs that are launched for 20 tokens, after a few."""
    sizes: list[int] = []
    launch = mx.async_eval

    def counted(*launched: Any) -> None:
        dot = io.StringIO()
        mx.export_to_dot(dot, *(array for _, array in tree_flatten(list(launched))))
        sizes.append(dot.getvalue().count("label"))
        launch(*launched)

    for _ in range(5):
        next(steps)
    monkeypatch.setattr(mx, "async_eval", counted)
    for _ in range(20):
        next(steps)
    monkeypatch.undo()
    steps.close()  # type: ignore[attr-defined]
    return sizes


@pytest.mark.parametrize("temp", [0.0, 0.7, 1.0])
def test_a_plain_round_is_no_larger_a_graph_than_mlx_lms(
    temp: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many operations as `generate_step` has, or fewer, but where noise is drawn ahead."""
    model = Table(257)
    plain = generate_step(mx.array([1, 2]), model, max_tokens=-1, sampler=make_sampler(temp))
    own = speculate(model, [1, 2], None, max_tokens=-1, sampler=Sampling(temp))
    allowed = max(graph_sizes(plain, monkeypatch))
    sizes = graph_sizes(own, monkeypatch)
    assert len(sizes) == 20
    assert sorted(sizes)[-3] <= allowed  # of 25 positions noise is drawn before the 8th and 16th


CALLS = {"no drafter": 58, "nothing to draft": 97, "a drafted round": 158}
"""Most Python calls a round; lower them with the code, and raise them for nothing."""


class SteadyClock(Auto):
    """The automatic draft length on a machine that takes five rows at once, and no more."""

    def record(self, round_: RoundRecord) -> None:
        seconds = 1.0 if round_.fed <= 5 else float(round_.fed)
        super().record(replace(round_, seconds=seconds, steady=True))


def calls_a_round(kind: str) -> float:
    """Calls of this package's Python functions in a round, the mean of 64 after a few others."""
    prompt = prompt_of(2 * VOCAB_SIZE) if kind == "a drafted round" else [0]
    drafter = None if kind == "no drafter" else default_drafter()
    stream = speculate(
        Table(), prompt, drafter, max_tokens=2000, draft_length=SteadyClock(), probe=False
    )
    calls, own = 0, str(Path(loop.__file__).parent)

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call" and frame.f_code.co_filename.startswith(own)

    with closing(stream):
        for token in stream:
            if token.stats.target_passes == 16:
                break
        sys.setprofile(count)
        try:
            for token in stream:
                if token.stats.target_passes == 80:
                    break
        finally:
            sys.setprofile(None)
    assert token.stats.target_passes == 80
    assert (token.stats.drafted > 200) == (kind == "a drafted round"), token.stats.drafted
    return calls / 64


def test_a_round_takes_no_more_python_calls_than_it_did() -> None:
    """Counted, not timed: without a drafter, with one that finds nothing, and with its drafts."""
    found = {kind: calls_a_round(kind) for kind in CALLS}
    assert all(found[kind] <= CALLS[kind] for kind in CALLS), found


def test_without_a_drafter_a_slow_caller_waits_for_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is learned from its seconds then, so that it stays hidden behind the caller."""
    waited: list[str] = []
    monkeypatch.setattr(RoundClock, "was_undisturbed", False)
    monkeypatch.setattr(verifier.LazyPass, "wait", lambda self: waited.append("pass"))
    stream = speculate(Table(16), [1], None, max_tokens=20, probe=False)
    assert len(list(stream)) == 20
    assert not waited
