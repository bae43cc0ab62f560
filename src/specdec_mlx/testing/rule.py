"""Does an acceptance rule keep its contract? One call for anybody's test suite, without a model.

from specdec_mlx.testing import check_rule

def test_my_rule_keeps_the_contract():
    check_rule(MyRule())
"""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.contracts import (
    AcceptanceRule,
    Evidence,
    Outcome,
    needs_distribution,
    shares_noise,
)
from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.testing.conformance import Conformance
from specdec_mlx.testing.decisions import (
    AT_ONE,
    GREEDY,
    AnswerError,
    Question,
    log,
    questions,
    sampled,
)
from specdec_mlx.testing.enumeration import enumerated
from specdec_mlx.token_ids import to_ids

EXACT = 1e-12  # largest error of a distribution in float64

FLOAT32 = 1e-4
"""Largest error of a chance in float32, where no difference of nearly equal numbers is taken."""


def check_rule(
    rule: AcceptanceRule, *, lossless: bool = True, num_texts: int = 20_000
) -> list[str]:
    """Hold an acceptance rule to the contract of `specdec_mlx.contracts`.

    Args:
        rule: an instance.
        lossless: True if it says that it leaves the target's distribution alone. A rule by coins is
            then enumerated in float64, with vocabularies of 2 to 5 tokens and K up to 3; of others
            texts are drawn.
        num_texts: texts of three tokens, with fixed seeds, for drawn drafts and for point masses.
            One rule in 500,000 is a false alarm; 20,000 texts find a total variation of 0.05 with a
            chance above 0.99.

    Returns:
        A line for each property that was checked.

    Raises:
        AssertionError: it broke one; says which, what happened and what to do.
    """
    left_out = {"coins": not isinstance(rule, CoinRule), "distribution": not lossless}
    names = [name for name in RuleConformance.properties if not left_out.get(name)]
    return RuleConformance(rule, lossless, num_texts).run(names)


