"""Does an acceptance rule keep its contract? One call for anybody's test suite, without a model.

from specdec_mlx.testing import check_rule

def test_my_rule_keeps_the_contract():
    check_rule(MyRule())

The target's rows and the randomness are the loop's own; only the logits are made up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.checks.chi_square import ChiSquare, limit
from specdec_mlx.contracts import (
    AcceptanceRule,
    Agreement,
    Draft,
    DraftContext,
    Evidence,
    Outcome,
    Verdict,
    needs_distribution,
    shares_noise,
)
from specdec_mlx.rules.arithmetic import point_mass
from specdec_mlx.rules.coins import CoinRule
from specdec_mlx.sampling.distribution import Sampling
from specdec_mlx.sampling.noise import Noise
from specdec_mlx.target.next_token import NextToken, RoundNoise, Rows
from specdec_mlx.testing.conformance import Conformance
from specdec_mlx.testing.enumeration import (
    Comparison,
    Source,
    Tokens,
    continued,
    enumerated,
    moved_on,
    sources,
    state_after,
)
from specdec_mlx.token_ids import to_ids, to_list

Numbers = dict[str, Any]  # of an answer, read

AT_ONE, GREEDY = Sampling(temp=1.0), Sampling()
NUM_DRAFT, VOCAB_SIZE, LENGTH = 2, 3, 3  # K, V and tokens of the texts that are drawn
EXACT = 1e-12  # largest error of a distribution in float64

FLOAT32 = 1e-4
"""Largest error of a chance in float32, where no difference of nearly equal numbers is taken."""


LAZY = "Use MLX's functions throughout: no item(), tolist(), mx.eval, `if` on an array"


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


@dataclass(frozen=True, eq=False)
class Question:
    """A draft, and the target at its positions.

    target_probs: [K+1, V], of which logprobs are the logarithms. tokens: [K]. draft_probs: [K, V],
    None for a point mass. sampler: one that is no `Sampling` gives no distribution. is_extreme: a
    distribution excludes tokens or equals another.
    """

    target_probs: np.ndarray
    logprobs: mx.array
    tokens: Tokens
    draft_probs: np.ndarray | None
    sampler: Callable[[mx.array], mx.array]
    seed: int
    is_extreme: bool = False

    def __str__(self) -> str:
        """The question in words, for error messages."""
        kind = "point-mass" if self.draft_probs is None else "drawn"
        how = (
            self.sampler
            if isinstance(self.sampler, Sampling)
            else "a sampler that can only be called"
        )
        return f"{kind} draft {list(self.tokens)}, V = {self.target_probs.shape[-1]}, {how}"

    def rows(self) -> Rows:
        """The target, as the loop shows it."""
        return Rows(self.logprobs, NextToken(self.sampler, (), Noise(self.seed)), 0)

    def ask(self, rule: AcceptanceRule, evidence: Any = None) -> Verdict | Agreement:
        """The lazy answer of a rule."""
        probs = None if self.draft_probs is None else _log(self.draft_probs)
        draft = Draft(to_ids(self.tokens), probs, evidence=evidence)
        return rule.decide(self.rows(), draft, RoundNoise(Noise(self.seed), 0))

    def possible(self) -> np.ndarray:
        """Tokens that the target may draw at each row, [K+1, V]."""
        rows = self.rows()
        every = np.ones(self.target_probs.shape, bool)
        return np.array(rows.probs) > 0 if rows.has_distribution else every


def questions(sampler: Callable[[mx.array], mx.array]) -> Iterator[Question]:
    """Drafts of 1 to 3 tokens, drawn and point masses, easy ones and the extremes."""
    for seed, vocab_size in enumerate((2, 3, 5, 9) * 2):
        rng = np.random.default_rng(seed)
        num_tokens = 1 + seed % 3
        p = rng.dirichlet(np.ones(vocab_size), num_tokens + 1)
        other = rng.dirichlet(np.ones(vocab_size), num_tokens)
        likely = np.where(p >= np.median(p, axis=-1, keepdims=True), p, 0)
        without_some = likely / likely.sum(axis=-1, keepdims=True)
        for q in (other, p[:-1], _one_hots(other), _one_hots(-p[:-1])):
            tokens = tuple(int(rng.choice(vocab_size, p=row)) for row in q)
            for own in (p, _one_hots(p), without_some):
                is_extreme = own is not p or q is not other
                yield Question(own, _log(own), tokens, q, sampler, seed, is_extreme)
        for copied in (rng.integers(vocab_size, size=num_tokens), np.argmax(p[:-1], axis=-1)):
            yield Question(p, _log(p), tuple(copied.tolist()), None, sampler, seed)


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
        self.answers = [self._outcome(question) for question in self.asked]
        num_kept = sum(outcome.num_accepted for outcome in self.answers)
        return f"{len(self.asked)} drafts, of which {num_kept} tokens were kept"

    def purity(self) -> str:
        """The answer follows from what was given alone, and waits for nothing."""
        options, state = dict(getattr(self.rule, "__dict__", {})), _global_state()
        again = [self._outcome(question, with_evidence=True) for question in self.asked[::-1]]
        for question, first, second in zip(self.asked, self.answers, again[::-1], strict=True):
            emitted = f"asked twice, it emitted {first.tokens} and {second.tokens}; {question}."
            self.require(first.tokens == second.tokens, emitted)
        is_same = options == getattr(self.rule, "__dict__", {})
        self.require(is_same, "deciding changed the rule itself.")
        self.require(state == _global_state(), "deciding moved MLX's global random state.")
        for question in (self.asked[0], self.asked[-1]):
            try:
                mx.compile(partial(self._arrays, question))(question.logprobs)
            except ValueError as error:  # a trace has no numbers
                self.require("[eval]" in str(error), f"decide() raised {error}.")
                self.fail(
                    "decide() waits for numbers; a round waits once, after the verdict.", LAZY
                )
        return f"{len(self.asked)} answers are the same again, and none is waited for"

    def _arrays(self, question: Question, logprobs: mx.array) -> list[mx.array]:
        asked = replace(question, logprobs=logprobs)
        return list(asked.ask(self.rule).arrays().values())

    def greedy(self) -> str:
        """At temperature 0 the target's own tokens are emitted."""
        return self._emits_own_tokens(GREEDY)

    def samplers(self) -> str:
        """So they are with a sampler that can only be called, if the rule takes one."""
        if needs_distribution(self.rule):
            return "it needs the target's distribution, and is refused without"
        return self._emits_own_tokens(lambda x: mx.argsort(-x, axis=-1)[..., 1])

    def _emits_own_tokens(self, sampler: Callable[[mx.array], mx.array]) -> str:
        asked = list(questions(sampler))
        for question in asked:
            emitted, own = self._outcome(question).tokens, to_list(question.rows().tokens)
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
            on_mlx = [mx.array(x.astype(np.uint32 if x is tokens else np.float32)) for x in arrays]
            chances = rule.accept_probs(*arrays)
            self._check_chances("accept_probs", chances, rule.accept_probs(*on_mlx), question)
            for n in range(len(tokens) + 1):
                after, after32 = rule.next_probs(*arrays, n), rule.next_probs(*on_mlx, mx.array(n))
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
        found = f"{name} are {chances.tolist()} on NumPy, {on_mlx.tolist()} on MLX; {question}."
        are_chances = np.all((chances >= 0) & (chances <= 1 + EXACT))
        self.require(are_chances, f"{found} These are no chances.")
        is_same = question.is_extreme or np.allclose(chances, np.array(on_mlx), atol=FLOAT32)
        self.require(is_same, found)

    def distribution(self) -> str:
        """The tokens emitted have the target's own distribution, jointly."""
        lines = []
        if isinstance(self.rule, CoinRule):
            what = "it decides by coins, and shares the noise of the target's own draws. A draft "
            what += "that was rejected would be drawn from the same noise again."
            next_step = "Share noise only to keep what equals target.tokens"
            self.require(not shares_noise(self.rule), what, next_step)
            distances = []
            for comparison in enumerated(self.rule):
                distances.append(comparison.total_variation)
                self.require(distances[-1] < EXACT, str(comparison))
            lines = [f"{len(distances)} enumerated, total variation at most {max(distances):.0e}"]
        if type(self.rule).decide is not CoinRule.decide:
            for comparison, statistic, most in self.sampled():
                found = f"{comparison.how}, chi-square {statistic:.0f}, limit {most:.0f}"
                self.require(statistic <= most, f"{comparison} ({found})")
                lines.append(found)
        return "; ".join(lines)

    def sampled(self) -> Iterator[tuple[Comparison, float, float]]:
        """Texts of drawn drafts, and of point masses: distributions, chi-square, limit."""
        target, draft = sources(VOCAB_SIZE, 1)
        own = continued(target, {(): 1.0}, LENGTH)
        for source, kind in ((draft, "at random"), (None, "point masses")):
            seen = np.zeros(own.shape)
            np.add.at(seen, tuple(np.array(self._texts(target, source)).T), 1)
            test = ChiSquare.of(seen.ravel(), self.num_texts * own.ravel())
            how = f"{self.num_texts} texts drawn, K = {NUM_DRAFT} {kind}, V = {VOCAB_SIZE}"
            comparison = Comparison(seen / self.num_texts, own, how)
            yield comparison, test.statistic, limit(test.freedom)

    def _texts(self, target: Source, draft: Source | None) -> list[Tokens]:
        """Texts of LENGTH tokens; those that are equally long are asked about together."""
        keys = mx.random.split(mx.random.key(0), self.num_texts)
        texts: list[Tokens] = [()] * self.num_texts
        tables = _log(target.probs), None if draft is None else _log(draft.probs)
        for position in range(LENGTH):
            here = [i for i, text in enumerate(texts) if len(text) == position]
            if not here:
                continue
            answers: list[Verdict | Agreement] = []
            states = mx.array([state_after(0, texts[i]) for i in here])
            decide = partial(self._round, position, *tables, answers)
            rows = _vectorised(decide, keys[mx.array(here)], states, mx.arange(len(here)))
            for i, numbers in zip(here, rows, strict=True):
                drafted, any_token = numbers["drafted"], np.ones((NUM_DRAFT + 1, VOCAB_SIZE), bool)
                outcome = self._read(answers[0], numbers, drafted, any_token, "a drawn text")
                texts[i] = (*texts[i], *outcome.tokens)[:LENGTH]
        return texts

    def _round(
        self,
        position: int,
        target: mx.array,
        draft: mx.array | None,
        answers: list[Verdict | Agreement],
        key: mx.array,
        state: mx.array,
        index: mx.array,
    ) -> dict[str, mx.array]:
        """Numbers of one answer, and what was drafted, [K]; point masses take turns by index.

        target, draft: log-probabilities by state, [NUM_STATES, V]; no draft is a point mass.
        """
        noise = _OwnNoise(0, key)
        context = DraftContext(noise=noise, coupled=shares_noise(self.rule), vocab_size=VOCAB_SIZE)
        gumbels = context.draft_gumbels(position, NUM_DRAFT)
        tokens, states = [], [state]
        for i in range(NUM_DRAFT):
            token = index // VOCAB_SIZE**i % VOCAB_SIZE
            if draft is not None:
                token = mx.argmax(draft[states[-1]] + gumbels[i])
            tokens.append(token)
            states.append(moved_on(states[-1], token.astype(mx.int32)))
        drafted, passed = to_ids(mx.stack(tokens)), mx.stack(states)
        rows = Rows(target[passed], NextToken(AT_ONE, (), noise), position)
        given = Draft(drafted, None if draft is None else draft[passed[:-1]])
        answers.append(self.rule.decide(rows, given, RoundNoise(noise, position)))
        return {"drafted": drafted, **answers[-1].arrays()}

    # Answers

    def _outcome(self, question: Question, with_evidence: bool = False) -> Outcome:
        """The outcome of a draft, which has to be possible; a rule may read no evidence."""
        tokens = question.tokens
        evidence = [Evidence(match=9 - i) for i in range(len(tokens))] if with_evidence else None
        try:
            answer = question.ask(self.rule, evidence)
        except Exception as error:
            what = f"{question}: decide() raised {type(error).__name__}: {error}."
            self.fail(what, "Any draft of at least one token has a verdict")
        is_answer = isinstance(answer, Verdict | Agreement)
        what = f"{question}: decide() returned {type(answer).__name__}."
        self.require(is_answer, what, "Return Verdict or Agreement")
        for name, array in vars(answer).items():
            shape = {"target_tokens": (len(tokens) + 1,), "nodes": (len(tokens),)}.get(name, ())
            is_ids = isinstance(array, mx.array) and mx.issubdtype(array.dtype, mx.integer)
            kind, got = getattr(array, "dtype", type(array).__name__), getattr(array, "shape", None)
            what = f"{question}: {name} is {kind} of shape {got}; expected an mx.array of integers "
            what += f"of shape {shape}."
            is_right = (is_ids and got == shape) or (name == "nodes" and array is None)
            self.require(is_right, what, "See Verdict and Agreement in specdec_mlx.contracts")
        numbers = {name: array.tolist() for name, array in answer.arrays().items()}
        return self._read(answer, numbers, tokens, question.possible(), question)

    def _read(
        self,
        answer: Verdict | Agreement,
        numbers: Numbers,
        tokens: Sequence[int],
        possible: np.ndarray,
        where: object,
    ) -> Outcome:
        """The outcome of an answer that was read; possible: [K+1, V] what the target may draw."""
        n = numbers["verdict"][0] if "verdict" in numbers else 0
        first = list(range(n))
        nodes = numbers["nodes"][: max(0, n)] if "nodes" in numbers else first
        what = f"{where}: it kept {n} of {len(tokens)} tokens: {nodes}; expected the first ones."
        is_chain = 0 <= n <= len(tokens) and nodes == first
        self.require(is_chain, what, "Count the tokens from the first one on; nodes are for trees")
        outcome = answer.outcome(numbers, tokens)
        n, after = outcome.num_accepted, outcome.tokens[-1]
        self.require(
            0 <= after < possible.shape[-1] and possible[n, after],
            f"{where}: the token after {n} kept ones is {after}, to which the target gives no "
            f"chance there; it has one of {np.flatnonzero(possible[n]).tolist()}.",
            "Draw it from the target at row n: target.tokens[n], or argmax(log(probs) + gumbel)",
        )
        return outcome


