"""Acceptance rules: how much of a draft is kept, and what follows.

A package that declares

    [project.entry-points."specdec_mlx.rules"]
    my-rule = "my_package:MyRule"

gives its rule a name in `rule=` and on the command line. Built-in names stay, others go to the
first package by name.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from jaxtyping import Bool, Float, Integer

from specdec_mlx.arguments import (
    RULE_GROUP,
    argument_error,
    installed,
    load,
    make_with,
    split_spec,
    unknown,
)
from specdec_mlx.contracts import (
    AcceptanceRule,
    Agreement,
    Decision,
    Draft,
    Randomness,
    TargetRows,
    Verdict,
)
from specdec_mlx.token_ids import to_ids

__all__ = [
    "AcceptanceRule",
    "Agreement",
    "Block",
    "CoinRule",
    "Randomness",
    "Rejection",
    "TargetRows",
    "Verdict",
    "acceptance_probability",
    "leading_run",
    "residual",
]

if TYPE_CHECKING:
    Array = Any
else:
    # of either library; shapes are checked under pytest
    Array = mx.array | np.ndarray | np.generic


Rows = Float[Array, "rows vocab"]  # [K+1, V] probabilities of the target


Ids = Integer[Array, " rows-1"]  # [K] draft tokens


# [K, V] probabilities that the draft tokens were drawn from
Drawn = Float[Array, "rows-1 vocab"]


Chances = Float[Array, " rows-1"]  # [K] chances that draft tokens are kept


Law = Float[Array, " vocab"]  # [V] distribution of the next token


SMALLEST = 1e-37  # stands for 0 in a denominator: the reciprocal is still a float32


def acceptance_probability(
    target_probs: Float[Array, "k vocab"],
    draft_probs: Float[Array, "k vocab"],
    tokens: Integer[Array, " k"],
) -> Float[Array, " k"]:
    r"""Chance that each draft token is kept, $\min(1, p(x) / q(x))$; [K].

    target_probs, draft_probs: [K, V]; tokens: [K] (Leviathan et al. 2023, Algorithm 1). Where q(x)
    = 0 it is 0 if p(x) = 0, else 1.
    """
    return capped_ratio(at(target_probs, tokens), at(draft_probs, tokens))


def residual(
    target_probs: Float[Array, "*batch vocab"],
    draft_probs: Float[Array, "*batch vocab"],
    weight: Float[Array, ""] | float = 1.0,
) -> Float[Array, "*batch vocab"]:
    r"""Distribution of the token after a rejection, $\mathrm{norm}(\max(0, w p - q))$; [..., V].

    w = 1 but for block verification (Leviathan et al. 2023, Algorithm 1). Where p = q the excess
    has no mass, rejection cannot happen, and p itself is returned.
    """
    xp = namespace_of(target_probs)
    excess = xp.maximum(weight * target_probs - draft_probs, 0)
    mass = xp.sum(excess, axis=-1, keepdims=True)
    return xp.where(mass > 0, ratio(excess, mass), target_probs)


def point_mass(
    tokens: Integer[Array, " k"], like: Float[Array, "rows vocab"]
) -> Float[Array, "k vocab"]:
    """Distribution of a drafter that would always propose `tokens`; dtype and V as in `like`."""
    xp = namespace_of(like)
    hits = xp.arange(like.shape[-1])[None, :] == tokens[:, None]
    return xp.where(hits, xp.ones_like(like[:1]), xp.zeros_like(like[:1]))


def draw(
    probs: Float[mx.array, "*batch vocab"], gumbel: Float[mx.array, " vocab"]
) -> Integer[mx.array, "*batch"]:
    """Token drawn from each distribution with standard Gumbel noise; never one without mass.

    probs: [..., V] probabilities, or what is proportional to them.
    """
    return mx.argmax(mx.log(probs) + gumbel, axis=-1)


def leading_run(coins: Bool[Array, " k"]) -> Integer[Array, ""]:
    """Number of leading entries of `coins` [K] that are true."""
    xp = namespace_of(coins)
    return xp.sum(xp.cumprod(coins.astype(xp.int32)))


def namespace_of(array: Any) -> Any:
    """The library whose functions an array goes through."""
    return mx if isinstance(array, mx.array) else np


def ratio(p: Any, q: Any) -> Any:
    """p/q, with 0 for 0/0 and a number that is far above 1 for p/0."""
    return p / namespace_of(q).maximum(q, SMALLEST)


def capped_ratio(p: Any, q: Any) -> Any:
    """min(1, p/q), with 0 for 0/0 and 1 for p/0."""
    return namespace_of(p).minimum(ratio(p, q), 1)


def at(probs: Float[Array, "k vocab"], tokens: Integer[Array, " k"]) -> Float[Array, " k"]:
    """probs[i, tokens[i]] for each row i; [K]."""
    return namespace_of(probs).take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def row(array: Any, index: Any) -> Any:
    """Row `index` of an array, which may be a scalar array itself."""
    return namespace_of(array).take(array, index, axis=0)


def with_zero_row(probs: Float[Array, "k vocab"]) -> Float[Array, "k+1 vocab"]:
    """Probabilities with a further row of zeros: after the last draft token nothing is excluded."""
    xp = namespace_of(probs)
    return xp.concatenate([probs, xp.zeros((1, probs.shape[-1]), probs.dtype)])


class CoinRule(ABC):
    """A rule for chains whose round follows from three functions of p, q and the draft.

    `accept_probs` gives the chance of each coin's heads, `num_accepted` turns the K coins into n,
    `next_probs` is the distribution of the token after; all three take NumPy arrays too, to be
    enumerated in float64. matches_greedy: with a greedy target the rule comes down to exact match,
    which is then computed, as every lossless rule does.
    """

    name: str
    matches_greedy: bool = False

    @abstractmethod
    def accept_probs(self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn) -> Chances:
        """Chance that the coin of each draft position shows heads; [K]."""

    def num_accepted(self, coins: Bool[Array, " k"]) -> Integer[Array, ""]:
        """How many draft tokens K coins keep; by default those before the first tails."""
        return leading_run(coins)

    def next_probs(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, num_accepted: Array | int
    ) -> Law:
        """Distribution of the token that follows n kept ones; [V].

        By default the residual at the rejected position, or p after the last draft token.
        """
        return residual(
            row(target_probs, num_accepted), row(with_zero_row(draft_probs), num_accepted)
        )

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        """Toss the coins and draw the token after; see `AcceptanceRule.decide`."""
        if target.greedy and self.matches_greedy:
            return Agreement(target.tokens)
        p, tokens = target.probs, to_ids(draft.tokens)
        q = point_mass(tokens, p) if draft.probs is None else draft.probs
        coins = randomness.uniform(len(tokens)) < self.accept_probs(p, tokens, q)
        num_accepted = self.num_accepted(coins)
        after = self.next_probs(p, tokens, q, num_accepted)
        return Verdict(num_accepted, draw(after, randomness.gumbel(after.shape[-1])))


@dataclass(frozen=True)
class Match:
    """Keep the draft as far as it equals the target's own tokens; the next token is the target's.

    Lossless for any sampler, since the target's own draw is always emitted.
    """

    name = "match"
    needs_distribution = False

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Agreement:
        """Compare with the target's own draws."""
        return Agreement(target.tokens)


