"""The tasks of a step and their dependencies, by name, and drawings of them; notebooks import it from their folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from html import escape
from itertools import accumulate
from typing import Any

from dask.callbacks import Callback

from daskgpt.config.errors import require, require_known
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataConfig, DataflowConfig
from daskgpt.graph.calls import Origin
from daskgpt.graph.program import Values, calls_of
from daskgpt.profiling.measure import job_from
from daskgpt.profiling.plan import planned, planned_step
from daskgpt.profiling.timeline import TaskGraph, chunks_of, color_of, longest_chain
from daskgpt.training.autotune import Trial

DRAWN = 300  # tasks that a picture has at most
LABELS, COLUMNS, NARROWEST, BOWS = 112, 236, 40, 16  # pixels: of names, of all columns, of one at least, of bows
ALONE, STRIPE, GAP, TOP = 15, 7, 19, 30  # heights: of a kernel alone, of one among several, between rows, of the chunks
LINE, MARK = "#9aa4b2", "#d1242f"


@dataclass(frozen=True)
class DataflowTask:
    """One task of a step.

    name    layer and place as on Dask's dashboard, and chunk; the pass is left out if it is forward
    chunk   (b, t), None in it for an axis that is whole; None for sums and updates, which belong to no chunk
    calls   origins of the kernels that it runs, in order
    bytes   of its results
    """

    name: str
    chunk: tuple[int | None, int | None] | None
    calls: tuple[Origin, ...]
    bytes: int


@dataclass(frozen=True, repr=False)
class Dataflow:
    """A graph of tasks.

    title   describes the step
    tasks   name -> task; tasks come after those that they wait for
    needs   name -> names of the tasks that it waits for
    peak    largest number of bytes of all arrays of the step at one time
    """

    title: str
    tasks: Mapping[str, DataflowTask]
    needs: Mapping[str, frozenset[str]]
    peak: int

    @property
    def edges(self) -> list[tuple[str, str]]:
        """Pairs (earlier task, later task that waits for it), in the order of the tasks."""
        return [(earlier, name) for name in self.tasks for earlier in self.tasks if earlier in self.needs[name]]

    @property
    def bytes(self) -> int:
        """Bytes of the results of all tasks."""
        return sum(task.bytes for task in self.tasks.values())

    def before(self, name: str) -> frozenset[str]:
        """Return the tasks that must be done before this one starts."""
        require_known(name, self.tasks, "Dataflow", "task")
        names = {name}
        for later in reversed(list(self.tasks)):
            if later in names:
                names |= self.needs[later]
        return frozenset(names - {name})

    def after(self, name: str) -> frozenset[str]:
        """Return the tasks that cannot start before this one is done."""
        require_known(name, self.tasks, "Dataflow", "task")
        names = {name}
        for later in self.tasks:
            if not names.isdisjoint(self.needs[later]):
                names.add(later)
        return frozenset(names - {name})

    def beside(self, name: str) -> frozenset[str]:
        """Return the tasks that may run at the same time as this one."""
        return frozenset(self.tasks) - self.before(name) - self.after(name) - {name}

    def chain(self) -> list[str]:
        """Return the longest chain of tasks of which each waits for the one before it; threads cannot shorten it."""
        needs = ((name, dict.fromkeys(sorted(self.needs[name]), 0.0)) for name in self.tasks)
        return longest_chain(needs, dict.fromkeys(self.tasks, 1.0))

    def depths(self) -> dict[str, int]:
        """Return the length of the longest chain of tasks before each task."""
        depths: dict[str, int] = {}
        for name in self.tasks:
            depths[name] = max((depths[earlier] + 1 for earlier in self.needs[name]), default=0)
        return depths

    def of(self, block: int, phase: str = "forward") -> Dataflow:
        """Return the tasks and kernels of one transformer block in one pass, which names leave out.

        Errors   ValueError if there are none
        """
        calls = {
            name: tuple(call for call in task.calls if (call.block, call.phase) == (block, phase))
            for name, task in self.tasks.items()
        }
        short = _distinct({name: _short(name, block, phase) for name, kernels in calls.items() if kernels})
        got = {"block": block, "phase": phase}
        require(bool(short), "Dataflow.of", "some task must run a kernel of it", got, "Ask for a block of the model.")
        tasks = {new: replace(self.tasks[name], name=new, calls=calls[name]) for name, new in short.items()}
        needs = {new: frozenset(short[need] for need in self.needs[name] & short.keys()) for name, new in short.items()}
        return Dataflow(f"block {block}, {phase}: {self.title}", tasks, needs, self.peak)

    def __repr__(self) -> str:
        chain, kernels = len(self.chain()), sum(len(task.calls) for task in self.tasks.values())
        return (
            f"Dataflow of {self.title}\n"
            f"tasks       {len(self.tasks):,}, which run {kernels:,} kernels; {len(self.edges):,} edges\n"
            f"chain       {chain:,} one after the other; {len(self.tasks) / max(chain, 1):.1f} at a time on average\n"
            f"bytes       {self.bytes / 1e6:,.2f} MB handed on, {self.peak / 1e6:,.2f} MB at the step's peak"
        )


def dataflow(
    config: ModelConfig,
    data: DataConfig | Mapping[str, Any] | None = None,
    dataflow: DataflowConfig | Mapping[str, Any] | None = None,
) -> Dataflow:
    """Return the tasks of a training step and their dependencies, without running the step.

    Chunks and grain that are auto are chosen as by `daskgpt.plan`.

    Errors    ValueError if the configurations do not fit each other

    >>> from daskgpt import preset
    >>> small = preset("tiny", blocks=1)
    >>> graph = dataflow(small, {"batch_size": 4}, {"batch_chunk": 2, "grain": "kernel"})
    >>> graph = graph.of(block=0)
    >>> len(graph.tasks), len(graph.chain())
    (20, 10)
    """
    job = job_from(config, data=data, dataflow=dataflow)
    step = planned_step(*planned(job))
    results = dict[Any, int]()  # bytes of what each task returns
    with Callback(posttask=lambda key, result, *_: results.update({key: _bytes_of(result)})):
        trial = Trial(step)
    inside, chunk_of_call = TaskGraph.of(step).needs, chunks_of(step)
    calls = {key: [call.key for call in calls_of(step.graph[key]) if call.key in chunk_of_call] for key in inside}
    chunks = {key: next((c for call in keys if (c := chunk_of_call[call])), None) for key, keys in calls.items()}
    names = _distinct({key: _name(step.title(key), chunk) for key, chunk in chunks.items()})
    needs = {names[key]: frozenset(names[need] for need in keys) for key, keys in inside.items()}
    tasks = {}
    for key in TopologicalSorter(inside).static_order():
        origins = tuple(map(step.kernels.origin, calls[key]))
        tasks[names[key]] = DataflowTask(names[key], chunks[key], origins, results.get(key, 0))
    size, chunk = (" x ".join(map(str, shape)) for shape in (job.batch_shape, step.dials.chunk))
    flow = Dataflow(f"{size} tokens in chunks of {chunk}, grain {step.dials.grain}", tasks, needs, trial.peak)
    depths = flow.depths()
    return replace(flow, tasks={name: tasks[name] for name in sorted(tasks, key=lambda name: (depths[name], name))})


def _bytes_of(result: Any) -> int:
    """Return the bytes of the arrays in a task's result, each of which counts once."""

    def arrays_in(value: Any) -> Iterator[Any]:
        if isinstance(value, list | tuple):
            for part in value:
                yield from arrays_in(part)
        elif value is not None:
            yield value

    found = arrays_in(result.values if isinstance(result, Values) else result)
    return sum(array.nbytes for array in {id(array): array for array in found}.values())


