"""Draft lengths of texts that share passes. By the rule of "auto", the width pays on average."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from specdec_mlx.contracts import Draft, RoundRecord
from specdec_mlx.draft_length.chances import tokens_and_evidence
from specdec_mlx.draft_length.store import EXPLORATION, Account, Tuning
from specdec_mlx.draft_length.value import Auto, DraftLength, Model, Prices


@dataclass
class SharedLength:
    """The draft length of all texts in a batch.

    Attributes:
        tuning: learned costs of the model.
        models: drafters that cost time, by their keys.
        prices: costs of passes over all texts.
    """

    tuning: Tuning
    models: dict[str, Model] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.prices = Prices(self.tuning.cost_model())

    def resize(self, num_rows: int) -> None:
        self.prices.update(self.tuning.cost_model(num_texts=num_rows))

    def share(self, rows: Sequence[tuple[RowLength, str, Draft]]) -> list[Draft]:
        """The part of each row's draft that is verified.

        `rows` has each row's draft length, its drafter's key and its draft.
        """
        width = max(len(draft) for _, _, draft in rows)
        # A draft of a model is never cut, because its length was chosen before it was drawn.
        if width and not any(part in self.models for _, part, _ in rows):
            reaches = [row.reaches(part, draft) for row, part, draft in rows]
            by_place = zip_longest(*reaches, fillvalue=0.0)
            # A pass costs the same for all rows, so the mean chance of a position decides.
            mean = [sum(each) / len(rows) for each in by_place]
            width, _ = self.prices.best(mean, is_copied=True)
            # A row must not fall behind by more than its account allows.
            while width and not all(
                self.prices.cost_model(1 + width, is_copied=True) - 1.0 - sum(reach[:width])
                <= row.account.budget
                for (row, _, _), reach in zip(rows, reaches, strict=True)
            ):
                width -= 1
        return [draft.head(width) for _, _, draft in rows]

    def record(
        self,
        width: int,
        rows: Sequence[tuple[DraftLength, int]],
        seconds: float,
        *,
        steady: bool,
        parts: Collection[str] = (),
    ) -> None:
        """Learn from a pass over at most `width` draft tokens.

        Args:
            width: draft tokens in a row.
            rows: draft length of each row, and the tokens that it emitted.
            seconds: seconds of the round.
            steady: the seconds are typical and may be learned.
            parts: keys of the drafters.
        """
        self.resize(len(rows))
        cost_model = self.prices.cost_model
        models = [self.models[part] for part in parts if part in self.models]
        # The time above the known cost of the pass is the cost of the drafting steps.
        if steady and width and cost_model.seconds and models:
            for model in models:
                model.learned.steps.add_round(cost_model, seconds, width)
        elif steady:
            cost_model.add(1 + width, seconds, is_copied=not models)
        cost = cost_model(1 + width, is_copied=not models)
        cost += max((m.learned.steps(width) for m in models), default=0.0)
        for length, num_tokens in rows:
            if isinstance(length, RowLength):
                length.account.add(num_tokens - cost + EXPLORATION)
        self.prices.update(cost_model, sum(num for _, num in rows) / len(rows), cost)


@dataclass
class RowLength(DraftLength):
    """The draft length of one text. Its drafts are chains, which `SharedLength` cuts.

    Attributes:
        account: the time that the text may lose against a plain batch, in plain passes.
    """

    values_drafts = True

    shared: SharedLength
    account: Account = field(default_factory=Account)

    def __post_init__(self) -> None:
        self.auto = Auto(self.shared.tuning, shared_prices=self.shared.prices)

    def limit(self, part: str, cheap: bool) -> int:
        """The longest useful draft, or the length that was chosen for all rows of a draft model."""
        if not cheap and part not in self.auto.parts:
            self.auto.parts[part] = self.shared.models.setdefault(part, self.auto.part(part, Model))
        return self.auto.limit(part, cheap)

    def cut(self, part: str, draft: Draft) -> int:
        """Keep the whole draft unless it would lose even if every row had one this good."""
        return len(draft) if self.auto.cut(part, draft) else 0

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        key, draft = self.auto.choose(drafts)
        return key, dict(drafts).get(key, draft)

    def beats_chosen(self, part: str) -> bool:
        return self.auto.beats_chosen(part)

    def reaches(self, part: str, draft: Draft) -> list[float]:
        """Chances [K] that each token and all tokens before it are accepted."""
        if not len(draft):
            return []
        # A drawn draft is judged by its positions only. Its tokens must not decide.
        known = tokens_and_evidence(draft) if draft.logprobs is None else ((), [0] * len(draft))
        chances: list[float] = self.auto.parts[part].reaches(*known)
        return chances

    def record(self, round_: RoundRecord) -> None:
        for key, part in self.auto.parts.items():
            part.record(replace(round_, steady=False), round_.drafted > 0 and key == round_.part)
