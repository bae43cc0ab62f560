"""Does an acceptance rule keep its contract? Made-up logits, without a model.

The target's rows and the randomness are the loop's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.contracts import (
    AcceptanceRule,
    Agreement,
    Decision,
    Draft,
    DraftContext,
    Evidence,
    Outcome,
    Verdict,
    needs_distribution,
    shares_noise,
)
from specdec_mlx.lab.proof.chi_square import RARE_ALARM, ChiSquare
from specdec_mlx.lab.proof.conformance import Conformance
from specdec_mlx.lab.proof.enumeration import (
    Comparison,
    Drawn,
    Tokens,
    continued,
    enumerated,
    moved_on,
    one_hots,
    pairs,
    sources,
    state_after,
    up_to,
)
from specdec_mlx.rules import CoinRule
from specdec_mlx.sampling import Noise, Sampling
from specdec_mlx.target import NextToken, RoundNoise, RoundPositions
from specdec_mlx.token_ids import to_ids, to_list

AT_ONE, GREEDY = Sampling(temp=1.0), Sampling()
NUM_DRAFT, VOCAB_SIZE, LENGTH = 2, 3, 3  # K, V and tokens of the texts that are drawn
NUM_TEXTS = 20_000
EXACT = 1e-12  # largest error of a distribution in float64

FLOAT32 = 1e-5  # and in float32

LAZY = "Use MLX's functions throughout: no item(), tolist(), mx.eval, `if` on an array"


def check_rule(rule: AcceptanceRule, *, lossless: bool = True) -> list[str]:
    """Check an acceptance rule against the contract of `specdec_mlx.contracts`.

    Args:
        rule: an instance.
        lossless: True if the rule claims to leave the target's distribution unchanged. A rule that
            decides by coins is then enumerated in float64, with vocabularies of 2 to 5 tokens and K
            up to 3. Other rules draw 20,000 texts, for drawn drafts and for point masses. One
            correct rule in 500,000 fails, and a total variation of 0.05 is found with a probability
            above 0.99.

    Returns:
        A line for each property that was checked.

    Raises:
        AssertionError: the rule broke a property. The message says what happened and what to do.
    """
    left_out = {"coins": not isinstance(rule, CoinRule), "distribution": not lossless}
    check = RuleConformance(rule, lossless)
    return check.run(name for name in check.properties if not left_out.get(name))


@dataclass(frozen=True, eq=False)
class Question:
    """A draft, and the target at its positions.

    Attributes:
        logprobs: [K+1, V] of the target.
        tokens: [K] draft tokens.
        draft_logprobs: [K, V] of the drafter. None for a point mass.
        sampler: a `Sampling`, or a sampler without a known distribution.
        noise: of the generation.
        position: number of tokens before the draft.
    """

    logprobs: mx.array
    tokens: Any
    draft_logprobs: mx.array | None
    sampler: Callable[[mx.array], mx.array]
    noise: Noise
    position: int = 0

    def __str__(self) -> str:
        kind = "point-mass" if self.draft_logprobs is None else "drawn"
        how = getattr(self.sampler, "__name__", self.sampler)
        return f"{kind} draft {list(self.tokens)}, V = {self.logprobs.shape[-1]}, {how}"

    def rows(self) -> RoundPositions:
        return RoundPositions(self.logprobs, NextToken(self.sampler, (), self.noise), self.position)

    def ask(self, rule: AcceptanceRule, evidence: Any = None) -> Decision:
        draft = Draft(to_ids(self.tokens), self.draft_logprobs, evidence=evidence)
        return rule.decide(self.rows(), draft, RoundNoise(self.noise, self.position))


def questions(sampler: Callable[[mx.array], mx.array]) -> Iterator[Question]:
    for seed, (target, draft, num_draft, _) in enumerate([*pairs(), *pairs()]):
        drafts = list(Drawn(draft, up_to(num_draft)).drafts(0))
        _, tokens, probs = drafts[seed % len(drafts)]
        logprobs = _log(target.along(0, tokens))
        for declared in (_log(probs), None):
            yield Question(logprobs, tokens, declared, sampler, Noise(seed))


def second_best(logprobs: mx.array) -> mx.array:
    return mx.argsort(-logprobs, axis=-1)[..., 1]


def to_mlx(array: Any) -> mx.array:
    """The array with the type that the loop uses: uint32 for integers, bool, or float32."""
    kinds = {"i": mx.uint32, "b": mx.bool_}
    return mx.array(array).astype(kinds.get(np.asarray(array).dtype.kind, mx.float32))


@dataclass
class RuleConformance(Conformance):
    """The test of a rule."""

    properties = {  # noqa: RUF012
        "protocol": "See AcceptanceRule in specdec_mlx.contracts",
        "purity": "Draw from `randomness` alone, keep no state, and leave draft.evidence alone",
        "greedy": "Answer Agreement(target.tokens) where target.greedy, and where not "
        "target.has_distribution unless needs_distribution = True; or say lossless=False if the "
        "rule means to change the text",
        "coins": "One body of code for NumPy and MLX, which minds 0/0: rules.arithmetic has "
        "namespace_of, leading_run, capped_ratio and residual",
        "distribution": "Keep x with a chance of at most min(1, p(x)/q(x)), and draw the token "
        "after a rejection from what that leaves of p, norm(max(0, p - q)); or say lossless=False "
        "if the rule means to change the distribution",
    }
    subject: Any
    lossless: bool

    def protocol(self) -> str:
        """The rule has a name, and its decisions are readable and possible."""
        # A class passes the protocol check too, but it is no instance.
        is_rule = isinstance(self.subject, AcceptanceRule) and not inspect.isclass(self.subject)
        self.require(is_rule, f"{self.subject!r} has no name or no decide().")
        name = self.subject.name
        self.require(isinstance(name, str), f"its name is {name!r}, no str.")
        samplers: list[Any] = [AT_ONE, GREEDY]
        samplers += [] if needs_distribution(self.subject) else [second_best]
        self.questions = [question for sampler in samplers for question in questions(sampler)]
        self.answers = [self._outcome(question) for question in self.questions]
        num_kept = sum(outcome.num_accepted for outcome in self.answers)
        return f"{len(self.questions)} drafts, of which {num_kept} tokens were kept"

    def purity(self) -> str:
        """A decision depends only on its arguments, and does not wait for numbers."""
        global_state: Any = mx.random.state
        options, moved = (dict(getattr(self.subject, "__dict__", {})), global_state[0].tolist())
        # The reverse order shows state that a decision leaves for the next.
        again = [self._outcome(question, with_evidence=True) for question in self.questions[::-1]]
        for question, first, second in zip(self.questions, self.answers, again[::-1], strict=True):
            self.require(
                first.tokens == second.tokens,
                f"asked twice, it emitted {first.tokens} and {second.tokens}; {question}.",
            )
        is_same = options == getattr(self.subject, "__dict__", {})
        self.require(is_same, "deciding changed the rule itself.")
        is_same = moved == global_state[0].tolist()
        self.require(is_same, "deciding moved MLX's global random state.")
        for question in (self.questions[0], self.questions[-1]):
            # A trace has no numbers, so reading one inside decide() raises.
            def traced(logprobs: mx.array, question: Question = question) -> list[mx.array]:
                answer = replace(question, logprobs=logprobs).ask(self.subject)
                return list(answer.arrays().values())

            try:
                mx.compile(traced)(question.logprobs)
            except ValueError as error:  # a trace has no numbers
                self.require("[eval]" in str(error), f"decide() raised {error}.")
                what = "decide() waits for numbers; a round waits once, after the verdict."
                self.require(False, what, LAZY)
        return f"{len(self.questions)} answers are the same again, and none is waited for"

    def greedy(self) -> str:
        """At temperature 0, and with samplers of unknown distribution, the target decides.

        Rules that need the distribution do not meet samplers of this kind.
        """
        num_asked = 0
        for question, answer in zip(self.questions, self.answers, strict=True):
            if question.sampler != AT_ONE:
                emitted, targets = answer.tokens, to_list(question.rows().tokens)
                self.require(
                    not self.lossless or emitted == targets[: len(emitted)],
                    f"it emitted {emitted}; expected the target's own, {targets}; {question}.",
                )
                num_asked += 1
        can = "the target's own" if self.lossless else "possible"
        return f"{num_asked} drafts, what is emitted is {can}"

    def coins(self) -> str:
        """The functions of a rule by coins return probabilities, in float64 as in float32."""
        self.exact = list(enumerated(self.subject))
        on_mlx = enumerated(self.subject, to_mlx)
        for exact, single in zip(self.exact, on_mlx, strict=True):
            are_chances = np.all(exact.got >= 0) and abs(exact.got.sum() - 1) < EXACT
            what = f"{exact.how}: chances of the texts add up to {exact.got.sum():.6g}, not to 1, "
            self.require(are_chances, f"{what}or some are below 0.")
            is_same = np.allclose(exact.got, single.got, atol=FLOAT32)
            what = f"on MLX {replace(single, expected=exact.got)}"
            self.require(is_same, f"{what} Expected is what they are on NumPy.")
        return f"{len(self.exact)} rounds enumerated, on MLX as on NumPy"

    def distribution(self) -> str:
        """The emitted tokens have the target's distribution jointly."""
        lines = []
        if isinstance(self.subject, CoinRule):
            self.require(
                not shares_noise(self.subject),
                "it decides by coins, and shares the noise of the target's own draws. A draft "
                "that was rejected would be drawn from the same noise again.",
                "Share noise only to keep what equals target.tokens",
            )
            for comparison in self.exact:
                self.require(comparison.total_variation < EXACT, str(comparison))
            largest = max(comparison.total_variation for comparison in self.exact)
            lines = [f"{len(self.exact)} enumerated, total variation at most {largest:.0e}"]
        # A rule with its own decide() may not use the functions that were enumerated.
        if type(self.subject).decide is not CoinRule.decide:
            for comparison, test in self.sampled():
                result = f"chi-square {test.statistic:.0f}, p = {test.p_value:.2g}"
                self.require(test.p_value >= RARE_ALARM, f"{comparison} ({result})")
                lines.append(f"{comparison.how}, {result}")
        return "; ".join(lines)

    def sampled(self) -> Iterator[tuple[Comparison, ChiSquare]]:
        """Texts of drawn drafts and of point masses, beside the target's distribution."""
        target, draft = sources(VOCAB_SIZE, 1)
        expected = continued(target, {(): 1.0}, LENGTH)
        for is_drawn, kind in ((True, "at random"), (False, "point masses")):
            probs = draft.probs if is_drawn else one_hots(draft.probs)
            seen = np.zeros(expected.shape)
            with self.blaming("drawing texts"):
                texts = self._texts(_log(target.probs), _log(probs), is_drawn)
                np.add.at(seen, tuple(np.array(texts).T), 1)
            how = f"{NUM_TEXTS} texts drawn, K = {NUM_DRAFT} {kind}, V = {VOCAB_SIZE}"
            test = ChiSquare.of(seen.ravel(), NUM_TEXTS * expected.ravel())
            yield Comparison(seen / NUM_TEXTS, expected, how), test

    def _texts(self, target: mx.array, draft: mx.array, is_drawn: bool) -> list[Tokens]:
        """Texts of LENGTH tokens.

        Args:
            target: log-probabilities [NUM_STATES, V] by state.
            draft: log-probabilities [NUM_STATES, V] by state.
            is_drawn: False for point masses.
        """
        keys = mx.random.split(mx.random.key(0), NUM_TEXTS)
        texts: list[Tokens] = [()] * NUM_TEXTS
        for position in range(LENGTH):
            # Texts of equal length are decided together, in one vectorised call.
            here = [i for i, text in enumerate(texts) if len(text) == position]
            if not here:
                continue
            states = mx.array([state_after(0, texts[i]) for i in here])
            ask = partial(self._drafted, target, draft, is_drawn, position)
            rounds = _vectorised(ask, keys[mx.array(here)], states)
            for i, numbers in zip(here, rounds, strict=True):
                kind = Verdict if "verdict" in numbers else Agreement
                outcome = kind.outcome(numbers, numbers["drafted"])
                texts[i] = (*texts[i], *outcome.tokens)[:LENGTH]
        return texts

    def _drafted(
        self, target: mx.array, draft: mx.array, is_drawn: bool, position: int, *inputs: mx.array
    ) -> dict[str, mx.array]:
        """Arrays of the decision on one draft [K], and the draft.

        Args:
            target: log-probabilities [NUM_STATES, V] by state.
            draft: log-probabilities [NUM_STATES, V] by state.
            is_drawn: False for point masses.
            position: number of tokens before the draft.
            *inputs: the generation's noise key [2], and the state of its text.
        """
        key, state = inputs
        noise, coupled = _OwnNoise(0, key), shares_noise(self.subject)
        context = DraftContext(noise=noise, coupled=coupled, vocab_size=VOCAB_SIZE)
        tokens, states = [], [state]
        for gumbel in context.draft_gumbels(position, NUM_DRAFT):
            tokens.append(mx.argmax(draft[states[-1]] + gumbel))
            states.append(moved_on(states[-1], tokens[-1].astype(mx.int32)))
        drafted, passed = to_ids(mx.stack(tokens)), mx.stack(states)
        declared = draft[passed[:-1]] if is_drawn else None
        question = Question(target[passed], drafted, declared, AT_ONE, noise, position)
        return {"drafted": drafted, **question.ask(self.subject).arrays()}

    def _outcome(self, question: Question, with_evidence: bool = False) -> Outcome:
        """The outcome of a draft as the loop reads it. AssertionError if it is impossible.

        Args:
            question: the draft and the target.
            with_evidence: pass the drafter's evidence too, which a rule must not read.
        """
        size = len(question.tokens) if with_evidence else 0
        evidence = [Evidence(match=9 - i) for i in range(size)] or None
        next_step = "Return a Verdict or an Agreement: any draft of a token has one"
        with self.blaming(f"{question}: decide()", next_step):
            answer = question.ask(self.subject, evidence)
            numbers = {name: x.tolist() for name, x in answer.arrays().items()}
            outcome = answer.outcome(numbers, question.tokens)
        kinds = {array.dtype for array in vars(answer).values() if array is not None}
        are_integers = all(mx.issubdtype(kind, mx.integer) for kind in kinds)
        self.require(are_integers, f"{question}: it answers in {kinds}, not in integers.")
        n, after = outcome.num_accepted, outcome.tokens[-1]
        what = f"{question}: it kept tokens {list(outcome.accepted)}; expected the first ones."
        next_step = "Count the tokens from the first one on; nodes are for trees"
        self.require([*outcome.accepted] == [*range(n)], what, next_step)
        # A sampler of unknown distribution may emit any token.
        rows, every = question.rows(), mx.ones(question.logprobs.shape)
        probs = rows.probs if rows.has_distribution else every
        possible = np.flatnonzero(np.array(probs[n]))
        what = f"{question}: the token after {n} kept ones is {after}, to which the target gives "
        what += f"no chance there; it has one of {possible.tolist()}."
        next_step = "Draw it from target at row n: target.tokens[n], or argmax(log(probs) + gumbel)"
        self.require(after in possible, what, next_step)
        return outcome


