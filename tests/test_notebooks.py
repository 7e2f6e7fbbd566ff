"""Every notebook runs from top to bottom, its puzzles know right from wrong, and it is stored without results."""

from __future__ import annotations

import sys

import nbformat
import pytest
from chromium import PATH, visit
from machines import Machines
from run_notebooks import NOTEBOOKS, answered, execute, page, puzzles, solutions

import daskgpt

PHONE = (390, 844)  # pixels


def by_name(path):
    return path.stem


@pytest.fixture(scope="module", params=NOTEBOOKS, ids=by_name)
def executed(request, tmp_path_factory):
    """Path and cells of a notebook that has run with its puzzles tried, with one more cell that says where."""
    folder = tmp_path_factory.mktemp(request.param.stem)
    notebook = answered(nbformat.read(request.param, as_version=4), solutions(request.param))
    notebook.cells.append(nbformat.v4.new_code_cell("import sys\nprint(sys.executable)"))
    execute(notebook, folder)
    assert [path.name for path in folder.iterdir() if path.name != "ipython"] == [], "the notebook left files behind"
    return request.param, notebook.cells


def outputs(cells):
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def text(cell):
    """What a cell has shown, as text."""
    return "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs)


@pytest.mark.slow
def test_notebook_runs_without_errors_in_this_python(executed):
    _, cells = executed
    code = [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
    assert all(cell.execution_count for cell in code)
    assert [output for output in outputs(cells) if output.output_type == "error"] == []
    assert text(code[-1]).strip() == sys.executable


@pytest.mark.slow
def test_notebook_draws_pictures(executed):
    _, cells = executed
    shown = [output.get("data", {}) for output in outputs(cells)]
    assert sum("image/png" in each or "<svg" in each.get("text/html", "") for each in shown) >= 3


@pytest.mark.slow
def test_checks_know_right_answers_from_wrong_ones_and_from_none(executed):
    path, cells = executed
    begins = {"check": "Your turn", "none": "Your turn", "right": "Right", "wrong": "Not yet"}
    parts = [(*cell.id.partition("-")[:2], text(cell).strip()) for cell in cells if cell.cell_type == "code"]
    told = [(kind, shown) for kind, dash, shown in parts if dash and kind in begins]
    assert [(kind, shown) for kind, shown in told if not shown.startswith(begins[kind])] == []
    assert [kind for kind, _ in told].count("right") == len(solutions(path))


SAME = {"4": " the same\n", "5": "the same losses: True\n"}  # what notebooks that compare hashes find


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem[0] in SAME], ids=by_name)
def test_notebook_uses_a_cluster_that_runs_already(path, tmp_path, monkeypatch):
    machines, place = tmp_path / "machines", tmp_path / "place"
    machines.mkdir()
    place.mkdir()
    with Machines(machines, 2) as cluster:
        cluster.have(2)
        monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", cluster.address)
        cells = execute(nbformat.read(path, as_version=4), place).cells
        assert [output for output in outputs(cells) if output.output_type == "error"] == []
        shown = "".join(text(cell) for cell in cells if cell.cell_type == "code")
        assert f"scheduler  cluster at {cluster.address}, 2 workers" in shown
        assert "LocalCluster" not in shown
        assert SAME[path.stem[0]] in shown
        assert cluster.processes["scheduler"].poll() is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_puzzles_have_solutions(path):
    notebook, found = nbformat.read(path, as_version=4), solutions(path)
    ids = [cell.id for cell in notebook.cells]
    assert puzzles(notebook) == list(found)
    for name in found:
        assert ids[ids.index(f"puzzle-{name}") + 1] == f"check-{name}"
        assert found[name]["right"]
        assert found[name]["wrong"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_notebook_is_stored_without_results(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.slow
@pytest.mark.skipif(PATH is None, reason="needs Chromium")
def test_a_phone_shows_what_a_notebook_shows(executed, tmp_path):
    path, cells = executed
    file = tmp_path / "page.html"
    file.write_text(page(nbformat.v4.new_notebook(cells=cells), path.stem))
    width = "document.documentElement.scrollWidth"
    found = visit(file, tmp_path / "profile", "document.readyState === 'complete'", (width,), size=PHONE, phone=True)
    assert found.requests[0] == file.as_uri()
    assert [url for url in found.requests[1:] if not url.startswith("data:")] == []
    assert found.messages == []
    assert found.values == [PHONE[0]]


def test_a_puzzle_says_what_an_answer_is_worth():
    told = [daskgpt.puzzle(answer, lambda x: x + 1 == 3, "count", "two") for answer in (None, 2, 3, "two")]
    assert [str(each).split(".")[0] for each in told] == ["Your turn", "Right", "Not yet", "Not yet"]
    assert str(told[1]) == "Right. two"
    assert str(told[2]) == "Not yet. count"
    assert "TypeError" in str(told[3])
    assert [bool(each) for each in told] == [False, True, False, False]
    assert "<b>Right.</b>" in told[1]._repr_html_()
