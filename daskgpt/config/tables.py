"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of cells: the first column at the left, the others at the right."""
    first, *others = (max(map(len, cells)) for cells in zip(*rows))
    lines = (
        name.ljust(first) + "".join(f"  {cell:>{size}}" for cell, size in zip(cells, others)) for name, *cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)
