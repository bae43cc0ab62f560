"""`llm -m specdec/NAME`: the text is the model's own, and its account is in the log."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from click.testing import CliRunner
from llm.cli import cli

import specdec_mlx as sd
from specdec_mlx.lab.pair import draft_path, target_path

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
QUESTION = "The global statement is a declaration. It is used by "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lab's target, with a chat template."""
    copy = tmp_path_factory.mktemp("models") / "lab"
    shutil.copytree(target_path(), copy)
    path = copy / "tokenizer_config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text(encoding="utf-8")), "chat_template": TEMPLATE}),
        encoding="utf-8",
    )
    return copy


@pytest.fixture
def name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    assert run("specdec", "add", str(folder)) == "Added: llm -m specdec/lab\n"
    return "specdec/lab"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == code, result.output
    return result.output


def plain(folder: Path, messages: list[dict[str, str]], num: int = 40) -> str:
    model, tokenizer = mlx_lm.load(str(folder))
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return str(mlx_lm.generate(model, tokenizer, prompt, max_tokens=num))


def ask(name: str, *options: Any) -> str:
    flags = [str(part) for option in (*options, ("max_tokens", 40)) for part in ("-o", *option)]
    return run("-m", name, QUESTION, *flags)


@pytest.mark.parametrize(
    "options",
    [
        (),
        [("draft_model", draft_path())],
        [("drafter", "none")],
        [("drafter", "suffix"), ("seed", 3)],
    ],
)
def test_an_answer_is_the_models_own(folder: Path, name: str, options: Any) -> None:
    text = plain(folder, [{"role": "user", "content": QUESTION}])
    assert ask(name, *options) == text + "\n"
    logged = json.loads(run("logs", "--json", "-n", "1"))[0]
    account = json.loads(run("logs", "--json", "-n", "1"))[0]["response_json"]
    assert logged["output_tokens"] == 40
    assert account["finish_reason"] == "length"
    assert account["accepted"] <= account["drafted"] <= 40 * 16
    assert (account["drafted"] > 0) == (options != [("drafter", "none")])


def test_a_seed_is_one_text_with_any_drafter(name: str) -> None:
    drawn = [("temperature", 0.9), ("top_p", 0.9), ("seed", 5)]
    texts = {ask(name, *drawn, ("drafter", drafter)) for drafter in ("auto", "none", "ngram")}
    assert len(texts) == 1
    assert texts != {ask(name, ("drafter", "none"))}


def test_a_conversation_sends_its_earlier_turns(folder: Path, name: str) -> None:
    first = ask(name).strip("\n")
    run("-m", name, "-c", "And then?", "-o", "max_tokens", "10")
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": plain(folder, [{"role": "user", "content": QUESTION}])},
        {"role": "user", "content": "And then?"},
    ]
    logged = json.loads(run("logs", "--json", "-n", "1"))[0]
    assert first
    assert logged["response"] == plain(folder, messages, 10)


def test_a_memory_is_written_when_the_command_ends(name: str, tmp_path: Path) -> None:
    path = tmp_path / "memory.specdec"
    flags = ["-o", "memory", str(path), "-o", "max_tokens", "40"]
    command = [sys.executable, "-m", "llm", "-m", name, QUESTION, *flags]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (written,) = sd.Memory.load(path).texts()
    _, tokenizer = mlx_lm.load(str(target_path()))
    assert tokenizer.decode(list(written)) + "\n" == said


def test_models_are_listed_and_forgotten(name: str, folder: Path) -> None:
    assert run("specdec", "list") == f"{name}: {folder}\n"
    assert "Known: lab." in run("specdec", "remove", "other", code=1)
    run("specdec", "remove", name)
    assert run("specdec", "list") == ""


@pytest.mark.parametrize("content", [b"", b'{"lab": "/mo', b"[1]", b'{"lab": 1}', b"\xff\xfe"])
def test_a_damaged_registry_ends_no_command(
    content: bytes, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command goes on, the user is told once, and the file is kept beside the new one."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    path = tmp_path / "specdec.json"
    path.write_bytes(content)
    command = [sys.executable, "-m", "llm", "models"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr.count(f"{path} cannot be read") == 1
    assert path.read_bytes() == content
    run("specdec", "add", str(folder))
    assert json.loads(path.read_text(encoding="utf-8")) == {"lab": str(folder)}
    assert (tmp_path / "specdec.json.damaged").read_bytes() == content


def test_an_interrupted_command_leaves_the_registry_as_it_was(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is replaced once the new content is written, and nothing is left beside it."""
    path = tmp_path / "specdec.json"
    before, write_text = path.read_bytes(), Path.write_text

    def cut(part: Path, text: str, **how: Any) -> int:
        write_text(part, text[:5], **how)
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", cut)
    run("specdec", "remove", name, code=1)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".specdec*"))
