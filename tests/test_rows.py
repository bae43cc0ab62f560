"""Results as tables: CSV that reads back, and pandas, which is no dependency."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import specdec_mlx as sd
from specdec_mlx.bench.record import Record
from specdec_mlx.bench.replay import Score, Scores
from specdec_mlx.checks import CheckReport, Part
from specdec_mlx.stats.rows import Row, Rows, columns
from test_plots import result
from test_views import stats_of


class Given(Rows):
    """Rows as they are given."""

    def __init__(self, *rows: Row) -> None:
        self._rows = rows

    def rows(self) -> tuple[Row, ...]:
        return self._rows


AWKWARD = Given(
    {"name": 'a, "b"\nc', "number": 0.1 + 0.2},
    {"name": "é", "missing": None, "late": True},
)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def tables() -> dict[str, Rows]:
    """One of each kind of result that can be exported."""
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
    }


EXPECTED: dict[str, tuple[int, dict[str, str]]] = {
    "stats": (3, {"round": "2", "drafted": "3", "accepted": "3", "emitted": "4"}),
    "bench": (2, {"drafter": "ngram", "category": "b", "ratio": "1.5", "accepted_share": "0.5"}),
    "replay": (2, {"cost": "measured", "speedup": "1.4", "live_ratio": ""}),
    "check": (
        2,
        {"part": "joint", "status": "failed", "passed": "False", "p_value": "0.25", "texts": "3"},
    ),
}
"""Kind of result -> number of rows, and some cells of the last one."""


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """A module that stands for pandas; what its frames were made of."""
    made: list[tuple[Any, Any]] = []

    class DataFrame:
        def __init__(self, data: Any, columns: Any) -> None:
            made.append((data, columns))

    module = ModuleType("pandas")
    module.DataFrame = DataFrame  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", module)
    return made


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_result_can_be_written_as_csv(kind: str, tmp_path: Path) -> None:
    """One line a row beneath a header with the fields' own names; None is empty."""
    path = tmp_path / "table.csv"
    tables()[kind].to_csv(path)
    number, cells = EXPECTED[kind]
    rows = read(path)
    assert len(rows) == number
    assert {name: rows[-1][name] for name in cells} == cells


@pytest.mark.parametrize("kind", EXPECTED)
def test_every_result_becomes_a_data_frame(kind: str, frames: list[tuple[Any, Any]]) -> None:
    """Of the very rows, with the columns in their order; values keep their types."""
    table = tables()[kind]
    frame = table.to_pandas()
    assert type(frame).__name__ == "DataFrame"
    ((data, names),) = frames
    assert data == list(table.rows())
    assert names == columns(table.rows())


def test_awkward_cells_read_back(tmp_path: Path) -> None:
    """Commas, quotes, line ends and letters beyond ASCII survive; a number keeps all its digits."""
    path = tmp_path / "table.csv"
    AWKWARD.to_csv(path)
    first, second = read(path)
    assert first["name"] == 'a, "b"\nc'
    assert float(first["number"]) == 0.1 + 0.2
    assert second == {"name": "é", "number": "", "missing": "", "late": "True"}


def test_rows_with_other_columns_share_one_header() -> None:
    assert columns(AWKWARD.rows()) == ["name", "number", "missing", "late"]
    assert columns([]) == []


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(sd.errors.MissingPackageError, match="pip install pandas"):
        sd.stats.SpeculationStats().to_pandas()


def test_nothing_imports_pandas_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CSV needs the standard library alone."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    for kind, table in tables().items():
        table.to_csv(tmp_path / f"{kind}.csv")