@dataclass(frozen=True, eq=False)
class _OwnNoise(Noise):
    """Noise with its own key, so that MLX can trace many generations as one.

    Attributes:
        key_offset: [2], added to each key.
    """

    key_offset: mx.array

    def key(self, purpose: str, position: int) -> mx.array:
        return super().key(purpose, position) + self.key_offset

    def uniform(self, purpose: str, position: int, n: int = 1) -> mx.array:
        """Uniform numbers from MLX. The base class draws on the host, which cannot be traced."""
        return mx.random.uniform(shape=(n,), key=self.key(purpose, position))

    def gumbels(self, places: Sequence[tuple[str, int]], vocab: int) -> mx.array:
        return mx.stack([self.gumbel(*place, vocab) for place in places])


def _vectorised(
    decide: Callable[..., dict[str, mx.array]], *inputs: mx.array
) -> Iterator[dict[str, Any]]:
    """Results for each row of the inputs, computed together where MLX can vectorise `decide`."""
    try:
        arrays = mx.vmap(decide)(*inputs)
        columns = [array.tolist() for array in arrays.values()]
        yield from (dict(zip(arrays, row, strict=True)) for row in zip(*columns, strict=True))
    except ValueError as error:
        if "vmap" not in str(error):
            raise
        for row in zip(*inputs, strict=True):
            yield {name: array.tolist() for name, array in decide(*row).items()}


def _log(probs: np.ndarray) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(probs).astype(np.float32))