def _name(title: str, chunk: tuple[int | None, ...] | None) -> str:
    kind, _, place = title.partition("-")
    where = "" if chunk is None else f"[{', '.join('all' if part is None else str(part) for part in chunk)}]"
    return f"{kind.removesuffix('.forward')} {place}{where}"


def _short(name: str, block: int, phase: str) -> str:
    """Return a name without block and pass."""
    kind, _, place = name.partition(" ")
    place = place.removeprefix(f"h.{block}.")
    return f"{kind.removesuffix(f'.{phase}')} {place}"


def _distinct(names: Mapping[Any, str]) -> dict[Any, str]:
    """Return names that differ: repeated ones get a number."""
    counts = Counter[str]()
    distinct: dict[Any, str] = {}
    for key, name in names.items():
        counts[name] += 1
        distinct[key] = name if counts[name] == 1 else f"{name} #{counts[name]}"
    return distinct


# Drawings.


@dataclass(frozen=True, repr=False)
class Drawing:
    """A graph as a notebook shows it: time runs down, with a column per chunk and a stripe per kernel.

    marked  names of tasks that are red
    hidden  edges that are not drawn
    """

    flow: Dataflow
    marked: Collection[str] = ()
    hidden: Collection[tuple[str, str]] = ()

    def __repr__(self) -> str:
        return repr(self.flow)

    def _repr_html_(self) -> str:
        drawn = _Picture(self).svg() if len(self.flow.tasks) <= DRAWN else ""
        return f"<pre>{escape(self.flow.title if self.marked else repr(self))}</pre>{drawn}"


def title_of(task: DataflowTask) -> str:
    """Return the name of a task without the chunk."""
    return task.name.partition("[")[0]


def height_of(task: DataflowTask) -> int:
    """Return the height of a task's box [pixels], which has a stripe per kernel."""
    return ALONE if len(task.calls) < 2 else STRIPE * len(task.calls)


