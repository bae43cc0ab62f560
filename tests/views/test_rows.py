"""Results as tables: CSV that reads back, and pandas, which is no dependency."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_plots import result
from test_views import stats_of

import specdec_mlx as sd
from selection import in_one_test
from specdec_mlx.lab.bench.record import Record
from specdec_mlx.lab.bench.timing import Settings
from specdec_mlx.lab.proof import CheckReport, Part
from specdec_mlx.stats.account import Row, Rows, columns

NUMBERS = {"p_value": 0.25, "power": {"a": 1.0}, "texts": 3}


class Given(Rows):
    def rows(self) -> tuple[Row, ...]:
        """Awkward ones, of which the second has other columns."""
        first = {"name": 'a, "b"\nc', "number": 0.1 + 0.2}
        return first, {"name": "é", "missing": None, "late": True}


TABLES = [
    Given(),
    stats_of((0, 0), (4, 2), (3, 3)),
    Record("bench", {}, Settings(), [], results=[result("ngram", "4", kind, 1.5) for kind in "ab"]),
    CheckReport([Part("widths", "passed", "Same."), Part("joint", "failed", "No", NUMBERS)]),
]


@in_one_test("table", TABLES)
def test_every_result_can_be_written_as_csv_and_becomes_a_data_frame(
    table: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pandas: a line a row beneath a header with all fields' own names; None is empty."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    path, names = tmp_path / "rows.csv", columns(table.rows())
    table.to_csv(path)
    with path.open(encoding="utf-8", newline="") as file:
        assert list(csv.DictReader(file)) == [
            {name: "" if row.get(name) is None else str(row[name]) for name in names}
            for row in table.rows()
        ]
    with pytest.raises(sd.errors.MissingPackageError, match="pip install pandas"):
        table.to_pandas()
    made = SimpleNamespace(DataFrame=lambda data, columns: (data, columns))
    monkeypatch.setitem(sys.modules, "pandas", made)
    assert table.to_pandas() == (list(table.rows()), names)
