"""Acceptance rules: from the target's law and a draft to how many tokens are kept and what follows.

Pure functions over arrays. They run on MLX in float32 inside the loop and on NumPy in float64 in
the exact tests: one body of code, whichever library its arrays come from. They know no model and
no cache. In the maths p is the target's law and q the law that the draft was drawn from; in the
code they are `target_probs` [K+1, V] and `draft_probs` [K, V].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

import mlx.core as mx
import numpy as np

from specdec_mlx.errors import UnknownNameError
from specdec_mlx.options import split_spec
from specdec_mlx.types import AcceptanceRule, Verdict

Array = Any  # an mx.array or a np.ndarray


def acceptance_probability(target_probs: Array, draft_probs: Array, tokens: Array) -> Array:
    r"""Chance that each draft token is kept, $\min(1, p(x) / q(x))$; [K].

    target_probs, draft_probs: [K, V] probabilities; tokens: [K] (Leviathan et al. 2023,
    Algorithm 1). A token with q(x) = 0 cannot have been drawn; its chance is 0 where p(x) = 0 and
    1 elsewhere.
    """
    return _capped_ratio(at(target_probs, tokens), at(draft_probs, tokens))


def residual(target_probs: Array, draft_probs: Array, weight: Array = 1.0) -> Array:
    r"""Law of the token that replaces a rejected one, $\mathrm{norm}(\max(0, w p - q))$; [..., V].

    p is the target, q the draft, and w = 1 but for block verification (Leviathan et al. 2023,
    Algorithm 1). Where p = q the excess has no mass, rejection cannot happen, and p itself is
    returned.
    """
    xp = library_of(target_probs)
    excess = xp.maximum(weight * target_probs - draft_probs, 0)
    mass = xp.sum(excess, axis=-1, keepdims=True)
    return xp.where(mass > 0, excess / xp.where(mass > 0, mass, 1), target_probs)


def point_mass(tokens: Array, like: Array) -> Array:
    """Law [K, V] of a drafter that would always propose `tokens` [K]; dtype and V as in `like`."""
    xp = library_of(like)
    hits = xp.arange(like.shape[-1])[None, :] == tokens[:, None]
    return xp.where(hits, xp.ones_like(like[:1]), xp.zeros_like(like[:1]))


def match(target_tokens: Sequence[int], draft_tokens: Sequence[int]) -> tuple[int, int]:
    """Keep the draft as far as it equals the target's own tokens; the next token is the target's.

    target_tokens: [K+1], one draw of the target per position; draft_tokens: [K]. Returns the number
    of accepted tokens, n, and the token after them. Lossless for any way of drawing them, since
    what is emitted is always the target's own draw.
    """
    n = 0
    while n < len(draft_tokens) and draft_tokens[n] == target_tokens[n]:
        n += 1
    return n, target_tokens[n]


def decide(
    rule: AcceptanceRule,
    target_probs: mx.array,
    draft_tokens: mx.array,
    draft_probs: mx.array | None,
    uniform: mx.array,
    gumbel: mx.array,
) -> Verdict:
    """Verdict of a rule, given its randomness: `uniform` [K] in [0, 1), `gumbel` [V] standard."""
    if draft_probs is None:
        draft_probs = point_mass(draft_tokens, target_probs)
    coins = uniform < rule.accept_probs(target_probs, draft_tokens, draft_probs)
    num_accepted = rule.num_accepted(coins)
    law = rule.next_probs(target_probs, draft_tokens, draft_probs, num_accepted)
    return Verdict(num_accepted, draw(law, gumbel))


def draw(probs: mx.array, gumbel: mx.array) -> mx.array:
    """Token drawn from a law [V] with standard Gumbel noise [V]; never one without mass."""
    return mx.argmax(mx.log(probs) + gumbel)


@dataclass(frozen=True)
class Rejection:
    """Token by token (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023)."""

    name: str = field(default="rejection", init=False)

    def accept_probs(self, target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
        """min(1, p/q) at each draft token; [K]."""
        return acceptance_probability(target_probs[:-1], draft_probs, draft_tokens)

    def num_accepted(self, coins: Array) -> Array:
        """Tokens before the first tails."""
        return leading_run(coins)

    def next_probs(
        self, target_probs: Array, draft_tokens: Array, draft_probs: Array, num_accepted: Array
    ) -> Array:
        """Residual at the rejected position, or p after the last draft token; [V]."""
        return residual(
            _row(target_probs, num_accepted), _row(_with_zero_row(draft_probs), num_accepted)
        )


@dataclass(frozen=True)
class Block:
    r"""The draft as a whole (Sun et al. 2024, arXiv 2403.10444).

    What is kept ends at the last heads, not at the first tails: a token that fell short is saved
    by those after it. In expectation it keeps at least as many as `Rejection`, and as many at
    K = 1 and for point masses. The coins weigh $p_i = \min(1, p_{i-1} p(x_i) / q(x_i))$, $p_0 = 1$,
    the chance that at least the first i tokens are kept, given those.
    """

    name: str = field(default="block", init=False)

    def accept_probs(self, target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
        r"""$h_i = s_i / (s_i + 1 - p_i)$, $s_i$ the mass of $\max(0, p_i p - q)$ after x_i; [K].

        Nothing is excluded after the last token: $s_K = h_K = p_K$. 0/0 means that x_i is sure to
        be kept and that p = q after it, and so is the next token; 1 is taken.
        """
        xp = library_of(target_probs)
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        excess = weights[:, None] * target_probs - _with_zero_row(draft_probs)
        mass = xp.sum(xp.maximum(excess, 0), axis=-1)[1:]
        total = mass + (1 - weights[1:])
        return xp.where(total > 0, mass / xp.where(total > 0, total, 1), xp.ones_like(mass))

    def num_accepted(self, coins: Array) -> Array:
        """Tokens up to the last heads."""
        return coins.shape[0] - leading_run(library_of(coins).logical_not(coins[::-1]))

    def next_probs(
        self, target_probs: Array, draft_tokens: Array, draft_probs: Array, num_accepted: Array
    ) -> Array:
        r"""$\mathrm{norm}(\max(0, p_n p - q))$, or p after the last draft token; [V]."""
        weights = running_weights(target_probs, draft_tokens, draft_probs)
        return residual(
            _row(target_probs, num_accepted),
            _row(_with_zero_row(draft_probs), num_accepted),
            _row(weights, num_accepted),
        )


@dataclass(frozen=True)
class Lenient(Rejection):
    r"""Changes the target's law: accepts more than is due (Leviathan et al. 2023, appendix A.5).

    lenience: l in (0, 1]; a draft token is kept with chance $\min(1, p(x) / (l q(x)))$, or, where
    the target is greedy, if $p(x) \ge l \max p$, p before the temperature. l = 1 is `Rejection`.

    What holds all the same: given the text before it, no token is emitted with a chance above
    p(x) / l, nor above p(x) if q(x) <= p(x). After a rejection the residual is that of
    `Rejection`; of all laws to take there it leaves the smallest distance to p, the sum of
    min(q, p/l) - p over q > p. With a greedy target, no token emitted is less than l times as
    likely as the likeliest.
    """

    name: str = field(default="lenient", init=False)
    lenience: float = 0.5

    def __post_init__(self) -> None:
        """Refuse what gives no guarantee."""
        if not 0 < self.lenience <= 1:
            raise ValueError(
                f"Lenient(lenience={self.lenience!r}): expected a number in (0, 1]; no token is "
                "emitted with more than 1/lenience times its chance (1: no lenience)."
            )

    def accept_probs(self, target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
        """min(1, p / (l q)) at each draft token; [K]."""
        return acceptance_probability(target_probs[:-1], self.lenience * draft_probs, draft_tokens)

    def nearly_matches(self, target_logprobs: Array, draft_tokens: Array) -> Array:
        """Whether p(x) >= l max p at each draft token, for a greedy target; [K] booleans.

        target_logprobs: [K+1, V], before the temperature.
        """
        best = target_logprobs[:-1].max(axis=-1)
        return at(target_logprobs[:-1], draft_tokens) - best >= log(self.lenience)


@dataclass(frozen=True)
class Typical:
    r"""Changes the target's law: keeps what is typical of it (Medusa, Cai et al. 2024, 2.3.1).

    A draft token is kept iff $p(x) > \min(\epsilon, \delta e^{-H(p)})$, H the entropy in nats,
    however it was drawn; the token after the last one kept is drawn from p. With a greedy target,
    whose law is a one-hot, that is exact match.

    What holds all the same: a token at or below the threshold is never kept from a draft, and is
    emitted with a chance of at most p(x); one above it, with less than p(x) / threshold. The
    target's likeliest token is always kept.
    """

    name: str = field(default="typical", init=False)
    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        """Refuse thresholds that the likeliest token may not pass."""
        for name in ("epsilon", "delta"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise ValueError(f"Typical({name}={value!r}): expected a number in [0, 1).")

    def threshold(self, target_probs: Array) -> Array:
        """What p(x) must be above; [...] for laws [..., V]."""
        xp = library_of(target_probs)
        entropy = -xp.sum(target_probs * _log_where_positive(target_probs), axis=-1)
        return xp.minimum(self.epsilon, self.delta * xp.exp(-entropy))

    def accept_probs(self, target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
        """1 where the draft token is typical, else 0; [K]."""
        p = at(target_probs[:-1], draft_tokens)
        return (p > self.threshold(target_probs[:-1])) * library_of(p).ones_like(p)

    def num_accepted(self, coins: Array) -> Array:
        """Tokens before the first that is not typical."""
        return leading_run(coins)

    def next_probs(
        self, target_probs: Array, draft_tokens: Array, draft_probs: Array, num_accepted: Array
    ) -> Array:
        """The target's law after the last token kept; [V]."""
        return _row(target_probs, num_accepted)


