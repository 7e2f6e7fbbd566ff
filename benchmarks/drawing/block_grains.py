"""One block's forward pass at every grain: kernel calls as cells, chunks as columns, and frames around those of a task.

Everything is read from recorded steps: calls and edges from the graph as it was built, frames from the merged one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import pairwise

from daskgpt.config.model import preset
from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.calls import Origin, is_pick
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Graph, Key
from daskgpt.graph.program import calls_of
from daskgpt.model.step import CompiledStep, Dials, compile_step
from daskgpt.profiling.timeline import color_of
from drawing.svg import FAINT, FRAME, INK, Picture

BATCH = (4, 64)
# Grain and chunk of each panel: tokens cut, then whole sequences, where there is nothing to gather.
PANELS = (("kernel", (2, 32)), ("segment", (2, 32)), ("block", (2, 32)), ("block", (1, 64)), ("chunk", (1, 64)))
CELL, ROW, COLUMN, PANEL, LEFT, TOP = (18, 14), 30, 38, 172, 150, 80


@dataclass(frozen=True)
class Cell:
    """A kernel call of the forward pass: its row (a layer in the model), and the columns that it spans."""

    stage: str
    origin: Origin
    columns: tuple[int, ...]


def block_grains() -> str:
    """The picture, as SVG: a block with another before and another behind it."""
    config, block = preset("tiny", blocks=3), 1
    steps = {}
    for grain, chunk in PANELS:
        steps[grain, chunk] = compile_step(config, BATCH, OptimizerConfig(), Dials(chunk, grain, in_place=True))
    rows = _rows(next(iter(steps.values())), block)  # tokens are cut there: it has all layers
    picture = Picture("One transformer block's forward pass at each grain")
    _labels(picture, rows, block)
    x: float = LEFT
    for (_, chunk), step in steps.items():
        x = _panel(picture, x, step, rows, chunk, block)
    picture.width = x - 40
    return picture.text()


def _cells(step: CompiledStep) -> dict[Key, Cell]:
    """The kernel calls of the forward pass in the blocks."""
    graph, tokens = step.kernels.graph, step.batch_shape[1] // step.dials.chunk[1]
    cells = {}
    for key in graph:
        origin: Origin | None = step.kernels.origin(key)
        if origin is None or origin.phase != "forward" or origin.block is None or is_pick(graph[key]):
            continue
        b, t, *_ = chunk_of(graph, key, whole=False) or (0, 0)
        columns = range(tokens) if t is None else [t]
        cells[key] = Cell(origin.stage, origin, tuple(b * tokens + column for column in columns))
    return cells


def _rows(step: CompiledStep, block: int) -> dict[str, int]:
    """Stage -> its row: all of a block, the last of the one before and the first of the one behind."""
    cells, needs = _cells(step), dict[str, set[str]]()
    for key, cell in cells.items():
        read = {cells[source].stage for source in _read(step.kernels.graph, key) if source in cells}
        needs.setdefault(cell.stage, set()).update(read)
    blocks = {cell.stage: cell.origin.block for cell in cells.values()}
    ordered = list(TopologicalSorter(needs).static_order())
    inside = [number for number, stage in enumerate(ordered) if blocks[stage] == block]
    return {stage: row for row, stage in enumerate(ordered[inside[0] - 1 : inside[-1] + 2])}


def _labels(picture: Picture, rows: Mapping[str, int], block: int) -> None:
    for stage, row in rows.items():
        layer, where = stage.split(" ", 1)
        name, inside = layer.partition(".")[0], where.split(".", 2)
        in_block = int(inside[1]) == block
        place = inside[2] if in_block else where
        picture.words(8, TOP + row * ROW + 11, name, fill=INK if in_block else FAINT, bold=in_block)
        picture.words(LEFT - 18, TOP + row * ROW + 11, place, size=10, anchor="end", fill=FAINT)
    for line in (0.5, len(rows) - 1.5):  # where the block begins and ends
        y = TOP + line * ROW + CELL[1] / 2 + 0.5
        picture.path(f"M8 {y:g}H{LEFT - 18}", dashed=True)


def _panel(
    picture: Picture, x: float, step: CompiledStep, rows: Mapping[str, int], chunk: tuple[int, int], block: int
) -> float:
    """Draw one grain from x on; where it ends."""
    cells, graph, grain = _cells(step), step.kernels.graph, step.dials.grain
    count = 1 + max(column for cell in cells.values() for column in cell.columns)
    tokens = step.batch_shape[1] // chunk[1]
    picture.words(x, 16, f"grain {grain}", size=13, bold=True)
    picture.words(x, 32, f"{count} chunks of {chunk[0]} x {chunk[1]}", size=10)
    picture.words(x, 46, f"{step.tasks} tasks a step", size=10)
    for column in range(count):
        name = f"b{column // tokens}" + (f" t{column % tokens}" if tokens > 1 else "")
        picture.words(x + column * COLUMN + CELL[0] / 2, 66, name, size=9, anchor="middle", fill=FAINT)
    together = [[cells[call.key] for call in calls_of(task) if call.key in cells] for task in step.graph.values()]
    tasks = [calls for calls in together if calls and grain != "kernel"]
    for calls in sorted(tasks, key=lambda calls: (calls[0].columns, [rows.get(cell.stage, -1) for cell in calls])):
        _frame(picture, x, calls, rows, block)
    following = dict(pairwise(sorted({rows[cell.stage] for cell in cells.values() if cell.stage in rows})))
    shown = {key: cell for key, cell in cells.items() if cell.stage in rows}
    for key in sorted(shown, key=lambda key: (rows[shown[key].stage], shown[key].columns)):
        for source in sorted(_read(graph, key), key=str):
            if source in shown:
                straight = following[rows[shown[source].stage]] == rows[shown[key].stage]
                _edge(picture, x, shown[source], shown[key], rows, straight)
    for cell in sorted(shown.values(), key=lambda cell: (rows[cell.stage], cell.columns)):
        left, top, right, bottom = _place(x, cell, rows)
        colour = color_of(cell.origin.layer)
        told = f"{cell.origin.kind} {cell.origin.where}"
        picture.box(left, top, right - left, bottom - top, fill=colour, told=told)
    return x + PANEL


def _frame(picture: Picture, x: float, cells: Sequence[Cell], rows: Mapping[str, int], block: int) -> None:
    """A frame around the calls of one task, open where it continues in another block."""
    places = [_place(x, cell, rows) for cell in cells if cell.stage in rows]
    if not places:
        return
    shown = [rows[cell.stage] for cell in cells if cell.stage in rows]
    others = [cell.origin.block or 0 for cell in cells if cell.stage not in rows]
    above = min(shown) == 0 and any(other < block for other in others)
    below = max(shown) == len(rows) - 1 and any(other > block for other in others)
    left, right = min(place[0] for place in places) - 6, max(place[2] for place in places) + 6
    top, bottom = min(place[1] for place in places) - 6, max(place[3] for place in places) + 6
    sides = f"M{left:g} {bottom:g}V{top:g}{'M' if above else 'L'}{right:g} {top:g}V{bottom:g}"
    picture.path(sides + ("" if below else f"H{left:g}"), stroke=FRAME, width=1.3)


def _edge(picture: Picture, x: float, source: Cell, reader: Cell, rows: Mapping[str, int], straight: bool) -> None:
    """From a call to one that reads its result: straight, or around what lies between."""
    left, _, right, bottom = _place(x, source, rows)
    to_left, to_top, to_right, _ = _place(x, reader, rows)
    if straight:
        narrow = (left + right) / 2 if right - left < to_right - to_left else (to_left + to_right) / 2
        picture.path(f"M{narrow:g} {bottom:g}V{to_top:g}")
        return
    side = right + 3
    picture.path(
        f"M{right - 4:g} {bottom:g}Q{side:g} {bottom + 2:g} {side:g} {bottom + 10:g}"
        f"V{to_top - 10:g}Q{side:g} {to_top - 2:g} {right - 4:g} {to_top:g}"
    )


def _place(x: float, cell: Cell, rows: Mapping[str, int]) -> tuple[float, float, float, float]:
    top = TOP + rows[cell.stage] * ROW
    return x + cell.columns[0] * COLUMN, top, x + cell.columns[-1] * COLUMN + CELL[0], top + CELL[1]


def _read(graph: Graph, key: Key) -> set[Key]:
    """The calls that a call reads: for one result of several, the call that returned it."""
    calls: set[Key] = set()
    for source in graph[key].dependencies:
        calls |= graph[source].dependencies if is_pick(graph[source]) else {source}
    return calls
