"""Timelines: kernel calls with their places in the model, summaries of them, and strips of color for notebooks."""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from graphlib import TopologicalSorter
from html import escape
from itertools import accumulate, groupby, pairwise, product
from operator import itemgetter
from textwrap import fill
from typing import TypeVar

from daskgpt.config.errors import require
from daskgpt.config.rich import html_text, text_table
from daskgpt.graph.calls import PHASES, Origin, is_pick
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Key, is_leaf
from daskgpt.graph.program import Span, calls_of
from daskgpt.graph.recording import CompiledStep

K = TypeVar("K")
Task = tuple[int, Key]
Curve = list[tuple[float, int]]  # times, and the value from then on

COLORS = {
    "linear": "#4269d0",
    "attention": "#ff725c",
    "gelu": "#efb118",
    "layernorm": "#3ca951",
    "add": "#a463f2",
    "crossentropy": "#ff8ab7",
    "embedding": "#9c6b4e",
    "adamw": "#7f8c99",
    "muon": "#5b6770",
    "gather": "#17becf",
    "split": "#97bbf5",
    "mean": "#303030",
}
MESSAGES = {"receive": "#d62728", "send": "#f4a3a3"}  # red, as on Dask's pages
OTHER_COLOR = "#d0a842"
DARKER = 0.62  # of a forward kernel's color: its backward kernels

COLUMNS, LANE, GAP, LETTERS = 700, 22, 4, 110  # pixels


def is_message(layer: str) -> bool:
    """Return whether an event of this name sends a message to another worker, or waits for one."""
    return layer.partition(".")[0] in MESSAGES


def color_of(layer: str, backward: bool) -> str:
    """Return the color of a layer: bright forward, dark backward, red for messages."""
    if is_message(layer):
        return MESSAGES[layer.partition(".")[0]]
    color = COLORS.get(layer, OTHER_COLOR)
    parts = [int(color[at : at + 2], 16) * (DARKER if backward else 1) for at in (1, 3, 5)]
    return "#" + "".join(f"{int(part):02x}" for part in parts)


