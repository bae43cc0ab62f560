"""Acceptance by rule: the table says what the accounts of the texts say, all rounds together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rules
from benchmarks.rules import account_of, by_rule, format_results
from specdec_mlx import Sampling, lab, speculate
from specdec_mlx.bench.prompts import Task
from specdec_mlx.drafters.model import ModelDrafter
from specdec_mlx.stats.counterfactual import BY_ROUND, BY_TOKEN, COLUMNS, Counterfactual
from tiny_model_folder import write_model_folder

TEXTS = ("A list is ", "The function returns a ", "def f(x):")


def tables(count: int, seed: int) -> list[tuple[np.ndarray, int]]:
    """Rounds of 3 positions with chances at random, and how many tokens each accepted."""
    random = np.random.default_rng(seed)
    return [(random.random((3, COLUMNS)), int(random.integers(4))) for _ in range(count)]


def recorded(rounds: list[tuple[np.ndarray, int]]) -> Counterfactual:
    account = Counterfactual()
    for table, num_accepted in rounds:
        account.record(table, num_accepted)
    return account


def test_merged_accounts_are_one_account_of_all_rounds() -> None:
    """Texts of different lengths, one of none: not the mean of their means."""
    first, second = tables(5, seed=0), tables(20, seed=1)
    merged = Counterfactual()
    for part in (first, [], second):
        merged.merge(recorded(part))
    whole = recorded(first + second)
    assert merged.rounds == whole.rounds == 25
    assert merged.observed == pytest.approx(whole.observed)
    for rule in BY_ROUND:
        expected = whole.accepted_per_round[rule]
        assert merged.accepted_per_round[rule] == pytest.approx(expected)
    for own, other in zip(merged.positions, whole.positions, strict=True):
        assert (own.reached, own.observed) == (other.reached, other.observed)
        for rule in BY_TOKEN:
            assert own.expected[rule] == pytest.approx(other.expected[rule])


def test_results_are_the_accounts() -> None:
    """Every number of the table, worked out from the rounds by hand."""
    rounds = tables(30, seed=2)
    account = recorded(rounds)
    results = {result.rule: result for result in by_rule(account)}
    assert list(results) == list(BY_ROUND)
    for column, rule in enumerate(BY_TOKEN):
        result = results[rule]
        at = [[t[i, column] for t, n in rounds if n >= i] for i in range(3)]
        assert result.by_position == pytest.approx([np.mean(row) for row in at])
        assert result.acceptance == pytest.approx(np.mean(np.concatenate(at)))
    for rule, result in results.items():
        kept = account.accepted_per_round[rule].mean
        assert result.accepted_per_round == kept
        assert result.tokens_per_pass == 1 + kept
        for reference in ("rejection", "match"):
            other = results[reference]
            ratio = result.tokens_per_pass / other.tokens_per_pass
            assert result.pass_ratios[reference] == pytest.approx(ratio)
            if result.acceptance is not None:
                assert other.acceptance is not None
                assert result.acceptance_ratios is not None
                ratio = result.acceptance / other.acceptance
                assert result.acceptance_ratios[reference] == pytest.approx(ratio)
    assert (results["block"].by_position, results["block"].acceptance_ratios) == (None, None)


def test_the_lab_pair_keeps_the_proven_order() -> None:
    """Block keeps at least what rejection does, which accepts at least as coupled and match."""
    pair = lab.load_pair()
    tasks = [Task(text, "text", pair.tokenizer.encode(text)) for text in TEXTS]
    texts = 0

    def count() -> None:
        nonlocal texts
        texts += 1

    account = account_of(
        pair.target,
        ModelDrafter(pair.draft),
        tasks,
        max_tokens=48,
        temp=1.0,
        draft_length=3,
        on_text=count,
    )
    assert texts == 3
    results = {result.rule: result for result in by_rule(account)}
    assert results["block"].accepted_per_round >= results["rejection"].accepted_per_round
    chances = {rule: results[rule].acceptance or 0 for rule in BY_TOKEN}
    assert chances["rejection"] >= chances["coupled"] > chances["match"] > 0
    assert account.positions[0].reached == account.rounds > 30


def test_a_text_ends_with_its_end_token() -> None:
    """With the first one, which is not drafted; or with the second, in the first round's draft."""
    pair = lab.load_pair()
    task = Task("", "", pair.tokenizer.encode(TEXTS[0]))
    options = {"max_tokens": 48, "temp": 1.0, "draft_length": 3}
    whole = account_of(pair.target, ModelDrafter(pair.draft), [task], **options)
    sampling: dict[str, Any] = {"sampler": Sampling(1.0), "seed": 0}
    (first,) = speculate(pair.target, task.prompt, max_tokens=1, **sampling)
    every_token = set(range(1000))
    for end_tokens, rounds in ((every_token, 0), (every_token - {first.token}, 1)):
        cut = account_of(
            pair.target, ModelDrafter(pair.draft), [task], end_tokens=end_tokens, **options
        )
        assert cut.rounds == rounds < whole.rounds


def test_no_rounds_are_an_error() -> None:
    with pytest.raises(ValueError, match="No round had a draft"):
        by_rule(Counterfactual())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table is printed, and is in the JSON with the account; the 4-bit copy drafts."""
    folder = write_model_folder(tmp_path / "model", hidden_size=64, intermediate_size=64)
    (prompts := tmp_path / "p.jsonl").write_text(
        "\n".join(json.dumps({"id": t, "category": "c", "prompt": t}) for t in TEXTS)
    )
    path = tmp_path / "rules.json"
    arguments = ["--model", str(folder), "--prompts", str(prompts), "--per-category", "2"]
    arguments += ["--max-tokens", "16", "--draft-length", "2", "--json", str(path)]
    rules.main(arguments)
    record: dict[str, Any] = json.loads(path.read_text())
    results = [rules.RuleResult(**result) for result in record["results"]]
    printed = capsys.readouterr().out
    assert printed.startswith(f"2 texts, {record['account']['rounds']} rounds\n")
    assert format_results(results) in printed
    assert record["account"]["rounds"] > 4
    assert [len(r.by_position or ()) for r in results] == [0, 2, 2, 2, 2]
    assert all(0 < (r.acceptance or 1) < 1.001 for r in results)
