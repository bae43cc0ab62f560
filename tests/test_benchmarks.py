"""The experiments of `benchmarks/`: every one runs, and its numbers are what it says they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step

import command_line
from benchmarks import heads, server, specbench
from selection import FULL
from specdec_mlx import lab
from specdec_mlx.draft_length.value import Fixed
from specdec_mlx.drafters.prompt_lookup import PromptLookupDrafter
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.lab.bench.cost import linear_cost
from specdec_mlx.lab.bench.peers import MLX_DSPARK, MLX_OPTIQ, make_peer
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.replay import greedy_context, replay_text
from specdec_mlx.lab.bench.timing import Settings
from specdec_mlx.lab.papers.recycling import SuccessorTable
from specdec_mlx.lab.prompts import RecordedText
from specdec_mlx.loop import Token
from specdec_mlx.models.loading import load_model
from tiny_model_folder import write_model_folder

ROOT = Path(__file__).parent.parent
PARTS = {"agent_model", "oracles", "recorded_rows"}  # modules that are no command
FOREIGN = {"references"}  # runs torch, which is not installed
LONG = {"power_of_probe", "server_load"}  # take minutes at their least

PROMPT = "the cat in the hat and the other cat in the hat and the"

GENERATES = """
import unittest

from mlx_lm import load, stream_generate


class TestIt(unittest.TestCase):
    def test_it(self):
        model, tokenizer = load("mlx-community/Qwen1.5-0.5B-Chat-4bit")
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": "the cat"}])
        self.assertEqual(len(list(stream_generate(model, tokenizer, prompt, max_tokens=4))), 4)
"""
"""As a test of mlx-lm's."""

COMMANDS = {
    "agents": "{scratch} --write-target",
    "batches": "--model {model} --prompts {prompts} --rows 2 --groups 1 --repeats 1 --max-tokens 8",
    "described_lookups": "{sessions} --method RAMP",
    "head_trees": "{medusa} --prompts {prompts} --every 5 --sizes 2 --max-tokens 8",
    "heads": "{medusa} --prompts {prompts} --every 5 --lengths 2 --max-tokens 8",
    "heavy": "--gigabytes 0.04 --num-draft-tokens 2 --texts 1 --max-tokens 8 --repeats 1",
    "host_time": "--context 300 --rounds 2",
    "memory": "{folder} --tokenizer {model} --max-tokens 100000",
    "mlx_lm_tests": "{mlx_lm_tests} --model {model}",
    "hosts": "--help",
    "import_report": "{report}",
    "online": "--model {model} --draft-model {model} --texts 2 --held-out 1 --max-tokens 8",
    "papers": "--help",
    "peers": "--peer mlx-dspark --help",
    "policies": "{texts} --curve m3-max",
    "prior": "{texts} --drafter ngram",
    "real_agent": "--help",
    "recorded_drafts": "{texts} --draft-model {model} --json {out}",
    "recorded_tops": "{texts} --model {model} --json {out}",
    "replay": "{texts} --drafter ngram --num-draft-tokens 2",
    "specbench": "{questions} --model {model} --max-tokens 8",
    "rollback": "--model {model} --context 64 --repeats 2",
    "rules": "--model {model} --draft-model {model} --prompts {prompts} --max-tokens 8",
    "server": "--model {model} --prompts {prompts} --num 3 --clients 2 --max-tokens 40"
    " --num-draft-tokens 3 --in-process",
    "server_cost": "--max-tokens 8 --repeats 1 --clients 1",
    "sessions": "--sessions {sessions} --id one --model {model} --turns 2 --max-tokens 40",
    "shortlist": "{texts} --model {model} --size 16 --size 64",
    "suffix_reference": "--help",
    "systems": "--every 16 --max-tokens 4 --part cascades",
    "tables": "--help",
    "tree_cost": "--model {model} --repeats 1",
    "windows": "--drafter eagle3 --texts 1 --max-tokens 8",
    "worst_case": "--model {model} --num-prompts 1 --repeats 1 --max-tokens 8",
}
"""Arguments of each."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny model, prompts, and recorded texts of it."""
    folder = tmp_path_factory.mktemp("benchmarks")
    model = write_model_folder(folder / "model", hidden_size=64, intermediate_size=64)
    rows = [{"id": str(i), "category": "x", "prompt": f"{i} {PROMPT}"} for i in range(5)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    said = [{"role": role, "content": PROMPT} for role in ("user", "assistant") * 2]
    asked = [{"question_id": 1, "category": "stem", "turns": [PROMPT, PROMPT]}]
    asked += [{"question_id": 2, "category": "rag", "turns": [f"a {PROMPT}"]}]
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, asked)))
    (folder / "sessions.jsonl").write_text(json.dumps({"id": "one", "messages": said}))
    texts, prompts = str(folder / "texts.json"), str(folder / "prompts.jsonl")
    flags = ["--model", model, "--prompts", prompts, "--max-tokens", "24", "--drafter", "ngram"]
    assert command_line.run("bench", *flags, "--json", texts).returncode == 0
    medusa = f"--model {lab.target_path()} --head {lab.head_path('medusa')}"
    made = {"model": str(model), "prompts": prompts, "texts": texts, "medusa": medusa}
    made["sessions"] = str(folder / "sessions.jsonl")
    made["report"] = str(ROOT / "docs" / "data" / "report-cpu.json")
    made["scratch"] = str(folder / "scratch")
    made["questions"] = str(folder / "questions.jsonl")
    (folder / "tests").mkdir()
    (folder / "tests" / "test_it.py").write_text(GENERATES)
    made["mlx_lm_tests"] = str(folder / "tests")
    return made | {"out": str(folder / "out.json"), "folder": str(ROOT / "benchmarks")}


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
    assert modules == set(COMMANDS) | FOREIGN | LONG
    assert {name for name in modules if f"`python -m benchmarks.{name}" in page} == modules