@dataclass(frozen=True)
class Coupled:
    """Match, with drafts drawn from the noise of the target's tokens, equal far more often.

    A seed gives one text with any drafter and draft length (Daliri et al. 2024, arXiv 2408.07978).
    """

    name = "coupled"
    needs_distribution = True
    shares_noise = True

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Agreement:
        """Compare with the target's own draws."""
        return Agreement(target.tokens)


@dataclass(frozen=True)
class Rejection(CoinRule):
    """Token by token (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

    name = "rejection"
    matches_greedy = True

    def accept_probs(self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn) -> Chances:
        """min(1, p/q) at each draft token; [K]."""
        return acceptance_probability(target_probs[:-1], draft_probs, draft_tokens)


@dataclass(frozen=True)
class Block(CoinRule):
    r"""The draft as a whole (Sun et al. 2024, arXiv 2403.10444).

    The kept tokens end at the last heads: a token that fell short is saved by those after it. In
    expectation it keeps at least as many as `Rejection`. The coins weigh $p_i = \min(1, p_{i-1}
    p(x_i) / q(x_i))$, $p_0 = 1$, the chance that at least the first i tokens are kept, given those.
    """

    name = "block"
    matches_greedy = True

    def accept_probs(self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn) -> Chances:
        r"""$h_i = s_i / (s_i + 1 - p_i)$, $s_i$ the mass of $\max(0, p_i p - q)$ after x_i; [K].

        $s_K = h_K = p_K$. 0/0 means that x_i is sure to be kept and p = q after it; 1 is taken.
        """
        xp = namespace_of(target_probs)
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        excess = weights[:, None] * target_probs - with_zero_row(draft_probs)
        mass = xp.sum(xp.maximum(excess, 0), axis=-1)
        total = mass + (1 - weights)
        # a row of no distribution ends the draft
        at_end = xp.where(xp.isnan(mass), weights, 1)
        return xp.where(total > 0, ratio(mass, total), at_end)[1:]

    def num_accepted(self, coins: Bool[Array, " k"]) -> Integer[Array, ""]:
        """Tokens up to the last heads."""
        xp = namespace_of(coins)
        kept = coins * xp.arange(1, coins.shape[0] + 1)
        return xp.max(kept) if coins.shape[0] else xp.sum(kept)

    def next_probs(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, num_accepted: Array | int
    ) -> Law:
        r"""$\mathrm{norm}(\max(0, p_n p - q))$, or p after the last draft token; [V]."""
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        return residual(
            row(target_probs, num_accepted),
            row(with_zero_row(draft_probs), num_accepted),
            row(weights, num_accepted),
        )


def running_weights(
    target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn
) -> Float[Array, " rows"]:
    r"""p_0 ... p_K of `Block`; [K+1].

    Unrolled, $p_i$ is the smallest product of the ratios $p(x_l) / q(x_l)$ of any run of tokens
    that ends with x_i, the empty run's 1 included; a product that overflowed before a 0 is 0.
    """
    xp = namespace_of(target_probs)
    ratios = ratio(at(target_probs[:-1], draft_tokens), at(draft_probs, draft_tokens))
    ratios = xp.concatenate([xp.ones_like(target_probs[:1, 0]), ratios])
    places = xp.arange(ratios.shape[0])
    # [start, end]
    products = xp.cumprod(xp.where(places[:, None] < places, ratios, 1), axis=1)
    return xp.min(xp.where(xp.isnan(products), 0, products), axis=0)


@dataclass(frozen=True)
class AutoRule:
    """Match for point masses, greedy targets and opaque samplers, else block."""

    name = "auto"
    needs_distribution = False

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        """Pass on to the rule that suits the draft."""
        if draft.logprobs is None or target.greedy or not target.has_distribution:
            return Agreement(target.tokens)
        return Block().decide(target, draft, randomness)

    def for_draft(self, draft: Draft) -> AcceptanceRule:
        """Block for drafts drawn at random, else match."""
        return Match() if draft.logprobs is None else Block()


RULES: dict[str, Callable[..., AcceptanceRule]] = {
    "auto": AutoRule,
    "match": Match,
    "coupled": Coupled,
    "rejection": Rejection,
    "block": Block,
}
"""The rules of the library, by name. They leave the target's distribution alone."""


