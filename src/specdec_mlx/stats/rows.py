"""Results as rows, for a spreadsheet or for pandas."""

from __future__ import annotations

import csv
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec_mlx.errors import MissingPackageError

if TYPE_CHECKING:
    from pandas import DataFrame

Row = dict[str, Any]  # column -> value; a column that a row lacks is empty


class Rows(ABC):
    """A result that is also a table."""

    @abstractmethod
    def rows(self) -> Sequence[Row]:
        """The table, one dict a row."""

    def to_csv(self, path: Path | str) -> None:
        """Write the table as UTF-8, comma-separated, with a header; None becomes empty."""
        rows = self.rows()
        with Path(path).open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns(rows))
            writer.writeheader()
            writer.writerows(rows)

    def to_pandas(self) -> DataFrame:
        """The table as a DataFrame; raises MissingPackageError without pandas."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise MissingPackageError(
                "to_pandas() needs pandas, which is not installed. Use: pip install pandas, or "
                "to_csv(path), which needs nothing."
            ) from error
        rows = self.rows()
        return DataFrame(list(rows), columns=columns(rows))


def columns(rows: Sequence[Row]) -> list[str]:
    """Columns of all rows, each once, in order of appearance."""
    return list(dict.fromkeys(name for row in rows for name in row))