@FULL
def test_long_texts_are_counted_by_hundreds(files: dict[str, str]) -> None:
    """Every token of them: one a pass, and those accepted; learning makes a difference."""
    flags = f"--long 180 --max-tokens 60 --texts 1 --num-draft-tokens 3 --json {files['out']}"
    done = command_line.run(*flags.split(), program="benchmarks.online")
    assert done.returncode == 0, done.stderr
    record = json.loads(Path(files["out"]).read_text())
    for way in ("not learning", "learning"):
        passes, drafted, accepted = np.array(record[way]).T
        assert np.all(np.abs(passes + accepted - [100, 80]) <= 4)
        assert sum(passes + accepted) - 180 in range(4)
        assert np.all(accepted <= drafted)
    assert record["learning"] != record["not learning"]


# mlx-lm's own tests: the three columns differ where the drafters show ----------------------------

SEES = """
import unittest

from mlx_lm.generate import generate_step


class TestIt(unittest.TestCase):
    def test_alike(self):
        raise ValueError("in every column")

    def test_installed(self):
        self.assertFalse(hasattr(generate_step, "__wrapped__"))
"""


@FULL
def test_what_differs_from_stock_is_named_and_is_exit_status_1(
    tmp_path: Path, files: dict[str, str]
) -> None:
    """Not what fails stock as well, with the same."""
    (tmp_path / "test_it.py").write_text(SEES)
    flags = [tmp_path, "--model", files["model"]]
    done = command_line.run(*flags, program="benchmarks.mlx_lm_tests")
    assert done.returncode == 1
    assert "test_it.TestIt.test_installed: NOT EXPECTED" in done.stdout
    assert "test_it.TestIt.test_alike:" not in done.stdout
    assert done.stdout.count("ValueError: in every column") == 3


@FULL
def test_a_column_generates_with_drafters_only_if_it_says_so(files: dict[str, str]) -> None:
    """None in the first; what a test generates counts in both others."""
    flags = [files["mlx_lm_tests"], "--model", files["model"]]
    done = command_line.run(*flags, program="benchmarks.mlx_lm_tests")
    counts = [line.split("; ")[1].split()[0] for line in done.stdout.splitlines() if "; " in line]
    assert counts == ["0", "1", "1"]


# Spec-Bench: the texts are the target's own, and passes are counted -------------------------------


def test_spec_bench_records_greedy_answers_to_all_turns(files: dict[str, str]) -> None:
    """The second question follows the first answer; the likeliest token is the token itself."""
    model, tokenizer = loaded()
    questions = specbench.read_questions(files["questions"])
    recorded = specbench.record_texts(model, tokenizer, questions, 8)
    texts = {text.id: text for text in recorded}
    parts = {"1/0": "mt_bench", "1/1": "mt_bench", "2/0": "rag"}
    assert {text.id: text.category for text in texts.values()} == parts
    first, second = texts["1/0"], texts["1/1"]
    answer = tokenizer.decode(first.generated, skip_special_tokens=True)
    assert answer in tokenizer.decode(second.prompt)
    assert len(second.prompt) > len(first.prompt)
    for text in texts.values():
        plain = generate_step(mx.array(text.prompt), model, max_tokens=8)
        assert text.generated == [token for token, _ in plain][: len(text.generated)]
        assert [top[0] for top in text.top_tokens] == text.generated
        assert {len(set(top)) for top in text.top_tokens} == {specbench.TOP}


