"""One drafter in one generation: what may be drafted with it, what that brings, and what it costs.

Each part of a drafter has an account of its own, which outlives the generation. A look-up is asked
in every round. Of a draft model, which costs time to ask, nothing is known without paying: it
drafts on account.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from specdec_mlx.draft_length.acceptance import AcceptanceHistory
from specdec_mlx.draft_length.tuning import FIRST_BUDGET, Learned
from specdec_mlx.token_ids import to_list
from specdec_mlx.types import Draft, Evidence, RoundRecord, Step

LENGTHS = (1, 2, 3, 4, 6, 9, 14)
"""Draft lengths that are tried: few, so that kernels are compiled for few shapes; 4, 9 and 14 fill
MLX's tiles of 5 rows."""

LONGEST = LENGTHS[-1]

COPY_LENGTHS = (*LENGTHS, 24, 32, 48, 64)
"""Lengths of look-ups: where a text is copied, as edits are, most of it comes in one piece."""

LONGEST_COPY = COPY_LENGTHS[-1]

CHOICES = frozenset(COPY_LENGTHS)

SURE = 0.4
"""Recent acceptance from which on a look-up is asked for more than `LONGEST`; a single wrong token
takes it below."""

TRIAL_SHARE = 0.002
"""Share of the time that a look-up may lose in trying lengths whose cost is not known."""

EXPENSIVE_BUDGET = 2.0
"""What a draft model that is new may lose, in plain rounds: a few short drafts."""

EXPLORATION_SHARE = 0.005
"""Share of the time that one may lose besides: beside a look-up, over 8 texts of 96 tokens, both
together are 1%."""

PROVEN_SHARE = 0.01
"""The same of one that has paid before, and is likely to pay again when the text turns."""

LARGEST_BUDGET = 6.0
"""Most that gains add up to, and so the most that a draft model loses when a text turns. With 4, a
good one whose drafts cost more than a plain round is paused after three unlucky ones, and in
simulations needed 0.84 of the plain time where 0.69 was enough."""


