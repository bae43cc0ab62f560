"""The demo keeps to its time, compares what it says it compares, and writes plain text."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from selection import FULL, in_one_test
from specdec_mlx.bench.contenders import PLAIN, Contender, Emitted
from specdec_mlx.bench.prompts import Task
from specdec_mlx.bench.timing import TURN_TOKENS, Sample
from specdec_mlx.cli import commands as cli
from specdec_mlx.cli import demo, demo_report
from specdec_mlx.cli.demo import PAIR, Show, after_rehearsal
from specdec_mlx.cli.demo_report import LEAST_TOKENS, Budget, Pace, Scene, fit
from specdec_mlx.draft_length.store import Tuning, tuning_for
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from tiny_model_folder import write_model_folder

END = 9


class Clock:
    """Time that passes only where the contenders work."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def scene(
    clock: Clock,
    name: str = "text",
    pace: Pace = Pace(1.0, 0.0),  # noqa: B008
    slower: float = 1.0,
    num_prompt: int = 10,
    ways: int = 3,
    ends_after: int = 999,
) -> Scene:
    """One whose contenders take `slower` times what the plan takes them for.

    Their texts are 0, 1, ..., 7, 0, 1, ..., END.
    """

    def start(prompt: list[int], max_tokens: int, seed: int) -> Generator[Emitted, None, None]:
        clock.now += slower * num_prompt * pace.position
        for i in range(max_tokens):
            clock.now += slower * pace.step
            yield Emitted(END if i == ends_after else i % 8)

    names = [PLAIN, *(f"drafter {i}" for i in range(1, ways))]
    contenders = [Contender(drafter, "auto", start) for drafter in names]
    return Scene(Task(name, name, [0] * num_prompt), contenders, pace, 64, (END,))


def show(*scenes: Scene, drafters: Any = None, tokenizer: Any = None, **rehearsal: Any) -> Show:
    rehearsal = {"rehearsal": [0], "rehearsal_tokens": 5} | rehearsal
    return Show(nn.Module(), tokenizer, drafters or {}, scenes=scenes, **rehearsal)


@in_one_test(
    ("seconds", "expected"),
    [
        (9 * LEAST_TOKENS, [3, 3, 3]),
        (9 * LEAST_TOKENS - 1, [2, 2, 2]),
        (6 * LEAST_TOKENS - 1, [2, 2]),
        (4 * LEAST_TOKENS - 1, [2]),
        (0, [2]),
    ],
)
def test_what_does_not_fit_is_left_out_from_the_end(seconds: float, expected: list[int]) -> None:
    """First further contenders, then texts; one text by two contenders always stays."""
    shown = fit([scene(Clock(), name) for name in ("a", "b", "c")], seconds)
    assert [len(scene.contenders) for scene in shown] == expected
    assert [s.task.id for s in shown] == ["a", "b", "c"][: len(expected)]


@given(
    step=st.floats(0.01, 2),
    num_prompts=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    slower=st.floats(0.1, 1.0),
    seconds=st.floats(1, 600),
    repeats=st.integers(1, 4),
)
def test_no_more_time_is_spent_than_was_said(
    step: float, num_prompts: list[int], slower: float, seconds: float, repeats: int
) -> None:
    """If nothing is slower than plain decoding; texts have two turns after their first token."""
    clock, pace = Clock(), Pace(step, step / 8)
    scenes = [scene(clock, str(i), pace, slower, n) for i, n in enumerate(num_prompts)]
    shown = fit(scenes, seconds)
    limit = max(seconds, sum(s.seconds(LEAST_TOKENS) for s in shown))
    samples = demo.play(show(*shown), Budget(limit, clock), repeats)
    assert clock.now <= limit * (1 + 1e-9)
    first = [s for s in samples if s.repeat == 0]
    assert {s.id for s in first} == {s.task.id for s in shown}
    assert min(len(sample.tokens) for sample in first) > 2 * TURN_TOKENS


def test_all_texts_stop_at_the_same_token(capsys: pytest.CaptureFixture[str]) -> None:
    """So that none is judged by fewer of them; unless it had come to its end."""
    clock = Clock()
    scenes = [scene(clock, "a"), scene(clock, "b", ends_after=20), scene(clock, "c")]
    samples = demo.play(show(*scenes), Budget(450, clock), 1)
    a, b, c = ({len(s.tokens) for s in samples if s.id == name} for name in "abc")
    assert (a, b) == (c, {21})
    (length,) = a
    assert 21 < length < 64
    said = capsys.readouterr().err
    assert f"a {length}, b 21, c {length} tokens; cut, since the time was over" in said


def test_time_that_is_over_before_anything_is_an_error_with_the_next_step() -> None:
    """A live text on a very slow machine may take all of it."""
    clock = Clock()
    budget = Budget(5, clock)
    clock.now = 6
    with pytest.raises(ValueError, match=r"over before the first text. .* --seconds"):
        demo.play(show(scene(clock)), budget, 1)


