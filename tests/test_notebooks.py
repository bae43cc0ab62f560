"""Notebooks run from top to bottom, and are committed as they ran."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tiny_model_folder import write_model_folder

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))

MOST_CELLS = {"01_quickstart.ipynb": 14}
"""A quick start is quick."""


def read(name: str) -> Any:
    return nbformat.read(FOLDER / name, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def fails_on_purpose(cell: Any) -> bool:
    return "raises-exception" in cell.metadata.get("tags", [])


def errors(cell: Any) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == "error"]


def text_of(cell: Any) -> str:
    """All that a cell printed, displayed or raised."""
    return "".join(
        output.get("text", "")
        + "".join(output.get("traceback", []))
        + "".join(str(value) for value in output.get("data", {}).values())
        for output in cell.outputs
    )


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "tiny")


def test_there_are_notebooks() -> None:
    assert "01_quickstart.ipynb" in NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(
    name: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model; cells tagged raises-exception raise, no other does, and texts are equal."""
    monkeypatch.setenv("SPECDEC_MLX_NOTEBOOK_MODEL", str(model_folder))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    notebook = read(name)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()
    for cell in code_cells(notebook):
        assert bool(errors(cell)) == fails_on_purpose(cell), cell.source
        assert "DIFFERENT" not in text_of(cell)
        assert "ANOTHER TEXT" not in text_of(cell)
    assert not (tmp_path / "cache").exists(), "the notebook does not use the model it is given"


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_committed_from_one_run(name: str) -> None:
    """Cells were executed once, in order, and what they print is there."""
    notebook = read(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    printing = [cell for cell in cells if "print(" in cell.source]
    assert printing
    assert all(text_of(cell).strip() for cell in printing)
    for cell in cells:
        assert bool(errors(cell)) == fails_on_purpose(cell), cell.source


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_outputs_are_clean(name: str) -> None:
    """No warnings, no paths of somebody's machine, no text that differs."""
    for cell in code_cells(read(name)):
        assert not [o for o in cell.outputs if o.get("name") == "stderr"], text_of(cell)
        for unwanted in ("/home/", "/Users/", "/root/", "/tmp/", "site-packages", "DIFFERENT"):
            assert unwanted not in text_of(cell)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_uses_the_package_and_defines_nothing_of_its_own(name: str) -> None:
    """Functions and classes belong in the package; the quick start stays short."""
    notebook = read(name)
    assert len(notebook.cells) <= MOST_CELLS.get(name, 40)
    for cell in code_cells(notebook):
        lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
        for node in ast.walk(ast.parse("\n".join(lines))):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef), ast.unparse(node)
