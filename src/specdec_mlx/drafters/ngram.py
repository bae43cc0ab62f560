"""Drafts from counts of what followed the last few tokens (n-gram tables with back-off).

The predictor of akunu, a C++ engine for Apple silicon: the most frequent continuation of the
longest context of a few tokens that has been seen, in the prompt or in the output.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from specdec_mlx.arguments import require
from specdec_mlx.contracts import (
    Draft,
    DraftContext,
    Drafter,
    Evidence,
    LookUpSession,
    TextIndex,
    places_class,
    share_class,
)

MAX_ORDER = 8

Context = tuple[int, ...]


class Continuation(NamedTuple):
    """The most frequent token after a context of `width` tokens: `seen` of `total` times."""

    token: int
    width: int
    seen: int = 1
    total: int = 1


class Continuations:
    """Counts of the tokens after one context, and the best: of equal ones the most recent."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, token: int, times: int = 1) -> None:
        self.best = token
        self.counts = {token: times}
        self.total = times

    def add(self, token: int, times: int = 1) -> None:
        """Count `token`, which alone can become the best by that."""
        self.total += times
        count = self.counts.get(token, 0) + times
        self.counts[token] = count
        if count >= self.counts[self.best]:
            self.best = token


class NGramCounts:
    """Counts for the orders from `min_order` to `max_order`, at most `max_entries` pairs of each.

    To make room it forgets the contexts that were not seen for longest. All takes constant time.
    """

    def __init__(self, min_order: int, max_order: int, max_entries: int) -> None:
        self.widths = range(min_order - 1, max_order)
        self._max_entries = max_entries
        self._num_entries = dict.fromkeys(self.widths, 0)
        # Most contexts of a text are seen once; a bare token for those is a quarter of the memory.
        self._tables: dict[int, OrderedDict[Context, int | Continuations]] = {
            width: OrderedDict() for width in self.widths
        }

    def __len__(self) -> int:
        """Pairs held."""
        return sum(self._num_entries.values())

    def shift(self, context: Context, token: int) -> Context:
        """Append a token to a context and drop what has become too old."""
        longer = (*context, token)
        return longer[max(0, len(longer) - self.widths[-1]) :]

    def learn(self, context: Context, token: int) -> None:
        """Count `token` after the last tokens of a text, once per order."""
        length = len(context)
        for width in self.widths:
            if width <= length:
                self.add(context[length - width :], token)

    def add(self, context: Context, token: int, times: int = 1) -> None:
        """Count `token` after one context."""
        table, width = self._tables[len(context)], len(context)
        entry = table.get(context)
        if entry is None:
            self._make_room(context)
            table[context] = token if times == 1 else Continuations(token, times)
            self._num_entries[width] += 1
            return
        table.move_to_end(context)
        if isinstance(entry, int):
            entry = table[context] = Continuations(entry)
        if token not in entry.counts:
            if not self._make_room(context):
                return
            self._num_entries[width] += 1
        entry.add(token, times)

    def ngrams(self) -> Iterator[tuple[Context, int]]:
        """All n-grams and their counts, the contexts not seen for longest first."""
        for table in self._tables.values():
            for context in table:
                for token, count in self.counts(context).items():
                    yield (*context, token), count

    def counts(self, context: Context) -> Mapping[int, int]:
        """How often each continuation was seen."""
        entry = self._tables[len(context)].get(context)
        if entry is None:
            return {}
        return entry.counts if isinstance(entry, Continuations) else {entry: 1}

    def continuation(self, context: Context) -> Continuation | None:
        """The best continuation of the longest known end of a context."""
        length = len(context)
        for width in reversed(self.widths):
            if width > length:
                continue
            entry = self._tables[width].get(context[length - width :])
            if isinstance(entry, int):
                return Continuation(entry, width)
            if entry is not None:
                return Continuation(entry.best, width, entry.counts[entry.best], entry.total)
        return None

    def _make_room(self, context: Context) -> bool:
        """Forget contexts until one more pair fits; False where only `context` itself is left."""
        table, width = self._tables[len(context)], len(context)
        while self._num_entries[width] >= self._max_entries:
            oldest = next(iter(table))
            if oldest == context:
                return False
            self._num_entries[width] -= len(self.counts(oldest))
            del table[oldest]
        return True