@dataclass
class Account(ABC):
    """One drafter in one generation, and its account, which outlives the generation.

    expected: tokens that the round with its draft was expected to bring when its length was chosen.
    learned: what is known of it. scored: its draft that is being compared with what comes. gain:
    what its next draft is expected to bring beyond plain decoding, in tokens less cost at the going
    rate; of a look-up known once it has proposed, of a draft model before it is asked. num_steps:
    draft steps that were run for the present round, as far as they are counted. latest: the text's
    last token, None at first. looks_at_tokens: whether a draft is cut for what its tokens are,
    which only what is copied may be.
    """

    learned: Learned
    scored: ScoredDraft | None = None
    gain: float = 0.0
    was_cut: bool = False
    expected: float = 1.0
    num_steps: int = 0
    latest: int | None = None
    first_budget: ClassVar[float] = FIRST_BUDGET
    looks_at_tokens: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """How predictable the text is, is not known yet."""
        self.learned.acceptance.begin_text()

    @abstractmethod
    def limit(self, rate: float) -> int:
        """Most tokens that it may propose now."""

    @abstractmethod
    def can_afford(self, length: int, expected: float) -> bool:
        """Whether the exploration budget stands a draft; expected: tokens that it brings."""

    def goes_on(self, evidence: Sequence[Evidence], rate: float) -> Step:
        """Draft on to the limit."""
        return Step.GO_ON

    def round_cost(self, num_drafted: int) -> float:
        """Cost of a round with its draft, in plain rounds."""
        return self.learned.costs.ratio(num_drafted)

    @property
    def dropped_cost(self) -> float:
        """Cost of draft steps of this round that brought no draft, in plain rounds."""
        return 0.0

    def settle_steps(self, round_: RoundRecord) -> None:
        """Charge draft steps that brought no draft; by default there are none."""
        return

    @abstractmethod
    def settle(self, round_: RoundRecord) -> None:
        """Learn what a round with its draft cost, and charge the exploration budget."""

    def cut(self, draft: Draft, rate: float) -> int:
        """Length of the largest value, given what speaks for each token."""
        evidence = [0] * len(draft) if draft.evidence is None else draft.evidence
        tokens = to_list(draft.tokens)
        return self.keep(tokens, evidence, self.chances(tokens, evidence), rate)

    def keep(
        self,
        tokens: list[int],
        evidence: Sequence[Evidence | int],
        chances: Iterable[float],
        rate: float,
    ) -> int:
        """The same of tokens on the host, each with its chance; from now on they are scored."""
        kept = self.best_length(chances, len(tokens), rate, plain_value=1.0 - rate)
        self.was_cut = True
        if kept or self.scored is None:
            self.scored = ScoredDraft(
                tokens,
                evidence,
                self.learned.acceptance,
                looks_at_tokens=self.looks_at_tokens,
                before=self.latest,
            )
        return kept

    def chances(self, tokens: list[int], evidence: Sequence[Evidence | int]) -> Iterator[float]:
        """How likely each token of a draft is to be accepted, if those before it are; [K]."""
        copied = tokens if self.looks_at_tokens else None
        return self.learned.acceptance.chances(evidence, copied, self.latest)

    def follow(self, round_: RoundRecord) -> None:
        """Score the open draft, and go on by one round of any part or none."""
        if self.scored is not None and self.scored.is_through(round_.tokens):
            self.scored = None
        if round_.tokens:
            self.latest = round_.tokens[-1]

    def learn_acceptance(self, round_: RoundRecord) -> None:
        """Learn from the verdict on its draft, where no evidence did that already."""
        if not self.was_cut:
            for i in range(min(round_.accepted + 1, round_.drafted)):
                self.learned.acceptance.learn(0, i, i < round_.accepted)

    def best_length(
        self, chances: Iterable[float], whole: int, rate: float, plain_value: float
    ) -> int:
        """Length of the largest value that can be afforded; 0 if none is above `plain_value`.

        Args:
            chances: of each token of a draft, asked for as far as they are needed.
            whole: how many tokens it has.
            rate: the going rate, in tokens a plain round's time.
            plain_value: what the value has to exceed.
        """
        costs = self.learned.costs
        best, best_value = 0, plain_value
        reach, expected = 1.0, 1.0
        for length, chance in enumerate(() if costs.needs_plain else chances, start=1):
            reach *= chance
            expected += reach
            if length in CHOICES or length == whole:
                value = expected - rate * costs.optimistic_ratio(length)
                if value > best_value and self.can_afford(length, expected):
                    best, best_value, self.expected = length, value, expected
                if value + reach * (whole - length) <= best_value:
                    break  # were all that follows right if this one is, and cost nothing
        self.gain = best_value - (1.0 - rate)
        return best


class LookUpAccount(Account):
    """A look-up: proposing is free, so that only lengths whose cost is unknown are a risk."""

    looks_at_tokens: ClassVar[bool] = True

    def limit(self, rate: float) -> int:
        """The longest, or where drafts have been wrong lately `LONGEST`; `cut` decides."""
        self.was_cut = False
        return LONGEST_COPY if self.learned.acceptance.recent >= SURE else LONGEST

    def can_afford(self, length: int, expected: float) -> bool:
        """Whether the length is no trial, or its loss in the worst case can be borne."""
        if not self._is_trial(length):
            return True
        loss = self.learned.costs.worst_ratio(length) - expected
        return loss <= self.learned.exploration_budget

    def settle(self, round_: RoundRecord) -> None:
        """Charge what a trial lost by its cost, of which an unlucky draft says nothing."""
        costs = self.learned.costs
        was_trial = self._is_trial(round_.drafted)
        if round_.steady:
            costs.add(round_.drafted, round_.seconds)
        if was_trial:
            lost = max(0.0, costs.ratio(round_.drafted) - max(round_.emitted, self.expected))
            self.learned.exploration_budget -= lost

    def follow(self, round_: RoundRecord) -> None:
        """Earn this round's share of the time for trials."""
        super().follow(round_)
        self.learned.exploration_budget += TRIAL_SHARE

    def _is_trial(self, length: int) -> bool:
        costs = self.learned.costs
        return costs.is_stale or not costs.is_measured(length)


