"""Draft lengths of several texts that share their passes: one width, as long as it pays for all.

A pass over R texts and drafts of K tokens has R (1 + K) rows, and costs what the staircase of one
text says of so many. Width K is worth the tokens that all texts are expected to get, less what it
costs at the going rate: the value rule of `auto`. At K = 0 it is the plain batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import mlx.core as mx

from specdec_mlx.draft_length.auto import RATE_MEMORY
from specdec_mlx.draft_length.chances import Chances, Scored, told
from specdec_mlx.draft_length.parts import LENGTHS, LONGEST, SURE
from specdec_mlx.draft_length.costs import median
from specdec_mlx.draft_length.store import Account, Tuning
from specdec_mlx.types import Draft, DraftLength, RoundRecord

PATIENCE = 1.0
"""Plain passes that a text may be expected to fall back; its own unlucky drafts come on top."""


@dataclass
class SharedLength:
    """The one draft length of all texts.

    tuning: what is known of passes and drafters. num_rows: texts of the present pass.
    """

    tuning: Tuning
    num_rows: int = 1
    account: Account = field(default_factory=Account)
    _tokens: float = 0.0
    _cost: float = 0.0
    _kind: str = ""

    def of_row(self) -> RowLength:
        """What one text's drafts are asked and cut by."""
        return RowLength(self)

    @property
    def rate(self) -> float:
        """Tokens that the time of a plain pass has lately brought, at least one a text."""
        return max(float(self.num_rows), self._tokens / self._cost if self._cost else 0.0)

    def cost(self, width: int) -> float:
        """Cost of a pass over drafts of so many tokens, in plain passes over as many texts."""
        return self.tuning.batch_stairs(self.num_rows)(1 + width)

    def most(self) -> int:
        """Longest drafts that may be tried."""
        return self.tuning.batch_stairs(self.num_rows).most_rows() - 1

    def limit_of_model(self, part: str, chances: Chances) -> int:
        """The length that a draft model is asked for in every row; 0 if it cannot be afforded."""
        learned = self.tuning.of(part)
        reach = [[*accumulate(chances.of_draft([0] * LONGEST), mul)]] * self.num_rows
        width = self.best(reach, learned.steps.step)
        loss = self.cost(width) - 1.0 + learned.steps(width)
        return width if learned.account.stands(loss / 2) else 0

    def best(
        self, reaches: Sequence[Sequence[float]], step: float = 0.0, lags: Sequence[float] = ()
    ) -> int:
        """The width of the largest value; 0 if none beats the plain batch.

        Args:
            reaches: of each row, the chance that all of a draft up to each token is accepted.
            step: cost of a draft token.
            lags: plain passes that each row is behind a plain batch.
        """
        tokens, best, best_value = [1.0] * len(reaches), 0, self.num_rows - self.rate
        longest = min(self.most(), max(map(len, reaches), default=0))
        for width in range(1, longest + 1):
            tokens = [
                n + (reach[width - 1] if len(reach) >= width else 0.0)
                for n, reach in zip(tokens, reaches, strict=True)
            ]
            if width not in LENGTHS and width < longest:
                continue
            cost = self.cost(width) + step * width
            is_fair = all(
                cost <= n or lag + cost - n <= PATIENCE
                for n, lag in zip(tokens, lags or [0.0] * len(tokens), strict=True)
            )
            value = sum(tokens) - self.rate * cost
            if value > best_value and is_fair:
                best, best_value = width, value
        return best

    def share(self, rows: Sequence[tuple[RowLength, str, Draft]]) -> list[Draft]:
        """What of each row's draft is verified.

        A draft that was drawn is cut by its length and by the other rows alone, never by what was
        drawn.

        Args:
            rows: of each row its draft, and the key of the drafter that it is from.
        """
        reaches = [row.reach(part, draft) for row, part, draft in rows]
        self._kind = max((row.kind(part) for row, part, draft in rows if len(draft)), default="")
        width = max(map(len, reaches))
        if not self._kind and width:  # else it is paid for already
            width = self.best(reaches, lags=[row.lag for row, _, _ in rows])
            while width and not self.account.stands((self.cost(width) - 1.0) / 2):
                width -= 1
        for row, part, draft in rows:
            if width and len(draft):
                row.score(part, draft)
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
            tokens: how many it brought to each row.
            seconds: from one reading to the next.
            steady: whether those are the seconds of one pass with all its rows.
            lengths: of each row, of those that may fall behind.
        """
        if steady:
            self.tuning.batch_stairs(len(tokens)).add(1 + width, seconds)
        cost = self.cost(width)
        if self._kind and width:
            learned = self.tuning.of(self._kind)
            cost += learned.steps(width)
            learned.account.add(sum(tokens) / len(tokens) - cost)
        self.account.earn()
        if width:
            plain = self.tuning.batch_stairs(len(tokens)).plain
            real = seconds / median(plain) if plain and steady else cost
            self.account.add(sum(tokens) / len(tokens) - real)
        for length, num_tokens in zip(lengths, tokens, strict=bool(lengths)):
            if isinstance(length, RowLength):
                length.lag += cost - num_tokens
        self._tokens = RATE_MEMORY * self._tokens + sum(tokens)
        self._cost = RATE_MEMORY * self._cost + cost


@dataclass
class RowLength:
    """One text's side of a shared draft length; see `policy.DraftLength`.

    lag: plain passes that it is behind a plain batch, by what passes typically cost.
    """

    shared: SharedLength
    lag: float = 0.0
    _is_cheap: dict[str, bool] = field(default_factory=dict)
    _chances: dict[str, Chances] = field(default_factory=dict)
    _scored: dict[str, Scored] = field(default_factory=dict)

    def limit(self, part: str, cheap: bool) -> int:
        """The longest that is tried, or what is chosen for a draft model in every row."""
        if part not in self._chances:
            self._is_cheap[part] = cheap
            known = self.shared.tuning.of(part, look_up=cheap)
            self._chances[part] = known.chances if cheap else known.blind
        if cheap:
            return LENGTHS[-1] if self._chances[part].recent >= SURE else LONGEST
        return self.shared.limit_of_model(part, self._chances[part])

    def cut(self, part: str, draft: Draft) -> int:
        """All of it, unless it would not even pay if all rows had one like it."""
        shared = self.shared
        if self.kind(part) or shared.best([self.reach(part, draft)] * shared.num_rows):
            return len(draft)
        self.score(part, draft)
        return 0

    def kind(self, part: str) -> str:
        """The key of a drafter that costs time to ask, "" for a look-up."""
        return "" if self._is_cheap.get(part, True) else part

    def record(self, round_: RoundRecord) -> None:
        """Learn what was right of the drafts, verified or not."""
        if round_.drafted and round_.part not in self._scored:
            for i in range(min(round_.accepted + 1, round_.drafted)):
                self._chances[round_.part].learn(0, i, i < round_.accepted)
        for part in [p for p, draft in self._scored.items() if draft.is_through(round_.tokens)]:
            del self._scored[part]

    def reach(self, part: str, draft: Draft) -> list[float]:
        """The chance of each token of a draft that it and all before it are accepted.

        Of one that was drawn, or is not computed yet, by the place in the draft alone.
        """
        if part not in self._chances or not len(draft):
            return []
        evidence = told(draft)[1] if _is_known(draft) else [0] * len(draft)
        return [*accumulate(self._chances[part].of_draft(evidence), mul)]

    def score(self, part: str, draft: Draft) -> None:
        """Score this draft from now on, and no longer an earlier one, of which a part is known."""
        if part in self._chances and _is_known(draft):
            self._scored[part] = Scored(*told(draft), self._chances[part], copied=False)


def _is_known(draft: Draft) -> bool:
    """True for a draft that can be scored against what comes: not drawn, and on the host."""
    return draft.logprobs is None and not isinstance(draft.tokens, mx.array)