RULES: dict[str, AcceptanceRule] = {rule.name: rule for rule in (Rejection(), Block())}
"""Rules by law that leave the target's law alone."""
LOSSY: dict[str, Callable[..., AcceptanceRule]] = {"lenient": Lenient, "typical": Typical}
"""Rules that change it; asked for by name only."""
MATCH = "match"
COUPLED = "coupled"
"""Match, with draft tokens drawn from the noise that the target's tokens are drawn from (Daliri et
al. 2024, arXiv 2408.07978): what is accepted follows as in `match`, and is equal far more often."""


def rule_names() -> list[str]:
    """Names that `rule=` takes; those of `LOSSY` take options too."""
    return ["auto", MATCH, COUPLED, *RULES, *LOSSY]


def make_rule(choice: str | AcceptanceRule) -> str | AcceptanceRule:
    """What a caller passed as `rule`: a rule, or "auto", "match" or "coupled", which are none.

    choice: a rule, or NAME or NAME:key=value,..., such as "lenient:lenience=0.5" and
    "typical:epsilon=0.09,delta=0.3". Raises UnknownNameError, and ValueError for options that the
    rule does not take.
    """
    if not isinstance(choice, str):
        if isinstance(choice, AcceptanceRule) and not isinstance(choice, type):
            return choice
        raise ValueError(f"rule={choice!r}: expected a name or an instance of an AcceptanceRule.")
    name, options = split_spec(choice)
    if name not in rule_names():
        raise UnknownNameError(f"Unknown rule {name!r}. Known: {', '.join(rule_names())}.")
    if name in LOSSY:
        try:
            return LOSSY[name](**options)
        except TypeError as error:
            raise ValueError(f"Rule {choice!r}: {error}.") from error
    if options:
        raise ValueError(f"Rule {choice!r}: {name} takes no options.")
    return RULES.get(name, name)


