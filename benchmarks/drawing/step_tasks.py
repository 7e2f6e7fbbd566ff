"""The tasks of a step and what they wait for: forward and backward in the columns of two chunks, updates between them.

Everything is read from a recorded step: the tasks are those that a scheduler is given.
"""

from __future__ import annotations

from collections import defaultdict

from daskgpt.config.model import preset
from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.calls import Origin
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Graph, Key, is_leaf
from daskgpt.graph.program import calls_of
from daskgpt.model.step import CompiledStep, Dials, compile_step
from drawing.svg import INK, Picture

BATCH, CHUNK = (4, 64), (2, 64)
BOX, ROW, COLUMN, TOP = (196, 20), 26, 290, 34
FILLS = {"forward": "#dbe5fb", "backward": "#fbdcd6", "head": "#ece0f8", "update": "#e3e6e9"}


def step_tasks() -> str:
    """The picture, as SVG."""
    step = compile_step(preset("tiny", blocks=2), BATCH, OptimizerConfig(), Dials(CHUNK, "block", in_place=True))
    graph = {key: node for key, node in step.graph.items() if not is_leaf(node)}
    picture = Picture("The tasks of a step, grain block")
    for column, name in enumerate(("chunk 0", "sums and updates", "chunk 1")):
        picture.words(10 + column * COLUMN, 18, name, size=12, bold=True)
    places = _places(step, graph)
    for key in sorted(graph, key=places.__getitem__):
        for source in sorted(graph[key].dependencies & graph.keys(), key=places.__getitem__):
            _edge(picture, places[source], places[key])
    for key in sorted(graph, key=places.__getitem__):
        x, y = places[key]
        origins = [step.kernels.origin(call.key) for call in calls_of(graph[key])]
        told = ", ".join(dict.fromkeys(f"{origin.kind} {origin.where}" for origin in origins))
        picture.box(x, y, *BOX, fill=FILLS[_way(origins)], stroke="#b9bec4", told=told)
        picture.words(x + 7, y + 14, step.title(key), size=10.5)
    return picture.text()


def _way(origins: list[Origin]) -> str:
    """Which pass a task belongs to; "head" where it turns from forward to backward."""
    passes = {origin.phase for origin in origins}
    if "update" in passes:
        return "update"
    return passes.pop() if len(passes) == 1 else "head"


def _column(step: CompiledStep, key: Key) -> int:
    """Left or right for the two chunks, the middle for sums and updates."""
    first = calls_of(step.graph[key])[0].key
    chunk = chunk_of(step.kernels.graph, first, whole=True)
    return 1 if chunk is None else 2 * int(chunk[0])


def _rows(graph: Graph) -> dict[Key, int]:
    """Task -> how many tasks the longest chain to it has."""
    rows: dict[Key, int] = {}

    def row(key: Key) -> int:
        if key not in rows:
            rows[key] = max((row(source) + 1 for source in graph[key].dependencies & graph.keys()), default=0)
        return rows[key]

    for key in graph:
        row(key)
    return rows


def _places(step: CompiledStep, graph: Graph) -> dict[Key, tuple[float, float]]:
    """Left and top of each task's box: a column's tasks one below the other, all columns of one height."""
    rows = _rows(graph)
    columns: dict[int, list[Key]] = defaultdict(list)
    for key in sorted(graph, key=lambda key: (rows[key], step.title(key), key[1:])):
        columns[_column(step, key)].append(key)
    most, places = max(map(len, columns.values())), dict[Key, tuple[float, float]]()
    for column, keys in columns.items():
        for number, key in enumerate(keys):
            apart = ROW * (most - 1) / (len(keys) - 1)
            places[key] = 10.0 + column * COLUMN, TOP + number * apart
    return places


def _edge(picture: Picture, source: tuple[float, float], reader: tuple[float, float]) -> None:
    """Down within a column, else from side to side."""
    (x, y), (to_x, to_y) = source, reader
    if x == to_x:
        bow = 0 if to_y - y < 2 * ROW or x != 10.0 + COLUMN else 12
        start, end = x + BOX[0] / 2 - bow, to_x + BOX[0] / 2 - bow
        picture.path(f"M{start:g} {y + BOX[1]:g}L{end:g} {to_y:g}", stroke=INK, width=1.2)
        return
    right = to_x > x
    start, end = x + BOX[0] * right, to_x + BOX[0] * (not right)
    middle, y, to_y = (start + end) / 2, y + BOX[1] / 2, to_y + BOX[1] / 2
    picture.path(f"M{start:g} {y:g}C{middle:g} {y:g} {middle:g} {to_y:g} {end:g} {to_y:g}", width=0.7)
