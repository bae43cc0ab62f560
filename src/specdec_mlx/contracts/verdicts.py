"""The contract of a rule: `AcceptanceRule`, `TargetRows`, `Verdict`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
from jaxtyping import Bool, Float, Integer

from specdec_mlx.contracts.drafting import Draft
from specdec_mlx.errors import VerdictError


@dataclass(slots=True)
class Outcome:
    """Outcome of one round, known to the host.

    kept: indices of the draft tokens kept, from the root down. tokens: [n + 1] emitted, the one
    after the kept included; fewer where max_tokens cut them.
    """

    kept: Sequence[int]
    tokens: list[int]

    @property
    def num_accepted(self) -> int:
        """How many draft tokens were kept, n."""
        return len(self.kept)


class Decision(ABC):
    """Answer of a rule, lazy: `Verdict`, `Agreement`, or for a tree `TreeVerdict`."""

    @abstractmethod
    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome."""

    @abstractmethod
    def outcome(self, numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""


@dataclass(frozen=True)
class Verdict(Decision):
    """Decision of a rule about one draft.

    num_accepted: n, draft tokens kept, the first of a chain, 0 to K; scalar int array. next_token:
    drawn from the target, the bonus token or the correction; scalar int array.
    """

    num_accepted: Integer[mx.array, ""]
    next_token: Integer[mx.array, ""]

    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome."""
        next_token = self.next_token.astype(mx.int32)
        return {"verdict": mx.stack([self.num_accepted, next_token])}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        (n, next_token), k = numbers["verdict"], len(drafted)
        if not 0 <= n <= k:
            raise VerdictError(
                f"The rule kept {n} tokens of a draft of {k}; expected a number from 0 to K."
            )
        return Outcome(range(n), [*drafted[:n], next_token])


@dataclass(frozen=True)
class Agreement(Decision):
    """Verdict of a rule that keeps a chain as far as it equals the target's own draws [K+1].

    It is compared on the host: the fewer small operations follow a pass, the better.
    """

    target_tokens: Integer[mx.array, " k+1"]

    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome."""
        return {"target_tokens": self.target_tokens}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        own = numbers["target_tokens"]
        if len(own) != len(drafted) + 1:
            raise VerdictError(
                f"The rule answered with {len(own)} tokens for a draft of {len(drafted)}; "
                "expected the target's own token at each of the K + 1 positions."
            )
        n = 0
        while n < len(drafted) and drafted[n] == own[n]:
            n += 1
        return Outcome(range(n), own[: n + 1])


@dataclass(frozen=True)
class TreeVerdict(Decision):
    """Decision about a tree: coins and tokens for all its nodes; the path is found on the host.

    coins: [K] how each token's coin fell. after: [K+1] the token that follows if the kept ones end
    at this row. kept: K coins -> the kept tokens, from the root down.
    """

    coins: Bool[mx.array, " k"]
    after: Integer[mx.array, " k+1"]
    kept: Callable[[Sequence[bool]], list[int]]

    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome."""
        return {"coins": self.coins, "after": self.after}

    def outcome(self, numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        kept = self.kept(numbers["coins"])
        row = kept[-1] + 1 if kept else 0
        return Outcome(kept, [*(drafted[i] for i in kept), numbers["after"][row]])


class TargetRows(Protocol):
    """The target at the K+1 positions of a round, as a rule sees it; all of it lazy."""

    @property
    def greedy(self) -> bool:
        """True if all mass lies on the argmax (temperature 0)."""

    @property
    def has_distribution(self) -> bool:
        """True if `probs` is known; not so for a sampler that can only be called."""

    @property
    def logprobs(self) -> Float[mx.array, "rows vocab"]:
        """Log-probabilities after the logits processors, before temperature and filters."""

    @property
    def probs(self) -> Float[mx.array, "rows vocab"]:
        """The distribution that the next token is drawn from, float32; a one-hot if greedy."""

    @property
    def tokens(self) -> Integer[mx.array, " rows"]:
        """The target's own draw at each row, from the noise of that position."""


class Randomness(Protocol):
    """Randomness of a rule in one round, independent of the draft's own noise."""

    def uniform(self, n: int) -> Float[mx.array, " n"]:
        """Numbers in [0, 1), one for each draft token's coin."""

    def gumbel(self, vocab: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise for the token after the kept ones."""


@runtime_checkable
class AcceptanceRule(Protocol):
    """Pure decision about a draft: knows no model, no cache, and holds no state.

    `rules.coins.CoinRule` is a base for rules that decide token by token, `rules.match.Match` the
    simplest rule. Optional attributes: see the functions below.
    """

    @property
    def name(self) -> str:
        """Name for `rule=`."""

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Decision:
        """Decide about a draft of at least one token, which need not be computed yet.

        target: at K+1 positions; where greedy, `target.probs` is a one-hot, and a rule that is
        exact answers `Agreement(target.tokens)`. randomness: all that the rule may draw with.
        """


def needs_distribution(rule: AcceptanceRule) -> bool:
    """`needs_distribution` of a rule: it reads `TargetRows.probs` in any case; default: it does."""
    return getattr(rule, "needs_distribution", True)


def shares_noise(rule: AcceptanceRule) -> bool:
    """`shares_noise` of a rule: drafts are drawn from the noise of the target's own draws."""
    return getattr(rule, "shares_noise", False)


def rule_for(rule: AcceptanceRule, draft: Draft) -> AcceptanceRule:
    """`for_draft(draft)` of a rule: which one decides about it where the target is not greedy."""
    for_draft = getattr(rule, "for_draft", None)
    return rule if for_draft is None else for_draft(draft)
