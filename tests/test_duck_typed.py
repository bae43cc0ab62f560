"""Drafters, rules and rollback strategies of somebody else's: the package knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from specdec_mlx.contracts import Evidence, FeatureRows, Features, Step
from specdec_mlx.duck_typed import as_drafter, begin_session
from specdec_mlx.lab import check_rule, check_strategy
from specdec_mlx.rules import CoinRule
from test_docs import DOCS, blocks

VOCAB = 128
PROMPT = [5, 17, 99, 3, 64, 17, 99, 42]
NUM_TOKENS = 24


class Methods:
    """Every method that a session may have; inherits nothing. noted: the calls."""

    def __init__(self, coming: Sequence[int], noted: list[Any]) -> None:
        self.coming, self.noted, self.done = coming, noted, 0

    def propose(self, limit: int) -> sd.Draft:
        return self.propose_while(limit, lambda evidence: Step.GO_ON)

    def propose_while(self, limit: int, goes_on: Any) -> sd.Draft:
        coming = self.coming[self.done : self.done + min(limit, 3)]
        tokens = [*coming[:2], *((token + 1) % VOCAB for token in coming[2:])]
        length = sum(goes_on([Evidence()] * n) is Step.GO_ON for n in range(1, 1 + len(tokens)))
        self.noted.append(("propose", limit, length))
        return sd.Draft(tokens[:length])

    def propose_after(self, tokens: Sequence[int], limit: int) -> sd.Draft:
        return sd.Draft([*tokens, 1][:limit])

    def candidates(self, limit: int) -> Sequence[sd.Draft]:
        return [sd.Draft([one] * min(limit, 2)) for one in (3, 4)]

    def observe(self, tokens: Sequence[int]) -> None:
        self.noted.append(("observe", list(tokens)))
        self.done += len(tokens)

    def see(self, features: FeatureRows) -> None:
        self.noted.append(("see", features.top_tokens.tolist()))

    def see_rejected(self, tokens: Sequence[int], features: FeatureRows) -> None:
        self.noted.append(("see_rejected", list(tokens), features.top_tokens.tolist()))

    def close(self, length: int) -> None:
        self.noted.append(("close", length))


class DrafterMethods:
    """Every method that a drafter may have; inherits nothing."""

    key, features, branches = "theirs", Features(top=1, rejected=True), 1
    session: Any = Methods

    def __init__(self, coming: Sequence[int]) -> None:
        self.coming, self.noted = coming, []

    def begin(self, prompt: Sequence[int], context: sd.drafters.DraftContext) -> Any:
        self.noted.append(("begin", prompt))
        return self.session(self.coming, self.noted)

    def check(self, context: sd.drafters.DraftContext) -> None:
        self.noted.append(("check", context.vocab_size))


class Inheriting(DrafterMethods, sd.Drafter):
    """The same as a drafter of the contracts."""

    session = type("Inheriting", (Methods, sd.Session), {})


class TwoMethods:
    """A drafter and its session with the methods that both must have, and no other."""

    def begin(self, prompt: Sequence[int], context: sd.drafters.DraftContext) -> TwoMethods:
        return self

    def propose(self, limit: int) -> sd.Draft:
        return sd.Draft([0] * limit)

    def observe(self, tokens: Sequence[int]) -> None:
        if tokens[-1] in REFUSED:
            raise OverflowError("its own")


REFUSED: list[int] = []


@pytest.mark.parametrize("around", [lambda one: one, sd.BestOf])
def test_a_drafter_that_inherits_nothing_gets_all_calls(around: Any) -> None:
    """Those that a drafter of the contracts gets, in the same order."""
    model, noted = tiny.build("qwen2"), []
    coming = scripted.plain(NUM_TOKENS)
    for kind in (DrafterMethods, Inheriting):
        drafter = kind(coming)
        items = text(model, around(drafter), num_draft_tokens=3)
        session = begin_session(as_drafter(drafter), PROMPT, CONTEXT)
        assert session.can_stop
        assert session.looks_ahead
        assert session.propose_after([8, 9], 3).tokens == [8, 9, 1]
        assert [draft.tokens for draft in session.candidates(4)] == [[3, 3], [4, 4]]
        assert len(session.propose_while(3, lambda evidence: Step.STOP_BEFORE)) == 0
        assert [item.token for item in items] == coming
        noted.append(drafter.noted)
    assert noted[0] == noted[1]
    names = {"begin", "check", "propose", "observe", "see", "see_rejected", "close"}
    assert {name for name, *_ in noted[0]} == names


def test_two_methods_are_a_drafter() -> None:
    """All that it lacks has its default, and what it raises is its own."""
    model, drafter = tiny.build("qwen2"), TwoMethods()
    known = as_drafter(drafter)
    assert (as_drafter(known), as_drafter(None), known) == (known, None, as_drafter(drafter))
    assert (known.features, known.branches, known.drafters, known.models()) == (None, 1, [], [])
    assert not any((known.on_every_rank, known.describe(), known.keeps_draft_cache(CONTEXT)))
    assert (known.key, known.class_name) == ("test_duck_typed.TwoMethods", "TwoMethods")
    session = begin_session(known, PROMPT, CONTEXT)
    assert not any((session.cheap, session.forks, session.can_stop, session.reads_target))
    assert not session.looks_ahead
    assert [draft.tokens for draft in session.candidates(2)] == [[0, 0]]
    assert session.parts("its") == [("its", session)]
    items = text(model, drafter)
    assert [item.token for item in items] == scripted.plain(NUM_TOKENS)
    REFUSED[:] = [items[5].token]
    with pytest.raises(OverflowError, match="its own"):
        text(model, drafter)


CONTEXT = sd.drafters.DraftContext()


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
    values = {"reluctant": "test_duck_typed:Reluctant", "block": "test_duck_typed:Reluctant"}
    values |= {"broken": "test_duck_typed:Missing", "no-rule": "pathlib:Path"}
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
