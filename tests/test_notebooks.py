"""Notebooks run from top to bottom, and are committed as they ran."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from selection import FULL, in_one_test
from specdec_mlx import lab

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))
MOST_CELLS = 17
DEFINES = {"05_write_a_drafter.ipynb"}  # A drafter of the reader's own is the point of it


def read(name: str) -> tuple[Any, list[Any]]:
    """A notebook, and its cells of code."""
    notebook = nbformat.read(FOLDER / name, as_version=4)
    return notebook, [cell for cell in notebook.cells if cell.cell_type == "code"]


def fails_as_it_is_meant_to(cell: Any) -> bool:
    """True if it raised and says that it does, or neither."""
    has_failed = any(output.output_type == "error" for output in cell.outputs)
    return has_failed == ("raises-exception" in cell.metadata.get("tags", []))


def text_of(cell: Any) -> str:
    """All that a cell printed, displayed or raised."""
    return "".join(
        output.get("text", "")
        + "".join(output.get("traceback", []))
        + "".join(str(value) for value in output.get("data", {}).values())
        for output in cell.outputs
    )


@FULL
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the lab pair; cells tagged raises-exception raise, no other does, and texts are equal."""
    monkeypatch.setenv("SPECDEC_MLX_NOTEBOOK_MODEL", str(lab.target_path()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECDEC_MLX_NOTEBOOK_STEPS", "4")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    notebook, cells = read(name)
    for cell in cells:
        cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    for cell in cells:
        assert fails_as_it_is_meant_to(cell), cell.source
        assert "DIFFERENT" not in text_of(cell)
        assert "ANOTHER TEXT" not in text_of(cell)
    unpacked = tmp_path / "cache" / "lab"  # the pair that ships, in float32
    fetched = set((tmp_path / "cache").rglob("*.safetensors")) - set(unpacked.rglob("*"))
    assert not fetched, "the notebook does not use the model it is given"


@in_one_test("name", NOTEBOOKS)
def test_outputs_are_committed_from_one_run_and_clean(name):
    """Executed once, in order; no warnings, no paths of somebody's machine, no other text.

    Functions and classes belong in the package, but for a drafter of one's own.
    """
    notebook, cells = read(name)
    nbformat.validate(notebook)
    assert (FOLDER / name).stat().st_size < 1_000_000
    assert len(notebook.cells) <= MOST_CELLS
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(text_of(cell).strip() for cell in cells if "print(" in cell.source)
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) / 2
    assert any("raises-exception" in cell.metadata.get("tags", []) for cell in cells)
    assert any("import specdec_mlx" in cell.source for cell in cells)
    for cell in cells:
        assert fails_as_it_is_meant_to(cell), cell.source
        assert not [o for o in cell.outputs if o.get("name") == "stderr"], text_of(cell)
        for unwanted in ("/home/", "/Users/", "/root/", "/tmp/", "site-packages", "DIFFERENT"):
            assert unwanted not in text_of(cell)
        lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
        for node in ast.walk(ast.parse("\n".join(lines))):
            is_defined = isinstance(node, ast.FunctionDef | ast.ClassDef)
            assert name in DEFINES or not is_defined, ast.unparse(node)
