"""Session files: each assistant message is a text, what stands before it its prompt, in order."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import scripted
from specdec_mlx.bench import replay
from specdec_mlx.bench.cost import linear_cost
from specdec_mlx.bench.record import Record, RecordedText, load_record, read_sessions, save_record
from specdec_mlx.contracts import Draft, DraftContext

VOCAB = 256
END = 3


class Bytes:
    """A tokenizer of bytes with a template that marks who speaks."""

    has_chat_template = True
    eos_token_id = END

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<a>")


CONVERSATION = {
    "id": "one",
    "category": "agents",
    "messages": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hello"},
        {"role": "tool", "content": None},
        {"role": "assistant", "content": "bye"},
        {"role": "user", "content": "?"},
    ],
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
    """The prompt is all that stands before it, the conversation its session, an end token last."""
    texts = read_sessions(written(tmp_path, [CONVERSATION]), Bytes())
    assert [bytes(t.generated) for t in texts] == [b"hello\x03", b"bye\x03"]
    assert bytes(texts[1].prompt) == b"<system>S<user>hi<assistant>hello<tool><a>"
    assert {t.session for t in texts} == {"one"}
    assert {t.category for t in texts} == {"agents"}
    assert len({t.id for t in texts}) == 2


def test_edits_of_one_session_are_one_conversation(tmp_path: Path) -> None:
    """A prompt and its reference a line, in the order of the file."""
    texts = read_sessions(written(tmp_path, EDITS), Bytes())
    found = [(text.id, bytes(text.generated), text.session) for text in texts]
    assert found == [("e1", b"b\x03", "7"), ("e2", b"d\x03", "7")]


def test_other_lines_are_refused_by_number(tmp_path: Path) -> None:
    """The error names the line, and what is expected there; a file without answers is refused."""
    for row in ({"id": "x"}, {"turns": [], "reference": ""}, {"messages": [{"role": "user"}]}, [1]):
        with pytest.raises(ValueError, match="line 2: expected a JSON object with `messages`"):
            read_sessions(written(tmp_path, [CONVERSATION, row]), Bytes())
    silent = {"messages": [{"role": "user", "content": "hi"}]}
    with pytest.raises(ValueError, match="no assistant message"):
        read_sessions(written(tmp_path, [silent]), Bytes())


class Rememberer:
    """Proposes the texts that its earlier generations closed with: a drafter that remembers."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def begin(self, prompt: Sequence[int], context: DraftContext) -> Any:
        memory, so_far, start = self.texts, list[int](), len(prompt)

        class Session:
            cheap = True

            def propose(self, limit: int) -> Draft:
                for text in memory:
                    if text[: len(so_far)] == so_far:
                        return Draft(text[len(so_far) :][:limit])
                return Draft()

            def observe(self, tokens: Sequence[int]) -> None:
                so_far.extend(tokens)

            def close(self, length: int) -> None:
                memory.append(so_far[: length - start])

        return Session()


def repeated(num_texts: int) -> Record:
    """The same text again and again, in two sessions."""
    texts = [
        RecordedText(str(i), "c", [1, 2], [5, 6, 7, 8, 9, 10], f"session {i % 2}")
        for i in range(num_texts)
    ]
    return Record("", {}, {"vocab_size": VOCAB, "max_tokens": 6}, texts)


def test_memory_goes_on_from_text_to_text_and_not_from_way_to_way() -> None:
    """The first text is new to each draft length; sessions are scored one by one, and add up."""
    wrong = scripted.OracleDrafter([11] * 20, VOCAB)
    drafters = {"none of use": wrong, "memory": Rememberer}
    scores = replay.score_record(repeated(4), drafters, ["5", "8"], linear_cost(0.0))
    for name in drafters:
        for length in ("5", "8"):
            own = [s for s in scores if s.drafter == name and s.draft_length == length]
            (total,) = (s.target_passes for s in own if s.category == "all" and not s.session)
            by_session = [s.target_passes for s in own if s.session]
            assert len(by_session) == 2
            assert sum(by_session) == total
            assert total == (6 + 3 * 2 if name == "memory" else 4 * 6)


def test_the_command_replays_sessions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts come from the sessions, measured costs from the record, a table for each curve."""
    monkeypatch.setattr(replay, "load_tokenizer", lambda name: _Sized())
    cost = dataclasses.replace(linear_cost(0.1), name="measured")
    record = Record("", {}, {}, [], cost=cost, results=[], differences=[])
    save_record(record, tmp_path / "record.json")
    assert load_record(tmp_path / "record.json").cost is not None
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    path = str(written(tmp_path, [CONVERSATION, *EDITS]))
    scores = str(tmp_path / "scores.json")
    arguments = [str(tmp_path / "record.json"), "--sessions", path, "--model", str(tmp_path)]
    monkeypatch.setattr("specdec_mlx.models.check_folder", lambda folder: None)
    given = [*arguments, "--draft-length", "2", "--json", scores]
    assert replay.main(parser.parse_args(given)) == 0
    report = capsys.readouterr().out
    assert report.count("| drafter") == 2
    assert "4 texts, cost measured" in report
    assert {s["session"] for s in json.loads(Path(scores).read_text())} == {"", "one", "7"}
    record = replay.record_of_sessions(written(tmp_path, [CONVERSATION]), tmp_path)
    assert record.settings["max_tokens"] == len("hello") + 1  # no text is cut short
    with pytest.raises(ValueError, match="Nothing to replay"):
        replay.main(parser.parse_args([]))


class _Sized(Bytes):
    def __len__(self) -> int:
        return VOCAB
