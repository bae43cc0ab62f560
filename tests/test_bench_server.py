"""The benchmark of the server: what it counts, and that it measures what it says."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import server as bench
from benchmarks.server import OURS, STOCK, Answer, Phase
from selection import FULL
from specdec_mlx.errors import MissingPackageError
from tiny_model_folder import write_model_folder

PROMPT = "the cat in the hat and the other cat in the hat"


def test_servers_are_asked_in_turn_and_timed_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is first alternates; the time of each is the sum of its own."""
    asked: list[tuple[str, str]] = []
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def asking(name: str, seconds: float) -> bench.Ask:
        def ask(prompt: str) -> Answer:
            asked.append((name, prompt))
            clock[0] += seconds
            return Answer(prompt, 3)

        return ask

    servers = {STOCK: asking(STOCK, 3.0), OURS: asking(OURS, 2.0)}
    phase = bench.one_after_another(servers, ["a", "b", "c"])
    assert asked == [
        *((STOCK, "a"), (OURS, "a"), (OURS, "b"), (STOCK, "b"), (STOCK, "c"), (OURS, "c"))
    ]
    assert phase.seconds == {STOCK: 9.0, OURS: 6.0}
    assert phase.ratio == 1.5
    assert phase.num_same == 3
    groups = bench.several_at_once(servers, list("abcdefgh"), clients=3)
    assert [len(answers) for answers in groups.answers.values()] == [8, 8]
    assert [answer.text for answer in groups.answers[OURS]] == list("abcdefgh")
    assert groups.seconds == {STOCK: 24.0, OURS: 16.0}


def test_errors_and_other_texts_are_counted() -> None:
    """A failed request is never the same text."""
    phase = Phase("one")
    phase.answers = {
        STOCK: [Answer("a"), Answer("b"), Answer(error="no"), Answer(error="no")],
        OURS: [Answer("a"), Answer("c"), Answer(""), Answer(error="no")],
    }
    assert phase.num_same == 1
    assert phase.num_errors == {STOCK: 2, OURS: 1}
    assert "1/4" in bench.table([phase])
    kept = json.dumps(bench.record([phase], texts=False))
    assert '"text"' not in kept
    assert '"text": "c"' in json.dumps(bench.record([phase], texts=True))


def test_a_missing_client_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the command that helps."""
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingPackageError, match="pip install openai"):
        bench.asking("http://127.0.0.1:1", 3)


def test_clients_are_timed_to_their_tokens() -> None:
    """Of each server: the median client's time to a token, and that of the slowest."""
    phase = Phase("two")
    phase.answers = {
        STOCK: [Answer("a", 3, per_token=seconds) for seconds in (0.1, 0.2, 0.6)],
        OURS: [Answer("a", 3, per_token=0.1), Answer(error="no"), Answer(error="no")],
    }
    assert phase.per_token(STOCK) == (0.2, 0.6)
    assert phase.per_token(OURS) == (0.1, 0.1)
    row = bench.table([phase]).splitlines()[1].split()
    assert row[-3:] == ["200.0", "600.0", "0"]


def test_the_request_that_fares_worst_is_told() -> None:
    """By its last token, whatever came of the others; answers without a text do not count."""
    phase = Phase("two")
    phase.answers = {
        STOCK: [Answer("a", 3, last=2.0), Answer("b", 3, last=1.0), Answer(error="no")],
        OURS: [Answer("a", 3, last=1.0), Answer("b", 3, last=1.5), Answer(error="no")],
    }
    assert phase.latest == 1.5
    assert " 1.50 " in bench.table([phase])


def test_each_phase_has_prompts_of_its_own() -> None:
    """As long as there are enough; then the first come again."""
    assert bench.of_phases(list("abcdef"), 2, 3) == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert bench.of_phases(list("abc"), 2, 2) == [["a", "b"], ["c", "a"]]
    assert bench.of_phases(["a"], 2, 2) == [["a"], ["a"]]


@FULL
def test_both_servers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As processes, with a tiny model: the same texts, no errors, and our account."""
    folder = write_model_folder(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": str(i), "category": "x", "prompt": f"{i} {PROMPT}"} for i in range(5)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    figures = tmp_path / "figures.json"
    arguments = ["--model", str(folder), "--prompts", str(prompts), "--num", "3", "--clients", "2"]
    arguments += ["--max-tokens", "40", "--draft-length", "3", "--in-process"]
    arguments += ["--json", str(figures)]
    assert bench.main(arguments) == 0
    alone, together = json.loads(figures.read_text())["phases"]
    assert alone["same"] == together["same"] == 3
    assert alone["errors"] == together["errors"] == {STOCK: 0, OURS: 0}
    assert any(answer["speculation"]["drafted"] for answer in alone["answers"][OURS])
    assert all(not answer["speculation"] for answer in alone["answers"][STOCK])
    assert json.loads(figures.read_text())["library"] > 0
    out = capsys.readouterr().out
    assert "one after another" in out
    assert "2 at once" in out


@FULL
def test_a_server_that_does_not_start_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what it said."""
    arguments = ["--model", str(write_model_folder(tmp_path / "model"))]
    assert bench.main([*arguments, "--draft-length", "-3"]) == 2
    assert "expected an int >= 0" in capsys.readouterr().err
