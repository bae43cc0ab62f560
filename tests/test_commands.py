"""mlx-lm's commands with our flags: each flag is seen by its effect."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from commanding import both_ways, run, run_stock
from specdec_mlx.mlx_lm_plugin.commands import COMMANDS
from specdec_mlx.mlx_lm_plugin.flags import argparse_with_flags, replaced_names
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


def generate(folders: Path, *flags: str, tokens: int = 80) -> str:
    """What `specdec-mlx generate` prints."""
    done = run(
        *("generate", "--model", str(folders / "model"), "--prompt", PROMPT),
        *("--max-tokens", str(tokens), *flags),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def text_in(output: str) -> str:
    """What was written, between mlx-lm's two rules."""
    return output.split("==========\n")[1]


@pytest.fixture(scope="module")
def stock_output(folders: Path) -> str:
    arguments = ("--model", folders / "model", "--prompt", PROMPT, "--max-tokens", 80)
    return run_stock("generate", *arguments).stdout


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


@both_ways
def test_generate_drafts_by_default_and_prints_below_mlx_lms_lines(
    folders: Path, stock_output: str
) -> None:
    """Same text, mlx-lm's three closing lines, then ours."""
    output = generate(folders)
    assert text_in(output) == text_in(stock_output)
    *_, prompt, generation, memory, ours = output.strip().splitlines()
    assert prompt.startswith("Prompt: ")
    assert generation.startswith("Generation: 80 tokens")
    assert memory.startswith("Peak memory: ")
    assert ACCOUNT.fullmatch(ours)


@both_ways
def test_draft_length_and_stats(folders: Path, stock_output: str) -> None:
    """K shows in the account by position; --stats prints that account."""
    output = generate(folders, "--draft-length", "3", "--stats")
    assert text_in(output) == text_in(stock_output)
    tokens_per_pass, accepted, drafted = account(output)
    assert tokens_per_pass > 1.2
    assert 0 < accepted <= drafted
    positions = re.search(r"Acceptance by position: (.*)", output)
    assert positions
    assert len(positions[1].split(",")) == 3
    assert "Rounds by accepted tokens: 0: " in output
    assert "Rounds by accepted" not in generate(folders, "--draft-length", "3", tokens=3)


@both_ways
def test_num_draft_tokens_is_mlx_lms_name_for_it(folders: Path) -> None:
    """With a draft model or without one; and without --verbose only the text is on stdout."""
    flags = ("--num-draft-tokens", "2", "--stats", "--verbose", "False")
    done = run("generate", "--model", str(folders / "model"), "--prompt", PROMPT, *flags)
    assert "Rounds" not in done.stdout
    positions = re.search(r"Acceptance by position: (.*)", done.stderr)
    assert positions
    assert len(positions[1].split(",")) == 2


@both_ways
def test_drafter_chooses_the_drafter(folders: Path, stock_output: str) -> None:
    """`none` drafts nothing, options arrive, and several are tried in order."""
    none = generate(folders, "--drafter", "none")
    assert text_in(none) == text_in(stock_output)
    assert none.rstrip().endswith("Speculation: none")
    rarely = generate(folders, "--drafter", "prompt-lookup:min_ngram=5", "--draft-length", "4")
    both = generate(
        folders,
        *("--drafter", "prompt-lookup:min_ngram=5", "--drafter", "ngram"),
        *("--draft-length", "4"),
    )
    assert text_in(rarely) == text_in(both) == text_in(stock_output)
    assert account(rarely)[2] < account(both)[2]


@both_ways
def test_draft_model_drafts(folders: Path, stock_output: str) -> None:
    """The model itself is always right; another one is not, and the text is the same."""
    itself = generate(folders, "--draft-model", str(folders / "model"), "--draft-length", "4")
    other = generate(folders, "--draft-model", str(folders / "other"), "--draft-length", "4")
    assert text_in(itself) == text_in(other) == text_in(stock_output)
    assert account(itself) == (5.0, 64, 64)
    assert account(other)[1] < account(other)[2]


@both_ways
def test_rule_decides_how_much_is_accepted(folders: Path) -> None:
    """At temperature 1 a perfect draft model is accepted whole by rejection, not by match."""
    flags = ("--draft-model", str(folders / "model"), "--draft-length", "4")
    flags += ("--temp", "1", "--seed", "3")
    tokens_per_pass, accepted, drafted = account(generate(folders, *flags, "--rule", "rejection"))
    assert accepted == drafted
    assert tokens_per_pass == 5
    _, accepted, drafted = account(generate(folders, *flags, "--rule", "match"))
    assert accepted < drafted


