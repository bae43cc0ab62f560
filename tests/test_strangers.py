"""A rule, a drafter and a rollback strategy of somebody else's: one short file each, none of ours.

What they extend is used as it is: nothing of the package knows of them, or is changed for them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

import scripted
import specdec_mlx as sd
import tiny
import tiny_text
from selection import in_one_test
from specdec_mlx.drafters import registry as drafter_registry
from specdec_mlx.rules import registry as rule_registry
from specdec_mlx.target.strategies import STRATEGIES
from specdec_mlx.testing import check_drafter, check_rule, check_strategy
from strangers.cache import BlockCache
from strangers.drafter import Periodic
from strangers.rule import Reluctant
from strangers.strategy import DropBlocks

FILES = sorted((Path(__file__).parent / "strangers").glob("[a-z]*.py"))
EXTENSIONS = {"drafter.py", "rule.py", "strategy.py"}
MOST_LINES = 35

PUBLIC = {
    "specdec_mlx",
    "specdec_mlx.contracts",
    "specdec_mlx.rules.arithmetic",
    "specdec_mlx.rules.coins",
    "specdec_mlx.target.strategies",
}
"""Modules that an extension may import: its page names them."""

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 24
SAMPLINGS = {"temperature 0": sd.Sampling(), "temperature 1": sd.Sampling(temp=1.0)}


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def test_an_extension_is_one_short_file_that_imports_what_is_public() -> None:
    """At most 35 lines each; no private name, and no module that its page does not name."""
    assert {path.name for path in FILES} == EXTENSIONS | {"cache.py"}
    for path in FILES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES, path.name
        for module, name in imported(path):
            assert not name.startswith("_"), path.name
            assert module in PUBLIC or not module.startswith("specdec_mlx"), module


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Somebody's distribution, as pip would leave it; found and forgotten again."""
    info = tmp_path / "strangers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strangers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[specdec_mlx.drafters]\nperiodic = strangers.drafter:Periodic\n"
        "[specdec_mlx.rules]\nreluctant = strangers.rule:Reluctant\n"
        "block = strangers.rule:Reluctant\nbroken = strangers.rule:Missing\n"
        "no-rule = strangers.drafter:Periodic\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    forget_packages()
    with pytest.warns(UserWarning, match="rule 'block' of strangers is left out, since specdec-ml"):
        rule_registry.rule_names()
    yield
    monkeypatch.undo()
    forget_packages()


def forget_packages() -> None:
    """Installed packages are looked through once in a process; here they change."""
    for lookup in (drafter_registry._entries, rule_registry._installed):
        getattr(lookup, "cache_clear", lambda: None)()


@cache
def target() -> nn.Module:
    return tiny.build("qwen2")


def run(drafter: Any, model: nn.Module | None = None, **options: Any) -> list[sd.responses.Token]:
    options = {"max_tokens": NUM_TOKENS, "draft_length": 4, "seed": 3} | options
    return list(sd.speculate(model or target(), PROMPT, drafter, **options))


def tokens(items: list[sd.responses.Token]) -> list[int]:
    return [item.token for item in items]


def oracle(sampling: sd.Sampling, wrong: float = 0.0) -> scripted.OracleDrafter:
    """Knows the text that plain decoding writes."""
    text = tokens(run(None, sampler=sampling, max_tokens=NUM_TOKENS + 10))
    return scripted.OracleDrafter(text, VOCAB, wrong=wrong)


# The rule -----------------------------------------------------------------------------------------


def test_the_rule_keeps_the_contract() -> None:
    """Whole rounds enumerated, for a share of 1 too, which is rejection."""
    for rule in (Reluctant(), Reluctant(share=1.0)):
        assert "total variation at most" in check_rule(rule)[-1]


