"""Counts of what followed each context of a few tokens, bounded, oldest contexts out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

Context = tuple[int, ...]


class Continuation(NamedTuple):
    """The most frequent token after a context.

    width: how long the context is. seen, total: how often the token was seen there, and any.
    """

    token: int
    width: int
    seen: int = 1
    total: int = 1


class NGramCounts:
    """How often each token followed each context, for the orders from `min_order` to `max_order`.

    A context argument is the last max_order - 1 tokens, or fewer where the text is shorter; each
    order reads what it needs from its end.
    """

    def __init__(self, min_order: int, max_order: int, max_entries: int) -> None:
        """Start with empty tables of at most `max_entries` pairs each."""
        self._width = max_order - 1
        self._tables = [
            (order - 1, ContinuationTable(max_entries)) for order in range(min_order, max_order + 1)
        ]
        self._longest_first = self._tables[::-1]

    def shift(self, context: Context, token: int) -> Context:
        """Append a token to a context and drop what has become too old."""
        longer = (*context, token)
        return longer[max(0, len(longer) - self._width) :]

    def add(self, context: Context, token: int) -> None:
        """Count `token` after `context`, once per order."""
        length = len(context)
        for width, table in self._tables:
            if width > length:
                break
            table.add(context[length - width :], token)

    def add_times(self, ngram: Context, times: int) -> None:
        """Count an n-gram of one order several times."""
        for width, table in self._tables:
            if width == len(ngram) - 1:
                table.add(ngram[:-1], ngram[-1], times)

    def ngrams(self) -> Iterator[tuple[Context, int]]:
        """All n-grams and their counts, the contexts not seen for longest first."""
        for _, table in self._tables:
            yield from table.ngrams()

    def continuation(self, context: Context) -> Continuation | None:
        """The best continuation of the longest known context."""
        length = len(context)
        for width, table in self._longest_first:
            entry = table.entry(context[length - width :]) if width <= length else None
            if isinstance(entry, int):
                return Continuation(entry, width)
            if entry is not None:
                return Continuation(entry.best, width, entry.counts[entry.best], entry.total)
        return None

    def matched(self, context: Context) -> int:
        """Length of the longest known context; 0 also where none is known."""
        found = self.continuation(context)
        return found.width if found else 0

    def law(
        self, context: Context, vocab_size: int, discount: float
    ) -> Float[np.ndarray, " vocab"] | None:
        """Smoothed probabilities [V] of the next token, float64; None where no context is known."""
        probs: Float[np.ndarray, " vocab"] | None = None
        for width, table in self._tables:
            if width > len(context):
                break
            counts = table.counts(_last(context, width))
            if not counts:  # forgotten at this order, perhaps still known at a higher one
                continue
            tokens = np.fromiter(counts.keys(), np.int64, len(counts))
            seen = np.fromiter(counts.values(), np.float64, len(counts))
            if probs is None:
                probs = np.zeros(vocab_size)
                probs[tokens] = seen / seen.sum()
            else:
                probs *= discount * len(counts) / seen.sum()
                probs[tokens] += (seen - discount) / seen.sum()
        return probs


class ContinuationTable:
    """Continuation counts per context, for contexts of one length.

    Holds at most `max_entries` pairs (context, continuation); to make room it forgets the contexts
    that were not seen for longest, whole. Adding and looking up take constant time.
    """

    def __init__(self, max_entries: int) -> None:
        """Start empty."""
        self._max_entries = max_entries
        self._num_entries = 0
        # Most contexts of a text are seen once; a bare token for those is a quarter of the memory.
        self._by_context: OrderedDict[Context, int | Continuations] = OrderedDict()

    def __len__(self) -> int:
        """Pairs held."""
        return self._num_entries

    def add(self, context: Context, token: int, times: int = 1) -> None:
        """Count `token` after `context`, once or several times."""
        entry = self._by_context.get(context)
        if entry is None:
            self._make_room(context)
            self._by_context[context] = token if times == 1 else Continuations(token, times)
            self._num_entries += 1
            return
        self._by_context.move_to_end(context)
        if isinstance(entry, int):
            entry = self._by_context[context] = Continuations(entry)
        if token not in entry.counts:
            if not self._make_room(context):
                return
            self._num_entries += 1
        entry.add(token, times)

    def ngrams(self) -> Iterator[tuple[Context, int]]:
        """All n-grams and their counts, the contexts not seen for longest first."""
        for context in self._by_context:
            for token, count in self.counts(context).items():
                yield (*context, token), count

    def entry(self, context: Context) -> int | Continuations | None:
        """What followed a context: a token that was seen once, or counts; None: unknown."""
        return self._by_context.get(context)

    def counts(self, context: Context) -> Mapping[int, int]:
        """How often each continuation was seen."""
        entry = self._by_context.get(context)
        if entry is None:
            return {}
        return entry.counts if isinstance(entry, Continuations) else {entry: 1}

    def _make_room(self, context: Context) -> bool:
        """Forget contexts until one more pair fits; False where only `context` itself is left."""
        while self._num_entries >= self._max_entries:
            oldest = next(iter(self._by_context))
            if oldest == context:
                return False
            entry = self._by_context.pop(oldest)
            self._num_entries -= len(entry.counts) if isinstance(entry, Continuations) else 1
        return True


class Continuations:
    """Counts of the tokens seen after one context, and the best: of equal ones the most recent."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, token: int, times: int = 1) -> None:
        """Start with one token, seen once or several times."""
        self.best = token
        self.counts = {token: times}
        self.total = times

    def add(self, token: int, times: int = 1) -> None:
        """Count `token` once more, or several times."""
        self.total += times
        count = self.counts.get(token, 0) + times
        self.counts[token] = count
        # Counts only grow, one token's at a time, so the best changes only to the token just seen;
        # on a tie it is the more recent one.
        if count >= self.counts[self.best]:
            self.best = token


def _last(context: Context, width: int) -> Context:
    """Last `width` tokens; a slice from -0 would be all of them."""
    return context[len(context) - width :]
