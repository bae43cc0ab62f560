"""Does an acceptance rule keep its contract? One call for anybody's test suite.

    from specdec_mlx.testing import check_rule

    def test_my_rule_keeps_the_contract():
        check_rule(MyRule())

No model is needed. Whether the target's distribution is left alone is found by enumeration where
the rule decides by coins, else by chi-square.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.testing.decisions import (
    AT_ONE,
    GREEDY,
    Answered,
    AnswerError,
    Question,
    check_shapes,
    questions,
    read,
    to_float32,
    with_evidence,
)
from specdec_mlx.testing.drawn_texts import sampled
from specdec_mlx.testing.failures import fail
from specdec_mlx.testing.round_distribution import Comparison, enumerated
from specdec_mlx.token_ids import to_ids
from specdec_mlx.types import (
    AcceptanceRule,
    Agreement,
    Draft,
    Outcome,
    Verdict,
    needs_distribution,
    shares_noise,
)

EXACT = 1e-12
"""How far a distribution may be off in float64."""

FLOAT32 = 1e-4
"""How far a chance may be off in float32, where no difference of nearly equal numbers is taken."""

BATCH = 250
"""Decisions that are computed together."""

LEAVES_ALONE = (
    "Keep x with a chance of at most min(1, p(x)/q(x)), and draw the token after a rejection from "
    "what that leaves of p, norm(max(0, p - q)); or say lossless=False if the rule means to change "
    "the distribution"
)


def check_rule(
    rule: AcceptanceRule, *, lossless: bool = True, num_texts: int = 20_000
) -> list[str]:
    """Hold an acceptance rule to the contract of `specdec_mlx.types`.

    Args:
        rule: an instance.
        lossless: whether it says that it leaves the target's distribution alone. A rule by coins
            is then enumerated in float64: rounds over vocabularies of 2 to 5 tokens, K up to 3,
            with distributions that change with the text. With any other rule texts are drawn.
        num_texts: texts of three tokens that are drawn, with fixed seeds, for drawn drafts and for
            point masses. Chi-square raises a false alarm for one rule in 500,000; with 20,000 texts
            it finds a rule that is off by a total variation of 0.05 with a chance above 0.99.

    Returns:
        A line for each property that was checked: protocol, purity, greedy, samplers, coins,
        distribution.

    Raises:
        AssertionError: it broke one; says which, what happened and what to do.
    """
    check = _Check(rule, lossless)
    lines = [check.protocol(), check.purity(), check.greedy(), check.samplers()]
    if isinstance(rule, CoinRule):
        lines.append(check.coins())
    if lossless:
        lines.append(check.distribution(num_texts))
    return lines


@dataclass
class _Check:
    """One rule under test."""

    rule: AcceptanceRule
    lossless: bool

    def protocol(self) -> str:
        """It has a name and decides; what it answers can be read, and can be true."""
        if inspect.isclass(self.rule) or not isinstance(self.rule, AcceptanceRule):
            self.fail(
                "protocol", f"{self.rule!r} has no name or no decide().", "See AcceptanceRule"
            )
        if not isinstance(self.rule.name, str):
            self.fail("protocol", f"its name is {self.rule.name!r}.", "rule= calls it by a str")
        asked = [*questions(AT_ONE), *questions(GREEDY)]
        num_kept = sum(outcome.num_accepted for outcome in self._outcomes("protocol", asked))
        return f"protocol: {len(asked)} drafts, of which {num_kept} tokens were kept"

    def purity(self) -> str:
        """The answer follows from what was given alone, and is not waited for."""
        asked = [*questions(AT_ONE), *questions(GREEDY)]
        options, state = dict(getattr(self.rule, "__dict__", {})), _global_state()
        once = self._outcomes("purity", asked)
        again = self._outcomes("purity", asked[::-1], with_evidence)[::-1]
        for question, first, second in zip(asked, once, again, strict=True):
            if first.tokens != second.tokens:
                self.fail(
                    "purity",
                    f"asked twice, it emitted {first.tokens} and {second.tokens}; {question}.",
                    "Draw from `randomness` alone, keep no state, and leave draft.evidence alone",
                )
        if options != getattr(self.rule, "__dict__", {}):
            self.fail("purity", "deciding changed the rule itself.", "A rule holds no state")
        if state != _global_state():
            self.fail(
                "purity",
                "deciding moved MLX's global random state.",
                "Draw from randomness.uniform and randomness.gumbel",
            )
        for question in (asked[0], asked[-1]):
            self._check_lazy(question)
        return f"purity: {len(asked)} answers are the same again, and none is waited for"

    def greedy(self) -> str:
        """At temperature 0 what is emitted is the target's own, token by token."""
        return self._emits_own_tokens("greedy", [*questions(GREEDY)])

    def samplers(self) -> str:
        """With a sampler that can only be called it is too, if the rule says that it takes one."""
        if needs_distribution(self.rule):
            return "samplers: it needs the target's distribution, and is refused without"

        def second_best(logprobs: mx.array) -> mx.array:
            return mx.argsort(-logprobs, axis=-1)[..., 1]

        return self._emits_own_tokens("samplers", [*questions(second_best)])

    def _emits_own_tokens(self, part: str, asked: list[Question]) -> str:
        """What is emitted is what the target draws by itself, if the rule is lossless."""
        outcomes = self._outcomes(part, asked)
        for question, outcome in zip(asked, outcomes, strict=True):
            own = question.own_tokens()[: len(outcome.tokens)]
            if self.lossless and outcome.tokens != own:
                wrong = next(i for i, token in enumerate(own) if token != outcome.tokens[i])
                self.fail(
                    part,
                    f"token {wrong} of a round is {outcome.tokens[wrong]}; expected the target's "
                    f"own, {own[wrong]}; {question}.",
                    "Answer Agreement(target.tokens) there, or say lossless=False if the rule "
                    "means to change the text",
                )
        can = "the target's own" if self.lossless else "possible"
        return f"{part}: {len(asked)} drafts, what is emitted is {can}"

    def coins(self) -> str:
        """The functions of a rule by coins give chances, in float64 and in float32 alike."""
        assert isinstance(self.rule, CoinRule)
        compared = 0
        for coins in (coins for k in (1, 2, 3) for coins in product([False, True], repeat=k)):
            self._check_count(self.rule, coins)
        for question in questions(AT_ONE):
            arrays, arrays32 = _arrays(question)
            chances = self.rule.accept_probs(*arrays)
            self._check_chances("accept_probs", chances, question)
            self._check_close("accept_probs", chances, self.rule.accept_probs(*arrays32), question)
            for n in range(len(question.tokens) + 1):
                after = self.rule.next_probs(*arrays, n)
                self._check_chances("next_probs", after, question)
                if not abs(after.sum() - 1) < EXACT:
                    self.fail(
                        "coins",
                        f"next_probs add up to {after.sum()} after {n} tokens; {question}.",
                        "Normalise them, also where nothing is left: rules.arithmetic.residual",
                    )
                after32 = self.rule.next_probs(*arrays32, mx.array(n))
                self._check_close("next_probs", after, after32, question)
                compared += 1
        return f"coins: {compared} distributions of the token after, on NumPy as on MLX"

    def distribution(self, num_texts: int) -> str:
        """The tokens emitted have the target's own distribution, jointly.

        Enumeration says it all where coins decide, since these and the draft are independent.
        """
        if not isinstance(self.rule, CoinRule):
            return f"distribution: {self._sampled(num_texts)}"
        if shares_noise(self.rule):
            self.fail(
                "distribution",
                "it decides by coins, and shares the noise of the target's own draws. A draft that "
                "was rejected has had its say, and would be drawn from the same noise again.",
                "Share noise only to keep what equals target.tokens",
            )
        line = f"distribution: {self._enumerated(self.rule)}"
        is_all = type(self.rule).decide is CoinRule.decide
        return line if is_all else f"{line}; {self._sampled(num_texts)}"

    def _enumerated(self, rule: CoinRule) -> str:
        """Total variation in float64."""
        distances = []
        for comparison in enumerated(rule):
            distances.append(comparison.total_variation)
            if not comparison.total_variation < EXACT:
                self._fail_distribution(comparison)
        return f"{len(distances)} enumerated, total variation at most {max(distances):.0e}"

    def _sampled(self, num_texts: int) -> str:
        """Chi-square of rounds that are drawn."""
        found = []
        draws = sampled(self.rule, num_texts, lambda a: self._collected("distribution", a))
        for comparison, statistic, limit in draws:
            found.append(f"chi-square {statistic:.0f}, limit {limit:.0f}")
            if not statistic <= limit:
                self._fail_distribution(comparison, f" ({found[-1]})")
        return f"{num_texts} texts drawn, {found[0]}; with point masses {found[1]}"

    def _fail_distribution(self, comparison: Comparison, note: str = "") -> NoReturn:
        self.fail("distribution", f"{comparison}{note}", LEAVES_ALONE)

    def _check_count(self, rule: CoinRule, coins: tuple[bool, ...]) -> None:
        on_numpy, on_mlx = (rule.num_accepted(a) for a in (np.array(coins), mx.array(coins)))
        if not 0 <= int(on_numpy) == int(on_mlx) <= len(coins):
            self.fail(
                "coins",
                f"coins {list(coins)} keep {on_numpy} tokens on NumPy and {on_mlx} on MLX.",
                f"One number for both, 0 to {len(coins)}; see rules.arithmetic.leading_run",
            )

    def _check_chances(self, name: str, chances: np.ndarray, question: Question) -> None:
        if not np.all((chances >= 0) & (chances <= 1 + EXACT)):
            self.fail(
                "coins",
                f"{name} are {chances.tolist()}, which are no chances; {question}.",
                "Mind 0/0: rules.arithmetic.capped_ratio and residual do",
            )

    def _check_close(
        self, name: str, on_numpy: np.ndarray, on_mlx: Any, question: Question
    ) -> None:
        if not isinstance(on_mlx, mx.array) or not isinstance(on_numpy, np.ndarray):
            self.fail(
                "coins",
                f"{name} are {type(on_numpy).__name__} of NumPy arrays and {type(on_mlx).__name__} "
                "of MLX arrays.",
                "Use the namespace of the arrays given: rules.arithmetic.namespace_of",
            )
        if not question.is_extreme and not np.allclose(on_numpy, np.array(on_mlx), atol=FLOAT32):
            self.fail(
                "coins",
                f"{name} are {on_numpy.tolist()} on NumPy, {on_mlx.tolist()} on MLX; {question}.",
                "One body of code for both: rules.arithmetic.namespace_of",
            )

    def _check_lazy(self, question: Question) -> None:
        """Raise if the rule waits for numbers, which a trace does not have."""

        def decided(logprobs: mx.array) -> list[mx.array]:
            return list(question.ask(self.rule, logprobs=logprobs).arrays().values())

        try:
            mx.compile(decided)(to_float32(question.target_logprobs))
        except ValueError as error:
            if "[eval]" not in str(error):
                raise
            self.fail(
                "purity",
                "decide() waits for numbers to be computed; a round waits once, after the verdict.",
                "Use MLX's functions throughout: no item(), tolist(), mx.eval, `if` on an array",
            )

    def _outcomes(
        self,
        part: str,
        asked: list[Question],
        changed: Callable[[Draft], Draft] = lambda draft: draft,
    ) -> list[Outcome]:
        """What the rule makes of each draft, each one possible; computed in batches."""
        outcomes: list[Outcome] = []
        for start in range(0, len(asked), BATCH):
            batch = asked[start : start + BATCH]
            answers = [
                self._answer(part, question, changed(question.draft())) for question in batch
            ]
            outcomes += self._collected(part, read(answers, batch))
        return outcomes

    def _collected(self, part: str, answered: Answered) -> list[Outcome]:
        """Outcomes, each one possible."""
        outcomes = []
        for question, outcome in answered:
            with self._failing(part, question):
                outcomes.append(outcome())
        return outcomes

    def _answer(self, part: str, question: Question, draft: Draft) -> Verdict | Agreement:
        """What the rule answers, which can be read."""
        with self._failing(part, question):
            try:
                answer = question.ask(self.rule, draft)
            except Exception as error:
                raise AnswerError(
                    f"decide() raised {type(error).__name__}: {error}.",
                    "Any draft of at least one token has a verdict",
                ) from error
            check_shapes(answer, len(question.tokens))
        return answer

    @contextmanager
    def _failing(self, part: str, question: Question) -> Iterator[None]:
        """Say which question a wrong answer was given to."""
        try:
            yield
        except AnswerError as error:
            self.fail(part, f"{question}: {error}", error.next_step)

    def fail(self, part: str, what: str, next_step: str) -> NoReturn:
        """Raise AssertionError: whose fault, what happened, what to do."""
        fail(self.rule, part, what, next_step)


def _arrays(question: Question) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """What the functions of a rule by coins take, on NumPy in float64 and on MLX in float32."""
    tokens = np.array(question.tokens)
    target_probs = np.exp(question.target_logprobs)
    if question.draft_logprobs is None:
        draft_probs = point_mass(tokens, target_probs)
    else:
        draft_probs = np.exp(question.draft_logprobs)
    on_mlx = to_float32(target_probs), to_ids(question.tokens), to_float32(draft_probs)
    return (target_probs, tokens, draft_probs), on_mlx


def _global_state() -> Any:
    """Of MLX's random numbers."""
    state: Any = mx.random.state
    return state[0].tolist()