@dataclass(frozen=True)
class NGramDrafter(Drafter):
    """Proposes the most frequent continuation of the longest known context (akunu's predictor).

    An n-gram of order n is a context of n - 1 tokens and the token after it. Among equally frequent
    tokens the most recent wins. The draft ends if no context is known. The defaults are akunu's.

    Attributes:
        max_order, min_order: 1 <= min_order <= max_order <= 8. Order 1 is the most frequent token.
        num_draft: most tokens in a draft.
        max_entries: most pairs of context and continuation per order. The contexts that were not
            seen for the longest time are forgotten.

    Memory: at most 640 * max_entries * (max_order - min_order + 1) bytes, 126 MB with the defaults;
    140 bytes a pair, 14 MB for 32,768 tokens that seldom repeat. Raises ValueError for numbers out
    of range.
    """

    max_order: int = 4
    min_order: int = 2
    num_draft: int = 4
    max_entries: int = 65_536

    def __post_init__(self) -> None:
        orders = f"an int from 1 (unigram) to {MAX_ORDER}"
        require(self, 1 <= self.max_order <= MAX_ORDER, "max_order", orders)
        lower = f"an int from 1 to max_order = {self.max_order}; lower it or raise max_order"
        require(self, 1 <= self.min_order <= self.max_order, "min_order", lower)
        one = "an int >= 1; to draft nothing, leave the drafter out"
        require(self, self.num_draft >= 1, "num_draft", one)
        require(self, self.max_entries >= 1, "max_entries", "an int >= 1")

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        """Count the n-grams of `prompt` [n]."""
        return LookUpSession(NGramIndex(self, prompt))


class NGramIndex(TextIndex):
    """The counts of one text, and counts that are kept between texts, if there are any.

    context: the last max_order - 1 tokens, fewer at the beginning. kept: a `lab.NGramTable`, asked
    where it knows a longer context; what was written is added to it at the end.
    """

    def __init__(self, config: NGramDrafter, prompt: Sequence[int], kept: Any = None) -> None:
        self.config, self.kept = config, kept
        self.counts = NGramCounts(config.min_order, config.max_order, config.max_entries)
        self.context: Context = ()
        self._num_prompt = len(prompt)
        self._written: list[int] = []
        self.append(prompt)
        self._written.clear()

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        """Up to `limit` tokens, each the most frequent after those before it."""
        context = self.context
        for token in more:
            context = self.counts.shift(context, token)
        draft: list[int] = []
        evidence: list[Evidence] = []
        most = min(limit, self.config.num_draft)
        while len(draft) < most and (found := self._longest(context)) is not None:
            draft.append(found.token)
            share = share_class(found.seen / found.total)
            evidence.append(Evidence(max(1, found.width), share, places_class(found.seen)))
            context = self.counts.shift(context, found.token)
        return Draft(draft, evidence=evidence)

    def append(self, tokens: Sequence[int]) -> None:
        """Count the tokens [n]: one table update a token and order."""
        for token in tokens:
            self.counts.learn(self.context, token)
            self.context = self.counts.shift(self.context, token)
        if self.kept is not None:
            self._written += tokens

    def close(self, length: int) -> None:
        """Count what was written in the kept counts."""
        if self.kept is not None:
            self.kept.add(self._written[: length - self._num_prompt])
            self._written = []

    def _longest(self, context: Context) -> Continuation | None:
        """The continuation of the longest known context; the text's own counts win a tie."""
        own = self.counts.continuation(context)
        if self.kept is None or (own and own.width == self.counts.widths[-1]):
            return own
        kept: Continuation | None = self.kept.continuation(context)
        return kept if kept and (own is None or kept.width > own.width) else own
