"""Drafts copied from an earlier place in the text (prompt lookup, Saxena 2023)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from specdec_mlx.arguments import require, require_cap
from specdec_mlx.contracts import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
    Evidence,
    LookUpSession,
    TextIndex,
)

MAX_MATCH = 64  # longest match that is measured, in tokens; longer matches are no more certain


@dataclass(frozen=True)
class PromptLookupDrafter(Drafter):
    """Copies what followed the longest earlier match of the last tokens (Saxena 2023).

    Attributes:
        max_ngram, min_ngram: longest and shortest match, in tokens, 1 to 8. Matches of a single
            token are mostly wrong.
        num_draft: most tokens in a draft, or None for no limit.
        occurrence: the match to continue among equally long matches, the most recent (1 to 4%
            better on chat) or the earliest (2% better on summaries).

    Memory: at most 200 * (max_ngram - min_ngram + 4) bytes a token, 1.4 kB by default. Raises
    ValueError for numbers out of range.
    """

    max_ngram: int = 5
    min_ngram: int = 2
    num_draft: int | None = None
    occurrence: Literal["recent", "earliest"] = "recent"

    def __post_init__(self) -> None:
        require(self, 1 <= self.max_ngram <= 8, "max_ngram", "an int from 1 to 8")
        lower = f"an int from 1 to max_ngram = {self.max_ngram}; lower it or raise max_ngram"
        require(self, 1 <= self.min_ngram <= self.max_ngram, "min_ngram", lower)
        require_cap(self)
        either = "'recent' or 'earliest'"
        require(self, self.occurrence in ("recent", "earliest"), "occurrence", either)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        """Index `prompt` [n]."""
        return LookUpSession(PromptLookupIndex(self, prompt))


class PromptLookupIndex(TextIndex):
    """The first or last position of each n-gram of a text."""

    def __init__(self, config: PromptLookupDrafter, prompt: Sequence[int]) -> None:
        self._config = config
        self._text: list[int] = []
        # Per n: n-gram -> the position after it. An n-gram enters only once the token at that
        # position is known, so that the one at the end of the text never finds itself.
        sizes = range(config.max_ngram, config.min_ngram - 1, -1)
        self._position_after: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in sizes}
        self.append(prompt)

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        length = min(limit, self._config.num_draft or limit)
        tail = [*self._text[-MAX_MATCH:], *more][-MAX_MATCH:]
        for n, positions in self._position_after.items():
            end = positions.get(tuple(tail[-n:]))
            if end is not None and length > 0:
                known = [*self._text[end : end + length], *more][:length]
                # A copy that reaches the end of the text goes around, as periodic texts do.
                copied = known * -(-length // len(known))
                evidence = Evidence(self._matched(end, tail, n))
                return Draft(copied[:length], evidence=[evidence] * length)
        return NO_DRAFT

    def append(self, tokens: Sequence[int]) -> None:
        text = self._text
        earliest = self._config.occurrence == "earliest"
        for token in tokens:
            end = len(text)
            for n, positions in self._position_after.items():
                if n <= end:
                    ngram = tuple(text[-n:])
                    positions[ngram] = positions.get(ngram, end) if earliest else end
            text.append(token)

    def _matched(self, end: int, tail: Sequence[int], n: int) -> int:
        """Number of tokens before `end` that equal the last tokens, at least `n`."""
        text = self._text
        while n < min(end, len(tail)) and text[end - n - 1] == tail[-n - 1]:
            n += 1
        return n