@dataclass(frozen=True)
class Event(Origin):
    """One kernel call: its place in the model, and the time at which it ran.

    chunk   (b, t), None in it for an axis that is whole; None for a call that belongs to no chunk
    lane    number of the thread or worker
    start   and end, in seconds since the timeline began
    bytes   of the arrays that it returned; an update in place returns none
    task    step and key of its task
    task_name  name of its task
    """

    step: int = 0
    chunk: tuple[int | None, int | None] | None = None
    lane: int = 0
    start: float = 0.0
    end: float = 0.0
    bytes: int = 0
    task: Task = (0, ())
    task_name: str = ""
    key: Key = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Window:
    """Steps that the scheduler got together, with start and end in seconds since the timeline began."""

    steps: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of a step and their dependencies.

    needs     every task -> tasks of the same step
    earlier   task -> tasks of the step before, if steps overlap
    awaited   the tasks of a window that must be done before the next one starts
    readers   readers of each kernel call's result in the same step, also of one that a pick takes from several results
    """

    needs: dict[Key, set[Key]]
    earlier: dict[Key, set[Key]]
    awaited: frozenset[Key]
    readers: dict[Key, list[Key]]

    @classmethod
    def of(cls, runnable: CompiledStep) -> TaskGraph:
        """Return the tasks of a step. On a cluster, updates may still run while the next step starts."""
        tasks = {key: node for key, node in runnable.graph.items() if not is_leaf(node)}
        needs = {key: set(node.dependencies) & tasks.keys() for key, node in tasks.items()}
        awaited = tasks.keys() if runnable.recorded.in_place else runnable.output_keys
        graph, readers = runnable.recorded.unmerged, defaultdict[Key, list[Key]](list)
        picked = {key: next(iter(node.dependencies)) for key, node in graph.items() if is_pick(node)}
        for key, node in graph.items():
            for dependency in node.dependencies if key not in picked else ():
                readers[picked.get(dependency, dependency)].append(key)
        return cls(needs, runnable.needs_of_last_run(), frozenset(awaited), dict(readers))

    @classmethod
    def of_ranks(cls, graphs: Sequence[TaskGraph]) -> TaskGraph:
        """Return the tasks of all ranks, without dependencies between ranks."""
        needs, earlier, readers = (
            dict(ChainMap(*(getattr(graph, name) for graph in graphs))) for name in ("needs", "earlier", "readers")
        )
        awaited = frozenset[Key]().union(*(graph.awaited for graph in graphs))
        return cls(needs, earlier, awaited, readers)


@dataclass(frozen=True, repr=False)
class Timeline:
    """Recorded steps: events in the order of their starts, the names of the lanes, and the dependencies of tasks."""

    title: str
    lanes: tuple[str, ...]
    events: tuple[Event, ...]
    windows: tuple[Window, ...]
    tasks: TaskGraph

    @property
    def steps(self) -> list[int]:
        """The steps, counted from 0 as in `metrics.jsonl`; what people see counts from 1."""
        return [step for window in self.windows for step in window.steps]

    def __repr__(self) -> str:
        """Return a summary that fits on one screen."""
        text = describe_summary(summarise(self)) if self.events else "no events"
        lines = [f"Timeline: {self.title}", *text.splitlines()]
        return "\n".join(fill(line, 100, subsequent_indent="  ") if len(line) > 100 else line for line in lines)

    def _repr_html_(self) -> str:
        """Return the same for notebooks, below the lanes as strips of color."""
        lanes = f"{svg_legend(self)}<br>{svg_strips(self)}" if self.events else ""
        return lanes + html_text(repr(self))


def chunks_of(runnable: CompiledStep) -> dict[Key, tuple[int | None, int | None] | None]:
    """Return the chunk of each kernel call of a step; None for a call that belongs to no chunk.

    A pick, which takes one of a kernel's results out of a tuple, has no work of its own, and is left out.
    """
    graph = runnable.recorded.unmerged
    keys = (call.key for node in runnable.graph.values() for call in calls_of(node))
    return {key: chunk_of(graph, key, whole=False) for key in keys if not is_pick(graph[key])}


def events_of(runnable: CompiledStep, spans: Iterable[tuple[int, Span]], start: float) -> list[Event]:
    """Return the events of one process from the (step, span) of its kernel calls.

    Lanes are numbers of threads, in the order in which these ran their first calls.

    start   start of the timeline, on the clock of the spans
    """
    home = {call.key: key for key, node in runnable.graph.items() for call in calls_of(node)}
    chunks, lanes, found = chunks_of(runnable), dict[int, int](), []
    for step, span in sorted(spans, key=lambda own: own[1].start):
        lane = lanes.setdefault(span.thread, len(lanes))
        if span.key in chunks:
            origin, task = astuple(runnable.recorded.origin(span.key)), home[span.key]
            when = step, chunks[span.key], lane, span.start - start, span.end - start
            own = [*origin, *when, span.bytes, (step, task), runnable.title(task), span.key]
            found.append(Event(*own))
    return found


def different_at_once(spans: Iterable[tuple[float, float, object]]) -> Curve:
    """Return the number of different names that run at once, as a curve, from (start, end, name) of each span."""
    changes = [change for start, end, name in spans for change in ((start, 1, name), (end, -1, name))]
    running: Counter[object] = Counter()
    found = []
    for time, own in groupby(sorted(changes, key=lambda change: change[0]), key=lambda change: change[0]):
        for _, change, name in own:
            running[name] += change
        running = +running  # without names that have ended
        found.append((time, len(running)))
    return found


# Numbers.


@dataclass(frozen=True)
class Summary:
    """A summary of recorded steps. Seconds are those of all steps together.

    wall               from a window's start to its end, over all windows
    busy               share of the wall time in which each lane ran kernels
    inside_share       share of all lanes' time between the kernels of a task
    scheduling_share   share of all lanes' time in which a task was ready and a lane had none
    waiting_share      share of all lanes' time in which a lane had none, and no task was ready for it
    overlap            share of the wall time in which two or more different layers ran at once
    steps_overlap      share of the wall time in which two or more different steps ran at once
    critical_path      the longest chain of tasks that had to wait for one another, by their measured times
    critical           (layer, phase) -> seconds of it on the critical path
    kernels            (layer, phase) -> seconds and calls, all lanes
    phases             seconds of each phase; empty if two phases ever ran at once
    """

    steps: int
    wall: float
    busy: dict[str, float]
    inside_share: float
    scheduling_share: float
    waiting_share: float
    overlap: float
    steps_overlap: float
    critical_path: float
    critical: dict[tuple[str, str], float]
    kernels: dict[tuple[str, str], tuple[float, int]]
    phases: dict[str, float]
    tasks: int

    @property
    def kernel_share(self) -> float:
        """Share of all lanes' time in which kernels ran."""
        return sum(self.busy.values()) / len(self.busy)


