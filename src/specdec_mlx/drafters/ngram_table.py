"""n-gram counts that are kept from generation to generation, and in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int

from specdec_mlx.drafters.ngram_counts import Context, Continuation, NGramCounts
from specdec_mlx.memory.kept import Kept, opened


class NGramTable(Kept):
    """Counts of what followed each context, for `NGramDrafter(table=...)`; thread-safe.

    max_order, min_order, max_entries: as there. tokenizer: whose token ids these are, or its
    fingerprint; None: the first that drafts from it.
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
        self.max_order, self.min_order, self.max_entries = max_order, min_order, max_entries
        self._unsaved: Counter[Context] = Counter()
        self._recount()

    def __repr__(self) -> str:
        """Its orders: a drafter's key does not change with what is counted."""
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

    def _merge(self, other: NGramTable) -> None:
        theirs = other.counts()
        with self._lock:
            for ngram, times in theirs.items():
                if self.min_order <= len(ngram) <= self.max_order:
                    self._add(ngram, times)

    def continuation(self, context: Context) -> Continuation | None:
        """The best continuation of the longest known end of a context."""
        with self._lock:
            return self._counts.continuation(context)

    def prune(self, max_entries: int) -> None:
        """Forget the contexts not seen for longest until so many pairs are left per order."""
        with self._lock:
            self.max_entries = max_entries
            self._recount(self.counts())

    def facts(self) -> Mapping[str, str]:
        """Orders, and the number of n-grams."""
        orders = f"{self.min_order} to {self.max_order}"
        return {"orders": orders, "n-grams": f"{len(self._counts):,}"}

    def save(self, path: Path | str | None = None) -> None:
        """Replace the file, as `Memory.save` does; every text counts once."""
        with self._lock:
            super().save(path)
            self._unsaved.clear()

    def _content(self, in_public: bool) -> tuple[dict[str, Any], Sequence[Int[np.ndarray, " n"]]]:
        rows = list(self._counts.ngrams())
        numbers = np.array([n for ngram, times in rows for n in (*ngram, times)], np.int32)
        header = {
            "tokenizer": self.tokenizer,
            "bounds": [self.max_order, self.min_order, self.max_entries],
            "orders": sorted(Counter(len(ngram) for ngram, _ in rows).items()),
        }
        return header, [numbers]

    @classmethod
    def _of(cls, header: dict[str, Any], data: Int[np.ndarray, " n"]) -> NGramTable:
        table = cls(*map(int, header["bounds"]), tokenizer=header["tokenizer"])
        at = 0
        for order, count in header["orders"]:
            end = at + count * (order + 1)
            for *context, token, times in data[at:end].reshape(count, order + 1).tolist():
                table._counts.add(tuple(context), token, times)
            at = end
        if at != len(data):
            raise ValueError(f"{len(data)} numbers instead of {at}")
        return table

    def _add(self, ngram: Context, times: int) -> None:
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


def as_table(
    table: NGramTable | Path | str | None, max_order: int, min_order: int
) -> NGramTable | None:
    """The table that is named: itself, or that of a file, of these orders where it is made."""
    if table is None or isinstance(table, NGramTable):
        return table
    return opened(table, NGramTable, lambda: NGramTable(max_order, min_order))