def rule_names() -> list[str]:
    """Names that `rule=` takes: the built-in ones, and those of installed packages."""
    return [*RULES, *_installed()]


def make_rule(choice: str | AcceptanceRule, *, is_seeded: bool = False) -> AcceptanceRule:
    """The rule that a caller passed: one, or NAME:key=value,... as "lenient:lenience=0.5".

    With a seed "auto" is coupled: under block the length of a draft, which timing chooses, would
    have a say in the text.

    Raises:
        UnknownNameError: no rule has this name.
        ValueError: options that the rule does not take, or something that is no rule.
        MissingPackageError: the package that brings the rule cannot be imported.
    """
    rule: Any = choice
    if isinstance(choice, str):
        name, options = split_spec("coupled" if is_seeded and choice == "auto" else choice)
        if name not in RULES and name not in _installed():
            raise unknown("rule", name, rule_names())
        kind = RULES.get(name) or load(_installed()[name], "rule")
        rule = make_with("rule", name, kind, options)
    if isinstance(rule, AcceptanceRule) and not isinstance(rule, type):
        return rule
    raise argument_error("rule", choice, "a name or an instance of an AcceptanceRule")


@functools.cache
def _installed() -> dict[str, EntryPoint]:
    return installed(RULE_GROUP, "rule", RULES)
