"""Draft lengths of several texts that share their passes: one width, as long as it pays for all.

Width K is worth the tokens that all texts are expected to get, less what a pass over K + 1 rows of
each costs at the going rate: the value rule of `auto`. At K = 0 it is the plain batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import mlx.core as mx

from specdec_mlx.draft_length.auto import RATE_DECAY, Ask, Auto
from specdec_mlx.draft_length.chances import told
from specdec_mlx.draft_length.costs import Staircase
from specdec_mlx.draft_length.parts import LENGTHS, LONGEST, LookUp
from specdec_mlx.draft_length.store import Account, Tuning
from specdec_mlx.types import Draft, DraftLength, DraftSession, RoundRecord


@dataclass
class SharedLength:
    """The one draft length of all texts.

    tuning: what is known of passes and drafters. num_rows: texts of the present pass.
    """

    tuning: Tuning
    num_rows: int = 1
    _tokens: float = 0.0
    _cost: float = 0.0
    _part: str = ""

    def of_row(self) -> RowLength:
        """What one text's drafts are asked and cut by."""
        return RowLength(self.tuning, shared=self)

    def stairs(self) -> Staircase:
        """Costs of passes over as many texts, in plain passes over them, by the rows of each."""
        return self.tuning.stairs(num_texts=self.num_rows)

    @property
    def rate(self) -> float:
        """Tokens that a text has lately got in the time of a plain pass, at least 1."""
        return max(1.0, self._tokens / self._cost if self._cost else 1.0)

    def limit_of_model(self, part: str) -> int:
        """The length that a draft model is asked for in every row; 0 if it cannot be afforded."""
        learned, stairs = self.tuning.of(part), self.stairs()
        reaches = [*accumulate(learned.unseen.of_draft([0] * LONGEST), mul)]
        best, best_value, gain = 0, 0.0, 0.0
        for length, reach in enumerate(reaches[: stairs.most_rows() - 1], start=1):
            gain += reach
            loss = stairs(1 + length) - 1.0 + learned.steps(length)
            if gain - self.rate * loss > best_value and learned.account.stands(loss / 2):
                best, best_value = length, gain - self.rate * loss
        return best

    def share(self, rows: Sequence[tuple[RowLength, str, Draft]]) -> list[Draft]:
        """The part of each row's draft that is verified.

        A draft that was drawn is cut by its length and by the other rows alone, never by what was
        drawn.

        Args:
            rows: of each row its draft, and the key of the drafter that it is from.
        """
        self._part = max((part for row, part, _ in rows if not row.is_free(part)), default="")
        width = max(len(draft) for _, _, draft in rows)
        if not self._part and width:  # else it is paid for already
            reaches = [row.reach(part, draft) for row, part, draft in rows]
            width, best_value, stairs = 0, 0.0, self.stairs()
            for length in LENGTHS:
                loss = stairs(1 + length) - 1.0
                gains = [sum(reach[:length]) for reach in reaches]
                value = sum(gains) / len(gains) - self.rate * loss
                affordable = zip(rows, gains, strict=True)
                if (
                    value > best_value
                    and length < stairs.most_rows()
                    and all(row.account.stands(loss - gain) for (row, _, _), gain in affordable)
                ):
                    width, best_value = length, value
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
        stairs = self.tuning.stairs(num_texts=len(tokens))
        if steady:
            stairs.add(1 + width, seconds)
        cost = stairs(1 + width)
        if steady and width and stairs.seconds:
            cost = seconds / stairs.seconds
        if self._part and width:
            cost += self.tuning.of(self._part).steps(width)
        for length, num_tokens in zip(lengths, tokens, strict=bool(lengths)):
            if isinstance(length, RowLength):
                length.account.add(num_tokens - cost)
                length.account.earn()
        self._tokens = RATE_DECAY * self._tokens + sum(tokens) / len(tokens)
        self._cost = RATE_DECAY * self._cost + cost


@dataclass
class RowLength(Auto):
    """One text's side of a shared draft length.

    account: what it may fall behind a plain batch, in plain passes.
    """

    shared: SharedLength = field(default_factory=lambda: SharedLength(Tuning()))
    account: Account = field(default_factory=Account)

    def stairs(self) -> Staircase:
        """Costs of passes over all rows."""
        return self.shared.stairs()

    def _update(self) -> None:
        """Take over what the last pass has changed."""
        self.prices.update(self.stairs(), self.shared.rate)

    def begin(self, part: str, session: DraftSession, may_fork: Callable[[], bool]) -> Ask:
        """Chains alone, of a length that is chosen before."""
        return session.propose

    def is_free(self, part: str) -> bool:
        """True for a look-up, and where there is no draft."""
        return not part or type(self._parts[part]) is LookUp

    def limit(self, part: str, cheap: bool) -> int:
        """The longest that is tried, or what is chosen for a draft model in every row."""
        longest = super().limit(part, cheap)
        return longest if self.is_free(part) else self.shared.limit_of_model(part)

    def cut(self, part: str, draft: Draft) -> int:
        """All of it, unless it would not even pay if all rows had one like it."""
        self._update()
        return len(draft) if super().cut(part, draft) else 0

    def reach(self, part: str, draft: Draft) -> list[float]:
        """[K] chance of each token of a draft that it and all before it are accepted.

        Of one that was drawn, or is not computed yet, by the place in the draft alone.
        """
        if not len(draft):
            return []
        if draft.logprobs is None and not isinstance(draft.tokens, mx.array):
            return self._parts[part].reaches(*told(draft))
        chances = self._parts[part].learned.unseen.of_draft([0] * len(draft))
        return [*accumulate(chances, mul)]

    def record(self, round_: RoundRecord) -> None:
        """Learn what was right of the drafts, verified or not; costs are learned by `shared`."""
        super().record(replace(round_, steady=False))
