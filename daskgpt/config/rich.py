"""Objects in notebooks: tables and drawings in HTML and SVG, without scripts, style sheets or a network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

CELL = "text-align: left; vertical-align: top; padding: 2px 10px 2px 0; white-space: normal"
NUMBER = "text-align: right; padding: 2px 0 2px 14px; font-variant-numeric: tabular-nums"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of cells: the first column at the left, the others at the right."""
    first, *others = (max(map(len, cells)) for cells in zip(*rows))
    lines = (
        name.ljust(first) + "".join(f"  {cell:>{size}}" for cell, size in zip(cells, others)) for name, *cells in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def html_table(title: str, rows: Sequence[Sequence[str]], *, head: Sequence[str] = (), numbers: bool = False) -> str:
    """Return a table with a title; cells are text, not HTML.

    numbers   whether all but the first column are numbers
    """

    def row(cells: Sequence[str], tag: str) -> str:
        styles = [CELL, *[NUMBER if numbers else CELL] * (len(cells) - 1)]
        inside = "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in zip(cells, styles))
        return f"<tr>{inside}</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    heading = f"<thead>{row(head, 'th')}</thead>" if head else ""
    return f'<div style="overflow-x: auto"><b>{escape(title)}</b><table>{heading}<tbody>{body}</tbody></table></div>'


def svg(width: float, height: float, parts: Iterable[str], attributes: str = 'role="img"') -> str:
    """Return a drawing that is never wider than its page."""
    size = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    look = f'{attributes} {size} style="max-width: 100%; height: auto; background: white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {look}>{"".join(parts)}</svg>'


def html_text(text: str) -> str:
    """Return lines unchanged, in a monospaced font."""
    style = "font-family: monospace; white-space: pre; overflow-x: auto; line-height: 1.3"
    return f'<pre style="{style}">{escape(text)}</pre>'