@dataclass(frozen=True, eq=False)
class _OwnNoise(Noise):
    """Noise with a key of its own, [2], by which MLX can trace many generations as one."""

    own: mx.array

    def key(self, purpose: str, position: int) -> mx.array:
        return super().key(purpose, position) + self.own

    def uniform(self, purpose: str, position: int, n: int = 1) -> mx.array:
        """Drawn by MLX, not on the host."""
        return mx.random.uniform(shape=(n,), key=self.key(purpose, position))

    def gumbels(self, places: Sequence[tuple[str, int]], vocab: int) -> mx.array:
        return mx.stack([self.gumbel(*place, vocab) for place in places])


def _vectorised(decide: Callable[..., dict[str, mx.array]], *given: mx.array) -> list[Numbers]:
    """Results for each row of what is given; one by one where MLX has to."""
    try:
        results = mx.vmap(decide)(*given)
        mx.eval(results)
    except ValueError as error:
        if "vmap" not in str(error):
            raise
        rows = [decide(*row) for row in zip(*given, strict=True)]
        results = {name: mx.stack([row[name] for row in rows]) for name in rows[0]}
    columns: Any = [array.tolist() for array in results.values()]
    return [dict(zip(results, row, strict=True)) for row in zip(*columns, strict=True)]


def _one_hots(scores: np.ndarray) -> np.ndarray:
    one_hots: np.ndarray = np.eye(scores.shape[-1])[np.argmax(scores, axis=-1)]
    return one_hots


def _log(probs: np.ndarray) -> mx.array:
    with np.errstate(divide="ignore"):
        return mx.array(np.log(probs).astype(np.float32))


def _global_state() -> Any:
    state: Any = mx.random.state
    return state[0].tolist()
