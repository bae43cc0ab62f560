"""The contract of a rule: `AcceptanceRule`, `TargetRows`, `Verdict`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
from jaxtyping import Bool, Float, Integer

from specdec_mlx.contracts.drafting import Draft


@dataclass(slots=True)
class Outcome:
    """Outcome of one round, known to the host.

    kept: indices of the draft tokens that were kept, from the root down; `range(n)` for a chain.
    tokens: [n + 1] what is emitted, the kept tokens and the one after them; fewer where the loop
        has cut them at max_tokens.
    """

    kept: Sequence[int]
    tokens: list[int]

    @property
    def num_accepted(self) -> int:
        """How many draft tokens were kept, n."""
        return len(self.kept)


@dataclass(frozen=True)
class Verdict:
    """Decision of a rule about one draft.

    num_accepted: n, how many draft tokens are kept, 0 <= n <= K; scalar int array.
    next_token: the token after them, drawn from the target (after a whole chain the bonus token,
        else the correction); scalar int array.
    nodes: for a tree, [K] ints whose first n are the kept tokens, from the root down; None for a
        chain, which keeps its first n.
    """

    num_accepted: Integer[mx.array, ""]
    next_token: Integer[mx.array, ""]
    nodes: Integer[mx.array, " k"] | None = None

    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome."""
        numbers = {"verdict": mx.stack([self.num_accepted, self.next_token.astype(mx.int32)])}
        return numbers if self.nodes is None else {**numbers, "nodes": self.nodes}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        n, next_token = numbers["verdict"]
        kept = numbers["nodes"][:n] if "nodes" in numbers else range(n)
        return Outcome(kept, [*(drafted[i] for i in kept), next_token])


@dataclass(frozen=True)
class Agreement:
    """Verdict of a rule that keeps a chain as far as it equals the target's own tokens.

    The comparison is made on the host: the fewer small operations wait behind a pass, the better.

    target_tokens: [K+1] the target's own draw at each position.
    """

    target_tokens: Integer[mx.array, " k+1"]

    def arrays(self) -> dict[str, mx.array]:
        """Arrays to read for the outcome."""
        return {"target_tokens": self.target_tokens}

    @staticmethod
    def outcome(numbers: Mapping[str, Any], drafted: Sequence[int]) -> Outcome:
        """The outcome, from what was read and the draft's tokens [K]."""
        own = numbers["target_tokens"]
        n = 0
        while n < len(drafted) and drafted[n] == own[n]:
            n += 1
        return Outcome(range(n), own[: n + 1])


@dataclass(frozen=True)
class TreeVerdict:
    """Decision of a rule about a tree: coins and tokens for all its nodes, known together.

    The way through the tree is found on the host, where its shape is known.

    coins: [K] how each draft token's coin fell. after: [K+1] the token that follows if the kept
        ones end at this row. kept: K coins -> the kept tokens, from the root down.
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
    """The target at the K+1 positions of a round, as a rule sees it; all of it lazy.

    Row 0 follows the text, row i + 1 the draft token i.
    """

    @property
    def greedy(self) -> bool:
        """True if all mass lies on the argmax (temperature 0)."""
        ...

    @property
    def has_distribution(self) -> bool:
        """True if `probs` is known; not so for a sampler that can only be called."""
        ...

    @property
    def logprobs(self) -> Float[mx.array, "rows vocab"]:
        """Log-probabilities after the logits processors, before temperature and filters."""
        ...

    @property
    def probs(self) -> Float[mx.array, "rows vocab"]:
        """The distribution that the next token is drawn from, float32; a one-hot if greedy."""
        ...

    @property
    def tokens(self) -> Integer[mx.array, " rows"]:
        """The target's own draw at each row, from the noise of that position."""
        ...


class Randomness(Protocol):
    """Randomness of a rule in one round, independent of the draft's own noise."""

    def uniform(self, n: int) -> Float[mx.array, " n"]:
        """Numbers in [0, 1), one for each draft token's coin."""
        ...

    def gumbel(self, vocab: int) -> Float[mx.array, " vocab"]:
        """Standard Gumbel noise for the token after the kept ones."""
        ...


@runtime_checkable
class AcceptanceRule(Protocol):
    """Pure decision about a draft: knows no model, no cache, and holds no state.

    `rules.coins.CoinRule` is a base for rules that decide token by token, `rules.match.Match` is
    the simplest rule of all. Optional attributes: see the functions below.
    """

    @property
    def name(self) -> str:
        """Name for `rule=`."""
        ...

    def decide(
        self, target: TargetRows, draft: Draft, randomness: Randomness
    ) -> Verdict | Agreement:
        """Decide about a draft of at least one token.

        Args:
            target: the target at K+1 positions; where it is greedy, `target.probs` is a one-hot,
                and a rule that is exact answers `Agreement(target.tokens)`.
            draft: K tokens, as an `mx.array` that need not be computed yet.
            randomness: all that the rule may draw with.
        """
        ...


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
