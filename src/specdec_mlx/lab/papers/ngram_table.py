"""n-gram counts that are kept from generation to generation, and in a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from specdec_mlx.contracts import DraftContext, LookUpSession
from specdec_mlx.drafters.ngram import (
    Context,
    Continuation,
    NGramCounts,
    NGramDrafter,
    NGramIndex,
)
from specdec_mlx.memory.file import N_GRAMS, FileHeader, Integers, TableHeader
from specdec_mlx.memory.persistent import PersistentStore, opened


class NGramTable(PersistentStore):
    """Counts of the tokens after each context, for `TabledNGramDrafter`. It is thread-safe.

    Args:
        max_order: tokens of the longest n-gram.
        min_order: tokens of the shortest n-gram.
        max_entries: most pairs of context and token for each order.
        tokenizer: as for `Memory`.
    """

    kind: ClassVar[str] = N_GRAMS
    header = TableHeader
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
        self.max_order, self.min_order, self.max_entries = (max_order, min_order, max_entries)
        self._unsaved: Counter[Context] = Counter()
        self._recount()

    def empty(self) -> NGramTable:
        return NGramTable(self.max_order, self.min_order, self.max_entries)

    def __repr__(self) -> str:
        """The orders. They are part of a drafter's key, which must not change with the counts."""
        return f"<NGramTable of orders {self.min_order} to {self.max_order}>"

    def counts(self) -> dict[Context, int]:
        """Every n-gram with its count."""
        with self._lock:
            return dict(self._counts.ngrams())

    def add(self, tokens: Sequence[int]) -> None:
        """Count the n-grams of a text [n]."""
        stops, orders = range(1, len(tokens) + 1), range(self.min_order, self.max_order + 1)
        ngrams = (tuple(tokens[end - n : end]) for end in stops for n in orders if n <= end)
        with self._lock:
            self._add((ngram, 1) for ngram in ngrams)
            self.save_now_and_then()

    def _merge(self, other: NGramTable) -> None:
        # Counts of other orders would never be looked up.
        theirs = other.counts().items()
        with self._lock:
            self._add(one for one in theirs if self.min_order <= len(one[0]) <= self.max_order)

    def continuation(self, context: Context) -> Continuation | None:
        """The best continuation of the longest known suffix of a context."""
        with self._lock:
            return self._counts.continuation(context)

    def prune(self, max_entries: int) -> None:
        """Drop the oldest contexts until each order has at most `max_entries` pairs."""
        with self._lock:
            self.max_entries = max_entries
            self._recount(self.counts())

    def __len__(self) -> int:
        """Number of n-grams."""
        return len(self._counts)

    def save(self, path: Path | str | None = None) -> None:
        """Replace the file like `Memory.save`. Every text counts once."""
        with self._lock:
            super().save(path)
            self._unsaved.clear()

    def _content(self, in_public: bool) -> tuple[FileHeader, Sequence[Any]]:
        rows = list(self._counts.ngrams())
        # The file is one array of integers: the tokens of each n-gram and its count, by order.
        numbers = [n for ngram, times in rows for n in (*ngram, times)]
        header = TableHeader(
            kind=self.kind,
            tokenizer=self.tokenizer,
            bounds=(self.max_order, self.min_order, self.max_entries),
            orders=sorted(Counter(len(ngram) for ngram, _ in rows).items()),
        )
        return header, [numbers]

    @classmethod
    def _of(cls, header: TableHeader, data: Integers) -> NGramTable:
        table = cls(*header.bounds, tokenizer=header.tokenizer)
        at = 0
        for order, count in header.orders:
            end = at + count * (order + 1)
            for *context, token, times in data[at:end].reshape(count, order + 1).tolist():
                table._counts.add(tuple(context), token, times)
            at = end
        if at != len(data):
            raise ValueError(f"{len(data)} numbers instead of {at}")
        return table

    def _add(self, ngrams: Iterable[tuple[Context, int]]) -> None:
        for ngram, times in ngrams:
            self._counts.add(ngram[:-1], ngram[-1], times)
            # Another process may write the file too, so only these counts are added to it.
            if self.path is not None:
                self._unsaved[ngram] += times

    def _take_over(self, saved: NGramTable, *, is_own: bool) -> None:
        self._recount(saved.counts(), self._unsaved if is_own else self.counts())

    def _recount(self, *counts: Mapping[Context, int]) -> None:
        self._counts = NGramCounts(self.min_order, self.max_order, self.max_entries)
        for part in counts:
            for ngram, times in part.items():
                self._counts.add(ngram[:-1], ngram[-1], times)


@dataclass(frozen=True)
class TabledNGramDrafter(NGramDrafter):
    """An `NGramDrafter` that also uses counts of earlier generations.

    Args:
        table: used if this text's counts know no context of the same length. An `NGramTable`, or
            the path of its file, which is made if needed and saved when the process ends. None
            makes a table for the lifetime of the drafter.
    """

    table: NGramTable | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.table, NGramTable):
            make = partial(NGramTable, self.max_order, self.min_order)
            table = make() if self.table is None else opened(self.table, NGramTable, make)
            object.__setattr__(self, "table", table)

    def check(self, context: DraftContext) -> None:
        """Raise TokenizerMismatchError if the table was counted with another tokenizer."""
        self._table_of(context)

    def begin(self, prompt: Sequence[int], context: DraftContext) -> LookUpSession:
        return LookUpSession(NGramIndex(self, prompt, self._table_of(context)))

    def _table_of(self, context: DraftContext) -> NGramTable:
        assert isinstance(self.table, NGramTable)
        return self.table.of(context)
