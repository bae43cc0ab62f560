"""The experiments of `benchmarks/`: every one runs, and its numbers are what it says they are."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from functools import cache, partial
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import numpy as np
import pytest

import command_line
from benchmarks import heads, server
from benchmarks.peers import MLX_DSPARK, MLX_OPTIQ, PEERS, _Rounds, make_peer
from benchmarks.rules import account_of, by_rule
from benchmarks.server import OURS, STOCK, Answer, Phase
from selection import FULL
from specdec_mlx import Sampling, lab, speculate
from specdec_mlx.bench import run
from specdec_mlx.bench.contenders import make_contenders
from specdec_mlx.bench.prompts import Prompt, Task
from specdec_mlx.bench.summary import ALL
from specdec_mlx.bench.timing import Settings, time_generation
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.errors import MissingPackageError
from specdec_mlx.loop import Token
from specdec_mlx.models import load_model
from specdec_mlx.stats.counterfactual import BY_ROUND, BY_TOKEN, COLUMNS, Counterfactual
from tiny_model_folder import write_model_folder

ROOT = Path(__file__).parent.parent
PARTS = {"oracles", "recorded_rows"}  # modules that are no command
FOREIGN = {"references"}  # runs torch, which is not installed

PROMPT = "the cat in the hat and the other cat in the hat and the"

COMMANDS = {
    "batches": "--model {model} --prompts {prompts} --rows 2 --groups 1 --repeats 1 --max-tokens 8",
    "head_trees": "{medusa} --prompts {prompts} --every 5 --sizes 2 --max-tokens 8",
    "heads": "{medusa} --prompts {prompts} --every 5 --lengths 2 --max-tokens 8",
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
    "server": "--model {model} --prompts {prompts} --num 3 --clients 2 --max-tokens 40"
    " --draft-length 3 --in-process",
    "tree_cost": "--model {model} --repeats 1",
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
    texts, prompts = str(folder / "texts.json"), str(folder / "prompts.jsonl")
    flags = ["--model", model, "--prompts", prompts, "--max-tokens", "24", "--drafter", "ngram"]
    assert command_line.run("bench", *flags, "--json", texts).returncode == 0
    medusa = f"--model {lab.target_path()} --head {lab.head_path('medusa')}"
    made = {"model": str(model), "prompts": prompts, "texts": texts, "medusa": medusa}
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
    assert modules == set(COMMANDS) | FOREIGN
    assert {name for name in modules if f"`python -m benchmarks.{name}" in page} == modules


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


# Rules: the table is the accounts of the texts, all rounds together -------------------------------

TEXTS = ("A list is ", "The function returns a ", "def f(x):")
Rounds = list[tuple[np.ndarray, int]]


def some_rounds(count: int, seed: int) -> Rounds:
    """Rounds of 3 positions with chances at random, and how many tokens each accepted."""
    random = np.random.default_rng(seed)
    return [(random.random((3, COLUMNS)), int(random.integers(4))) for _ in range(count)]


def recorded(rounds: Rounds) -> Counterfactual:
    account = Counterfactual()
    for table, num_accepted in rounds:
        account.record(table, num_accepted)
    return account


def test_results_are_the_accounts_all_rounds_together() -> None:
    """Every number of the table from the rounds by hand: not the mean of the texts' means."""
    texts = (some_rounds(5, seed=0), [], some_rounds(20, seed=1))
    account, rounds = Counterfactual(), [*texts[0], *texts[2]]
    for part in texts:
        account.merge(recorded(part))
    assert account.as_dict() == recorded(rounds).as_dict()
    results = {result.rule: result for result in by_rule(account)}
    assert list(results) == list(BY_ROUND)
    for column, rule in enumerate(BY_TOKEN):
        at = [[t[i, column] for t, n in rounds if n >= i] for i in range(3)]
        assert results[rule].by_position == pytest.approx([np.mean(row) for row in at])
        assert results[rule].acceptance == pytest.approx(np.mean(np.concatenate(at)))
    for rule, result in results.items():
        kept = account.accepted_per_round[rule].mean
        assert (result.accepted_per_round, result.tokens_per_pass) == (kept, 1 + kept)
        for reference in ("rejection", "match"):
            other = results[reference]
            ratios = {result.pass_ratios[reference]: result.tokens_per_pass / other.tokens_per_pass}
            if result.acceptance_ratios is not None:
                share = (result.acceptance or 0) / (other.acceptance or 1)
                ratios[result.acceptance_ratios[reference]] = share
            assert [*ratios] == pytest.approx([*ratios.values()])
    assert (results["block"].by_position, results["block"].acceptance_ratios) == (None, None)
    with pytest.raises(ValueError, match="No round had a draft"):
        by_rule(Counterfactual())