def summarise(timeline: Timeline) -> Summary:
    """Return the summary of a timeline.

    Errors   ValueError if it has no events
    """
    events = timeline.events
    rule, advice = "a timeline must have events", "Record at least one step."
    require(bool(events), "summarise", rule, {"events": len(events)}, advice)
    wall = sum(window.end - window.start for window in timeline.windows)
    spans = _spans(events, lambda event: event.task)
    path = critical_path(timeline, spans)
    on_path, critical = set(path), defaultdict[tuple[str, str], float](float)
    kernels: dict[tuple[str, str], tuple[float, int]] = {}
    busy = [0.0] * len(timeline.lanes)
    for event in events:
        kind = event.layer, event.phase
        seconds, calls = kernels.get(kind, (0.0, 0))
        kernels[kind] = seconds + event.seconds, calls + 1
        busy[event.lane] += event.seconds
        if event.task in on_path:
            critical[kind] += event.seconds
    all_time = wall * len(timeline.lanes)
    in_tasks = sum(end - start for start, end in spans.values())
    scheduling = _scheduling(timeline, spans)
    return Summary(
        steps=len(timeline.steps),
        wall=wall,
        busy=dict(zip(timeline.lanes, (seconds / wall for seconds in busy))),
        inside_share=max(in_tasks - sum(busy), 0.0) / all_time,
        scheduling_share=scheduling / all_time,
        waiting_share=max(1 - (in_tasks + scheduling) / all_time, 0.0),
        overlap=seconds_of(layers_at_once(timeline), 2) / wall,
        steps_overlap=seconds_of(different_at_once((e.start, e.end, e.step) for e in events), 2) / wall,
        critical_path=sum(spans[task][1] - spans[task][0] for task in path if task in spans),
        critical=dict(sorted(critical.items(), key=lambda item: -item[1])),
        kernels=kernels,
        phases=_phases(timeline),
        tasks=len(spans),
    )


def _spans(events: Iterable[Event], of: Callable[[Event], K]) -> dict[K, tuple[float, float]]:
    """Return the time from the first start to the last end of the events of each group."""
    spans: dict[K, tuple[float, float]] = {}
    for event in events:
        start, end = spans.get(of(event), (event.start, event.end))
        spans[of(event)] = min(start, event.start), max(end, event.end)
    return spans


def _needs(timeline: Timeline) -> Iterator[tuple[Window, Task, list[Task]]]:
    """Yield each task of each step with its window and the tasks that it waits for; the latter come first."""
    tasks = timeline.tasks
    order = tuple(TopologicalSorter(tasks.needs).static_order())
    for window in timeline.windows:
        for step, key in product(window.steps, order):
            earlier = [(step - 1, other) for other in tasks.earlier.get(key, ())]
            yield window, (step, key), [(step, other) for other in tasks.needs[key]] + earlier