class RuleConformance(Conformance):
    """One rule under test."""

    properties = {  # noqa: RUF012
        "protocol": "See AcceptanceRule in specdec_mlx.contracts",
        "purity": "Draw from `randomness` alone, keep no state, and leave draft.evidence alone",
        "greedy": "Answer Agreement(target.tokens) there, or say lossless=False if the rule means "
        "to change the text",
        "samplers": "Answer Agreement(target.tokens), or say needs_distribution = True; or say "
        "lossless=False if the rule means to change the text",
        "coins": "One body of code for NumPy and MLX, which minds 0/0: rules.arithmetic has "
        "namespace_of, leading_run, capped_ratio and residual",
        "distribution": "Keep x with a chance of at most min(1, p(x)/q(x)), and draw the token "
        "after a rejection from what that leaves of p, norm(max(0, p - q)); or say lossless=False "
        "if the rule means to change the distribution",
    }

    def __init__(self, rule: AcceptanceRule, lossless: bool, num_texts: int) -> None:
        super().__init__(rule)
        self.rule, self.lossless, self.num_texts = rule, lossless, num_texts
        self.asked = [*questions(AT_ONE), *questions(GREEDY)]

    def protocol(self) -> str:
        """It has a name and decides; its answers can be read, and can be true."""
        is_rule = isinstance(self.rule, AcceptanceRule) and not inspect.isclass(self.rule)
        self.require(is_rule, f"{self.rule!r} has no name or no decide().")
        self.require(isinstance(self.rule.name, str), f"its name is {self.rule.name!r}, no str.")
        num_kept = sum(self._outcome(question).num_accepted for question in self.asked)
        return f"{len(self.asked)} drafts, of which {num_kept} tokens were kept"

    def purity(self) -> str:
        """The answer follows from what was given alone, and waits for nothing."""
        options, state = dict(getattr(self.rule, "__dict__", {})), _global_state()
        once = [self._outcome(question) for question in self.asked]
        again = [self._outcome(question, with_evidence=True) for question in self.asked[::-1]]
        for question, first, second in zip(self.asked, once, again[::-1], strict=True):
            emitted = f"asked twice, it emitted {first.tokens} and {second.tokens}; {question}."
            self.require(first.tokens == second.tokens, emitted)
        is_same = options == getattr(self.rule, "__dict__", {})
        self.require(is_same, "deciding changed the rule itself.")
        self.require(state == _global_state(), "deciding moved MLX's global random state.")
        for question in (self.asked[0], self.asked[-1]):
            self._check_lazy(question)
        return f"{len(self.asked)} answers are the same again, and none is waited for"

    def _check_lazy(self, question: Question) -> None:
        """Raise if the rule waits for numbers, which a trace does not have."""

        def decided(logprobs: mx.array) -> list[mx.array]:
            return list(question.ask(self.rule, logprobs).arrays().values())

        try:
            mx.compile(decided)(log(question.target_probs))
        except ValueError as error:
            if "[eval]" not in str(error):
                raise
            self.fail(
                "decide() waits for numbers to be computed; a round waits once, after the verdict.",
                "Use MLX's functions throughout: no item(), tolist(), mx.eval, `if` on an array",
            )

    def greedy(self) -> str:
        """At temperature 0 the target's own tokens are emitted."""
        return self._emits_own_tokens([*questions(GREEDY)])

    def samplers(self) -> str:
        """So they are with a sampler that can only be called, if the rule takes one."""
        if needs_distribution(self.rule):
            return "it needs the target's distribution, and is refused without"
        return self._emits_own_tokens([*questions(lambda x: mx.argsort(-x, axis=-1)[..., 1])])

    def _emits_own_tokens(self, asked: list[Question]) -> str:
        for question in asked:
            emitted = self._outcome(question).tokens
            own: list[Any] = question.rows().tokens.tolist()  # type: ignore[assignment]
            what = f"it emitted {emitted}; expected the target's own, {own}; {question}."
            self.require(not self.lossless or emitted == own[: len(emitted)], what)
        can = "the target's own" if self.lossless else "possible"
        return f"{len(asked)} drafts, what is emitted is {can}"

    def coins(self) -> str:
        """The functions of a rule by coins give chances, in float64 and in float32 alike."""
        rule: Any = self.rule
        compared = 0
        for coins in (coins for k in (1, 2, 3) for coins in product([False, True], repeat=k)):
            counts = [int(rule.num_accepted(of(coins))) for of in (np.array, mx.array)]
            what = f"coins {list(coins)} keep {counts[0]} on NumPy and {counts[1]} on MLX."
            self.require(0 <= counts[0] == counts[1] <= len(coins), what)
        for question in questions(AT_ONE):
            p, tokens, q = question.target_probs, np.array(question.tokens), question.draft_probs
            arrays = p, tokens, point_mass(tokens, p) if q is None else q
            p32, q32 = (mx.array(x.astype(np.float32)) for x in arrays[::2])
            on_mlx = p32, to_ids(question.tokens), q32
            chances = rule.accept_probs(*arrays)
            self._check_chances("accept_probs", chances, rule.accept_probs(*on_mlx), question)
            for n in range(len(question.tokens) + 1):
                after = rule.next_probs(*arrays, n)
                after32 = rule.next_probs(*on_mlx, mx.array(n))
                self._check_chances("next_probs", after, after32, question)
                what = f"next_probs add up to {after.sum()} after {n} tokens; {question}."
                self.require(abs(after.sum() - 1) < EXACT, what)
                compared += 1
        return f"{compared} distributions of the token after, on NumPy as on MLX"

    def _check_chances(self, name: str, chances: Any, on_mlx: Any, question: Question) -> None:
        """Raise unless these are chances, and the same on both libraries."""
        kinds = f"{type(chances).__name__} of NumPy arrays and {type(on_mlx).__name__} of MLX's"
        are_own = isinstance(chances, np.ndarray) and isinstance(on_mlx, mx.array)
        self.require(are_own, f"{name} are {kinds}.")
        what = f"{name} are {chances.tolist()}, which are no chances; {question}."
        self.require(np.all((chances >= 0) & (chances <= 1 + EXACT)), what)
        is_same = question.is_extreme or np.allclose(chances, np.array(on_mlx), atol=FLOAT32)
        what = f"{name} are {chances.tolist()} on NumPy, {on_mlx.tolist()} on MLX; {question}."
        self.require(is_same, what)

    def distribution(self) -> str:
        """The tokens emitted have the target's own distribution, jointly."""
        if not isinstance(self.rule, CoinRule):
            return self._sampled()
        if shares_noise(self.rule):
            self.fail(
                "it decides by coins, and shares the noise of the target's own draws. A draft that "
                "was rejected has had its say, and would be drawn from the same noise again.",
                "Share noise only to keep what equals target.tokens",
            )
        distances = []
        for comparison in enumerated(self.rule):
            distances.append(comparison.total_variation)
            self.require(distances[-1] < EXACT, str(comparison))
        line = f"{len(distances)} enumerated, total variation at most {max(distances):.0e}"
        is_all = type(self.rule).decide is CoinRule.decide
        return line if is_all else f"{line}; {self._sampled()}"

    def _sampled(self) -> str:
        found = []
        try:
            for comparison, statistic, most in sampled(self.rule, self.num_texts):
                found.append(f"chi-square {statistic:.0f}, limit {most:.0f}")
                self.require(statistic <= most, f"{comparison} ({found[-1]})")
        except AnswerError as error:
            self.fail(f"in drawn texts: {error.args[0]}", error.args[1])
        return f"{self.num_texts} texts drawn, {found[0]}; with point masses {found[1]}"

    def _outcome(self, question: Question, with_evidence: bool = False) -> Outcome:
        """The outcome of a draft, which has to be possible; a rule may read no evidence."""
        evidence = [Evidence(match=9 - i) for i in range(len(question.tokens))]
        try:
            return question.outcome(self.rule, evidence if with_evidence else None)
        except AnswerError as error:
            self.fail(f"{question}: {error.args[0]}", error.args[1])


def _global_state() -> Any:
    state: Any = mx.random.state
    return state[0].tolist()
