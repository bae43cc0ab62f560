"""Every experiment of `benchmarks/` runs, on a tiny model or the lab pair, as its page says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import command_line
from selection import FULL
from tiny_model_folder import write_model_folder

ROOT = Path(__file__).parent.parent
PARTS = {"oracles", "recorded_rows"}
"""Modules that are no command."""

PROMPT = "the cat in the hat and the other cat in the hat and the"

COMMANDS = {
    "batches": "--model {model} --prompts {prompts} --rows 2 --groups 1 --repeats 1 --max-tokens 8",
    "head_trees": "--every 16 --sizes 2 --max-tokens 8",
    "heads": "--every 16 --lengths 2 --max-tokens 8",
    "host_time": "--context 300 --rounds 2",
    "memory": "{folder} --tokenizer {model} --max-tokens 100000",
    "online": "--model {model} --draft-model {model} --texts 2 --held-out 1 --max-tokens 8",
    "peers": "--peer mlx-dspark --help",
    "prior": "{texts} --drafter ngram",
    "recorded_drafts": "{texts} --draft-model {model} --json {out}",
    "recorded_tops": "{texts} --model {model} --json {out}",
    "replay": "{texts} --drafter ngram --draft-length 2",
    "rollback": "--model {model} --context 64 --repeats 2",
    "rules": "--model {model} --draft-model {model} --prompts {prompts} --max-tokens 8",
    "server": "--help",
    "tree_cost": "--model {model} --repeats 1",
    "worst_case": "--model {model} --num-prompts 1 --repeats 1 --max-tokens 8",
}
"""Arguments of each; `test_bench_server.py` runs the server's."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny model, prompts, and recorded texts of it."""
    folder = tmp_path_factory.mktemp("benchmarks")
    model = write_model_folder(folder / "model")
    rows = [{"id": str(i), "category": "x", "prompt": f"{i} {PROMPT}"} for i in range(2)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = {name: str(folder / name) for name in ("texts.json", "out.json")}
    prompts = str(folder / "prompts.jsonl")
    flags = ["--model", model, "--prompts", prompts, "--max-tokens", "24", "--drafter", "ngram"]
    assert command_line.run("bench", *flags, "--json", made["texts.json"]).returncode == 0
    return {
        "model": str(model),
        "prompts": prompts,
        "texts": made["texts.json"],
        "out": made["out.json"],
        "folder": str(ROOT / "benchmarks"),
    }


@FULL
@pytest.mark.parametrize("name", COMMANDS)
def test_it_runs(name: str, files: dict[str, str]) -> None:
    """And prints something."""
    arguments = COMMANDS[name].format(**files).split()
    done = command_line.run(*arguments, program=f"benchmarks.{name}")
    assert done.returncode == 0, done.stderr
    assert done.stdout or Path(files["out"]).exists()


def test_the_page_lists_every_experiment() -> None:
    """Each by its command, and nothing else."""
    modules = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - PARTS - {"__init__"}
    page = (ROOT / "benchmarks" / "README.md").read_text()
    assert modules == set(COMMANDS)
    assert {name for name in modules if f"`python -m benchmarks.{name}" in page} == modules