def critical_path(timeline: Timeline, spans: Mapping[Task, tuple[float, float]]) -> list[Task]:
    """Return the longest chain of tasks of which each had to wait for the one before, in order.

    A task waits for the tasks whose results it reads, for barriers, for tasks of the step before (the update of a
    weight and its readers), and for all tasks that had to be done before its window was submitted.
    """
    length, before = dict[Task | None, float]({None: 0.0}), dict[Task | None, Task | None]()
    current, gate = timeline.windows[0], None
    for window, task, needed in _needs(timeline):
        if window is not current:
            done = product(current.steps, timeline.tasks.awaited)
            current, gate = window, max(done, key=length.__getitem__, default=gate)
        before[task] = max([gate, *(need for need in needed if need in length)], key=length.__getitem__)
        start, end = spans.get(task, (0.0, 0.0))
        length[task] = length[before[task]] + end - start
    path, at = list[Task](), max(length, key=length.__getitem__)
    while at is not None:
        path.append(at)
        at = before[at]
    return path[::-1]


def _scheduling(timeline: Timeline, spans: Mapping[Task, tuple[float, float]]) -> float:
    """Return the seconds, of all lanes, in which a lane had no task although one was ready.

    A task is ready when all tasks that it waits for are done. Barriers and tasks without kernels take no time.
    """
    done = dict[Task, float]()
    changes: list[tuple[float, int, int]] = []  # time, and by how much the numbers of ready and running tasks change
    for window, task, needed in _needs(timeline):
        ready = max([window.start, *(done[need] for need in needed if need in done)])
        start, end = spans.get(task, (ready, ready))
        done[task] = end
        changes += [(min(ready, start), 1, 0), (start, -1, 1), (end, 0, -1)]
    seconds, ready_tasks, running = 0.0, 0, 0
    changes.sort()
    for (time, more_ready, more_running), (following, _, _) in pairwise(changes):
        ready_tasks, running = ready_tasks + more_ready, running + more_running
        seconds += (following - time) * max(min(ready_tasks, len(timeline.lanes) - running), 0)
    return seconds


def live_bytes(timeline: Timeline) -> Curve:
    """Return the bytes of activations and gradients that are still to be read, as a curve.

    A result counts from the end of its kernel to the end of its last reader in the same step. Parameters, moments and
    the scratch memory of kernels do not count.
    """
    ends = {(event.step, event.key): event.end for event in timeline.events}
    changes: Counter[float] = Counter()
    for event in timeline.events:
        readers = timeline.tasks.readers.get(event.key, ()) if event.phase != "update" else ()
        last = max((ends.get((event.step, key), event.end) for key in readers), default=event.end)
        if last > event.end and event.bytes:
            changes[event.end] += event.bytes
            changes[last] -= event.bytes
    times = sorted(changes)
    return list(zip(times, accumulate(changes[time] for time in times)))


def layers_at_once(timeline: Timeline) -> Curve:
    """Return the number of different layers that run at once; all updates count as one layer."""
    return different_at_once((event.start, event.end, event.stage) for event in timeline.events)


def seconds_of(counts: Curve, least: int) -> float:
    """Return the seconds in which a curve has at least this value."""
    return sum(following - time for (time, count), (following, _) in pairwise(counts) if count >= least)


def _phases(timeline: Timeline) -> dict[str, float]:
    """Return the seconds of each phase, from the end of the phase before; empty if two phases overlap."""
    spans, found = _spans(timeline.events, lambda event: (event.step, event.phase)), dict.fromkeys(PHASES, 0.0)
    for window in timeline.windows:
        last = window.start
        for step, phase in product(window.steps, PHASES):
            start, end = spans.get((step, phase), (last, last))
            if start < last:
                return {}
            found[phase] += end - last
            last = end
    return found


def describe_summary(found: Summary) -> str:
    """Return a summary as text, with means over the steps."""
    per_step = 1e3 / found.steps
    path = ", ".join(
        f"{layer}.{phase} {seconds / found.critical_path:.0%}"
        for (layer, phase), seconds in list(found.critical.items())[:5]
    )
    lines = [
        f"wall          {found.wall * per_step:9.2f} ms a step, {found.steps} step{'s' if found.steps > 1 else ''}",
        *(f"{name:13} {share:9.1%} busy, {1 - share:.1%} idle" for name, share in found.busy.items()),
        f"overlap       {found.overlap:9.1%} of the time two or more layers at once, "
        f"{found.steps_overlap:.1%} two or more steps",
        f"critical path {found.critical_path * per_step:9.2f} ms a step, "
        f"{found.critical_path / found.wall:.0%} of the wall time: {path}",
        f"threads' time {found.kernel_share:9.1%} kernels, {found.inside_share:.1%} between the kernels of a task, "
        f"{found.scheduling_share:.1%} scheduling (a task was ready), {found.waiting_share:.1%} waiting (none was)",
        f"tasks         {found.tasks / found.steps:9,.0f} a step",
        "",
        _table(found),
    ]
    return "\n".join(lines)


