"""Rules and rollback strategies of somebody else's: the package knows nothing of them.

Drafters of others are in test_new_drafter.py and test_wrong_calls.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
from selection import in_one_test
from specdec_mlx import rules
from specdec_mlx.caches import STRATEGIES
from specdec_mlx.lab import check_rule, check_strategy
from specdec_mlx.rules import CoinRule
from test_docs import DOCS, blocks

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 24


@dataclass(frozen=True)
class Reluctant(CoinRule):
    """Keeps x with chance s min(1, p/q); what that leaves of p, norm(p - s min(p, q)), follows."""

    name = "reluctant"
    share: float = 0.5

    def accept_probs(self, target_probs: Any, draft_tokens: Any, draft_probs: Any) -> Any:
        chances = rules.acceptance_probability(target_probs[:-1], draft_probs, draft_tokens)
        return self.share * chances

    def next_probs(
        self, target_probs: Any, draft_tokens: Any, draft_probs: Any, num_accepted: Any
    ) -> Any:
        minimum = rules.namespace_of(draft_probs).minimum
        kept = rules.with_zero_row(self.share * minimum(target_probs[:-1], draft_probs))
        rows = (rules.row(probs, num_accepted) for probs in (target_probs, kept))
        return rules.residual(*rows)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rules of somebody's distribution; found and forgotten again."""
    values = {"reluctant": "test_strangers:Reluctant", "block": "test_strangers:Reluctant"}
    values |= {"broken": "test_strangers:Missing", "no-rule": "pathlib:Path"}
    found = [EntryPoint(name, value, "specdec_mlx.rules") for name, value in values.items()]
    for entry in found:
        vars(entry)["dist"] = SimpleNamespace(name="strangers")
    monkeypatch.setattr("specdec_mlx.arguments.entry_points", lambda group: found)
    rules._installed.cache_clear()  # looked through once in a process; here it changes
    with pytest.warns(UserWarning, match="rule 'block' of strangers is left out, since specdec-ml"):
        rules.rule_names()
    yield
    rules._installed.cache_clear()


@pytest.mark.full
@pytest.mark.usefixtures("installed")
def test_a_rule_of_an_installed_package_has_a_name_with_options() -> None:
    """It keeps the contract, and is asked at any temperature; names of ours stay ours."""
    assert rules.make_rule("reluctant:share=0.25") == Reluctant(0.25)
    assert "total variation at most" in check_rule(Reluctant())[-1]
    drafter = sd.ModelDrafter(model := tiny.build("qwen2"))
    for share, least, most in ((1.0, 0.999, 1.0), (0.5, 0.2, 0.8), (0.0, 0.0, 0.0)):
        for temp in (0.0, 1.0):
            sampler = sd.Sampling(temp=temp)
            items = text(model, drafter, rule=f"reluctant:share={share}", sampler=sampler)
            assert items[-1].stats.drafted > 0
            assert least <= items[-1].stats.acceptance_rate <= most
    assert "reluctant" in rules.rule_names()
    assert rules.rule_names().count("block") == 1
    assert rules.make_rule("block") == sd.rules.Block()


@pytest.mark.usefixtures("installed")
@in_one_test(
    ("choice", "error", "words"),
    [
        ("reluctent", sd.errors.UnknownNameError, "Known: auto, .*reluctant"),
        ("reluctant:shore=1", ValueError, "shore"),
        ("broken", sd.errors.MissingPackageError, "'broken' of strangers cannot be loaded"),
        ("no-rule", ValueError, "expected a name or an instance of an AcceptanceRule"),
    ],
)
def test_what_is_wrong_with_a_name_is_said(choice: str, error: type, words: str) -> None:
    """Unknown, with an option too many, of a package that is broken, of something else."""
    with pytest.raises(error, match=words):
        rules.make_rule(choice)


@pytest.mark.parametrize("temp", [0.0, 1.0])
@pytest.mark.parametrize("is_registered", [True, False])
def test_the_documentations_strategy_drafts_losslessly(
    temp: float, is_registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of mlx-lm's own caches; with the strategy no position is fed again."""
    page: dict[str, Any] = {}
    for block in blocks(DOCS / "teach-it-a-cache.md"):
        exec(block.code, page)
    block_cache = page["BlockCache"]
    strategy = STRATEGIES.pop(block_cache)
    assert check_strategy(strategy, block_cache)[0] == "protocol: drop blocks"
    if is_registered:
        monkeypatch.setitem(STRATEGIES, block_cache, strategy)
    model, sampling = tiny.build("qwen2"), sd.Sampling(temp=temp)
    expected = text(model, None, sampler=sampling, max_tokens=NUM_TOKENS + 10)
    drafter = scripted.OracleDrafter([item.token for item in expected], VOCAB, wrong=0.4)
    model.make_cache = lambda: [block_cache() for _ in model.layers]
    caches = make_prompt_cache(model)
    items = text(model, drafter, sampler=sampling, prompt_cache=caches)
    assert [item.token for item in items] == drafter.text[:NUM_TOKENS]
    stats = items[-1].stats
    assert 0 < stats.accepted < stats.drafted
    assert (stats.replayed == 0) == is_registered
    assert {cache.offset for cache in caches} == {len(PROMPT) + NUM_TOKENS}


def text(model: nn.Module, drafter: Any, **options: Any) -> list[sd.generation.Token]:
    options = {"max_tokens": NUM_TOKENS, "num_draft_tokens": 4, "seed": 3} | options
    return list(sd.speculate(model, PROMPT, drafter, **options))