def test_spec_bench_counts_tokens_a_pass_of_each_part() -> None:
    """40 tokens that the prompt holds: two alone, then 11 a pass; a text that is new has one."""
    known = RecordedText("1/0", "qa", [*range(100)], [*range(40)])
    new = RecordedText("2/0", "rag", [*range(100)], [*range(200, 220)])
    record = Record("", {}, Settings(40, vocab_size=1000), [known, new])
    method = specbench.Method("look-up", 10, lambda: PromptLookupDrafter(min_ngram=2))
    sample = replay_text(
        known, method.make(), Fixed(10), linear_cost(0.0), max_tokens=40, vocab_size=1000
    )
    header, _, answers, row = specbench.table(record, [method]).splitlines()
    assert answers.replace(" ", "") == "|answers||1|1|2||"
    assert [cell.strip() for cell in header.split("|")[3:6]] == ["qa", "rag", "all"]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    passes = 2 + 3 + 1  # tokens alone, full drafts, and the draft of what is left
    assert sample.passes == passes
    assert cells == [
        "look-up",
        "10",
        f"{40 / passes:.2f}",
        "1.00",
        f"{60 / (passes + 20):.2f}",
        "100%",
    ]


def test_a_tree_of_token_recycling_takes_nodes_by_the_product_of_their_ranks() -> None:
    """A second guess waits until the first guesses of first guesses are in, as deep as they go."""
    table = SuccessorTable()
    for token, *likeliest in [(1, 2, 3, 4), (2, 5, 6), (3, 7), (5, 1)]:
        table.note((token,), *((one,) for one in likeliest))
    session = specbench.RecyclingTree(table=table).begin([9, 1], greedy_context(10))
    # 1 -> 2 -> 5 -> 1 -> 2 ... have product 1, and six of them are the deepest path.
    assert list(session.propose(6).tokens) == [2, 5, 1, 2, 5, 1]
    assert list(session.propose(8).tokens)[6:] != [2, 5]
    del table.successors[5,]
    draft = session.propose(80)
    # Ranks 1, 1 1, 1 2, 2, 2 1, 3, with products 1, 1, 2, 2, 2, 3.
    assert (list(draft.tokens), draft.parents) == ([2, 5, 6, 3, 7, 4], [-1, 0, 0, -1, 3, -1])


# Heads: each generation is charged with its own passes --------------------------------------------

TOKEN = Token(0, "plain", None, None, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_generation_pays_for_the_passes_that_it_launched(
    order: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pass that is left at the end of a turn as well, whoever comes next."""
    device = SimpleNamespace(now=0.0, queued=0.0)

    def wait(stream: object = None) -> None:
        device.now, device.queued = device.now + device.queued, 0.0

    def generation(seconds: float, num_tokens: int) -> Iterator[Token]:
        """A token a pass; the next pass is under way when a token is emitted."""
        device.queued += seconds
        for left in reversed(range(num_tokens)):
            wait()
            device.queued += seconds if left else 0.0
            yield TOKEN

    costs, num_tokens = (1.0, 5.0), 2 + 3 * heads.TURN
    monkeypatch.setattr(heads.time, "perf_counter", lambda: device.now)
    monkeypatch.setattr(heads.mx, "synchronize", wait)
    runs = heads.race([generation(costs[i], num_tokens) for i in order])
    assert [run.seconds / (num_tokens - 2) for run in runs] == [costs[i] for i in order]


# Other packages, each of them no dependency of ours: without one its tests are left out -----------

MODULES = {MLX_DSPARK: "mlx_dspark", MLX_OPTIQ: "optiq"}


@cache
def loaded() -> tuple[nn.Module, Any]:
    return load_model(write_model_folder(Path(mkdtemp())))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what to install, before anything is run."""
    uses: dict[str, Any] = {name: partial(make_peer, name, *loaded()) for name in MODULES}
    uses["openai"] = partial(server.asking, "http://127.0.0.1:1", 3)
    for name, use in uses.items():
        monkeypatch.setitem(sys.modules, MODULES.get(name, name), None)
        with pytest.raises(MissingPackageError, match=f"pip install {name}"):
            use()
