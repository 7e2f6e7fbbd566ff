"""A picture as SVG text: boxes, lines and words, without a script, a style sheet or a network."""

from __future__ import annotations

from html import escape

FONT = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', sans-serif"
INK, FAINT, FRAME = "#222222", "#8a8a8a", "#3a3a3a"


class Picture:
    """Elements of a picture in the order in which they are painted, and how large it is in the end."""

    def __init__(self, title: str) -> None:
        self.title, self.width, self.height = title, 0.0, 0.0
        self.elements: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *,
        fill: str = "none",
        stroke: str = "none",
        radius: float = 3,
        told: str = "",
    ) -> None:
        """told   what a browser shows where the mouse rests"""
        inside = f"<title>{escape(told)}</title>" if told else ""
        self._add(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}" '
            f'fill="{fill}" stroke="{stroke}">{inside}</rect>',
            x + width,
            y + height,
        )

    def path(self, points: str, *, stroke: str = FAINT, width: float = 1, dashed: bool = False) -> None:
        """A line by SVG's commands, inside of what other elements take up."""
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self._add(f'<path d="{points}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}/>', 0, 0)

    def words(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 11,
        anchor: str = "start",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        """One line, its base line at y."""
        weight = ' font-weight="600"' if bold else ""
        style = f'font-size="{size:g}" text-anchor="{anchor}" fill="{fill}"{weight}'
        self._add(f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>', x, y)

    def _add(self, element: str, right: float, bottom: float) -> None:
        self.elements.append(element)
        self.width, self.height = max(self.width, right), max(self.height, bottom)

    def text(self, margin: float = 10) -> str:
        """The file, ending with a line break; white behind it, for pages that are dark."""
        width, height = round(self.width + margin), round(self.height + margin)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" font-family="{FONT}" role="img">'
        )
        white = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", white, *self.elements, "</svg>"]) + "\n"
