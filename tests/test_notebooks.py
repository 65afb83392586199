"""The notebooks run from the first cell to the last, in under a minute, with public names only."""

import ast
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from slow_cases import slow_but

import ipslimit
import ipslimit.nn
import ipslimit.optim
from ipslimit import solvers

FOLDER = Path(__file__).parent.parent / "notebooks"
FIRST = FOLDER / "01_rates.ipynb"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PUBLIC = {
    module.__name__: set(module.__all__)
    for module in (ipslimit, ipslimit.nn, ipslimit.optim, solvers)
}


def code(path):
    notebook = nbformat.read(path, as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= {
        "01_rates",
        "02_trajectories",
        "03_optimizers",
        "04_language",
    }


def executed(path):
    """Seconds of the notebook's kernel, and the outputs of its cells."""
    notebook = nbformat.read(path, as_version=4)
    # of the kernel itself: a busy machine stretches the minute on the wall
    notebook.cells.append(nbformat.v4.new_code_cell("import time; time.process_time()"))
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    )
    client.execute()  # raises where a cell does
    seconds = float(notebook.cells.pop().outputs[0]["data"]["text/plain"])
    return seconds, [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.parametrize("path", slow_but(NOTEBOOKS, FIRST, ids=lambda path: path.stem))
def test_notebook_runs(path, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    seconds, outputs = executed(path)
    if any(output.get("text", "").startswith("compiling the") for output in outputs):
        seconds, outputs = executed(path)  # compiled code is kept: this is what users wait for
    assert seconds < 60
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_uses_public_names_only(path):
    for source in code(path):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in PUBLIC:
                assert {alias.name for alias in node.names} <= PUBLIC[node.module]
            if isinstance(node, ast.Attribute):
                assert not node.attr.startswith("_")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
