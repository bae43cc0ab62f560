"""n-gram counts that are kept: from generation to generation, in a file, of several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from specdec_mlx.drafters.ngram_counts import Context, Continuation, NGramCounts
from specdec_mlx.memory.file import damaged, read_file, write_file
from specdec_mlx.memory.kept import Kept, opened


class NGramTable(Kept):
    """What followed each context of a few tokens, for `NGramDrafter(table=...)`; thread-safe.

    It keeps counts and no texts.

    max_order, min_order: orders counted; a context is one token shorter.
    max_entries: most pairs of context and continuation per order; contexts not seen for longest
        are forgotten.
    tokenizer: whose token ids these are, or its fingerprint; None: the first that drafts from it.
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
        """Start empty."""
        if not (1 <= min_order <= max_order and max_entries >= 1):
            raise ValueError(
                f"NGramTable: orders {min_order} to {max_order} with {max_entries} entries, "
                "expected 1 <= min_order <= max_order and an entry at least."
            )
        super().__init__(tokenizer)
        self.max_order, self.min_order, self.max_entries = max_order, min_order, max_entries
        self._counts = self._empty()
        self._unsaved: Counter[Context] = Counter()

    def __repr__(self) -> str:
        """Its orders; a drafter's key is not to change with what is counted."""
        return f"<NGramTable of orders {self.min_order} to {self.max_order}>"

    def counts(self) -> dict[Context, int]:
        """Every n-gram and how often it was seen."""
        with self._lock:
            return dict(self._counts.ngrams())

    def add(self, tokens: Sequence[int]) -> None:
        """Count the n-grams of a text [n]."""
        with self._lock:
            for end in range(len(tokens)):
                for order in range(self.min_order, min(self.max_order, end + 1) + 1):
                    self._add(tuple(tokens[end + 1 - order : end + 1]), 1)
            self.save_now_and_then()

    def merge(self, other: NGramTable) -> None:
        """Add the counts of another table of the same tokenizer, as far as the orders are equal.

        Raises TokenizerMismatchError for another one.
        """
        if other.tokenizer is not None:
            self.check_tokenizer(other.tokenizer)
        theirs = other.counts()
        with self._lock:
            for ngram, times in theirs.items():
                if self.min_order <= len(ngram) <= self.max_order:
                    self._add(ngram, times)

    def continuation(self, context: Context) -> Continuation | None:
        """As `NGramCounts.continuation`."""
        with self._lock:
            return self._counts.continuation(context)

    def prune(self, max_entries: int) -> None:
        """Forget contexts until an order has at most so many pairs, those not seen for longest."""
        with self._lock:
            self.max_entries = max_entries
            self._recount(self.counts())

    def facts(self) -> Mapping[str, str]:
        """Orders, and the number of n-grams."""
        orders = f"{self.min_order} to {self.max_order}"
        return {"orders": orders, "n-grams": f"{len(self.counts()):,}"}

    def save(self, path: Path | str | None = None) -> None:
        """As `Memory.save`; every text counts once, whoever has saved it."""
        with self._lock:
            super().save(path)
            self._unsaved.clear()

    def _write(self, path: Path, *, in_public: bool = False) -> str:
        rows = sorted(self._counts.ngrams(), key=lambda row: len(row[0]))  # stable
        numbers = np.array([n for ngram, times in rows for n in (*ngram, times)], np.int32)
        orders = Counter(len(ngram) for ngram, _ in rows)
        header = {
            "tokenizer": self.tokenizer,
            "bounds": [self.max_order, self.min_order, self.max_entries],
            "orders": sorted(orders.items()),
        }
        return write_file(path, self.kind, header, [numbers])

    @classmethod
    def load(cls, path: Path | str) -> NGramTable:
        """The table of a file.

        Raises:
            MemoryFileError: it is no table, is damaged, or is of a later version.
            FileNotFoundError: there is no such file.
        """
        path = Path(path)
        header, data = read_file(path, cls.kind)
        try:
            table = cls(*map(int, header["bounds"]), tokenizer=header["tokenizer"])
            at = 0
            for order, count in header["orders"]:
                end = at + count * (order + 1)
                for row in data[at:end].reshape(count, order + 1).tolist():
                    table._counts.add_times(tuple(row[:-1]), row[-1])
                at = end
            if at != len(data):
                raise ValueError(f"{len(data)} numbers instead of {at}")
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(path, f"its header does not fit its content ({error!r})") from error
        table.path, table._saved_as = path, header["id"]
        return table

    def _add(self, ngram: Context, times: int) -> None:
        """Count an n-gram, and note it for the file that the table is kept in."""
        self._counts.add_times(ngram, times)
        if self.path is not None:
            self._unsaved[ngram] += times

    def _empty(self) -> NGramCounts:
        return NGramCounts(self.min_order, self.max_order, self.max_entries)

    def _take_over(self, saved: NGramTable, *, is_own: bool) -> None:
        mine = self._unsaved if is_own else self.counts()
        self._recount(saved.counts(), mine)

    def _recount(self, *counts: Mapping[Context, int]) -> None:
        """Count anew, the oldest first."""
        self._counts = self._empty()
        for part in counts:
            for ngram, times in part.items():
                self._counts.add_times(ngram, times)


def as_table(
    table: NGramTable | Path | str | None, max_order: int, min_order: int
) -> NGramTable | None:
    """The table that is meant: itself, or that of a file; see `opened`.

    Args:
        table: a table, the path of its file, or None for none.
        max_order: of a table that is made, where there is no such file.
        min_order: of the same.
    """
    if table is None or isinstance(table, NGramTable):
        return table
    return opened(table, NGramTable, lambda: NGramTable(max_order, min_order))
