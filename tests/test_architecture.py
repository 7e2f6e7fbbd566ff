"""What import-linter cannot say: which files may name a private module of somebody else's."""

from __future__ import annotations

import re
from pathlib import Path

from tree import in_design, tree

import daskgpt

PACKAGE = Path(daskgpt.__file__).parent


def test_dasks_private_graph_nodes_stand_behind_one_file():
    users = [path for path in PACKAGE.rglob("*.py") if "dask._task_spec import" in path.read_text()]
    assert [path.relative_to(PACKAGE).as_posix() for path in users] == ["graph/nodes.py"]


def test_no_two_files_have_one_name():
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []


def test_errors_are_made_in_one_place():
    made_by_hand = re.compile(r"\b(?:Value|Type|Runtime|FileNotFound|FileExists)Error\(\s*f?\"[^\"]*: ")
    rooms = [path for path in PACKAGE.rglob("*.py") if "kernels" not in path.parts]
    assert [path.relative_to(PACKAGE).as_posix() for path in rooms if made_by_hand.search(path.read_text())] == []


def test_the_tree_in_the_design_is_the_tree():
    assert in_design() == tree(), "write it anew with: python tests/tree.py"
