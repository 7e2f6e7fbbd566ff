"""Every notebook runs from top to bottom in a kernel of this Python, and is stored without results."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {"01_one_step": 3}
SECONDS = 120  # for one cell; the first start on a machine compiles kernels


class ThisPython(AsyncKernelManager):
    """Starts the interpreter that runs the tests, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self):
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python", language="python")


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=lambda path: path.stem)
def executed(request, tmp_path_factory):
    """Name and cells of a notebook that has run, with one more cell that says where."""
    folder = tmp_path_factory.mktemp(request.param.stem)
    notebook = nbformat.read(request.param, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import sys\nprint(sys.executable)"))
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, resources=place, kernel_manager_class=ThisPython).execute(env=environment)
    assert [path.name for path in folder.iterdir() if path.name != "ipython"] == [], "the notebook left files behind"
    return request.param.stem, notebook.cells


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} >= FIGURES.keys()


@pytest.mark.slow
def test_notebook_runs_without_errors_in_this_python(executed):
    _, cells = executed
    code = [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
    assert all(cell.execution_count for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert [output for output in outputs if output.output_type == "error"] == []
    assert code[-1].outputs[0].text.strip() == sys.executable


def test_notebook_draws_its_figures(executed):
    name, cells = executed
    data = [output.get("data", {}) for cell in cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in each for each in data) == FIGURES.get(name, 0)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_results(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"
