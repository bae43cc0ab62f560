"""Session files: each assistant message is a text, what stands before it its prompt, in order."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import scripted
import specdec_mlx as sd
from specdec_mlx.lab.bench import replay
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.record import Record, read_sessions, save_record
from specdec_mlx.lab.bench.timing import Settings
from specdec_mlx.lab.commands import replay as replay_command
from specdec_mlx.lab.prompts import RecordedText

VOCAB = 256


class Bytes:
    """A tokenizer of bytes with a template that marks who speaks."""

    has_chat_template, eos_token_id, __len__ = True, 3, lambda self: VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>")


ROLES = [("system", "S"), ("user", "hi"), ("assistant", "hello"), ("tool", None)]
ROLES += [("assistant", "bye"), ("user", "?")]
CONVERSATION = {
    "id": "one",
    "category": "agents",
    "messages": [{"role": role, "content": content} for role, content in ROLES],
}
EDITS = [
    {"id": "e1", "category": "edits", "session": 7, "turns": ["fix a"], "reference": "b"},
    {"id": "e2", "category": "edits", "session": 7, "turns": ["fix c"], "reference": "d"},
]


def written(folder: Path, rows: Sequence[Any]) -> Path:
    path = folder / "sessions.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return path


def test_every_assistant_message_is_a_text(tmp_path: Path) -> None:
    """The prompt is all that stands before it, the conversation its session, an end token last;
    prompts and references of one session are one conversation, in the order of the file."""
    texts = read_sessions(written(tmp_path, [CONVERSATION, *EDITS]), Bytes())
    assert [bytes(t.generated) for t in texts] == [b"hello\x03", b"bye\x03", b"b\x03", b"d\x03"]
    assert bytes(texts[1].prompt) == b"<system>S<user>hi<assistant>hello<tool><a>"
    assert [t.session for t in texts] == ["one", "one", "7", "7"]
    assert [t.category for t in texts] == ["agents", "agents", "edits", "edits"]
    assert len({t.id for t in texts}) == 4
    assert [t.id for t in texts[2:]] == ["e1", "e2"]


def test_other_lines_are_refused_by_number(tmp_path: Path) -> None:
    """The error names the line, and what is expected there; a file without answers is refused."""
    for row in ({"id": "x"}, {"turns": [], "reference": ""}, {"messages": [{"role": "user"}]}, [1]):
        with pytest.raises(ValueError, match="line 2: expected a JSON object with `messages`"):
            read_sessions(written(tmp_path, [CONVERSATION, row]), Bytes())
    silent = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ValueError, match="no assistant message"):
        read_sessions(written(tmp_path, [silent]), Bytes())


def test_memory_goes_on_from_text_to_text_and_not_from_way_to_way() -> None:
    """The first text is new to each draft length; sessions are scored one by one, and add up."""
    written = [RecordedText(str(i), "c", [1, 2], list(range(5, 11)), f"{i % 2}") for i in range(4)]
    record = Record("", {}, Settings(6, vocab_size=VOCAB), written)
    wrong = scripted.OracleDrafter([11] * 20, VOCAB)
    drafters = {"none of use": wrong, "memory": lambda: sd.SuffixDrafter(memory=sd.Memory())}
    scores = replay.score_record(record, drafters, ["5", "8"], linear_cost(0.0)).results
    for name, length in product(drafters, ("5", "8")):
        own = [s for s in scores if s.drafter == name and s.draft_length == length]
        (total,) = (s.target_passes for s in own if s.category == "all" and not s.session)
        by_session = [s.target_passes for s in own if s.session]
        assert len(by_session) == 2
        assert sum(by_session) == total == (6 + 3 * 2 if name == "memory" else 4 * 6)


def test_the_command_replays_sessions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts come from the sessions, measured costs from the record, a table for each curve."""
    monkeypatch.setattr(replay, "load_tokenizer", lambda name: Bytes())
    monkeypatch.setattr("specdec_mlx.models.loading.check_folder", lambda folder: None)
    cost = replace(linear_cost(0.1), name="measured")
    record, scores = tmp_path / "record.json", tmp_path / "scores.json"
    save_record(Record("", {}, Settings(), [], cost=cost, results=[], differences=[]), record)
    parser = argparse.ArgumentParser()
    replay_command.add_arguments(parser)
    path = written(tmp_path, [CONVERSATION, *EDITS])
    given = [
        record,
        "--sessions",
        path,
        "--model",
        tmp_path,
        "--num-draft-tokens",
        2,
        "--json",
        scores,
    ]
    assert replay_command.main(parser.parse_args([*map(str, given)])) == 0
    report = capsys.readouterr().out
    assert report.count("| category") == 2
    assert "4 texts, cost measured" in report
    assert {s["session"] for s in json.loads(scores.read_text())} == {"", "one", "7"}
    settings = replay.record_of_sessions(written(tmp_path, [CONVERSATION]), tmp_path).settings
    assert settings.max_tokens == len("hello") + 1  # no text is cut short
    with pytest.raises(ValueError, match="Nothing to replay"):
        replay_command.main(parser.parse_args([]))