class _Picture:
    """A drawing that is narrow enough for a phone."""

    def __init__(self, drawing: Drawing) -> None:
        self.flow, self.marked, self.hidden = drawing.flow, drawing.marked, drawing.hidden
        flow, depths = self.flow, self.flow.depths()
        chunks = [task.chunk for task in flow.tasks.values() if task.chunk is not None]
        cut = sorted({(b or 0, t) for b, t, *_ in chunks if t is not None}) or sorted({(b or 0, 0) for b, *_ in chunks})
        self.columns = cut or [(0, 0)]
        self.wide = max(NARROWEST, COLUMNS / len(self.columns))
        # A row for each kind of task at a depth, and each part of the heads, so that no box hides another one.
        kinds = {name: (depths[name], title_of(task), (task.chunk or ())[2:]) for name, task in flow.tasks.items()}
        number = {kind: row for row, kind in enumerate(sorted(set(kinds.values())))}
        self.row = {name: number[kind] for name, kind in kinds.items()}
        self.rows = [
            [flow.tasks[name] for name, place in self.row.items() if place == row] for row in range(len(number))
        ]
        heights = (max(height_of(task) for task in row) + GAP for row in self.rows)
        *self.tops, self.bottom = accumulate(heights, initial=TOP)

    def box(self, name: str) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of a task's box, which spans the columns of its chunk."""
        task, top, inset = self.flow.tasks[name], self.tops[self.row[name]], min(6.0, self.wide / 8)
        chunk = task.chunk or (None, None)
        spanned = [n for n, place in enumerate(self.columns) if all(c in (None, p) for c, p in zip(chunk, place))] or [
            0
        ]
        left, right = LABELS + spanned[0] * self.wide + inset, LABELS + (spanned[-1] + 1) * self.wide - inset
        return left, top, right, top + height_of(task)

    def svg(self) -> str:
        """Return the drawing."""
        parts = [self._edge(*edge) for edge in self.flow.edges if edge not in self.hidden]
        parts += [self._task(name) for name in self.flow.tasks]
        parts += [self._label(number) for number in range(len(self.rows))]
        for number, (b, t) in enumerate(self.columns):
            middle = LABELS + (number + 0.5) * self.wide
            parts.append(f'<text x="{middle:.0f}" y="16" text-anchor="middle" font-size="11">[{b}, {t}]</text>')
        parts.append('<text x="0" y="16" font-size="11">chunk [b, t]</text>')
        size = f'width="{LABELS + self.wide * len(self.columns) + BOWS:.0f}" height="{self.bottom:.0f}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(parts)}</svg>'

    def _task(self, name: str) -> str:
        left, top, right, bottom = self.box(name)
        task, marked = self.flow.tasks[name], name in self.marked
        high = (bottom - top) / max(len(task.calls), 1)
        stripes = "".join(
            f'<rect x="{left:.1f}" y="{top + number * high:.1f}" width="{right - left:.1f}" height="{high:.1f}" '
            f'fill="{color_of(call.kind)}"/>'
            for number, call in enumerate(task.calls)
        )
        frame = f'fill="none" stroke="{MARK if marked else "#333"}" stroke-width="{2.5 if marked else 0.8}"'
        box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" {frame}'
        return f"<g><title>{escape(name)}</title>{stripes}<rect {box}/></g>"

    def _edge(self, earlier: str, later: str) -> str:
        """Return a line from the bottom of one task to the top of another; a bow passes rows between them."""
        left, _, right, foot = self.box(earlier)
        other_left, head, other_right, _ = self.box(later)
        if self.row[later] - self.row[earlier] > 1:
            bow = max(right, other_right) + self.wide * 0.22
            curve = f"C{bow:.1f},{foot + 14:.1f} {bow:.1f},{head - 14:.1f} {other_right - 5:.1f},{head:.1f}"
            path = f"M{right - 5:.1f},{foot:.1f} {curve}"
        else:
            path = f"M{(left + right) / 2:.1f},{foot:.1f} L{(other_left + other_right) / 2:.1f},{head:.1f}"
        color, width = (MARK, 2.2) if {earlier, later} <= set(self.marked) else (LINE, 1.2)
        return f'<path d="{path}" fill="none" stroke="{color}" stroke-width="{width}"/>'

    def _label(self, row: int) -> str:
        """Return the label at the left of a row: layer, place, and the number of kernels if there are several."""
        task, y = self.rows[row][0], self.tops[row]
        kind, _, place = title_of(task).partition(" ")
        kernels = [f"{len(task.calls)} kernels"] * (len(task.calls) > 1)
        looks = [(10.5, "#111"), (9, "#666"), (9, "#666")]
        return "".join(
            f'<text x="0" y="{y + 8 + 10 * number}" font-size="{size}" fill="{color}">{escape(line[:21])}</text>'
            for number, (line, (size, color)) in enumerate(zip((kind, place, *kernels), looks))
        )
