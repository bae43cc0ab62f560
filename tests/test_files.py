"""Text files: UTF-8 from any editor, a line is a line, and what is written is there as a whole."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specdec_mlx.files import json_lines, read_text, replacing, text_lines
from specdec_mlx.lab.bench.record import read_sessions
from specdec_mlx.lab.prompts import read_prompts
from specdec_mlx.lab.training import texts
from specdec_mlx.mlx_lm_plugin.flags import grammar_of

ROOT = Path(__file__).parent.parent
OTHER_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""Characters at which `str.splitlines` splits, and at which no line of a file ends."""
TEXT = f"a{OTHER_SEPARATORS}b é"


class Characters:
    """A tokenizer of characters, without a chat template."""

    has_chat_template, eos_token_id, bos_token = False, None, None

    def encode(self, text: str, **how: Any) -> list[int]:
        return [*map(ord, text)]


def windows(path: Path, *lines: str) -> Path:
    """Lines as an editor on Windows saves them."""
    path.write_bytes(b"\xef\xbb\xbf" + "".join(f"{line}\r\n" for line in lines).encode())
    return path


def unescaped(row: dict[str, Any]) -> str:
    """JSON with all characters as they are, but for those below the space, which JSON escapes."""
    return json.dumps(row, ensure_ascii=False)


def test_a_line_ends_at_a_line_feed_alone_in_all_files_of_prompts_and_texts(tmp_path: Path) -> None:
    """With a byte-order mark and the line ends of Windows; the numbers count blank lines."""
    prompt, pair = unescaped({"prompt": TEXT}), {"turns": [TEXT], "reference": TEXT}
    file = windows(tmp_path / "a.jsonl", prompt, "", prompt)
    characters, tokenizer = [*map(ord, TEXT)], Characters()
    assert list(json_lines(file)) == [(1, {"prompt": TEXT}), (3, {"prompt": TEXT})]
    assert [(p.id, p.text) for p in read_prompts(file)] == [("1", TEXT), ("3", TEXT)]
    assert texts.read_prompts([str(file)], tokenizer) == [characters] * 2
    windows(file, unescaped({"text": TEXT}))
    assert list(texts.read_documents([str(file)], tokenizer)) == [[(c, 1) for c in characters]]
    windows(file, unescaped(pair))
    (recorded,) = read_sessions(file, tokenizer)
    assert (recorded.prompt, recorded.generated) == (characters, characters)
    plain = windows(tmp_path / "a.txt", TEXT, "", TEXT)
    assert list(text_lines(plain)) == [(1, TEXT), (3, TEXT)]
    assert texts.read_prompts([str(plain)], tokenizer) == [characters] * 2
    (document,) = texts.read_documents([str(plain)], tokenizer)
    assert "".join(chr(token) for token, _ in document) == f"{TEXT}\n\n{TEXT}\n"


@pytest.mark.parametrize("read", [read_prompts, lambda path: list(json_lines(path))])
def test_a_file_that_cannot_be_read_is_named_with_the_line(read: Any, tmp_path: Path) -> None:
    """ValueError for another encoding, for no JSON, and for JSON that is too deep."""
    path = tmp_path / "a.jsonl"
    for content, words in (
        (b"\xff\xfe{\x00}\x00", "a.jsonl is not UTF-8 text"),
        (b'\n{"prompt": "a', "a.jsonl, line 2: expected JSON"),
        (b"[" * 100_000, "a.jsonl, line 1: expected JSON"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read(path)


def test_the_files_of_grammars_are_utf_8(tmp_path: Path) -> None:
    """A schema with a byte-order mark, and a grammar with letters beyond ASCII."""
    schema = windows(tmp_path / "schema.json", unescaped({"const": "é"}))
    assert "é" in str(grammar_of("json_schema", str(schema)))
    lark = windows(tmp_path / "g.lark", 'start: "é"')
    assert "é" in str(grammar_of("lark", str(lark)))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    """An error leaves the old content, and nothing beside it; the folder is made."""
    path = tmp_path / "new" / "a.json"
    with replacing(path) as part:
        part.write_text("old", encoding="utf-8")
    with pytest.raises(OSError, match="disk full"), replacing(path) as part:
        part.write_text("ne", encoding="utf-8")
        raise OSError("disk full")
    assert read_text(path) == "old"
    assert [*path.parent.iterdir()] == [path]


def calls_without_encoding(path: Path) -> Iterator[str]:
    """Calls of a source that read or write text in the encoding of the locale."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(func=ast.Attribute(attr="read_text"), args=[], keywords=[]):
                yield f"{path}:{node.lineno}"
            case ast.Call(func=ast.Attribute(attr="write_text"), args=[_], keywords=[]):
                yield f"{path}:{node.lineno}"
            case ast.Call(func=ast.Name(id="open"), args=[_, ast.Constant(value=mode)]):
                if "b" not in str(mode) and not node.keywords:
                    yield f"{path}:{node.lineno}"


def test_no_text_is_read_in_the_encoding_of_the_locale() -> None:
    """Files are the same on every machine: sources name UTF-8 wherever they read or write text."""
    sources = [
        p for room in ("src", "benchmarks", "contrib", "docs") for p in ROOT.glob(f"{room}/**/*.py")
    ]
    assert len(sources) > 200
    assert not [call for path in sources for call in calls_without_encoding(path)]