@dataclass
class ModelAccount(Account):
    """A draft model: asking it costs time, so that it drafts on account.

    Every round with its draft adds the tokens that it emitted to the exploration budget, and takes
    away what it cost, in plain rounds; every round of the generation adds a share of the time. It
    is asked for the draft of the largest value whose loss the budget stands, and paused when there
    is none. So a useless one loses the first budget and that share, and no more, whatever its
    acceptance looked like; one that pays is hardly ever paused; and a paused one is retried as soon
    as the share adds up to one draft token, in this generation or a later one.

    num_missed: tokens emitted since its last draft, None before its first. was_plain: whether the
    round before had no draft.
    """

    num_missed: int | None = None
    was_plain: bool = True
    first_budget: ClassVar[float] = EXPENSIVE_BUDGET

    def limit(self, rate: float) -> int:
        """The best length that can be afforded, whether it is worth more than none or not."""
        self.was_cut = False
        if not any(self.can_afford(length, 0.0) for length in LENGTHS):
            return 0  # paused: without a look at what each length would bring
        chances = self.learned.acceptance.chances([0] * LONGEST)
        return self.best_length(chances, LONGEST, rate, plain_value=-float("inf"))

    def cut(self, draft: Draft, rate: float) -> int:
        """All of it; of a draft with evidence the best part, at least the token paid for."""
        if draft.evidence is None:
            return len(draft)  # `limit` chose the length
        return max(1, super().cut(draft, rate))

    def can_afford(self, length: int, expected: float) -> bool:
        """Whether the budget stands a round that accepts nothing, whatever is expected of it."""
        return self.learned.costs.worst_ratio(length) - 1.0 <= self.learned.exploration_budget

    def settle(self, round_: RoundRecord) -> None:
        """Add what the round brought less what it cost."""
        self._change_budget(round_.emitted - self._learn_cost(round_))

    def _learn_cost(self, round_: RoundRecord) -> float:
        """What a round cost, in plain rounds; with what follows from it for later ones.

        A round in which the drafter also read what it had missed is not charged for that, and says
        only that its length costs no more; where nothing better is known, that is taken.
        """
        costs, length = self.learned.costs, round_.drafted
        known = costs.rough_ratio(length)
        if not round_.steady or not costs.plain:
            return known
        relative = max(1.0, costs.relative(length, round_.seconds))
        is_first = self.num_missed is None
        is_bound = not costs.is_measured(length) and (not is_first or relative < known)
        if is_bound or not self._has_to_catch_up():
            costs.add(length, round_.seconds)
            known = costs.rough_ratio(length)
        return min(known, relative)

    def _has_to_catch_up(self) -> bool:
        """Whether it reads more than a round's tokens first: the prompt, or those of a pause."""
        return self.num_missed is None or self.was_plain or self.num_missed > LONGEST + 1

    def follow(self, round_: RoundRecord) -> None:
        """Earn this round's share of the time."""
        super().follow(round_)
        self._change_budget(PROVEN_SHARE if self.learned.is_proven else EXPLORATION_SHARE)
        if self.num_missed is not None:
            self.num_missed += round_.emitted
        self.was_plain = not round_.drafted

    def learn_acceptance(self, round_: RoundRecord) -> None:
        """Learn by the place in the draft alone, which is all that `limit` goes by."""
        self.was_cut = False
        super().learn_acceptance(round_)
        self.num_missed = 0

    def _change_budget(self, amount: float) -> None:
        budget = self.learned.exploration_budget + amount
        self.learned.exploration_budget = min(max(0.0, budget), LARGEST_BUDGET)
        self.learned.is_proven = self.learned.is_proven or budget >= LARGEST_BUDGET


@dataclass(slots=True)
class ScoredDraft:
    """A draft, taken or not, that is being scored against what came.

    before: the token that comes before the one at `position`, None where it is not known.
    """

    tokens: list[int]
    evidence: Sequence[Evidence | int]
    history: AcceptanceHistory
    position: int = 0
    looks_at_tokens: bool = False
    before: int | None = None

    def is_through(self, emitted: Sequence[int]) -> bool:
        """Learn from the tokens emitted; whether the draft was wrong by now, or is at its end."""
        for token in emitted:
            if self.position == len(self.tokens):
                return True
            drafted = self.tokens[self.position]
            right = drafted == token
            copied = drafted if self.looks_at_tokens else None
            evidence = self.evidence[self.position]
            self.history.learn(evidence, self.position, right, copied, self.before)
            self.before = token
            self.position += 1
            if not right:
                return True
        return self.position == len(self.tokens)