@both_ways
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--drafter", "nothing"), "Unknown drafter 'nothing'. Known: model, ngram"),
        (("--drafter", "ngram:nothing=1"), "nothing"),
        (("--drafter", "model"), "--draft-model"),
        (("--draft-length", "-1"), "expected an int >= 0, auto or heuristic"),
        (("--rule", "nothing"), "Unknown rule 'nothing'"),
        (("--draft-model", "swapped"), "token 'x' has id"),
    ],
)
def test_what_cannot_be_done_is_said_in_words(
    flags: tuple[str, str], words: str, folders: Path
) -> None:
    """Status 2, no traceback."""
    flag, value = flags
    value = str(folders / value) if flag == "--draft-model" else value
    done = run("generate", "--model", str(folders / "model"), "--prompt", "a", flag, value)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@both_ways
@pytest.mark.parametrize("flags", [(), ("--drafter", "ngram")])
def test_chat_answers_as_mlx_lms(flags: tuple[str, ...], folders: Path) -> None:
    """Two turns and a reset: the same answers; with --stats a line after each."""
    arguments = ("--model", str(folders / "model"), "--max-tokens", "30")
    said = "the cat in the hat\nand the cat\nr\nthe cat in the hat\nq\n"
    theirs = run_stock("chat", *arguments, stdin=said)
    ours = run("chat", *arguments, "--draft-length", "4", "--stats", *flags, stdin=said)
    assert theirs.returncode == ours.returncode == 0, ours.stderr
    assert len(ACCOUNT.findall(ours.stdout)) == 3

    def answers(output: str) -> list[str]:
        lines = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", output).splitlines()
        timed = ("tok/s", "Speculation:")
        return [line for line in lines if not any(word in line for word in timed)]

    assert answers(ours.stdout) == answers(theirs.stdout)


@both_ways
def test_chat_takes_a_draft_model(folders: Path) -> None:
    """mlx-lm's chat has no such flag; the model itself is always right, in later turns too."""
    done = run(
        *("chat", "--model", str(folders / "model"), "--draft-model", str(folders / "model")),
        *("--max-tokens", "20", "--draft-length", "4", "--stats"),
        stdin="the cat\nand the hat\nq\n",
    )
    assert done.returncode == 0, done.stderr
    found = ACCOUNT.findall(done.stdout)
    assert len(found) == 2
    assert all(accepted == drafted != "0" for _, accepted, drafted, _ in found)


@both_ways
def test_benchmark_speculates(folders: Path) -> None:
    """With any drafter or a draft model, for one sequence; a batch is refused in words."""
    arguments = ("benchmark", "--model", str(folders / "model"), "-p", "20", "-g", "30", "-n", "1")
    done = run(
        *arguments, "--draft-model", str(folders / "model"), "--draft-length", "4", "--stats"
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"Averages: prompt_tps=\d", done.stdout)
    assert account(done.stdout) == (5.0, 24, 24)
    refused = run(*arguments, "-b", "2", "--drafter", "ngram")
    assert refused.returncode == 2
    assert "use --batch-size 1" in refused.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_all_of_mlx_lms_flags_are_there(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser is mlx-lm's own with ours added, so later flags come by themselves."""
    module = importlib.import_module(f"mlx_lm.{name}")
    helps = []
    for stand_in in (module.argparse, argparse_with_flags(lambda *args: None)):
        with (
            replaced_names(module, {"argparse": stand_in}),
            pytest.MonkeyPatch.context() as patch,
            pytest.raises(SystemExit),
        ):
            patch.setattr(sys, "argv", [name, "--help"])
            module.main()
        helps.append(set(re.findall(r"--[a-z-]+", capsys.readouterr().out)))
    theirs, ours = helps
    assert theirs < ours
    assert {"--drafter", "--draft-model", "--draft-length", "--rule", "--stats"} <= ours


@both_ways
def test_the_command_line_lists_them() -> None:
    """In its own help."""
    done = run("--help")
    assert all(re.search(rf"^    {name}\b", done.stdout, re.M) for name in COMMANDS)
