"""The demo keeps to its time, compares what it says it compares, and writes plain text."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from selection import FULL, in_one_test
from specdec_mlx.bench.contenders import PLAIN, Contender, Emitted
from specdec_mlx.bench.prompts import Task
from specdec_mlx.bench.timing import TURN_TOKENS, Sample
from specdec_mlx.cli import blas, demo, demo_report
from specdec_mlx.cli import commands as cli
from specdec_mlx.cli.demo_report import LEAST_TOKENS, Budget, Pace, Scene, fit
from specdec_mlx.draft_length.store import Tuning, tuning_for
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from tiny_model_folder import write_model_folder

END = 9


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scene(
    clock: Clock,
    name: str = "text",
    step: float = 1.0,
    slower: float = 1.0,
    num_prompt: int = 10,
    ways: int = 3,
    ends_after: int = 999,
) -> Scene:
    """Contenders that take `slower` times what the plan takes them for, `step` for a token and an
    eighth for one of the prompt. Their text is 0, 1, ..., 7, 0, 1, ..., END.
    """

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        clock.now += slower * num_prompt * step / 8
        for i in range(max_tokens):
            clock.now += slower * step
            yield Emitted(END if i == ends_after else i % 8)

    names = [PLAIN, *(f"drafter {i}" for i in range(1, ways))]
    contenders = [Contender(drafter, "auto", start) for drafter in names]
    return Scene(Task(name, name, [0] * num_prompt), contenders, Pace(step, step / 8), 64, (END,))


def play(scenes: Sequence[Scene], budget: Budget, repeats: int = 1) -> list[Sample]:
    return demo.play(demo.Show(nn.Module(), None, {}, [0], 5, scenes), budget, repeats)


@in_one_test(
    ("tokens", "expected"), [(9, [3, 3, 3]), (8.9, [2, 2, 2]), (5.9, [2, 2]), (3.9, [2]), (0, [2])]
)
def test_what_does_not_fit_is_left_out_from_the_end(tokens: float, expected: list[int]) -> None:
    shown = fit([scene(Clock(), name, num_prompt=0) for name in "abc"], tokens * LEAST_TOKENS)
    assert [len(scene.contenders) for scene in shown] == expected
    assert [s.task.id for s in shown] == [*"abc"][: len(expected)]


@given(
    st.floats(0.01, 2),
    st.lists(st.integers(1, 200), min_size=1, max_size=4),
    st.floats(0.1, 1.0),
    st.floats(1, 600),
    st.integers(1, 4),
)
def test_no_more_time_is_spent_than_was_said(
    step: float, num_prompts: list[int], slower: float, seconds: float, repeats: int
) -> None:
    """If nothing is slower than plain decoding; texts have two turns after their first token."""
    clock = Clock()
    scenes = [scene(clock, str(i), step, slower, n) for i, n in enumerate(num_prompts)]
    shown = fit(scenes, seconds)
    limit = max(seconds, sum(s.least_seconds for s in shown))
    samples = play(shown, Budget(limit, clock), repeats)
    assert clock.now <= limit * (1 + 1e-9)
    first = [s for s in samples if s.repeat == 0]
    assert {s.id for s in first} == {s.task.id for s in shown}
    assert min(len(sample.tokens) for sample in first) > 2 * TURN_TOKENS


def test_all_texts_stop_at_the_same_token(capsys: pytest.CaptureFixture[str]) -> None:
    """So that none is judged by fewer of them; unless it had come to its end."""
    clock = Clock()
    scenes = [scene(clock, "a"), scene(clock, "b", ends_after=20), scene(clock, "c")]
    samples = play(scenes, Budget(450, clock))
    a, b, c = ({len(s.tokens) for s in samples if s.id == name} for name in "abc")
    assert (a, b) == (c, {21})
    (length,) = a
    assert 21 < length < 64
    said = capsys.readouterr().err
    assert f"a {length}, b 21, c {length} tokens; cut, since the time was over" in said
    with pytest.raises(ValueError, match=r"over before the first text. .* --seconds"):
        play(scenes, Budget(-1, clock))  # a live text on a very slow machine may take all of it


def test_every_drafter_has_written_something_else_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[tuple[Any, ...]] = []

    def stream(*arguments: Any, drafter: Any, draft_length: Any) -> Iterator[str]:
        written.append((*arguments[1:], drafter, draft_length))
        yield from "ab"

    monkeypatch.setattr(demo, "stream_generate", stream)
    monkeypatch.setattr(demo, "show_live", lambda name, it: written.append((name, list(it))))
    main = demo.Show(nn.Module(), "tokens", {"lookup": "A", "ngram": "B"}, [1], 40, [])  # type: ignore[dict-item]
    pair = demo.Show(nn.Module(), "letters", {"model": "C"}, [2], 192, [])  # type: ignore[dict-item]
    demo.rehearse([main, pair], "auto", Budget(1, Clock()))
    assert written == [
        ("tokens", [1], 40, "A", "auto"),
        ("lookup", ["a", "b"]),
        ("tokens", [1], 40, "B", "auto"),
        ("letters", [2], 192, "C", "auto"),
    ]


def test_each_text_begins_with_what_the_rehearsal_taught_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is learned from one text is not known to the others, which are written meanwhile."""
    model, ours, taken = tiny.build("llama"), demo.ours, []

    def spied(*args: Any, tuning: Tuning, **kwargs: Any) -> Contender:
        taken.append(tuning)
        return ours(*args, tuning=tuning, **kwargs)  # type: ignore[misc]

    monkeypatch.setattr(demo, "ours", spied)
    taught = tuning_for(model)
    taught.of("the rehearsal's")
    way = demo.after_rehearsal(model, None, PromptLookupDrafter(), "prompt-lookup", "auto")
    for _ in range(2):
        assert len(list(way.start([1, 2, 3, 1, 2, 3], 12, 0))) == 12
    assert all(set(tuning.drafters) > {"the rehearsal's"} for tuning in taken)
    assert taken[0] is not taken[1]
    assert set(taught.drafters) == {"the rehearsal's"}


