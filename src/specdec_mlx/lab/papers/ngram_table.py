"""n-gram counts that are kept from generation to generation, and in a file."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float

from specdec_mlx.memory.file import Integers
from specdec_mlx.memory.kept import KeptFile

Context = tuple[int, ...]

DISCOUNT = 0.75  # share of a count that a distribution leaves to shorter contexts


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
        self._widths = range(min_order - 1, max_order)
        self._max_entries = max_entries
        self._num_entries = dict.fromkeys(self._widths, 0)
        # Most contexts of a text are seen once; a bare token for those is a quarter of the memory.
        self._tables: dict[int, OrderedDict[Context, int | Continuations]] = {
            width: OrderedDict() for width in self._widths
        }

    def __len__(self) -> int:
        """Pairs held."""
        return sum(self._num_entries.values())

    def shift(self, context: Context, token: int) -> Context:
        """Append a token to a context and drop what has become too old."""
        longer = (*context, token)
        return longer[max(0, len(longer) - self._widths[-1]) :]

    def learn(self, context: Context, token: int) -> None:
        """Count `token` after the last tokens of a text, once per order."""
        length = len(context)
        for width in self._widths:
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
        for width in reversed(self._widths):
            if width > length:
                continue
            entry = self._tables[width].get(context[length - width :])
            if isinstance(entry, int):
                return Continuation(entry, width)
            if entry is not None:
                return Continuation(
                    entry.best, width, entry.counts[entry.best], entry.total
                )
        return None

    def distribution(
        self, context: Context, vocab_size: int
    ) -> Float[np.ndarray, " vocab"] | None:
        """Smoothed probabilities [V] of the next token, float64; None where no context is known.

        Interpolated absolute discounting (Ney, Essen, Kneser 1994), from the plain frequencies of
        the lowest order on: q_n(x|h) = (c(hx) - d + d N(h) q_{n-1}(x|h')) / c(h), with c the count,
        N(h) the number of different continuations of h, and h' = h without its first token.
        """
        probs: Float[np.ndarray, " vocab"] | None = None
        for width in self._widths:
            counts = (
                self.counts(context[len(context) - width :])
                if width <= len(context)
                else {}
            )
            # forgotten at this order, perhaps still known at a higher one
            if not counts:
                continue
            tokens = np.fromiter(counts.keys(), np.int64, len(counts))
            seen = np.fromiter(counts.values(), np.float64, len(counts))
            if probs is None:
                probs = np.zeros(vocab_size)
                probs[tokens] = seen / seen.sum()
            else:
                probs *= DISCOUNT * len(counts) / seen.sum()
                probs[tokens] += (seen - DISCOUNT) / seen.sum()
        return probs

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


class NGramTable(KeptFile):
    """Counts of what followed each context, for `NGramDrafter(table=...)`; thread-safe.

    max_order, min_order, max_entries: as there. tokenizer: as of a `Memory`.
    """

    kind: ClassVar[str] = "n-grams"
    what: ClassVar[str] = "table"

    def __init__(
        self,
        max_order: int = 4,
        min_order: int = 2,
        max_entries: int = 1_000_000,
        *,
        tokenizer: Any = None,
    ) -> None:
        if not (1 <= min_order <= max_order and max_entries >= 1):
            raise ValueError(
                f"NGramTable: orders {min_order} to {max_order} with {max_entries} entries, "
                "expected 1 <= min_order <= max_order and an entry at least."
            )
        super().__init__(tokenizer)
        self.max_order, self.min_order, self.max_entries = (
            max_order,
            min_order,
            max_entries,
        )
        self._unsaved: Counter[Context] = Counter()
        self._recount()

    def empty(self) -> NGramTable:
        """A new one of the same orders and bound."""
        return NGramTable(self.max_order, self.min_order, self.max_entries)

    def __repr__(self) -> str:
        """Its orders: a drafter's key does not change with what is counted."""
        return f"<NGramTable of orders {self.min_order} to {self.max_order}>"

    def counts(self) -> dict[Context, int]:
        """Every n-gram and how often it was seen."""
        with self._lock:
            return dict(self._counts.ngrams())

    def add(self, tokens: Sequence[int]) -> None:
        """Count the n-grams of a text [n]."""
        ends, orders = (
            range(1, len(tokens) + 1),
            range(self.min_order, self.max_order + 1),
        )
        ngrams = (
            tuple(tokens[end - n : end]) for end in ends for n in orders if n <= end
        )
        with self._lock:
            self._add((ngram, 1) for ngram in ngrams)
            self.save_now_and_then()

    def _merge(self, other: NGramTable) -> None:
        theirs = other.counts().items()
        with self._lock:
            self._add(
                one for one in theirs if self.min_order <= len(one[0]) <= self.max_order
            )

    def continuation(self, context: Context) -> Continuation | None:
        """The best continuation of the longest known end of a context."""
        with self._lock:
            return self._counts.continuation(context)

    def prune(self, max_entries: int) -> None:
        """Forget the contexts not seen for longest until so many pairs are left per order."""
        with self._lock:
            self.max_entries = max_entries
            self._recount(self.counts())

    def __len__(self) -> int:
        """Number of n-grams."""
        return len(self._counts)

    def save(self, path: Path | str | None = None) -> None:
        """Replace the file, as `Memory.save` does; every text counts once."""
        with self._lock:
            super().save(path)
            self._unsaved.clear()

    def _content(self, in_public: bool) -> tuple[dict[str, Any], Sequence[Any]]:
        rows = list(self._counts.ngrams())
        numbers = [n for ngram, times in rows for n in (*ngram, times)]
        header = {
            "tokenizer": self.tokenizer,
            "bounds": [self.max_order, self.min_order, self.max_entries],
            "orders": sorted(Counter(len(ngram) for ngram, _ in rows).items()),
        }
        return header, [numbers]

    @classmethod
    def _of(cls, header: dict[str, Any], data: Integers) -> NGramTable:
        table = cls(*map(int, header["bounds"]), tokenizer=header["tokenizer"])
        at = 0
        for order, count in header["orders"]:
            end = at + count * (order + 1)
            for *context, token, times in (
                data[at:end].reshape(count, order + 1).tolist()
            ):
                table._counts.add(tuple(context), token, times)
            at = end
        if at != len(data):
            raise ValueError(f"{len(data)} numbers instead of {at}")
        return table

    def _add(self, ngrams: Iterable[tuple[Context, int]]) -> None:
        for ngram, times in ngrams:
            self._counts.add(ngram[:-1], ngram[-1], times)
            if self.path is not None:
                self._unsaved[ngram] += times

    def _take_over(self, saved: NGramTable, *, is_own: bool) -> None:
        self._recount(saved.counts(), self._unsaved if is_own else self.counts())

    def _recount(self, *counts: Mapping[Context, int]) -> None:
        """Start again with these counts, the oldest first."""
        self._counts = NGramCounts(self.min_order, self.max_order, self.max_entries)
        for part in counts:
            for ngram, times in part.items():
                self._counts.add(ngram[:-1], ngram[-1], times)