def leading_run(coins: Array) -> Array:
    """How many of the leading entries of `coins` [K] are true."""
    xp = library_of(coins)
    return xp.sum(xp.cumprod(coins.astype(xp.int32)))


def library_of(array: Array) -> Any:
    """The library whose functions an array goes through."""
    return mx if isinstance(array, mx.array) else np


def _capped_ratio(p: Array, q: Array) -> Array:
    """min(1, p/q), with 0 for 0/0 and 1 for p/0."""
    xp = library_of(p)
    return xp.where(p < q, p / xp.where(p < q, q, 1), (p > 0) * xp.ones_like(p))


def _log_where_positive(probs: Array) -> Array:
    """log p, with 0 for p = 0."""
    xp = library_of(probs)
    return xp.log(xp.where(probs > 0, probs, 1))


def running_weights(target_probs: Array, draft_tokens: Array, draft_probs: Array) -> Array:
    """p_0 ... p_K of `Block`; [K+1]."""
    xp = library_of(target_probs)
    p = at(target_probs[:-1], draft_tokens)
    q = at(draft_probs, draft_tokens)
    weights = [xp.ones_like(target_probs[0, 0])]
    for i in range(draft_tokens.shape[0]):
        weights.append(_capped_ratio(weights[-1] * p[i], q[i]))
    return xp.stack(weights)


def at(probs: Array, tokens: Array) -> Array:
    """probs[i, tokens[i]] for each row i; [K]."""
    return library_of(probs).take_along_axis(probs, tokens[:, None], axis=-1)[:, 0]


def _row(array: Array, index: Array) -> Array:
    return library_of(array).take(array, index, axis=0)


def _with_zero_row(probs: Array) -> Array:
    """Probabilities with a further row of zeros: after the last draft token nothing is excluded."""
    xp = library_of(probs)
    return xp.concatenate([probs, xp.zeros((1, probs.shape[-1]), probs.dtype)])
