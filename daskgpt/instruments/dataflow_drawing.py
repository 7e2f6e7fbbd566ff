"""A dataflow as a drawing: time runs down, a column a chunk, a stripe a kernel; narrow enough for a phone."""

from __future__ import annotations

from collections.abc import Collection
from html import escape

from daskgpt.instruments.dataflow import Dataflow, DataflowTask
from daskgpt.instruments.timeline import color_of

LABELS, COLUMNS, NARROWEST, BOWS = 112, 236, 40, 16  # pixels: of names, of all columns, of one at least, of bows
ALONE, STRIPE, GAP, TOP = 15, 7, 19, 30  # heights: of a kernel alone, of one among several, between rows, of the chunks
LINE, MARK = "#9aa4b2", "#d1242f"


class Layout:
    """Where each task stands."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow, depths = flow, flow.levels or flow.depths()
        chunks = [task.chunk for task in flow.tasks.values() if task.chunk is not None]
        cut = sorted({(b or 0, t) for b, t in chunks if t is not None}) or sorted({(b or 0, 0) for b, _ in chunks})
        self.columns = cut or [(0, 0)]
        self.wide = max(NARROWEST, COLUMNS / len(self.columns))
        self.width = LABELS + self.wide * len(self.columns) + BOWS
        # A row for each kind of task at a depth, so that none stands over another one.
        kinds = sorted({(depths[name], title_of(task)) for name, task in flow.tasks.items()})
        number = {kind: row for row, kind in enumerate(kinds)}
        self.row = {name: number[depths[name], title_of(task)] for name, task in flow.tasks.items()}
        rows: list[list[DataflowTask]] = [[] for _ in kinds]
        for name, task in flow.tasks.items():
            rows[self.row[name]].append(task)
        self.rows, self.tops, top = rows, list[float](), float(TOP)
        for row in rows:
            self.tops.append(top)
            top += max(map(height_of, row)) + GAP
        self.height = top

    def span(self, task: DataflowTask) -> tuple[float, float]:
        """Left and right end of a task: its column, those of all its tokens, or all."""
        own = [
            number
            for number, (b, t) in enumerate(self.columns)
            if task.chunk is None
            or ((task.chunk[0] is None or task.chunk[0] == b) and (task.chunk[1] is None or task.chunk[1] == t))
        ] or [0]
        inset = min(6.0, self.wide / 8)
        return LABELS + own[0] * self.wide + inset, LABELS + (own[-1] + 1) * self.wide - inset

    def box(self, name: str) -> tuple[float, float, float, float]:
        """Left, top, right and bottom."""
        task, top = self.flow.tasks[name], self.tops[self.row[name]]
        left, right = self.span(task)
        return left, top, right, top + height_of(task)


def title_of(task: DataflowTask) -> str:
    """Its name without the chunk."""
    return task.name.partition("[")[0]


def height_of(task: DataflowTask) -> float:
    return ALONE if len(task.calls) < 2 else STRIPE * len(task.calls)


def svg_dataflow(flow: Dataflow, marked: Collection[str] = ()) -> str:
    """The drawing, with some tasks and the edges between them in red."""
    at = Layout(flow)
    parts = [_edge(at, earlier, later, marked) for earlier, later in flow.edges]
    parts += [_task(at, name, name in marked) for name in flow.tasks]
    parts += [_label(at, number) for number in range(len(at.rows))]
    for number, (b, t) in enumerate(at.columns):
        middle = LABELS + (number + 0.5) * at.wide
        parts.append(f'<text x="{middle:.0f}" y="16" text-anchor="middle" font-size="11">[{b}, {t}]</text>')
    parts.append('<text x="0" y="16" font-size="11">chunk [b, t]</text>')
    size = f'viewBox="0 0 {at.width:.0f} {at.height:.0f}" width="{at.width:.0f}" height="{at.height:.0f}"'
    style = 'style="max-width: 100%; height: auto; background: white"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size} {style}>{"".join(parts)}</svg>'


def _task(at: Layout, name: str, marked: bool) -> str:
    left, top, right, bottom = at.box(name)
    task = at.flow.tasks[name]
    high = (bottom - top) / max(len(task.calls), 1)
    stripes = "".join(
        f'<rect x="{left:.1f}" y="{top + number * high:.1f}" width="{right - left:.1f}" height="{high:.1f}" '
        f'fill="{color_of(call.layer, call.phase == "backward")}"/>'
        for number, call in enumerate(task.calls)
    )
    frame = f'fill="none" stroke="{MARK if marked else "#333"}" stroke-width="{2.5 if marked else 0.8}"'
    box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" {frame}'
    return f"<g><title>{escape(name)}</title>{stripes}<rect {box}/></g>"


def _edge(at: Layout, earlier: str, later: str, marked: Collection[str]) -> str:
    """From the foot of a task to the head of another; past the rows between them in a bow."""
    left, _, right, foot = at.box(earlier)
    other_left, head, other_right, _ = at.box(later)
    x, other_x = (left + right) / 2, (other_left + other_right) / 2
    if at.row[later] - at.row[earlier] > 1:
        x, other_x = right - 5, other_right - 5
        bow = max(right, other_right) + at.wide * 0.22
        path = f"M{x:.1f},{foot:.1f} C{bow:.1f},{foot + 14:.1f} {bow:.1f},{head - 14:.1f} {other_x:.1f},{head:.1f}"
    else:
        path = f"M{x:.1f},{foot:.1f} L{other_x:.1f},{head:.1f}"
    both = earlier in marked and later in marked
    return f'<path d="{path}" fill="none" stroke="{MARK if both else LINE}" stroke-width="{2.2 if both else 1.2}"/>'


def _label(at: Layout, row: int) -> str:
    """What stands at the left of a row: the layer and where it is, of several kernels how many."""
    task, y = at.rows[row][0], at.tops[row]
    kind, _, place = title_of(task).partition(" ")
    lines = [kind, place, *([f"{len(task.calls)} kernels"] if len(task.calls) > 1 else [])]
    texts = [
        f'<text x="0" y="{y + 8 + 10 * number:.0f}" font-size="{10.5 if number == 0 else 9}" '
        f'fill="{"#111" if number == 0 else "#666"}">{escape(line[:21])}</text>'
        for number, line in enumerate(lines)
    ]
    return "".join(texts)
