"""The automatic draft length: as many tokens as pay, from measured cost and acceptance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf

from specdec_mlx.draft_length.accounts import Account, LookUpAccount, ModelAccount
from specdec_mlx.draft_length.agreement import compared, pooled
from specdec_mlx.draft_length.forking import ForkAccount
from specdec_mlx.draft_length.stepwise import StepwiseAccount
from specdec_mlx.draft_length.trees import Chain, Sources, TreeAccount
from specdec_mlx.draft_length.tuning import Tuning
from specdec_mlx.types import NO_DRAFT, Branches, Draft, Evidence, RoundRecord, Step

Proposed = tuple[list[int], Sequence[Evidence]]
"""The tokens of a draft, and what speaks for each."""

RATE_MEMORY = 0.95
"""Decay of the moving averages behind the going rate, a round: about 20 rounds."""

CARRIED = 0.5
"""What those of the last text weigh at the beginning of the next one. With 0, where every text
begins as if nothing had ever been gained, the agent's conversations lose 2% at a slope of 0.24."""


@dataclass
class Auto:
    """As many tokens as pay, 0 included; from measured cost and acceptance.

    Keeping K tokens is worth the tokens that it is expected to bring less what its round costs at
    the going rate: 1 + a_1 + a_1 a_2 + ... + a_1..a_K - rate * cost(K), with a_i the chance that
    token i is accepted if those before it were, cost in plain rounds, and rate the tokens that a
    plain round's time has lately brought, at least 1. The largest value wins; that is the marginal
    rule of an economic optimum, and at K = 0 it is plain decoding.

    Each part of a drafter has an account of its own. A look-up is asked in every round: what it
    proposed and was not taken is scored all the same against what came, so that it is noticed when
    the text becomes predictable. Of a draft model, which costs time to ask, nothing is known
    without paying; it is asked as long as its exploration budget stands the loss.

    tuning: what was learned before, by the key of the part; goes on learning.
    """

    tuning: Tuning = field(default_factory=Tuning)
    _parts: dict[str, Account] = field(default_factory=dict)
    _tokens: float = 0.0
    _cost: float = 0.0
    _chosen_gain: float = 0.0

    def __post_init__(self) -> None:
        """Begin at the rate of the last text, which a few rounds can outweigh."""
        self._tokens = CARRIED * self.tuning.tokens
        self._cost = CARRIED * self.tuning.cost

    def begin_steps(
        self,
        part: str,
        time_step: Callable[[], float] | None,
        *,
        time_reading: Callable[[], float] | None = None,
        at_once: bool = False,
        reads_along: bool = False,
    ) -> None:
        """Expect a drafter that asks `goes_on`; see `types.ChoosesSteps`."""
        learned = self.tuning.of(part, StepwiseAccount.first_budget)
        learned.drafting.at_once = at_once
        self._parts[part] = StepwiseAccount(
            learned, time_step=time_step, time_reading=time_reading, reads_along=reads_along
        )

    def prefilled(self, num_tokens: int, seconds: float) -> None:
        """Note what reading the prompt took; see `types.ChoosesSteps`."""
        for part in self._parts.values():
            if isinstance(part, StepwiseAccount) and num_tokens:
                part.prefill = seconds / num_tokens

    def goes_on(self, part: str, evidence: Sequence[Evidence]) -> Step:
        """Whether the latest position is worth verifying, and another one worth drafting."""
        return self._parts[part].goes_on(evidence, self.rate)

    def begin_tree(self, part: str, guessers: Sequence[str]) -> None:
        """Expect look-ups whose guesses share a tree; see `types.GrowsTrees`."""
        self._parts[part] = TreeAccount(self.tuning.of(part, TreeAccount.first_budget))
        for guesser in guessers:
            self.tuning.of(guesser, LookUpAccount.first_budget, look_up=True).guesses.begin_text()

    def begin_forks(self, part: str) -> None:
        """Expect a drafter whose drafts fork; see `types.SizesTrees`."""
        self._parts[part] = ForkAccount(self.tuning.of(part, ForkAccount.first_budget))

    def limit(self, part: str, cheap: bool) -> int:
        """The longest length that can pay, or for a draft that costs time, the one that does."""
        account = self._parts.get(part)
        if account is None:
            kind = LookUpAccount if cheap else ModelAccount
            learned = self.tuning.of(part, kind.first_budget, look_up=cheap)
            account = self._parts[part] = kind(learned)
        if not cheap and any(other.learned.costs.needs_plain for other in self._parts.values()):
            return 0
        return account.limit(self.rate)

    def cut(self, part: str, draft: Draft) -> int:
        """The length that pays best for this draft."""
        return self._parts[part].cut(draft, self.rate) if len(draft) else 0

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[int, int]:
        """The draft that is worth most, and its length; see `types.ChoosesDrafts`."""
        together = compared([draft for _, draft in drafts])
        accounts = [self._parts[part] for part, _ in drafts]
        return self._choose(accounts, together, _chances(accounts, together))

    def _choose(
        self,
        accounts: Sequence[Account],
        proposed: Sequence[Proposed],
        chances: Sequence[Iterable[float]],
    ) -> tuple[int, int]:
        """The same by accounts, by tokens with what speaks for each, and by their own chances."""
        rate, together = self.rate, pooled(chances, [tokens for tokens, _ in proposed])
        lengths = [
            account.keep(tokens, evidence, known, rate)
            for account, (tokens, evidence), known in zip(accounts, proposed, together, strict=True)
        ]
        gains = [account.gain for account in accounts]
        best = gains.index(max(gains))
        self._chosen_gain = gains[best]
        return best, lengths[best]

    def outbids(self, part: str, limit: int) -> bool:
        """Whether a draft model promises more than what was chosen; see `types.ChoosesDrafts`."""
        return self._parts[part].gain > self._chosen_gain

    def grow(
        self,
        part: str,
        drafts: Sequence[tuple[str, Draft]],
        guessers: Sequence[tuple[str, Branches]],
        size: tuple[int, int],
        may_fork: Callable[[], bool],
    ) -> Draft:
        """The chain or the tree that is worth most; see `types.GrowsTrees`."""
        account = self._parts[part]
        assert isinstance(account, TreeAccount)
        best, account.gain, account.drafter = NO_DRAFT, 0.0, ""
        together = compared([draft for _, draft in drafts])
        tokens = [of_draft for of_draft, _ in together]
        accounts = [self._parts[key] for key, _ in drafts]
        chances: Sequence[Iterable[float]] = _chances(accounts, together)
        forks_may_pay, best_chain = account.forks_may_pay(), None
        if forks_may_pay:  # then all of them are looked at, more than once
            chances = list(map(list, chances))
        if drafts:
            chosen, length = self._choose(accounts, together, chances)
            account.drafter, draft = drafts[chosen]
            best, account.gain = draft.head(length), self._chosen_gain
        if forks_may_pay:
            chains = [
                Chain(tuple(own), list(known)) for own, known in zip(tokens, chances, strict=True)
            ]
            if drafts:
                best_chain = chains[chosen]._replace(chances=list(pooled(chances, tokens)[chosen]))
            histories = [(guesser, self.tuning.of(key).guesses) for key, guesser in guessers]
            sources = Sources(chains, best_chain, histories)
            tree, gain = account.grow(sources, self.rate, *size)
            if tree.parents is not None and gain > account.gain and account.asks(may_fork):
                best, account.gain, account.drafter = tree, gain, ""
        return best

    def price(self, part: str, num_drafted: int, with_more: int) -> float:
        """What further draft tokens cost, in tokens; see `types.PricesPositions`."""
        account = self._parts[part]
        costs = account.learned.costs
        if costs.needs_plain or not account.can_afford(with_more, 1.0):
            return inf
        return self.rate * (costs.optimistic_ratio(with_more) - costs.optimistic_ratio(num_drafted))

    def record(self, round_: RoundRecord) -> None:
        """Learn cost and acceptance from a round, and the going rate; settle the accounts."""
        drafting = self._parts[round_.part] if round_.drafted else None
        if isinstance(drafting, TreeAccount) and drafting.drafter:
            drafting = self._parts[drafting.drafter]
        others = [part for part in self._parts.values() if part is not drafting]
        is_plain = drafting is None and not any(part.num_steps for part in others)
        for part in self._parts.values():
            part.learned.context = round_.context
            if is_plain and round_.steady:  # a plain round is everybody's
                part.learned.costs.add(0, round_.seconds)
        self._tokens = RATE_MEMORY * self._tokens + round_.emitted
        verified = drafting.round_cost(round_.drafted) if drafting else 1.0
        self._cost = RATE_MEMORY * self._cost + verified
        self._cost += sum(part.dropped_cost for part in others)
        for part in others:
            part.settle_steps(round_)
        if drafting is not None:
            drafting.settle(round_)
            drafting.learn_acceptance(round_)
            self._share_cost(drafting, round_)
        self.tuning.tokens, self.tuning.cost = self._tokens, self._cost
        for part in self._parts.values():
            part.follow(round_)

    def _share_cost(self, drafting: Account, round_: RoundRecord) -> None:
        """A look-up takes no time, so that a round with its draft costs the same with another's."""
        if isinstance(drafting, LookUpAccount) and round_.steady:
            for part in self._parts.values():
                if isinstance(part, LookUpAccount) and part is not drafting:
                    part.learned.costs.add(round_.drafted, round_.seconds)

    def wants_timing(self, num_drafted: int) -> bool:
        """Whether seconds are needed that a slow caller would hide; see `types.TimesRounds`."""
        costs = [part.learned.costs for part in self._parts.values()]
        if num_drafted == 0:
            return any(cost.needs_plain for cost in costs)
        return not any(cost.is_measured(num_drafted) for cost in costs)

    @property
    def rate(self) -> float:
        """Tokens that the time of a plain round has lately brought, at least 1."""
        return max(1.0, self._tokens / self._cost) if self._cost else 1.0


def _chances(accounts: Sequence[Account], proposed: Sequence[Proposed]) -> list[Iterator[float]]:
    """The chance of each token of each draft, by its own drafter."""
    return [
        account.chances(tokens, evidence)
        for account, (tokens, evidence) in zip(accounts, proposed, strict=True)
    ]
