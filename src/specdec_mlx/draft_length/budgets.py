"""What may be lost in finding out whether a draft model pays: over all texts, and in this one."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_mlx.draft_length.accounts import LARGEST_BUDGET, PROVEN_SHARE
from specdec_mlx.draft_length.tuning import Learned

TEXT_BUDGET = 2.0
"""What a text may lose at first, in plain rounds, however much earlier texts have earned."""

TEXT_SHARE = 0.005
"""Share of its time that a text may lose besides, where the draft model never paid."""

PROVEN_TEXT_SHARE = 0.03
"""The same where it has: a text keeps 0.95 of plain's speed, and one that began with bad luck is
drafted for again after a few dozen tokens. With 0.015 the lab's draft model, which gains little at
temperature 0.7, was silent in more than half of the rounds and gave 1.05 of plain, not 1.11."""

DOUBTFUL_TEXT_SHARE = 0.015
"""The same where it did in other texts, but is not expected to in this one."""

LUCK = 1 / 3
"""Share of what a draft brought beyond what was expected of it, or less, that is booked for all
texts, once the draft model has paid. The rest is luck: with all of it booked, one that gained a
tenth was silent for whole texts. One that never paid has all of it booked, since what is expected
of it is a guess; and so has each text, since what it loses is lost, by bad luck or not."""

LARGEST_BANK = 20.0
"""Most that gains add up to over all texts: enough that bad luck does not silence a good one."""

EXPLORATION_SHARE = 0.003
"""Share of the time that a draft model may lose which never paid; over 10 texts of 96 tokens a
useless one costs less than a hundredth."""

LIKELY_SHARE = 0.005
"""The same of one that never paid, and is expected to: bad luck with the first text shall not
silence it for ten others."""

LARGEST_DEBT = 0.3
"""Most of what a draft lost beyond its budget that later ones have to earn first: one unlucky draft
must not silence a good model."""

TRIAL_SHARE = 0.5
"""Share of a budget that reading may take where drafts have not paid yet; they have the rest."""

READING_SHARE = 0.04
"""Share of the text so far that reading may take, if all texts can pay for it: what is believed of
a model changes only where it is asked, and a long prompt must not keep it silent for good."""


RECOVERY = 4.0
"""Rounds in which a text may earn back what it lost, at what a draft is expected to gain there:
where that is much, a few unlucky drafts are no reason to stop. Without them the lab's draft model
was silent for half of the rounds at temperature 0.7, in which it drafts 1.4 times as fast."""


@dataclass
class Budgets:
    """The budgets of a draft model in one generation, in plain rounds.

    learned: of the model, with the budget of all texts. of_text: what this one may still lose.
    """

    learned: Learned
    of_text: float = TEXT_BUDGET

    def stand(self, loss: float, gain: float = 0.0) -> bool:
        """Whether both stand a loss.

        Args:
            loss: at most.
            gain: what a draft is expected to bring beyond plain decoding, by this text, too.
        """
        earned_back = RECOVERY * max(0.0, gain) if self.learned.is_proven else 0.0
        return loss <= min(self.learned.exploration_budget, self.of_text + earned_back)

    def stand_reading(self, cost: float, num_emitted: int, draft_loss: float) -> bool:
        """Whether they stand that the text so far is read, and leave enough for a draft.

        Args:
            cost: of reading it.
            num_emitted: how many tokens of the text have been written.
            draft_loss: what a first short draft may lose.
        """
        share = 1.0 if self.learned.is_proven else TRIAL_SHARE
        most = max(share * self.of_text, READING_SHARE * num_emitted)
        return cost <= most and cost + draft_loss <= self.learned.exploration_budget

    def book(self, emitted: int, expected: float, cost: float) -> None:
        """Add what a round brought less what it cost.

        Args:
            emitted: tokens that it brought.
            expected: tokens that it was expected to bring.
            cost: in plain rounds.
        """
        gain, luck = expected - cost, emitted - expected
        share = LUCK if self.learned.is_proven else 1.0
        self.change(gain + share * luck, of_text=gain + luck)

    def pay_for_reading(self, cost: float, num_emitted: int) -> None:
        """Take it away, from the text's only what goes beyond the share set aside for it."""
        self.change(-cost, min(0.0, READING_SHARE * num_emitted - cost))

    def earn(self, gain: float) -> None:
        """Add a round's share of the time.

        Args:
            gain: what a draft is expected to bring beyond plain decoding.
        """
        learned = self.learned
        if learned.is_proven:
            learned.exploration_budget += PROVEN_SHARE
            self.of_text += PROVEN_TEXT_SHARE if gain > 0 else DOUBTFUL_TEXT_SHARE
        else:
            learned.exploration_budget += LIKELY_SHARE if gain > 0 else EXPLORATION_SHARE
            self.of_text += TEXT_SHARE

    def change(self, amount: float, of_text: float | None = None) -> None:
        """Add an amount to both, or to the text's another one."""
        learned, budget = self.learned, self.learned.exploration_budget + amount
        learned.exploration_budget = min(max(-LARGEST_DEBT, budget), LARGEST_BANK)
        learned.is_proven = learned.is_proven or budget >= LARGEST_BUDGET
        left = self.of_text + (amount if of_text is None else of_text)
        self.of_text = min(max(-LARGEST_DEBT, left), LARGEST_BUDGET)