def test_the_rule_is_asked_at_any_temperature() -> None:
    """Drafts that are all right are kept with chance `share`; a greedy text is the plain one."""
    drafted = [(oracle(sd.Sampling()), 0.0), (sd.ModelDrafter(target()), 1.0)]
    for drafter, temp in drafted:
        for share, least, most in ((1.0, 0.999, 1.0), (0.5, 0.2, 0.8), (0.0, 0.0, 0.0)):
            items = run(drafter, rule=Reluctant(share=share), sampler=sd.Sampling(temp))
            assert items[-1].stats.drafted > 0
            assert least <= items[-1].stats.acceptance_rate <= most
            assert temp or tokens(items) == tokens(run(None))


@pytest.mark.usefixtures("installed")
def test_the_rule_has_a_name_with_options() -> None:
    """It gives the text of the rule itself, and stands in the list; names of ours stay ours."""
    greedy = oracle(sd.Sampling())
    by_name = run(greedy, rule="reluctant:share=0.25")
    by_object = run(greedy, rule=Reluctant(share=0.25))
    assert tokens(by_name) == tokens(by_object)
    assert by_name[-1].stats.accepted == by_object[-1].stats.accepted
    assert "reluctant" in rule_registry.rule_names()
    assert rule_registry.rule_names().count("block") == 1
    assert rule_registry.make_rule("block") == sd.rules.Block()


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
        rule_registry.make_rule(choice)


def test_packages_are_looked_through_once_and_not_for_built_in_rules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reading the metadata of all packages takes milliseconds, which each request would pay."""
    rule_registry.rule_names()
    monkeypatch.setattr("specdec_mlx.options.entry_points", pytest.fail)
    assert "auto" in rule_registry.rule_names()
    monkeypatch.setattr(rule_registry, "_installed", pytest.fail)
    assert rule_registry.make_rule("block") == sd.rules.Block()


# The drafter --------------------------------------------------------------------------------------


def test_the_drafter_keeps_the_contract() -> None:
    """As it is."""
    assert not check_drafter(Periodic(period=3))[0].startswith("protocol: 0 drafts")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_drafter_drafts_by_name_and_by_object(sampling: str) -> None:
    """The text is that of plain decoding, and drafts are kept."""
    model, tokenizer = tiny_text.model(), tiny_text.tokenizer()

    def text(drafter: Any) -> list[sd.responses.SpeculativeResponse]:
        options = {"sampler": SAMPLINGS[sampling], "seed": 3, "draft_length": 4, "max_tokens": 40}
        return list(sd.stream_generate(model, tokenizer, PROMPT, drafter=drafter, **options))

    plain, by_name, by_object = (text(d) for d in (None, "periodic:period=1", Periodic(period=1)))
    assert [r.token for r in plain] == [r.token for r in by_name] == [r.token for r in by_object]
    assert by_name[-1].stats.drafted == by_object[-1].stats.drafted > 0
    assert "periodic" in sd.drafters.drafter_names()


# The strategy -------------------------------------------------------------------------------------


def test_the_strategy_keeps_the_contract() -> None:
    """Passes over its cache are the default's: a layer of attention."""
    assert check_strategy(DropBlocks(), BlockCache)[0] == "protocol: drop blocks"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("is_registered", [True, False])
def test_a_model_with_that_cache_drafts_losslessly(
    sampling: str, is_registered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text is that of mlx-lm's own caches; with the strategy no position is fed again."""
    if not is_registered:
        monkeypatch.delitem(STRATEGIES, BlockCache)
    model = tiny.build("qwen2")
    model.make_cache = lambda: [BlockCache() for _ in model.layers]
    drafter = oracle(SAMPLINGS[sampling], wrong=0.4)
    caches = make_prompt_cache(model)
    items = run(drafter, model, sampler=SAMPLINGS[sampling], prompt_cache=caches)
    assert tokens(items) == tokens(run(None, sampler=SAMPLINGS[sampling]))
    stats = items[-1].stats
    assert 0 < stats.accepted < stats.drafted
    assert (stats.replayed == 0) == is_registered
    assert {cache.offset for cache in caches} == {len(PROMPT) + NUM_TOKENS}
