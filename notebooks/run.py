"""Run notebooks in place: `python notebooks/run.py [NAME ...]`, all of them without a name.

Notebook 1 takes the demo model, or the one that SPECDEC_MLX_NOTEBOOK_MODEL names; the others run on
the pair that ships with the package.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def run(path: Path) -> None:
    """Run one from top to bottom, in a folder of its own, and write its outputs."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(
            notebook,
            timeout=600,
            kernel_name="python3",
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if not is_bar(out)]
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)


def is_bar(output: nbformat.NotebookNode) -> bool:
    """True for a progress bar, which is for those who wait."""
    return output.get("name") == "stderr" and bool(re.search(r"\|.*\d\d:\d\d", output.text))


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # of tqdm, without ipywidgets
    for name in sys.argv[1:] or sorted(path.name for path in FOLDER.glob("*.ipynb")):
        print(name)
        run(FOLDER / name)
