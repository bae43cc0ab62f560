"""Draft lengths of several texts that share their passes: one width, as long as it pays for all.

Width K is worth what all texts are expected to get on average, less what a pass over K + 1 rows of
each costs at the going rate: the value rule of `auto`. At K = 0 it is the plain batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from specdec_mlx.draft_length.auto import Ask, Auto
from specdec_mlx.draft_length.chances import told
from specdec_mlx.draft_length.parts import Model, Prices
from specdec_mlx.draft_length.store import Account, Tuning
from specdec_mlx.types import Draft, DraftLength, DraftSession, RoundRecord


@dataclass
class SharedLength:
    """The one draft length of all texts.

    prices: of passes over as many texts, in plain passes over them, by the rows of each. models:
    drafters that cost time, asked for the same length in every row.
    """

    tuning: Tuning
    models: dict[str, Model] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """A single text, nothing written."""
        self.prices = Prices(self.tuning.stairs())
        self.resize(1)

    def resize(self, num_rows: int) -> None:
        """Expect passes over so many texts."""
        self.prices.update(self.tuning.stairs(num_texts=num_rows))

    def of_row(self) -> RowLength:
        """The draft length of one text."""
        return RowLength(self.tuning, shared=self)

    def share(self, rows: Sequence[tuple[RowLength, str, Draft]]) -> list[Draft]:
        """The part of each row's draft (length, drafter's key, draft) that is verified.

        A draft that was drawn is cut by its length and by the other rows alone, never by what was
        drawn; with one of a draft model in a pass, all that was drafted is verified.
        """
        width = max(len(draft) for _, _, draft in rows)
        if width and not any(part in self.models for _, part, _ in rows):
            reaches = [row.reaches(part, draft) for row, part, draft in rows]
            places = [[reach[k] for reach in reaches if k < len(reach)] for k in range(width)]
            width, _ = self.prices.best([sum(place) / len(rows) for place in places])
            while width and not all(
                row.account.stands(self.prices.cost(width) - 1.0 - sum(reach[:width]))
                for (row, _, _), reach in zip(rows, reaches, strict=True)
            ):
                width -= 1
        return [draft.head(width) for _, _, draft in rows]

    def record(
        self, width: int, rows: Sequence[tuple[DraftLength, int]], seconds: float, *, steady: bool
    ) -> None:
        """Learn from a pass.

        Args:
            width: tokens of its longest draft.
            rows: of each the draft length, and the number of tokens that the pass brought.
            seconds: from one reading to the next.
            steady: True if those are the seconds of one pass with all its rows.
        """
        self.resize(len(rows))
        stairs = self.prices.stairs
        if steady:
            stairs.add(1 + width, seconds)
        is_measured = steady and width and stairs.seconds
        cost = seconds / stairs.seconds if is_measured else stairs(1 + width)
        for length, num_tokens in rows:
            if isinstance(length, RowLength):
                length.account.add(num_tokens - cost)
                length.account.add()
        self.prices.update(stairs, sum(num for _, num in rows) / len(rows), cost)


@dataclass
class RowLength(Auto):
    """One text's side of a shared draft length.

    account: what it may fall behind a plain batch, in plain passes.
    """

    shared: SharedLength = field(default_factory=lambda: SharedLength(Tuning()))
    account: Account = field(default_factory=Account)

    def __post_init__(self) -> None:
        """Prices are those of all texts."""
        self.prices = self.shared.prices

    def begin(self, part: str, session: DraftSession, may_fork: Callable[[], bool]) -> Ask:
        """Chains alone, of a length that is chosen before."""
        return session.propose

    def limit(self, part: str, cheap: bool) -> int:
        """The longest that is tried, or what is chosen for a draft model in every row."""
        models = self.shared.models
        if not cheap and part not in models:
            models[part] = Model(self.prices, self.tuning.of(part))
        if not cheap:
            self._parts[part] = models[part]
        return super().limit(part, cheap)

    def cut(self, part: str, draft: Draft) -> int:
        """All of it, unless it would not even pay if all rows had one like it."""
        return len(draft) if super().cut(part, draft) else 0

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft that is worth most, whole."""
        key, draft = super().choose(drafts)
        return key, dict(drafts)[key] if len(draft) else draft

    def reaches(self, part: str, draft: Draft) -> list[float]:
        """[K] chance of each token that it and all before it are accepted; by place if drawn."""
        if not len(draft) or draft.logprobs is None:
            return self._parts[part].reaches(*told(draft)) if len(draft) else []
        return [*accumulate(self._parts[part].learned.chances.of_draft([0] * len(draft)), mul)]

    def record(self, round_: RoundRecord) -> None:
        """Learn what was right of the drafts, verified or not; `shared` learns what they cost."""
        for key, part in self._parts.items():
            part.record(replace(round_, steady=False), round_.drafted > 0 and key == round_.part)
