"""Draft lengths of several texts that share their passes: one width, as long as it pays for all.

Width K is worth what all texts are expected to get on average, less what a pass over K + 1 rows of
each costs at the going rate: the value rule of `auto`. At K = 0 it is the plain batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from specdec_mlx.draft_length.auto import RATE_DECAY, Ask, Auto
from specdec_mlx.draft_length.chances import told
from specdec_mlx.draft_length.parts import Model, Prices, verdict_of
from specdec_mlx.draft_length.store import Account, Tuning
from specdec_mlx.types import Draft, DraftLength, DraftSession, RoundRecord


@dataclass
class SharedLength:
    """The one draft length of all texts.

    prices: of passes over as many texts, in plain passes over them, by the rows of each.
    """

    tuning: Tuning
    _models: dict[str, Model] = field(default_factory=dict)
    _part: str = ""

    def __post_init__(self) -> None:
        """A single text, nothing written."""
        self._tokens = self._cost = 0.0
        self.prices = Prices(self.tuning.stairs())
        self.resize(1)

    def resize(self, num_rows: int) -> None:
        """Expect passes over so many texts."""
        rate = self._tokens / self._cost if self._cost else 1.0
        self.prices.update(self.tuning.stairs(num_texts=num_rows), max(1.0, rate))

    def of_row(self) -> RowLength:
        """The draft length of one text."""
        return RowLength(self.tuning, shared=self)

    def model(self, part: str) -> Model:
        """A drafter that costs time, asked for the same length in every row."""
        if part not in self._models:
            self._models[part] = Model(self.prices, self.tuning.of(part))
        return self._models[part]

    def share(self, rows: Sequence[tuple[RowLength, str, Draft]]) -> list[Draft]:
        """The part of each row's draft that is verified.

        A draft that was drawn is cut by its length and by the other rows alone, never by what was
        drawn; with one in a pass, all that was drafted is verified.

        Args:
            rows: of each row its draft, and the key of the drafter that it is from.
        """
        self._part = next((part for _, part, _ in rows if part in self._models), "")
        width = max(len(draft) for _, _, draft in rows)
        if width and not self._part:
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
        self,
        width: int,
        tokens: Sequence[int],
        seconds: float,
        *,
        steady: bool,
        lengths: Sequence[DraftLength] = (),
    ) -> None:
        """Learn from a pass.

        Args:
            width: tokens of its longest draft.
            tokens: [R] number of tokens that it brought to each row.
            seconds: from one reading to the next.
            steady: True if those are the seconds of one pass with all its rows.
            lengths: [R] of the rows, or none.
        """
        self.resize(len(tokens))
        stairs, mean = self.prices.stairs, sum(tokens) / len(tokens)
        if steady:
            stairs.add(1 + width, seconds)
        cost = (
            seconds / stairs.seconds if steady and width and stairs.seconds else stairs(1 + width)
        )
        for part, model in self._models.items():
            drafted = width > 0 and part == self._part
            if drafted:
                cost += model.learned.steps(width)
                model.learned.account.add(mean - cost)
            model.follow(RoundRecord(width, 0, round(mean), 1 + width), drafted)
        for length, num_tokens in zip(lengths, tokens, strict=bool(lengths)):
            if isinstance(length, RowLength):
                length.account.add(num_tokens - cost)
                length.account.earn()
        self._tokens = RATE_DECAY * self._tokens + mean
        self._cost = RATE_DECAY * self._cost + cost


@dataclass
class RowLength(Auto):
    """One text's side of a shared draft length.

    account: what it may fall behind a plain batch, in plain passes.
    """

    shared: SharedLength = field(default_factory=lambda: SharedLength(Tuning()))
    account: Account = field(default_factory=Account)

    def _update(self) -> None:
        """Take over what the last pass has changed."""
        self.prices.update(self.shared.prices.stairs, self.shared.prices.rate)

    def begin(self, part: str, session: DraftSession, may_fork: Callable[[], bool]) -> Ask:
        """Chains alone, of a length that is chosen before."""
        return session.propose

    def limit(self, part: str, cheap: bool) -> int:
        """The longest that is tried, or what is chosen for a draft model in every row."""
        if cheap:
            return super().limit(part, cheap)
        return self.shared.model(part).limit()

    def cut(self, part: str, draft: Draft) -> int:
        """All of it, unless it would not even pay if all rows had one like it."""
        if part not in self._parts:
            return len(draft)
        self._update()
        return len(draft) if super().cut(part, draft) else 0

    def choose(self, drafts: Sequence[tuple[str, Draft]]) -> tuple[str, Draft]:
        """The draft that is worth most, whole; see `types.ValuesDrafts`."""
        self._update()
        key, draft = super().choose(drafts)
        return key, dict(drafts)[key] if len(draft) else draft

    def outbids(self, part: str) -> bool:
        """True if a draft model promises more than what was chosen; see `types.ValuesDrafts`."""
        return self.shared.model(part).gain > self._chosen_gain

    def reaches(self, part: str, draft: Draft) -> list[float]:
        """[K] chance of each token of a draft that it and all before it are accepted.

        Of one that was drawn, by the places alone.
        """
        if not len(draft):
            return []
        if draft.logprobs is None:
            return self._parts[part].reaches(*told(draft))
        chances = self._parts[part].learned.chances.of_draft([0] * len(draft))
        return [*accumulate(chances, mul)]

    def record(self, round_: RoundRecord) -> None:
        """Learn what was right of the drafts, verified or not; `shared` learns what they cost."""
        if round_.drafted and round_.part not in self._parts:
            verdict = verdict_of(round_)
            self.shared.model(round_.part).learned.unseen.learn([0] * len(verdict), verdict)
            round_ = replace(round_, drafted=0)
        super().record(replace(round_, steady=False))
