"""Acceptance rules: how much of a draft is accepted, and the token that follows.

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
    # Rules take arrays of both libraries: tests enumerate them with NumPy in float64.
    Array = mx.array | np.ndarray | np.generic


Rows = Float[Array, "rows vocab"]  # [K+1, V] probabilities of the target


Ids = Integer[Array, " rows-1"]  # [K] draft tokens


# [K, V] probabilities that the draft tokens were drawn from
Drawn = Float[Array, "rows-1 vocab"]


Chances = Float[Array, " rows-1"]  # [K] chances that draft tokens are kept


Law = Float[Array, " vocab"]  # [V] distribution of the next token


SMALLEST = 1e-37  # replaces 0 in a denominator; its reciprocal is still finite in float32


def acceptance_probability(
    target_probs: Float[Array, "k vocab"],
    draft_probs: Float[Array, "k vocab"],
    tokens: Integer[Array, " k"],
) -> Float[Array, " k"]:
    r"""Chance that each draft token is accepted, $\min(1, p(x) / q(x))$; [K].

    Where q(x) = 0, the chance is 0 if p(x) = 0, else 1 (Leviathan et al. 2023, Algorithm 1).

    Args:
        target_probs: [K, V] p at each draft token.
        draft_probs: [K, V] q that each draft token was drawn from.
        tokens: [K] draft tokens.
    """
    return capped_ratio(at(target_probs, tokens), at(draft_probs, tokens))


def residual(
    target_probs: Float[Array, "*batch vocab"],
    draft_probs: Float[Array, "*batch vocab"],
    weight: Float[Array, ""] | float = 1.0,
) -> Float[Array, "*batch vocab"]:
    r"""Distribution of the token after a rejection, $\mathrm{norm}(\max(0, w p - q))$; [..., V].

    w is 1 except in block verification (Leviathan et al. 2023, Algorithm 1). Where p = q the excess
    has no mass, rejection cannot happen, and p itself is returned.
    """
    xp = namespace_of(target_probs)
    excess = xp.maximum(weight * target_probs - draft_probs, 0)
    mass = xp.sum(excess, axis=-1, keepdims=True)
    return xp.where(mass > 0, ratio(excess, mass), target_probs)


def point_mass(
    tokens: Integer[Array, " k"], like: Float[Array, "rows vocab"]
) -> Float[Array, "k vocab"]:
    """Distribution [K, V] of a drafter that always proposes `tokens`; dtype and V as in `like`."""
    xp = namespace_of(like)
    hits = xp.arange(like.shape[-1])[None, :] == tokens[:, None]
    return xp.where(hits, xp.ones_like(like[:1]), xp.zeros_like(like[:1]))


def draw(
    probs: Float[mx.array, "*batch vocab"], gumbel: Float[mx.array, " vocab"]
) -> Integer[mx.array, "*batch"]:
    """Token drawn from each distribution with standard Gumbel noise. Its mass is never 0.

    probs: [..., V] probabilities, or numbers proportional to them.
    """
    # Gumbel-max trick. log 0 = -inf excludes a token without mass.
    return mx.argmax(mx.log(probs) + gumbel, axis=-1)


def leading_run(coins: Bool[Array, " k"]) -> Integer[Array, ""]:
    """Number of true entries of `coins` [K] before the first false one."""
    xp = namespace_of(coins)
    return xp.sum(xp.cumprod(coins.astype(xp.int32)))


def namespace_of(array: Any) -> Any:
    return mx if isinstance(array, mx.array) else np


def ratio(p: Any, q: Any) -> Any:
    """p/q, with 0 for 0/0 and a huge number for p/0."""
    return p / namespace_of(q).maximum(q, SMALLEST)


def capped_ratio(p: Any, q: Any) -> Any:
    """min(1, p/q), with 0 for 0/0 and 1 for p/0."""
    return namespace_of(p).minimum(ratio(p, q), 1)


def at(probs: Float[Array, "k vocab"], tokens: Integer[Array, " k"]) -> Float[Array, " k"]:
    """probs[i, tokens[i]] for each i; [K]."""
    return namespace_of(probs).take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def row(array: Any, index: Any) -> Any:
    """Row `index` of an array. The index may be an array, known only to the device."""
    return namespace_of(array).take(array, index, axis=0)


def with_zero_row(probs: Float[Array, "k vocab"]) -> Float[Array, "k+1 vocab"]:
    """Probabilities with one more row of zeros: after the last draft token nothing is excluded."""
    xp = namespace_of(probs)
    return xp.concatenate([probs, xp.zeros((1, probs.shape[-1]), probs.dtype)])


class CoinRule(ABC):
    """A rule for chains that follows from three functions of p, q and the draft.

    `accept_probs` is the chance of heads of each coin, `num_accepted` turns the K coins into n, and
    `next_probs` is the distribution of the next token. All three also take NumPy arrays, so that
    tests can enumerate them in float64.

    Attributes:
        name: name for `rule=`.
        matches_greedy: with a greedy target the rule is exact match, which is then computed
            instead. This holds for every lossless rule.
    """

    name: str
    matches_greedy: bool = False

    @abstractmethod
    def accept_probs(self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn) -> Chances:
        """Chance of heads of the coin of each draft token; [K]."""

    def num_accepted(self, coins: Bool[Array, " k"]) -> Integer[Array, ""]:
        """Number of draft tokens accepted. By default those before the first tails."""
        return leading_run(coins)

    def next_probs(
        self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn, num_accepted: Array | int
    ) -> Law:
        """Distribution [V] of the token after n accepted ones.

        By default the residual at the rejected position, or p after the last draft token.
        """
        return residual(
            row(target_probs, num_accepted), row(with_zero_row(draft_probs), num_accepted)
        )

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        """Toss the coins and draw the next token; see `AcceptanceRule.decide`."""
        if target.greedy and self.matches_greedy:
            return Agreement(target.tokens)
        p, tokens = target.probs, to_ids(draft.tokens)
        q = point_mass(tokens, p) if draft.probs is None else draft.probs
        # All K coins are tossed and n is computed on the device, so that the host need not wait for
        # the first rejection.
        coins = randomness.uniform(len(tokens)) < self.accept_probs(p, tokens, q)
        num_accepted = self.num_accepted(coins)
        after = self.next_probs(p, tokens, q, num_accepted)
        return Verdict(num_accepted, draw(after, randomness.gumbel(after.shape[-1])))


@dataclass(frozen=True)
class Match:
    """Accept the draft as far as it equals the target's own tokens.

    Lossless for any sampler, because the target's own draw is always emitted.
    """

    name = "match"
    needs_distribution = False

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Agreement:
        return Agreement(target.tokens)


@dataclass(frozen=True)
class Coupled:
    """Match, with drafts drawn from the noise of the target's tokens, which agree more often.

    A seed gives one text with any drafter and draft length (Daliri et al. 2024, arXiv 2408.07978).
    """

    name = "coupled"
    needs_distribution = True
    shares_noise = True

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Agreement:
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

    The accepted tokens end at the last heads, so that later tokens can save a token that fell
    short. In expectation this accepts at least as many tokens as `Rejection`. The coins weigh $p_i
    = \min(1, p_{i-1} p(x_i) / q(x_i))$, $p_0 = 1$, the chance that at least the first i tokens are
    accepted.
    """

    name = "block"
    matches_greedy = True

    def accept_probs(self, target_probs: Rows, draft_tokens: Ids, draft_probs: Drawn) -> Chances:
        r"""$h_i = s_i / (s_i + 1 - p_i)$, $s_i$ the mass of $\max(0, p_i p - q)$ after x_i; [K].

        $s_K = h_K = p_K$. 0/0 means that x_i is certainly accepted and p = q after it; h is then 1.
        """
        xp = namespace_of(target_probs)
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        excess = weights[:, None] * target_probs - with_zero_row(draft_probs)
        mass = xp.sum(xp.maximum(excess, 0), axis=-1)
        total = mass + (1 - weights)
        # A row of logits that are not finite has a NaN mass. The weight then ends the draft there.
        at_end = xp.where(xp.isnan(mass), weights, 1)
        return xp.where(total > 0, ratio(mass, total), at_end)[1:]

    def num_accepted(self, coins: Bool[Array, " k"]) -> Integer[Array, ""]:
        """Number of tokens up to the last heads."""
        xp = namespace_of(coins)
        lengths = coins * xp.arange(1, coins.shape[0] + 1)
        return xp.max(lengths) if coins.shape[0] else xp.sum(lengths)

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
    """$p_0, ..., p_K$ of `Block`; [K+1]."""
    # Unrolled, p_i is the smallest product of the ratios p(x_l) / q(x_l) over any run of tokens
    # that ends with x_i, where the empty run gives 1. This needs no loop over tokens.
    xp = namespace_of(target_probs)
    ratios = ratio(at(target_probs[:-1], draft_tokens), at(draft_probs, draft_tokens))
    ratios = xp.concatenate([xp.ones_like(target_probs[:1, 0]), ratios])
    steps = xp.arange(ratios.shape[0])
    # products[i, j]: product of ratios i to j; a product that overflowed before a 0 is NaN
    products = xp.cumprod(xp.where(steps[:, None] < steps, ratios, 1), axis=1)
    return xp.min(xp.where(xp.isnan(products), 0, products), axis=0)


