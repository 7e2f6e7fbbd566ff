"""The tree in DESIGN.md: every file of the package with the first sentence of its docstring.

`python tests/tree.py` writes it anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, DESIGN = ROOT / "daskgpt", ROOT / "DESIGN.md"
BLOCK = re.compile(r"(?<=## The tree\n).*?```\n(.*?)```\n", re.DOTALL)
# From the top floor to the bottom.
ROOMS = (
    "instruments",
    "generation",
    "training",
    "data",
    "schedulers",
    "formats",
    "model",
    "graph",
    "kernels",
    "config",
)


def tree() -> str:
    """A line a file, rooms in the order of their floors."""
    lines = [_line(path, 0) for path in _files(PACKAGE)]
    for room in ROOMS:
        lines += _room(PACKAGE / room, 0)
    return "\n".join(lines) + "\n"


def _room(folder: Path, depth: int) -> Iterator[str]:
    yield f"{'  ' * depth}{folder.name + '/':<{30 - 2 * depth}}{_sentence(folder / '__init__.py')}"
    for path in _files(folder):
        yield _line(path, depth + 1)
    for inner in sorted(path for path in folder.iterdir() if (path / "__init__.py").exists()):
        yield from _room(inner, depth + 1)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")


def _line(path: Path, depth: int) -> str:
    return f"{'  ' * depth}{path.stem:<{30 - 2 * depth}}{_sentence(path)}"


def _sentence(path: Path) -> str:
    """The first sentence of a module's docstring, or what stands before its first colon and blank."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return re.split(r"(?<=[^.])\. |: `|\.$", text)[0]


def in_design() -> str:
    """What DESIGN.md has."""
    found = BLOCK.search(DESIGN.read_text())
    assert found, "DESIGN.md has no tree"
    return found[1]


if __name__ == "__main__":
    text = DESIGN.read_text()
    DESIGN.write_text(text.replace(f"```\n{in_design()}```\n", f"```\n{tree()}```\n"))