def sample(drafter: str, repeat: int, pace: float, tokens: Sequence[int] = range(11)) -> Sample:
    """One whose first token came with the prompt, and each other one after `pace` seconds."""
    text = ("text", "text", drafter, "auto", repeat, list(tokens))
    times = {"first_round": 1, "first_seconds": 3.0, "decode_seconds": pace * (len(tokens) - 1)}
    drafts = {"passes": 5, "drafted": 8, "accepted": 6, "drafting_rounds": 4}
    return Sample(*text, **times, **drafts, host_seconds=None, peak_bytes=0)


def row_of(samples: Sequence[Sample]) -> demo_report.Row:
    (row,) = demo_report.compare(nn.Module(), scene(Clock(), ways=2), samples)
    return row


def test_the_speed_is_the_median_of_the_repeats_own_ratios() -> None:
    paces = {PLAIN: (1.0, 9.0, 1.0), "drafter 1": (0.5, 3.0, 1.0)}
    row = row_of([sample(name, i, pace) for name in paces for i, pace in enumerate(paces[name])])
    assert row.speed == 2.0
    line = demo_report.format_table([row]).splitlines()[-1]
    assert line.split()[3:] == ["auto", *f"11 2.00 times plain 2.20 6 of 8 {row.verdict}".split()]


@in_one_test("tokens", [[*range(10), 5], range(10)])
@in_one_test("repeat", [0, 1])
@in_one_test(("gap", "verdict"), [(0.5, "DIFFERENT"), (1e-6, "parts at a tie")])
def test_a_text_that_differs_in_any_repeat_is_different_or_parts_at_a_tie(
    tokens: Sequence[int],
    repeat: int,
    gap: float,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("specdec_mlx.bench.identity.top_two_gap", lambda *args: gap)
    samples = [sample(name, i, 1.0) for name in (PLAIN, "drafter 1") for i in (0, 1)]
    samples[2 + repeat] = sample("drafter 1", repeat, 1.0, tokens)
    row = row_of(samples)
    assert row.verdict == verdict
    assert demo_report.format_table([row]).endswith(f"  {verdict}")


def test_without_a_good_blas_it_says_what_that_means_and_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    monkeypatch.setattr(demo, "blas_name", lambda: blas.REFERENCE_BLAS)
    demo.say_what_multiplies(None)
    said = capsys.readouterr().err
    assert "a pass over m positions costs m times one" in said
    assert 'pip install "specdec-mlx[cpu]"' in said
    assert "then preloads it by itself" in said


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def run(*arguments: str) -> int:
    """The command, with so much time that nothing is cut, however busy the machine is."""
    return cli.main(["demo", "--seconds", "900", "--repeats", "1", *arguments])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_gets_control_characters(
    is_terminal: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Accepted tokens are underlined there; anywhere else every character is one to read."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    assert run("--model", str(folder), "--draft-length", "4") == 0
    out, err = capsys.readouterr()
    assert ("\033[4m" in out) == is_terminal
    assert ("accepted drafts underlined" in out) == is_terminal
    if not is_terminal:
        assert {c for c in out + err if not c.isprintable()} <= {"\n", "�"}


def test_a_demo_whose_texts_differ_says_so_and_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = demo.ours

    def spoiled(*args: Any, **kwargs: Any) -> Contender:
        honest = ours(*args, **kwargs)

        def start(*call: Any) -> Generator[Emitted, None, None]:
            for i, emitted in enumerate(honest.start(*call)):
                yield replace(emitted, token=emitted.token ^ (i == 5))

        return replace(honest, start=start)

    monkeypatch.setattr(demo, "ours", spoiled)
    assert run("--model", str(folder), "--max-tokens", "8") == 1
    out = capsys.readouterr().out
    assert out.count(" DIFFERENT\n") == 7
    assert "0 of 7 texts are plain mlx-lm's" in out


@FULL
def test_the_demo_model_comes_with_the_pair_that_ships(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specdec_mlx.lab.demo_model.demo_model_path", lambda: folder)
    assert run("--max-tokens", "8") == 0
    found = [line.split() for line in capsys.readouterr().out.splitlines()]
    pair = demo.PAIR.split()
    assert [row[2:4] for row in found if row[:2] == pair] == [["model", "auto"], ["model", "4"]]
