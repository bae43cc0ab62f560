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
    """Counts of the tokens after one context, and the most frequent (then most recent) token."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, token: int, times: int = 1) -> None:
        self.best = token
        self.counts = {token: times}
        self.total = times

    def add(self, token: int, times: int = 1) -> None:
        self.total += times
        count = self.counts.get(token, 0) + times
        self.counts[token] = count
        # Only `token` can become the best, and it is the most recent.
        if count >= self.counts[self.best]:
            self.best = token


class NGramCounts:
    """Counts of n-grams of the orders `min_order` to `max_order`.

    Each order has at most `max_entries` pairs of a context and a token. The contexts that were not
    seen for the longest time are forgotten. Each operation takes constant time.
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
        return sum(self._num_entries.values())

    def shift(self, context: Context, token: int) -> Context:
        """Append a token to a context, and drop tokens beyond the longest context."""
        longer = (*context, token)
        return longer[max(0, len(longer) - self.widths[-1]) :]

    def learn(self, context: Context, token: int) -> None:
        """Count `token` after a context, once for each order."""
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
        # The first entry of the table is the context that was not seen for the longest time.
        table.move_to_end(context)
        if isinstance(entry, int):
            entry = table[context] = Continuations(entry)
        if token not in entry.counts:
            if not self._make_room(context):
                return
            self._num_entries[width] += 1
        entry.add(token, times)

    def ngrams(self) -> Iterator[tuple[Context, int]]:
        """All n-grams and their counts. Contexts not seen for the longest time come first."""
        for table in self._tables.values():
            for context in table:
                for token, count in self.counts(context).items():
                    yield (*context, token), count

    def counts(self, context: Context) -> Mapping[int, int]:
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
        """Forget contexts until one more pair fits. False if only `context` is left."""
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
    """The counts of one text, and optionally counts that are kept between texts.

    Attributes:
        counts: the counts of this text.
        context: the last max_order - 1 tokens, fewer at the beginning.
        table: a `lab.NGramTable` that is kept between texts, or None. The output is added to it.
    """

    def __init__(self, config: NGramDrafter, prompt: Sequence[int], table: Any = None) -> None:
        self.config, self.table = config, table
        self.counts = NGramCounts(config.min_order, config.max_order, config.max_entries)
        self.context: Context = ()
        self._num_prompt = len(prompt)
        self._output: list[int] = []
        self.append(prompt)
        self._output.clear()

    def draft(self, limit: int, more: Sequence[int] = ()) -> Draft:
        context = self.context
        for token in more:
            context = self.counts.shift(context, token)
        draft: list[int] = []
        evidence: list[Evidence] = []
        most = min(limit, self.config.num_draft)
        while len(draft) < most and (best := self._longest(context)) is not None:
            draft.append(best.token)
            share = share_class(best.seen / best.total)
            # A context of no tokens counts as a match of one token.
            evidence.append(Evidence(max(1, best.width), share, places_class(best.seen)))
            context = self.counts.shift(context, best.token)
        return Draft(draft, evidence=evidence)

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.counts.learn(self.context, token)
            self.context = self.counts.shift(self.context, token)
        if self.table is not None:
            self._output += tokens

    def close(self, length: int) -> None:
        if self.table is not None:
            self.table.add(self._output[: length - self._num_prompt])
            self._output = []

    def _longest(self, context: Context) -> Continuation | None:
        """The continuation of the longest known context. The text's own counts win a tie."""
        in_text = self.counts.continuation(context)
        if self.table is None or (in_text and in_text.width == self.counts.widths[-1]):
            return in_text
        saved: Continuation | None = self.table.continuation(context)
        return saved if saved and (in_text is None or saved.width > in_text.width) else in_text
