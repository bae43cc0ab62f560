"""Results as tables: CSV that reads back, and pandas, which is no dependency."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import specdec_mlx as sd
from selection import in_one_test
from specdec_mlx.bench.record import Record
from specdec_mlx.bench.replay import Score, Scores
from specdec_mlx.checks import CheckReport, Part
from specdec_mlx.stats.account import Row, Rows, columns
from test_plots import result
from test_views import stats_of


class Given(Rows):
    """Rows as they are given: awkward ones, of which the second has other columns."""

    def rows(self) -> tuple[Row, ...]:
        return (
            {"name": 'a, "b"\nc', "number": 0.1 + 0.2},
            {"name": "é", "missing": None, "late": True},
        )


def tables() -> dict[str, Rows]:
    record = Record(
        "specdec-mlx bench", {}, {}, [], results=[result("ngram", "4", kind, 1.5) for kind in "ab"]
    )
    score = Score("measured", "ngram", "4", "all", 1, 9, 5, 8, 4, 1.8, 1.4)
    numbers = {"p_value": 0.25, "power": {"a": 1.0}, "texts": 3}
    parts = [
        Part("widths", "passed", "Same.", {"texts": 1}),
        Part("joint", "failed", "No", numbers),
    ]
    return {
        "stats": stats_of((0, 0), (4, 2), (3, 3)),
        "bench": record,
        "replay": Scores([score, score]),
        "check": CheckReport(parts),
        "awkward": Given(),
    }


@in_one_test("kind", ["stats", "bench", "replay", "check", "awkward"])
def test_every_result_can_be_written_as_csv_and_becomes_a_data_frame(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without pandas: a line a row beneath a header with all fields' own names; None is empty."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    table, path = tables()[kind], tmp_path / f"{kind}.csv"
    table.to_csv(path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {name: "" if row.get(name) is None else str(row[name]) for name in columns(table.rows())}
        for row in table.rows()
    ]
    with pytest.raises(sd.errors.MissingPackageError, match="pip install pandas"):
        table.to_pandas()
    made = SimpleNamespace(DataFrame=lambda data, columns: (data, columns))
    monkeypatch.setitem(sys.modules, "pandas", made)
    assert table.to_pandas() == (list(table.rows()), columns(table.rows()))
