"""What import-linter cannot say: which files may name a private module of somebody else's."""

from __future__ import annotations

from pathlib import Path

import daskgpt

PACKAGE = Path(daskgpt.__file__).parent


def test_dasks_private_graph_nodes_stand_behind_one_file():
    users = [path for path in PACKAGE.rglob("*.py") if "dask._task_spec import" in path.read_text()]
    assert [path.relative_to(PACKAGE).as_posix() for path in users] == ["graph/nodes.py"]


def test_no_two_files_have_one_name():
    names = [path.name for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(name for name in set(names) if names.count(name) > 1) == []
