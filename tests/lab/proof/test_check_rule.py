"""The conformance test of rules passes ours, and fails rules that are broken in one way each."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import chi2, ncx2

from exact import COIN_RULES, WRONG_RULES
from selection import cases, each
from specdec_mlx.contracts import Agreement, Draft, Randomness, TargetRows, Verdict
from specdec_mlx.lab import check_rule
from specdec_mlx.lab.papers.lossy import LOSSY
from specdec_mlx.lab.proof import rule as rule_module
from specdec_mlx.lab.proof.chi_square import RARE_ALARM
from specdec_mlx.lab.proof.enumeration import enumerated
from specdec_mlx.lab.proof.rule import RuleConformance
from specdec_mlx.rules import (
    RULES,
    Block,
    Match,
    Rejection,
    at,
    leading_run,
    make_rule,
    namespace_of,
)

pytestmark = pytest.mark.usefixtures("compiled")  # the check traces what it is given


def parts(lines: list[str]) -> list[str]:
    return [line.partition(":")[0] for line in lines]


@pytest.mark.parametrize("name", cases(RULES, "match", "block"))
def test_our_lossless_rules_keep_the_contract(name: str) -> None:
    """Those by coins are enumerated to 1e-12, texts are drawn with the others."""
    lines = check_rule(make_rule(name))
    coins = ["coins"] if name in COIN_RULES else []
    assert parts(lines) == ["protocol", "purity", "greedy", *coins, "distribution"]
    how = "48 enumerated, total variation at most" if coins else "20000 texts drawn, K = 2"
    assert how in lines[-1]
    assert ("drawn" in lines[-1]) != bool(coins)


@pytest.mark.parametrize("name", cases(LOSSY, "lenient"))
def test_lossy_rules_keep_all_of_it_but_the_distribution(name: str) -> None:
    """They pass where they say what they are, as docstrings do, and fail where they do not."""
    assert name not in RULES
    assert (LOSSY[name].__doc__ or "").startswith("Changes the target's distribution")
    assert parts(check_rule(make_rule(name), lossless=False))[-1] == "coins"
    with pytest.raises(AssertionError, match="or say lossless=False"):
        check_rule(make_rule(name))


def test_the_named_wrong_rules_are_rejected() -> None:
    """All of them by enumeration alone, and what is wrong is said."""
    for rule in WRONG_RULES.values():
        assert max(comparison.total_variation for comparison in enumerated(rule)) > 0.01
    words = (
        r"SharpBonus, distribution: K = 1 drawn, V = 2: the text \[.*\] comes with a chance of 0"
    )
    words += r".* expected 0.*Over 2 tokens the total variation is 0.1"
    with pytest.raises(AssertionError, match=words):
        check_rule(WRONG_RULES["bonus at temperature 0.5"])


# Broken in one way each ---------------------------------------------------------------------------


class Sound:
    """Match, to be broken: what it answers is made of the number kept and the token after."""

    name: Any = "sound"

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Verdict | Agreement:
        own = target.tokens.astype(mx.int32)
        kept = leading_run(own[:-1] == draft.tokens.astype(mx.int32))
        return self.answer(kept, own, draft, randomness)

    def answer(self, kept: Any, own: Any, draft: Draft, randomness: Randomness) -> Any:
        return Verdict(kept, own[kept])


def sound_but(answer: Callable[..., Any]) -> Sound:
    """The sound rule, with an answer (kept, own, draft, randomness) of another kind."""
    return type("Broken", (Sound,), {"answer": lambda self, *args: answer(*args)})()


def keeping(change: Callable[..., Any]) -> Sound:
    """The sound rule, which keeps another number of tokens (kept, draft)."""
    return sound_but(lambda kept, own, draft, _: Verdict(now := change(kept, draft), own[now]))


class Counts(Sound):
    calls = 0

    def answer(self, kept: Any, own: Any, draft: Draft, randomness: Randomness) -> Any:
        self.calls += 1
        return super().answer(kept, own, draft, randomness)


class NeedsNothing(Sound):
    """Takes samplers that can only be called, and keeps what they would not have drawn."""

    needs_distribution = False

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Any:
        if target.has_distribution:
            return super().decide(target, draft, randomness)
        return Verdict(mx.array(1), target.tokens[1])


class CoinsFromTheNextToken(Rejection):
    """Right functions, but the coins and the token after are drawn from the same noise."""

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Any:
        class Same:
            def gumbel(self, vocab: int) -> mx.array:
                return randomness.gumbel(vocab)

            def uniform(self, n: int) -> mx.array:
                return mx.exp(-mx.exp(-randomness.gumbel(max(n, 3))))[:n]

        return super().decide(target, draft, Same())


class NotANumber(Rejection):
    """0/0 where draft and target exclude a token."""

    def accept_probs(self, target_probs: Any, draft_tokens: Any, draft_probs: Any) -> Any:
        p, q = at(target_probs[:-1], draft_tokens), at(draft_probs, draft_tokens)
        with np.errstate(all="ignore"):
            return namespace_of(p).minimum(1, p / (q * (p > 0)))


class Unnormalised(Rejection):
    def next_probs(self, target_probs: Any, tokens: Any, draft_probs: Any, kept: Any) -> Any:
        return 0.5 * super().next_probs(target_probs, tokens, draft_probs, kept)


class OnlyNumPy(Rejection):
    """On MLX the token after is drawn from p, whatever was rejected."""

    def next_probs(self, target_probs: Any, tokens: Any, draft_probs: Any, kept: Any) -> Any:
        right = super().next_probs(target_probs, tokens, draft_probs, kept)
        return target_probs[kept] if isinstance(target_probs, mx.array) else right


class CountsOtherwise(Rejection):
    """Counts all heads on MLX, and those before the first tails on NumPy."""

    def num_accepted(self, coins: Any) -> Any:
        is_mlx = isinstance(coins, mx.array)
        return coins.astype(mx.int32).sum() if is_mlx else super().num_accepted(coins)


class WithoutMax(Rejection):
    """The residual is p - q, which is negative where q is the larger."""

    def next_probs(self, target_probs: Any, tokens: Any, draft_probs: Any, kept: Any) -> Any:
        xp, p = namespace_of(target_probs), target_probs[kept]
        left = p - xp.concatenate([draft_probs, 0 * target_probs[-1:]])[kept]
        size = xp.abs(left).sum()
        return xp.where(size > 0, left / xp.where(size > 0, size, 1), p)


class UnnormalisedDraft(Rejection):
    """q sums to 0.9."""

    def accept_probs(self, target_probs: Any, draft_tokens: Any, draft_probs: Any) -> Any:
        return super().accept_probs(target_probs, draft_tokens, 0.9 * draft_probs)

    def next_probs(self, target_probs: Any, tokens: Any, draft_probs: Any, kept: Any) -> Any:
        return super().next_probs(target_probs, tokens, 0.9 * draft_probs, kept)


class Biased(Rejection):
    """3% of the chance of token 0 goes to token 1, where that is possible."""

    def next_probs(self, target_probs: Any, tokens: Any, draft_probs: Any, kept: Any) -> Any:
        right, xp = super().next_probs(target_probs, tokens, draft_probs, kept), namespace_of
        token = xp(right).arange(right.shape[-1])
        moved = 0.03 * right[0] * (right[1] > 0)
        return right + moved * (1.0 * (token == 1) - 1.0 * (token == 0))


calls = itertools.count()

BROKEN: dict[str, list[Any]] = {
    "protocol": [
        WithoutMax(),
        SimpleNamespace(name="no decide"),
        Sound,
        type("NoName", (Sound,), {"name": None})(),
        sound_but(lambda *given: given[4]),
        sound_but(lambda kept, own, *_: (kept, own[kept])),
        sound_but(lambda kept, own, *_: Verdict(kept, own[kept].astype(mx.float32))),
        sound_but(lambda kept, own, *_: Verdict(kept.item(), own[kept])),
        sound_but(lambda kept, own, *_: Verdict(kept[None], own[kept])),
        sound_but(lambda kept, own, *_: Agreement(own[:-1])),
        sound_but(lambda kept, own, *_: Verdict(kept - 1, own[kept])),
        sound_but(lambda kept, own, draft, coins: Verdict(kept, mx.argmax(coins.gumbel(2)))),
    ],
    "purity": [
        keeping(lambda kept, draft: kept * (next(calls) % 2)),
        Counts(),
        keeping(lambda kept, draft: (mx.random.uniform(), kept)[1]),
        keeping(lambda kept, draft: mx.array(kept.item())),
        keeping(lambda kept, draft: kept * (draft.evidence is None)),
    ],
    "greedy": [
        WRONG_RULES["lenience 1.2"],
        keeping(lambda kept, draft: mx.maximum(kept, 1)),
        NeedsNothing(),
    ],
    "coins": [NotANumber(), Unnormalised(), OnlyNumPy(), CountsOtherwise()],
    "distribution": [
        CoinsFromTheNextToken(),
        UnnormalisedDraft(),
        Biased(),
        # drafts from the target's own noise, some of which is there again next round
        type("SharedNoise", (Block,), {"shares_noise": True})(),
    ],
}


@pytest.mark.parametrize("part", cases(BROKEN, *BROKEN.keys() - {"distribution"}))
def test_a_broken_rule_fails_by_name(part: str) -> None:
    """AssertionError names the property that it breaks; every property has such a control."""
    assert BROKEN.keys() == RuleConformance.properties.keys()

    def fails(rule: Any) -> None:
        with pytest.raises(AssertionError, match=f", {part}: "):
            check_rule(rule)

    each(BROKEN[part], fails)


def test_the_sound_rule_passes() -> None:
    """The one that is broken above, as it is."""
    assert parts(check_rule(Sound()))[-1] == "distribution"


def test_the_stated_power_is_what_twenty_thousand_texts_have() -> None:
    """Off by a total variation d, the noncentrality is at least 4 N d^2 (Cauchy-Schwarz)."""
    freedom = 3**3 - 1
    limit = chi2.isf(RARE_ALARM, freedom)
    assert ncx2.sf(limit, freedom, 4 * 20_000 * 0.05**2) > 0.99
    for comparison, test in RuleConformance(Match(), True).sampled():
        assert test.freedom == freedom  # none of the 27 cells is joined with another
        assert comparison.total_variation < 0.05


def test_a_rule_that_cannot_be_vectorised_is_asked_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rule_module, "NUM_TEXTS", 100)
    quick = [*RuleConformance(Match(), True).sampled()]
    monkeypatch.setattr(mx, "vmap", Mock(side_effect=ValueError("[vmap] Not implemented.")))
    slow = RuleConformance(Match(), True).sampled()
    assert [c.got.tolist() for c, *_ in slow] == [c.got.tolist() for c, *_ in quick]
