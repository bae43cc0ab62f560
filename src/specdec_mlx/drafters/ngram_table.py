"""n-gram counts that are kept: from generation to generation, in a file, of several processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from threading import RLock
from typing import Any

import numpy as np

from specdec_mlx.drafters.ngram_counts import Context, Continuation, NGramCounts
from specdec_mlx.errors import MemoryFileError, TokenizerMismatchError
from specdec_mlx.memory.file import damaged, file_id, locked, read_file, write_file
from specdec_mlx.memory.tokenizer import tokenizer_fingerprint

KIND = "n-grams"
"""Of the files of tables."""


class NGramTable:
    """What followed each context of a few tokens, for `NGramDrafter(table=...)`; thread-safe.

    It keeps counts and no texts.

    max_order, min_order: orders counted; a context is one token shorter.
    max_entries: most pairs of context and continuation per order; contexts not seen for longest
        are forgotten.
    tokenizer: whose token ids these are, or its fingerprint; None: the first that drafts from it.
    """

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
        self.max_order, self.min_order, self.max_entries = max_order, min_order, max_entries
        self.tokenizer = _fingerprint(tokenizer)
        self.path: Path | None = None
        self._saved_as = ""
        self._lock = RLock()
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

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Raise TokenizerMismatchError unless the table is of this tokenizer, or of none yet."""
        found = _fingerprint(tokenizer)
        if self.tokenizer is None:
            self.tokenizer = found
        if self.tokenizer != found:
            raise TokenizerMismatchError(
                f"The table counts token ids of tokenizer {self.tokenizer}, the target's is "
                f"{found}. Give a table that was counted with this model's tokenizer."
            )

    def save(self, path: Path | str | None = None) -> None:
        """Write the file, or leave the old one as it is; see `Memory.save`.

        What another process saved there in the meantime is added to, so that every text counts
        once.

        Args:
            path: of the file; None: the one that it was loaded from.

        Raises:
            MemoryFileError: what stands there is no table, is damaged, or is another tokenizer's.
            ValueError: no path was given, and it was loaded from none.
        """
        path = path or self.path
        if path is None:
            raise ValueError("This table was loaded from no file. Give save(path).")
        path = Path(path)
        with self._lock, locked(path):
            if path.exists() and file_id(path) != self._saved_as:
                self._take_over(path)
            rows = sorted(self._counts.ngrams(), key=lambda row: len(row[0]))  # stable
            numbers = np.array([n for ngram, times in rows for n in (*ngram, times)], np.int32)
            orders = Counter(len(ngram) for ngram, _ in rows)
            header = {
                "tokenizer": self.tokenizer,
                "bounds": [self.max_order, self.min_order, self.max_entries],
                "orders": sorted(orders.items()),
            }
            self._saved_as = write_file(path, KIND, header, [numbers])
            self.path, self._unsaved = path, Counter()

    @classmethod
    def load(cls, path: Path | str) -> NGramTable:
        """The table of a file.

        Raises:
            MemoryFileError: it is no table, is damaged, or is of a later version.
            FileNotFoundError: there is no such file.
        """
        path = Path(path)
        header, data = read_file(path, KIND)
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

    def _take_over(self, path: Path) -> None:
        """Count what another process saved, and what was counted here since the last saving."""
        saved = NGramTable.load(path)
        if None not in (saved.tokenizer, self.tokenizer) and saved.tokenizer != self.tokenizer:
            raise MemoryFileError(
                f"{path} is the table of tokenizer {saved.tokenizer}, this one is of "
                f"{self.tokenizer}: it was left as it is. Save to another file."
            )
        mine = self._unsaved if path == self.path else self.counts()
        self._counts = self._empty()
        for ngram, times in (*saved.counts().items(), *mine.items()):
            self._counts.add_times(ngram, times)
        self.tokenizer = self.tokenizer or saved.tokenizer


def _fingerprint(tokenizer: Any) -> str | None:
    """A tokenizer's fingerprint, or the one that is given."""
    if tokenizer is None or isinstance(tokenizer, str):
        return tokenizer
    return tokenizer_fingerprint(tokenizer)
