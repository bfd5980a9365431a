"""Every notebook runs from top to bottom, offline, on the bundled model."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def _printed(cell) -> str:
    return "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")


@pytest.mark.notebook
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the notebook machinery
def test_notebook_runs(path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("matplotlib")
    notebook = nbformat.read(path, as_version=4)
    committed = [_printed(cell) for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    for cell, before in zip(notebook.cells, committed, strict=True):
        if "records" in cell.metadata.get("tags", ()):  # what such cells print depends only on the records
            assert _printed(cell) == before, f"run {path.name} again and commit its outputs"
    assert all(cell.outputs for cell in notebook.cells if cell.cell_type == "code" and "print" in cell.source)