def test_every_drafter_has_written_something_else_before_it_is_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On its own model and tokenizer, the first one live; what it learns stays with the model."""
    written: list[tuple[Any, ...]] = []

    def stream(*arguments: Any, drafter: Any, draft_length: Any) -> Iterator[str]:
        written.append((*arguments[1:], drafter, draft_length))
        yield from "ab"

    monkeypatch.setattr(demo, "stream_generate", stream)
    monkeypatch.setattr(demo, "show_live", lambda name, it: written.append((name, list(it))))
    lookups, model = {"lookup": "A", "ngram": "B"}, {"model": "C"}
    main = show(drafters=lookups, tokenizer="tokens", rehearsal=[1], rehearsal_tokens=40)
    pair = show(drafters=model, tokenizer="letters", rehearsal=[2], rehearsal_tokens=192)
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
    way = after_rehearsal(model, None, PromptLookupDrafter(), "prompt-lookup", "auto")
    for _ in range(2):
        assert len(list(way.start([1, 2, 3, 1, 2, 3], 12, 0))) == 12
    for tuning in taken:
        assert set(tuning.drafters) > {"the rehearsal's"}
    assert taken[0] is not taken[1]
    assert set(taught.drafters) == {"the rehearsal's"}


def sample(drafter: str, repeat: int, pace: float, tokens: Sequence[int] = range(11)) -> Sample:
    """One whose first token came with the prompt, and each other one after `pace` seconds."""
    seconds = {"first_seconds": 3.0, "decode_seconds": pace * (len(tokens) - 1)}
    counts = {"passes": 5, "drafted": 8, "accepted": 6, "drafting_rounds": 4, "peak_bytes": 0}
    own: Any = {"first_round": 1, "host_seconds": None, **seconds, **counts}
    return Sample("text", "text", drafter, "auto", repeat, list(tokens), **own)


def row_of(samples: Sequence[Sample]) -> demo_report.Row:
    (row,) = demo_report.compare(nn.Module(), scene(Clock(), ways=2), samples)
    return row


def test_the_speed_is_the_median_of_the_repeats_own_ratios() -> None:
    """A repeat in which the machine was slow for both says the same as one in which it was not."""
    paces = {PLAIN: (1.0, 9.0, 1.0), "drafter 1": (0.5, 3.0, 1.0)}
    row = row_of([sample(name, i, paces[name][i]) for name in paces for i in range(3)])
    assert row.speed == 2.0
    shown = demo_report.format_table([row]).splitlines()[-1].split()
    assert " ".join(shown[3:]) == f"auto 11 2.00 times plain 2.20 6 of 8 {row.verdict}"


@in_one_test("tokens", [[*range(10), 5], range(10)])
@in_one_test("repeat", [0, 1])
@in_one_test(("gap", "verdict"), [(0.5, "DIFFERENT"), (1e-6, "parts at a tie")])
def test_a_text_that_differs_in_any_repeat_is_different_or_parts_at_a_tie(
    tokens: Sequence[int], repeat: int, gap: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tie of the target's own logits may fall either way on a GPU."""
    monkeypatch.setattr("specdec_mlx.bench.identity.top_two_gap", lambda *args: gap)
    samples = [sample(name, i, 1.0) for name in (PLAIN, "drafter 1") for i in (0, 1)]
    samples[2 + repeat] = sample("drafter 1", repeat, 1.0, tokens)
    row = row_of(samples)
    assert row.verdict == verdict
    assert demo_report.format_table([row]).endswith(f"  {verdict}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


WITHOUT_HASTE = ("--seconds", "900", "--repeats", "1")
"""So that nothing is cut, however busy the machine is that runs the tests."""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_gets_control_characters(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Accepted tokens are underlined there; anywhere else every character is one to read."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    pieces = [SimpleNamespace(text=t, from_draft=t == "b", stats="2 tokens") for t in "ab"]
    demo.show_live("ngram", iter(pieces))  # type: ignore[arg-type]
    shown, underlined = ("a\033[4mb\033[0m", " (accepted drafts underlined)")
    expected = (shown, underlined) if is_terminal else ("ab", "")
    said = f"Live, with ngram{expected[1]}:\n\n{expected[0]}\n\n2 tokens\n\n"
    assert capsys.readouterr().out == said


def test_a_demo_whose_texts_differ_says_so_and_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is a check, not a decoration."""
    ours = demo.ours

    def spoiled(*args: Any, **kwargs: Any) -> Contender:
        honest = ours(*args, **kwargs)

        def start(*call: Any) -> Generator[Emitted, None, None]:
            for i, emitted in enumerate(honest.start(*call)):
                yield replace(emitted, token=emitted.token ^ (i == 5))

        return replace(honest, start=start)

    monkeypatch.setattr(demo, "ours", spoiled)
    assert cli.main(["demo", "--model", str(folder), "--max-tokens", "8", *WITHOUT_HASTE]) == 1
    out = capsys.readouterr().out
    assert out.count(" DIFFERENT\n") == 7
    assert "0 of 7 texts are plain mlx-lm's" in out


@FULL
def test_the_demo_model_comes_with_the_pair_that_ships(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model of one's own it is not shown."""
    monkeypatch.setattr("specdec_mlx.lab.demo_model.demo_model_path", lambda: folder)
    assert cli.main(["demo", "--max-tokens", "8", *WITHOUT_HASTE]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(PAIR)]
    assert [row[len(PAIR) :].split()[:2] for row in rows] == [["model", "auto"], ["model", "4"]]
