"""Tests that run the notebooks completely, with answers to their puzzles, and on a running cluster."""

import nbformat
import pytest
from machines import Machines
from run_notebooks import NOTEBOOKS, answered, execute, puzzles, solutions

SAME = {"4": " the same\n", "5": "the same losses: True\n"}  # what notebooks that compare hashes find
BEGINS = {"check": "Your turn", "none": "Your turn", "right": "Right", "wrong": "Not yet"}


def by_name(path):
    return path.stem


def shown_by(notebook):
    """The text that each cell of code has shown, by the cell's id; there is no error among it."""
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert [output for output in cell.outputs if output.output_type == "error"] == []
            texts = (out.get("text", "") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)
            shown[cell.id] = "".join(texts)
    return shown


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_notebook_runs_and_checks_answers(path, tmp_path):
    notebook, answers = nbformat.read(path, as_version=4), solutions(path)
    nbformat.validate(notebook)
    assert puzzles(notebook) == list(answers)
    shown = shown_by(execute(answered(notebook, answers), tmp_path))
    assert [file.name for file in tmp_path.iterdir() if file.name != "ipython"] == [], "the notebook left files behind"
    tried = [(name.partition("-")[0], text.strip()) for name, text in shown.items() if "-" in name]
    told = [(kind, text) for kind, text in tried if kind in BEGINS]
    assert [(kind, text) for kind, text in told if not text.startswith(BEGINS[kind])] == []
    assert [kind for kind, _ in told].count("right") == len(answers)


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem[0] in SAME], ids=by_name)
def test_notebook_uses_a_running_cluster(path, tmp_path, monkeypatch):
    machines, place = tmp_path / "machines", tmp_path / "place"
    machines.mkdir()
    place.mkdir()
    with Machines(machines, 2) as cluster:
        cluster.have(2)
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.address)
        shown = "".join(shown_by(execute(nbformat.read(path, as_version=4), place)).values())
        assert f"scheduler  cluster at {cluster.address}, 2 workers" in shown
        assert SAME[path.stem[0]] in shown
        assert cluster.processes["scheduler"].poll() is None