@dataclass(frozen=True)
class AutoRule:
    """Match for deterministic drafts, greedy targets and opaque samplers, else block."""

    name = "auto"
    needs_distribution = False

    def decide(self, target: TargetRows, draft: Draft, randomness: Randomness) -> Decision:
        if draft.logprobs is None or target.greedy or not target.has_distribution:
            return Agreement(target.tokens)
        return Block().decide(target, draft, randomness)

    def for_draft(self, draft: Draft) -> AcceptanceRule:
        return Match() if draft.logprobs is None else Block()


RULES: dict[str, Callable[..., AcceptanceRule]] = {
    "auto": AutoRule,
    "match": Match,
    "coupled": Coupled,
    "rejection": Rejection,
    "block": Block,
}
"""The rules of the library, by name. All of them preserve the target's distribution."""


def rule_names() -> list[str]:
    return [*RULES, *_installed()]


def make_rule(choice: str | AcceptanceRule, *, is_seeded: bool = False) -> AcceptanceRule:
    """The rule of a caller's choice: an object, or NAME:key=value,... as "lenient:lenience=0.5".

    Raises:
        UnknownNameError: no rule has this name.
        ValueError: the rule does not take these options, or the choice is no rule.
        MissingPackageError: the package that brings the rule cannot be imported.
    """
    rule: Any = choice
    if isinstance(choice, str):
        # With a seed, "auto" is coupled. Under block the text depends on draft lengths, which
        # depend on timing.
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
