"""The drawings of the documentation, made from the code: `python benchmarks/drawings.py` writes them."""

from __future__ import annotations

from pathlib import Path

from drawing.batch_sums import batch_sums
from drawing.block_grains import block_grains
from drawing.step_tasks import step_tasks

FOLDER = Path(__file__).parent.parent / "docs" / "drawings"
DRAWINGS = {"block_grains.svg": block_grains, "step_tasks.svg": step_tasks, "batch_sums.svg": batch_sums}


def write(folder: Path) -> None:
    """Every drawing as a file."""
    folder.mkdir(exist_ok=True)
    for name, draw in DRAWINGS.items():
        (folder / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    write(FOLDER)
