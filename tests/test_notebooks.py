"""Tests of the notebooks' files, which are stored without results, and of the verdicts on a puzzle's answers."""

import json

import pytest
from puzzles import puzzle
from run_notebooks import NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_stored_without_outputs(path):
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize(
    ("answer", "worth", "more"),
    [(None, "Your turn.", ""), (2, "Right.", "two"), (3, "Not yet.", "count"), ("two", "Not yet.", "TypeError")],
)
def test_puzzle_verdicts(answer, worth, more):
    told = puzzle(answer, lambda x: x + 1 == 3, "count", "two")
    assert bool(told) == (worth == "Right.")
    assert str(told).startswith(worth)
    assert more in str(told)
    assert f"<b>{worth}</b>" in told._repr_html_()
