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

QUESTIONS = [
    "01_quickstart",
    "02_why_it_is_lossless",
    "03_choosing_a_drafter",
    "04_how_many_tokens_to_draft",
    "05_write_a_drafter",
    "06_mlx_lm",
    "07_compare_on_your_own_pair",
    "08_train_a_head",
]
MOST_CELLS = 17
DEFINES = {"05_write_a_drafter.ipynb"}  # A drafter of the reader's own is the point of it


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


def test_there_is_one_for_each_question() -> None:
    assert [name.removesuffix(".ipynb") for name in NOTEBOOKS] == QUESTIONS


@FULL
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_every_cell_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the lab pair; cells tagged raises-exception raise, no other does, and texts are equal."""
    monkeypatch.setenv("SPECDEC_MLX_NOTEBOOK_MODEL", str(lab.target_path()))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("SPECDEC_MLX_NOTEBOOK_STEPS", "4")
    monkeypatch.setenv("SPECDEC_MLX_CACHE", str(tmp_path / "cache"))
    notebook = read(name)
    for cell in code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    resources = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources=resources).execute()
    for cell in code_cells(notebook):
        assert bool(errors(cell)) == fails_on_purpose(cell), cell.source
        assert "DIFFERENT" not in text_of(cell)
        assert "ANOTHER TEXT" not in text_of(cell)
    unpacked = tmp_path / "cache" / "lab"  # the pair that ships, in float32
    fetched = set((tmp_path / "cache").rglob("*.safetensors")) - set(unpacked.rglob("*"))
    assert not fetched, "the notebook does not use the model it is given"


@in_one_test("name", NOTEBOOKS)
def test_outputs_are_committed_from_one_run_and_clean(name):
    """Executed once, in order; no warnings, no paths of somebody's machine, no other text."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert (FOLDER / name).stat().st_size < 1_000_000
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(text_of(cell).strip() for cell in cells if "print(" in cell.source)
    assert sum(bool(cell.outputs) for cell in cells) > len(cells) / 2
    assert any(fails_on_purpose(cell) for cell in cells)
    for cell in cells:
        assert bool(errors(cell)) == fails_on_purpose(cell), cell.source
        assert not [o for o in cell.outputs if o.get("name") == "stderr"], text_of(cell)
        for unwanted in ("/home/", "/Users/", "/root/", "/tmp/", "site-packages", "DIFFERENT"):
            assert unwanted not in text_of(cell)


@in_one_test("name", NOTEBOOKS)
def test_a_notebook_uses_the_package_and_defines_nothing_of_its_own(name):
    """Functions and classes belong in the package, but for a drafter of one's own."""
    notebook = read(name)
    assert len(notebook.cells) <= MOST_CELLS
    assert any("import specdec_mlx" in cell.source for cell in code_cells(notebook))
    for cell in code_cells(notebook) if name not in DEFINES else []:
        lines = [line for line in cell.source.splitlines() if not line.startswith("%")]
        for node in ast.walk(ast.parse("\n".join(lines))):
            assert not isinstance(node, ast.FunctionDef | ast.ClassDef), ast.unparse(node)
