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


RECORD = Record("bench", {}, {}, [], results=[result("ngram", "4", kind, 1.5) for kind in "ab"])
SCORE = Score("measured", "ngram", "4", "all", 1, 9, 5, 8, 4, 1.8, 1.4)
PARTS = [
    Part("widths", "passed", "Same.", {"texts": 1}),
    Part("joint", "failed", "No", {"p_value": 0.25, "power": {"a": 1.0}, "texts": 3}),
]
CHECKED = {"part": "joint", "status": "failed", "passed": "False", "p_value": "0.25", "texts": "3"}

TABLES: list[tuple[Rows, int, dict[str, str]]] = [
    (stats_of((0, 0), (4, 2), (3, 3)), 3, {"round": "2", "drafted": "3", "emitted": "4"}),
    (RECORD, 2, {"drafter": "ngram", "category": "b", "ratio": "1.5", "accepted_share": "0.5"}),
    (Scores([SCORE, SCORE]), 2, {"cost": "measured", "speedup": "1.4", "live_ratio": ""}),
    (CheckReport(PARTS), 2, CHECKED),
    (Given(), 2, {"name": "é", "number": "", "missing": "", "late": "True"}),
]
"""Each kind of result, its number of rows, and some cells of the last one."""


@in_one_test(("table", "number", "cells"), TABLES)
def test_every_result_can_be_written_as_csv_and_becomes_a_data_frame(
    table: Rows,
    number: int,
    cells: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without pandas: a line a row beneath a header with all fields' own names; None is empty."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    path = tmp_path / "table.csv"
    table.to_csv(path)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == number
    assert {name: rows[-1][name] for name in cells} == cells
    if isinstance(table, Given):
        assert list(rows[0]) == ["name", "number", "missing", "late"]
        assert (rows[0]["name"], float(rows[0]["number"])) == ('a, "b"\nc', 0.1 + 0.2)
    with pytest.raises(sd.errors.MissingPackageError, match="pip install pandas"):
        table.to_pandas()
    made = SimpleNamespace(DataFrame=lambda data, columns: (data, columns))
    monkeypatch.setitem(sys.modules, "pandas", made)
    assert table.to_pandas() == (list(table.rows()), columns(table.rows()))