def test_a_text_ends_with_its_end_token() -> None:
    """The first token is not drafted; the second is in the first round's draft."""
    pair = lab.load_pair()
    tasks = [Task(text, "text", pair.tokenizer.encode(text)) for text in TEXTS]
    options: dict[str, Any] = {"max_tokens": 48, "temp": 1.0, "draft_length": 3}
    call, done = (pair.target, ModelDrafter(pair.draft)), list[int]()
    account = account_of(*call, tasks, on_text=lambda: done.append(1), **options)
    assert len(done) == 3
    assert account.positions[0].reached == account.rounds > 30
    (first,) = speculate(pair.target, tasks[0].prompt, max_tokens=1, sampler=Sampling(1.0), seed=0)
    every_token = set(range(1000))
    for end_tokens, rounds in ((every_token, 0), (every_token - {first.token}, 1)):
        assert account_of(*call, tasks[:1], end_tokens=end_tokens, **options).rounds == rounds


# The server ---------------------------------------------------------------------------------------


def test_servers_are_asked_in_turn_and_timed_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is first alternates; the time of each is the sum of its own."""
    asked: list[str] = []
    seconds = {STOCK: 3.0, OURS: 2.0}
    monkeypatch.setattr(time, "perf_counter", lambda: sum(seconds[name] for name in asked))

    def ask(name: str, prompt: str) -> Answer:
        asked.append(name)
        return Answer(prompt, 3)

    servers: dict[str, server.Ask] = {name: partial(ask, name) for name in seconds}
    phase = server.one_after_another(servers, ["a", "b", "c"])
    assert asked == [STOCK, OURS, OURS, STOCK, STOCK, OURS]
    assert phase.seconds == {STOCK: 9.0, OURS: 6.0}
    assert (phase.ratio, phase.num_same) == (1.5, 3)
    groups = server.several_at_once(servers, list("abcdefgh"), clients=3)
    assert [answer.text for answer in groups.answers[OURS]] == list("abcdefgh")
    assert len(groups.answers[STOCK]) == 8
    assert groups.seconds == {STOCK: 24.0, OURS: 16.0}


def test_a_phase_counts_errors_other_texts_and_times() -> None:
    """A failed request is never the same text, and counts in no time."""
    no = Answer(error="no")
    a, b, c = (
        Answer(text, 3, per_token=x, last=x) for text, x in zip("aab", (2, 4, 9), strict=True)
    )
    phase = Phase("it", answers={STOCK: [a, c, b, no], OURS: [b, a, no, no]})
    assert phase.num_same == 1
    assert phase.num_errors == {STOCK: 1, OURS: 2}
    assert phase.per_token(STOCK) == (4, 9)  # the median client's, and the slowest
    assert phase.per_token(OURS) == (3, 4)
    assert phase.latest == max(4 / 2, 4 / 9)  # of the request that fares worst
    table = server.table([phase])
    assert "1/4" in table
    assert " 2.00 " in table
    assert '"text"' not in json.dumps(server.record([phase], texts=False))
    assert '"text": "b"' in json.dumps(server.record([phase], texts=True))


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


@pytest.mark.parametrize("name", PEERS)
def test_texts_of_peers_are_plain_decodings_and_their_counts_add_up(name: str) -> None:
    """Every token is a draft's or a pass's own, but for one that a cut round did not get to."""
    pytest.importorskip(MODULES[name])
    model, tokenizer = loaded()
    texts = ["the cat and the hat and the cat and the", "on and on and on", "x"]
    tasks = run.make_tasks(tokenizer, [Prompt(text, "chat", text) for text in texts])
    contenders = [*make_contenders(model, [], []), make_peer(name, model, tokenizer)]
    record = run.run_bench(model, tasks, contenders, Settings(max_tokens=40), measure_cost=False)
    (result,) = (r for r in record.results if (r.drafter, r.category) == (name, ALL))
    assert result.identical == result.texts == 3
    assert 0 < result.accepted < result.drafted
    assert result.tokens_per_pass > 1
    for max_tokens, task in product((1, 2, 40), tasks):
        sample = time_generation(make_peer(name, *loaded()), task, Settings(max_tokens), 0)
        assert len(sample.tokens) == max_tokens
        assert sample.passes + sample.accepted - max_tokens in (0, 1)
        assert (sample.decode_seconds > 0) == (max_tokens > 1)


def test_rounds_of_callbacks_become_tokens() -> None:
    """Each round is its accepted tokens and one more, at the round's time; the last one is cut."""
    target = SimpleNamespace(verify=lambda: "logits")
    rounds = _Rounds(target)
    assert target.verify() == target.verify() == "logits"
    first_at = rounds.first_at
    for drafted, accepted in ((4, 2), (0, 0), (3, 3)):
        rounds.add(drafted=drafted, accepted=accepted, cap=4)
    emitted = list(rounds.emitted(list(range(7))))
    assert [e.token for e in emitted] == list(range(7))
    assert [e.from_draft for e in emitted] == [False, True, True, False, False, True, True]
    assert [e.at for e in emitted[:2]] == [first_at, rounds.rounds[0][2]]
    assert [e.counts for e in emitted[::3]] == [(1, 0, 0), (2, 4, 1), (4, 7, 2)]
