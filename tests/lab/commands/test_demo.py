"""The demo keeps to its time, compares what it says it compares, and writes plain text."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import replace as replaced
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest
import test_bench
from msgspec.structs import replace

import specdec_mlx as sd
import tiny
import tiny_text
from selection import FULL, in_one_test
from specdec_mlx.cli import commands as cli
from specdec_mlx.lab.bench.summary import Result, find_differences, summarise
from specdec_mlx.lab.bench.timing import PLAIN, Contender, Emitted, Sample
from specdec_mlx.lab.commands import demo
from specdec_mlx.lab.commands.demo import PAIR, Show
from specdec_mlx.lab.prompts import RecordedText

TASK = RecordedText("text", "text", [1, 2, 3, 1, 2, 3])


def show(model: nn.Module) -> Show:
    return Show(model, None, "ngram", sd.NGramDrafter(), [1], [TASK, replace(TASK, id="b")], 56)


@FULL
@in_one_test(("until", "lengths"), [(-1, {"text": 41}), (4, {"text": 49, "b": 41}), (99, None)])
def test_texts_are_cut_at_one_token_where_the_time_is_over(
    until: float, lengths: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is judged by fewer than 40; the first is always there, a later one may be missing."""
    ticks = iter(range(1000))
    monkeypatch.setattr(demo, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    samples = demo.play(show(tiny.build("llama")), "auto", until, 1)
    found = {name: {len(s.tokens) for s in samples if s.id == name} for name in ("text", "b")}
    expected = lengths or {"text": 56, "b": 56}
    assert found == {"text": set(), "b": set()} | {name: {n} for name, n in expected.items()}


def sample(drafter: str, repeat: int, pace: float, tokens: Sequence[int] = range(41)) -> Sample:
    """One whose first token came with the prompt, and each other one after `pace` seconds."""
    seconds = pace * (len(tokens) - 1)
    made = test_bench.sample("text", drafter, tokens, repeat=repeat, decode_seconds=seconds)
    counts = {"passes": 5, "drafted": 8, "accepted": 6}
    return replace(made, category="text", draft_length="auto", **counts)


def rows_of(samples: Sequence[Sample]) -> list[Result]:
    found = find_differences(nn.Module(), [TASK], samples)
    return [r for r in summarise(samples, found) if r.drafter != PLAIN and r.category == "text"]


def test_a_row_is_the_benchmarks_result() -> None:
    """Medians of the repeats, and the counts of all; a repeat in which all was slow counts less."""
    paces = [(1.0, 0.5), (9.0, 3.0), (1.0, 0.5)]
    samples = [
        sample(drafter, i, pace)
        for i, pair in enumerate(paces)
        for drafter, pace in zip((PLAIN, "drafter 1"), pair, strict=True)
    ]
    (row,) = rows_of(samples)
    assert row.ratio == 2.0
    header, _, line = (text.split("|")[1:-1] for text in demo.format_table([row]).splitlines())
    assert [cell.strip() for cell in header][:3] == ["text", "drafter", "K"]
    shown = ["41", "2.00 times plain", "8.20", "18 of 24", "identical"]
    assert [cell.strip() for cell in line[3:]] == shown


@in_one_test("tokens", [[*range(40), 5], range(40)])
@in_one_test("repeat", [0, 1])
@in_one_test(("gap", "verdict"), [(0.5, "DIFFERENT"), (1e-6, "parts at a tie")])
def test_a_text_that_differs_in_any_repeat_is_different_or_parts_at_a_tie(
    tokens: Sequence[int],
    repeat: int,
    gap: float,
    verdict: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tie of the target's own logits may fall either way on a GPU."""
    exact = SimpleNamespace(differences=[])
    monkeypatch.setattr("specdec_mlx.lab.bench.summary.probe", lambda model, **how: exact)
    monkeypatch.setattr("specdec_mlx.lab.bench.summary.near_tie", lambda differences: 1e-4)
    monkeypatch.setattr("specdec_mlx.lab.bench.summary.top_two_gap", lambda *args: gap)
    samples = [sample(name, i, 1.0) for name in (PLAIN, "drafter 1") for i in (0, 1)]
    samples[2 + repeat] = sample("drafter 1", repeat, 1.0, tokens)
    (row,) = rows_of(samples)
    assert demo.verdict(row) == verdict
    assert demo.format_table([row]).endswith(f" {verdict} |")


@in_one_test("max_tokens", [8, 40])
def test_the_clock_cuts_the_live_text_after_twenty_tokens(max_tokens: int) -> None:
    """A shorter text shows no draft at work; this one's time is over before it begins."""
    text = replaced(show(tiny.build("llama")), max_tokens=max_tokens)
    text = replaced(text, tokenizer=tiny_text.tokenizer())
    responses = list(demo.live_text(text, "2", until=-1))
    assert responses[-1].generation_tokens == min(20, max_tokens)


def legend_of(rows: Sequence[Result], *texts: str) -> str:
    """The lines beneath the table, without their line breaks."""
    return " ".join(demo.legend(rows, texts, nn.Linear(1, 1), None).split())


@in_one_test("num_tokens", [1, 39, 40])
def test_a_row_has_forty_tokens_or_is_left_out_with_a_reason(num_tokens: int) -> None:
    """Its tokens are compared all the same; a text that never began has its own reason."""
    samples = [sample(name, 0, 1.0, range(num_tokens)) for name in (PLAIN, "drafter 1")]
    rows, is_left_out = rows_of(samples), num_tokens < 40
    assert ("times plain" in demo.format_table(rows)) == (not is_left_out)
    legend = legend_of(rows, "text", "chat")
    reason = f"text is left out (identical): it has {num_tokens} tokens, and a speed takes 40"
    assert (reason in legend) == is_left_out
    assert "1 of 1 texts are plain mlx-lm's" in legend
    assert "chat is left out: the time was over before its turn." in legend
    assert "text is left out: the time" not in legend


NOTE = "text: auto is below plain."


@in_one_test(
    ("num_tokens", "pace", "drafted", "length", "note"),
    [
        (99, 1.02, 8, "auto", f"{NOTE} It drafted 8 tokens to learn whether drafts pay"),
        (99, 1.02, 0, "auto", f"{NOTE} It found no draft that it expected to pay."),
        (99, 1.001, 8, "auto", None),  # shown as 1.00
        (99, 0.9, 8, "auto", None),
        (99, 1.02, 8, "4", None),
        (100, 1.02, 8, "auto", None),
    ],
)
def test_a_short_row_in_which_auto_is_below_plain_says_why(
    num_tokens: int, pace: float, drafted: int, length: str, note: str | None
) -> None:
    """A fixed length makes no choice, and a long text has no excuse."""
    ours = sample("drafter 1", 0, pace, range(num_tokens))
    ours = replace(ours, draft_length=length, drafted=drafted)
    legend = legend_of(rows_of([sample(PLAIN, 0, 1.0, range(num_tokens)), ours]), "text")
    assert note in legend if note else NOTE not in legend


WITHOUT_HASTE = ("--seconds", "900", "--repeats", "1")
"""So that nothing is cut, however busy the machine is that runs the tests."""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_it_says_what_it_does_and_prints_a_table_of_identical_texts(
    is_terminal: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three prompts, and a fixed length for contrast; results alone on stdout.

    On a terminal accepted tokens are underlined; elsewhere every character is one to read.
    """
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    few = ("--num-draft-tokens", "3")
    assert cli.main(["demo", "--model", str(folder), *few, *WITHOUT_HASTE]) == 0
    out, err = capsys.readouterr()
    assert ("\033[4m" in out) == ("accepted drafts underlined" in out) == is_terminal
    if not is_terminal:
        assert {c for c in out + err if not c.isprintable()} <= {"\n", "�"}
    assert (
        "in about 900 s, or more on a slow machine: a text live, then edit, summary, chat," in err
    )
    live, _, table = out.partition("| text ")
    assert "target passes" in live
    rows = table.split("\n\n")[0].splitlines()[2:]
    expected = [[text, "auto", k] for text in ("edit", "summary", "chat") for k in ("3", "4")]
    assert [row.split()[1:6:2] for row in rows] == expected
    assert all(row.endswith(" identical |") for row in rows)
    assert "6 of 6 texts are plain mlx-lm's, token by token." in out


def test_a_demo_whose_texts_differ_says_so_and_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table is a check, not a decoration."""
    ours = demo.ours

    def spoiled(*args: Any, **kwargs: Any) -> Contender:
        honest = ours(*args, **kwargs)

        def start(*call: Any) -> Generator[Emitted, None, None]:
            for i, emitted in enumerate(honest.start(*call)):
                yield emitted._replace(token=emitted.token ^ (i == 5))

        return replace(honest, start=start)

    monkeypatch.setattr(demo, "ours", spoiled)
    assert cli.main(["demo", "--model", str(folder), "--max-tokens", "41", *WITHOUT_HASTE]) == 1
    out = capsys.readouterr().out
    assert out.count(" DIFFERENT |\n") == 6
    assert "0 of 6 texts are plain mlx-lm's" in out


@FULL
def test_the_demo_model_comes_with_the_pair_that_ships(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a model of one's own it is not shown."""
    monkeypatch.setattr("specdec_mlx.lab.demo_model.demo_model_path", lambda: folder)
    assert cli.main(["demo", "--max-tokens", "8", *WITHOUT_HASTE]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"| {PAIR}")]
    assert [row.split()[4:7:2] for row in rows] == [
        ["model", "auto"],
        ["model", "4"],
    ]
