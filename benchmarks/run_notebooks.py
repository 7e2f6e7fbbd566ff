"""Run notebooks from top to bottom in a kernel of this Python, and write them as pages that also fit a phone.

`python benchmarks/run_notebooks.py --out executed` runs all of them, or the given ones, and writes
`executed/NAME.html`.

A puzzle is two cells that follow each other: `puzzle-NAME` assigns None to the reader's answer, `check-NAME` checks it
with `puzzles.puzzle`. `tests/solutions/NOTEBOOK.toml` has a table for each NAME: `right` is a correct source of
`puzzle-NAME`, `wrong` a list of incorrect ones.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import tomllib
from copy import deepcopy
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpec
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbconvert import HTMLExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOLUTIONS = ROOT / "tests" / "solutions"
SECONDS = 600  # for one cell, which hangs then; the first start on a machine compiles kernels
# A page that needs no network: nbconvert's own templates load MathJax and more from one.
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{highlight}</style>
<style>
body {{ max-width: 52rem; margin: auto; padding: 0 12px 3rem; font: 16px/1.5 system-ui, sans-serif }}
body {{ background: white; color: #1b1b1b }}
pre, .highlight {{ font: 13px/1.4 ui-monospace, monospace; overflow-x: auto; margin: 0 }}
.input pre {{ white-space: pre-wrap; overflow-wrap: anywhere }}
.output pre {{ padding-bottom: 8px }}
.input .highlight {{ background: #f6f7f9; border-left: 3px solid #b9c4d6 }}
.input .highlight {{ padding: 8px 10px; margin: 12px 0 6px }}
.output {{ margin: 0 0 16px }}
.output_area, .text_cell_render {{ overflow-x: auto }}
img, svg {{ max-width: 100%; height: auto }}
table {{ border-collapse: collapse; font-size: 14px }}
td, th {{ padding: 2px 10px 2px 0; vertical-align: top; text-align: left }}
:not(pre) > code {{ background: #f1f2f4; padding: 0 3px; overflow-wrap: anywhere }}
.anchor-link, .prompt {{ display: none }}
</style>
<body>{body}</body>
</html>
"""


class ThisPython(AsyncKernelManager):
    """Starts the interpreter that runs the tests, whatever kernels are registered on the machine."""

    @property
    def kernel_spec(self):
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        return KernelSpec(argv=argv, display_name="Python", language="python")


def solutions(path: Path) -> dict[str, dict[str, str | list[str]]]:
    """Of each puzzle of a notebook: `right`, source of the puzzle's cell, and `wrong`, a list of such."""
    file = SOLUTIONS / f"{path.stem}.toml"
    return tomllib.loads(file.read_text()) if file.exists() else {}


def puzzles(notebook) -> list[str]:
    """Their names, in the order of the notebook."""
    return [cell.id.removeprefix("puzzle-") for cell in notebook.cells if cell.id.startswith("puzzle-")]


def answered(notebook, answers):
    """The notebook with each puzzle tried with every wrong answer, with the right one, and left as it was."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        kind, _, name = cell.id.partition("-")
        if kind == "puzzle":
            puzzle = cell
        elif kind == "check":
            tries = [("wrong", source) for source in answers[name]["wrong"]] + [("right", answers[name]["right"])]
            for number, (worth, source) in enumerate([*tries, ("none", puzzle.source)]):
                given = nbformat.v4.new_code_cell(source, id=f"given-{number}-{name}")
                check = deepcopy(cell)
                check.id = f"{worth}-{number}-{name}"
                cells += [given, check]
    return nbformat.from_dict({**notebook, "cells": cells})


def execute(notebook, folder: Path):
    """Run a notebook, in its place, as a user in `folder` would.

    Errors   nbclient.exceptions.CellExecutionError for a cell that raises
    """
    paths = [str(ROOT), str(ROOT / "notebooks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "IPYTHONDIR": str(folder / "ipython"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=SECONDS, resources=place, kernel_manager_class=ThisPython).execute(env=environment)
    return notebook


def page(notebook, title: str) -> str:
    """What a notebook shows, as a page of one file, which needs no network."""
    exporter = HTMLExporter(template_name="basic")
    # Else each state of a progress line would be shown, one below the other.
    exporter.register_preprocessor(CoalesceStreamsPreprocessor, enabled=True)
    body, resources = exporter.from_notebook_node(notebook)
    return PAGE.format(title=title, body=body, highlight="\n".join(resources["inlining"]["css"]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks, by how their names begin; all of them where none is named")
    parser.add_argument("--out", type=Path, default=Path("executed"), help="folder of the pages")
    parser.add_argument("--scheduler", default="", help="address of a cluster that runs already, for notebooks 4 and 5")
    parser.add_argument("--solved", action="store_true", help="with the puzzles' answers tried, wrong and right")
    given = parser.parse_args()
    if given.scheduler:
        os.environ["DASK_SCHEDULER_ADDRESS"] = given.scheduler
    chosen = [path for path in NOTEBOOKS if not given.names or path.stem.startswith(tuple(given.names))]
    if not chosen:
        print(f"no notebook's name begins with {' or '.join(given.names)}", file=sys.stderr)
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    for path in chosen:
        notebook, start = nbformat.read(path, as_version=4), time.perf_counter()
        notebook = answered(notebook, solutions(path)) if given.solved else notebook
        with tempfile.TemporaryDirectory() as folder:
            execute(notebook, Path(folder))
        file = given.out / f"{path.stem}.html"
        file.write_text(page(notebook, path.stem))
        print(f"{time.perf_counter() - start:5.0f} s  {file}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