def _table(found: Summary) -> str:
    """Return a table of milliseconds and calls per step, by layer and pass, of all lanes together."""
    layers = {layer for layer, _ in found.kernels}
    of_layer = {layer: [found.kernels.get((layer, phase), (0.0, 0)) for phase in PHASES] for layer in sorted(layers)}
    rows = sorted(of_layer.items(), key=lambda row: -sum(seconds for seconds, _ in row[1]))
    columns = zip(*of_layer.values())
    rows.append(("all", [(sum(seconds for seconds, _ in own), sum(calls for _, calls in own)) for own in columns]))
    table = [["ms a step", *PHASES, "all", "calls"]]
    for name, own in rows:
        seconds, calls = map(sum, zip(*own))
        shown = [f"{1e3 * each / found.steps:.3f}" if each or name == "all" else "" for each, _ in own]
        table.append([name, *shown, f"{1e3 * seconds / found.steps:.3f}", f"{calls / found.steps:,.0f}"])
    return text_table(table)


# Strips of color, whose size does not depend on the number of kernel calls.


def svg_strips(timeline: Timeline, *, end: float = 0.0, named: bool = True) -> str:
    """Return lanes as SVG. Each column of pixels has the color of the layer and pass that took most of its time.

    end     seconds of the whole width; 0 = those of the timeline
    named   whether lanes have their names at the left
    """
    own = max(window.end for window in timeline.windows)
    end, left = end or own, LETTERS if named else 0
    height = len(timeline.lanes) * (LANE + GAP)
    parts = []
    for number, name in enumerate(timeline.lanes):
        top = number * (LANE + GAP)
        parts.append(f'<text x="0" y="{top + 15}" font-size="11">{escape(name)}</text>' if named else "")
        width = COLUMNS * own / end
        parts.append(f'<rect x="{left}" y="{top}" width="{width:.0f}" height="{LANE}" fill="#eef0f3"/>')
        for color, group in groupby(enumerate(_columns(timeline, number, end)), key=itemgetter(1)):
            first, *others = (column for column, _ in group)
            place = f'x="{left + first}" y="{top}" width="{1 + len(others)}" height="{LANE}"'
            parts.append(f'<rect {place} fill="{color}"/>' if color else "")
    size = f'viewBox="0 0 {left + COLUMNS} {height}" width="{left + COLUMNS}" height="{height}"'
    style = 'style="max-width: 100%; height: auto"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


def svg_legend(*timelines: Timeline) -> str:
    """Return the colors of the layers of all timelines, as HTML."""
    square = '<span style="display: inline-block; width: 11px; height: 11px; background: {}"></span> {}'
    return " &nbsp; ".join(square.format(color_of(layer, False), escape(layer)) for layer in layers_of(*timelines))


def layers_of(*timelines: Timeline) -> list[str]:
    """Return the names of the layers of all timelines."""
    return sorted({event.layer for timeline in timelines for event in timeline.events})


def _columns(timeline: Timeline, lane: int, end: float) -> list[str]:
    """Return the color of each column; "" if the lane ran no kernel for most of it."""
    taken = [defaultdict[str, float](float) for _ in range(COLUMNS)]
    wide = end / COLUMNS
    for event in timeline.events:
        if event.lane != lane:
            continue
        color = color_of(event.layer, event.phase == "backward")
        for column in range(int(event.start / wide), min(int(event.end / wide) + 1, COLUMNS)):
            taken[column][color] += min(event.end, (column + 1) * wide) - max(event.start, column * wide)
    return [max(own, key=own.__getitem__) if sum(own.values()) > wide / 2 else "" for own in taken]
