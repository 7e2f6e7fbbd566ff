"""Timelines: kernel calls with their places in the model, as Chrome's trace events and as numbers."""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple, TypeVar

from daskgpt.config.errors import number_of, require, text_table
from daskgpt.graph.calls import PHASES, Origin, call_of, is_pick
from daskgpt.graph.compiled import CompiledGraph
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Key, is_leaf
from daskgpt.graph.program import Span, calls_of

K = TypeVar("K")
Task = tuple[int, Key]

# Layers, some with their pass, by color; the tasks of several kernels are named by `graph.fuse.title`.
PALETTE = {
    "#4269d0": "linear unembedding tokens",
    "#ff725c": "attention",
    "#3ca951": "layernorm rmsnorm qk_norm",
    "#efb118": "gelu relu2 swiglu",
    "#a463f2": "add",
    "#17becf": "gather",
    "#9c6b4e": "embedding",
    "#ff8ab7": "crossentropy tokens.head",
    "#7f8c99": "adamw update",
    "#bcbd22": "mean",
    "#97bbf5": "split",
    "#5b6770": "muon",
    "#f2b6a0": "rotary",
    "#c8b0ec": "dropout",
    "#d62728": "receive",  # red, as on Dask's pages
    "#f4a3a3": "send",
}
COLORS = {layer: color for color, layers in PALETTE.items() for layer in layers.split()}
OTHER_COLOR = "#d0a842"
DARKER = 0.62  # of a forward kernel's color: its backward kernels


def is_message(kind: str) -> bool:
    """Return whether a call of this name sends a message to another worker, or waits for one."""
    return kind.partition(".")[0] in ("receive", "send")


def color_of(name: str, other: str = OTHER_COLOR) -> str:
    """Return the color of a layer and pass: bright forward, dark backward, red for messages.

    name   `linear.backward`, or `linear`; what follows a dash is left out
    other  color of a layer that has none
    """
    kind = name.partition("-")[0]
    layer, _, phase = kind.partition(".")
    color = COLORS.get(kind) or COLORS.get(layer, other)
    if phase != "backward" or not color:
        return color
    return "#" + "".join(f"{int(int(color[at : at + 2], 16) * DARKER):02x}" for at in (1, 3, 5))


@dataclass(frozen=True)
class Event(Origin):
    """One kernel call: its place in the model, and the time at which it ran.

    chunk   (b, t), None in it for an axis that is whole, or (b, None, h) for a part of the heads; None for a call that
            belongs to no chunk
    lane    number of the thread, of all workers
    start   and end, in seconds since the timeline began
    bytes   of the arrays that it returned (an update in place returns none), or of the message that it sent
    task    step and key of its task
    task_name  name of its task
    """

    step: int = 0
    chunk: tuple[int | None, ...] | None = None
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


class Lane(NamedTuple):
    """A thread of a worker, counted from 1, or of this process, whose name is empty."""

    worker: str
    thread: int

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.worker, f"thread {self.thread}")))


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of a step and their dependencies.

    needs     every task -> tasks of the same step
    earlier   task -> tasks of the step before, if steps overlap
    awaited   the tasks of a window that must be done before the next one starts
    """

    needs: dict[Key, set[Key]]
    earlier: dict[Key, set[Key]]
    awaited: frozenset[Key]

    @classmethod
    def of(cls, runnable: CompiledGraph) -> TaskGraph:
        """Return the tasks of a step. On a cluster, updates may still run while the next step starts."""
        tasks = {key: node for key, node in runnable.graph.items() if not is_leaf(node)}
        needs = {key: set(node.dependencies) & tasks.keys() for key, node in tasks.items()}
        awaited = tasks.keys() if runnable.kernels.in_place else runnable.output_keys
        return cls(needs, runnable.needs_of_last_run(), frozenset(awaited))

    @classmethod
    def of_ranks(cls, graphs: Sequence[TaskGraph]) -> TaskGraph:
        """Return the tasks of all ranks, without dependencies between ranks."""
        needs, earlier = (dict(ChainMap(*(getattr(graph, name) for graph in graphs))) for name in ("needs", "earlier"))
        return cls(needs, earlier, frozenset[Key]().union(*(graph.awaited for graph in graphs)))


@dataclass(frozen=True, repr=False)
class Timeline:
    """Recorded steps: events in the order of their starts, their lanes, and the dependencies of tasks."""

    title: str
    lanes: tuple[Lane, ...]
    events: tuple[Event, ...]
    windows: tuple[Window, ...]
    tasks: TaskGraph

    @property
    def steps(self) -> list[int]:
        """The steps, counted from 0 as in `metrics.jsonl`; what people see counts from 1."""
        return [step for window in self.windows for step in window.steps]

    @cached_property
    def summary(self) -> Summary:
        """Times of kernels, tasks and lanes. Errors   ValueError without events"""
        return summarise(self)

    def trace(self) -> dict[str, Any]:
        """Return Chrome's trace events, which Perfetto reads as well: a process per worker, a thread per lane.

        Source   the Trace Event Format: ph X is an event with a duration, M a name; times are in microseconds
        """
        workers = list(dict.fromkeys(lane.worker for lane in self.lanes))
        places = [(1 + workers.index(lane.worker), 1 + number) for number, lane in enumerate(self.lanes)]
        names = [(pid, 0, "process_name", worker or self.title) for pid, worker in enumerate(workers, 1)]
        names += [(*place, "thread_name", f"thread {lane.thread}") for place, lane in zip(places, self.lanes)]
        entries: list[dict[str, Any]] = [
            {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}} for pid, tid, kind, name in names
        ]
        for event in self.events:
            # On a cluster, clocks differ by some microseconds. Rounded ends keep calls of one thread apart.
            start, end = (round(max(seconds, 0.0) * 1e6, 3) for seconds in (event.start, event.end))
            pid, tid = places[event.lane]
            entry = {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": round(end - start, 3), "name": event.kind}
            shown = {name: getattr(event, name) for name in ("layer", "block", "chunk", "bytes")}
            more = {"pass": event.phase, "where": event.place, "step": event.step + 1, "task": event.task_name}
            entries.append({**entry, "cat": f"{event.phase},step {event.step + 1}", "args": {**shown, **more}})
        about = {"title": self.title, "summary": str(self.summary)}
        return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": about}

    def __repr__(self) -> str:
        """Return a summary that fits on one screen."""
        text = str(self.summary) if self.events else "no events"
        lines = [f"Timeline: {self.title}", *text.splitlines()]
        return "\n".join(fill(line, 100, subsequent_indent="  ") if len(line) > 100 else line for line in lines)


def chunks_of(runnable: CompiledGraph) -> dict[Key, tuple[int | None, ...] | None]:
    """Return the chunk of each kernel call of a step; None for a call that belongs to no chunk.

    A pick, which takes one of a kernel's results out of a tuple, has no work of its own, and is left out.
    """
    graph = runnable.kernels.graph
    keys = (call.key for node in runnable.graph.values() for call in calls_of(node))
    return {key: chunk_of(graph, key, whole=False) for key in keys if not is_pick(graph[key])}


def events_of(runnable: CompiledGraph, spans: Iterable[tuple[int, Span]], start: float) -> list[Event]:
    """Return the events of one process from the (step, span) of its kernel calls.

    Lanes are numbers of threads, in the order in which these ran their first calls.

    start   start of the timeline, on the clock of the spans
    """
    tasks = {call.key: key for key, node in runnable.graph.items() for call in calls_of(node)}
    chunks, lanes, events = chunks_of(runnable), dict[int, int](), []
    for step, span in sorted(spans, key=lambda pair: pair[1].start):
        lane = lanes.setdefault(span.thread, len(lanes))
        if span.key in chunks:
            origin, task = astuple(runnable.kernels.origin(span.key)), tasks[span.key]
            when = step, chunks[span.key], lane, span.start - start, span.end - start
            call = call_of(runnable.kernels.graph[span.key])
            size = call.size if is_message(origin[0]) else span.bytes
            fields = [*origin, *when, size, (step, task), runnable.title(task), span.key]
            events.append(Event(*fields))
    return events


def seconds_at_once(spans: Iterable[tuple[float, float, object]], least: int) -> float:
    """Return the seconds in which so many different names or more run at once, from (start, end, name) of each span."""
    changes = [change for start, end, name in spans for change in ((start, 1, name), (end, -1, name))]
    running, seconds, before = Counter[object](), 0.0, 0.0
    for time, change, name in sorted(changes, key=itemgetter(0)):
        seconds += time - before if len(running) >= least else 0.0
        running[name] += change
        before = time
        if not running[name]:
            del running[name]
    return seconds


# Numbers.


@dataclass(frozen=True)
class Summary:
    """A summary of recorded steps. Seconds are those of all steps together.

    wall               from a window's start to its end, over all windows
    busy               share of the wall time in which each lane ran kernels
    inside_share       share of all lanes' time between the kernels of a task
    scheduling_share   share of all lanes' time in which a task was ready and a lane had none
    waiting_share      share of all lanes' time in which a lane had none and none was ready, or waited for a worker
    overlap            share of the wall time in which two or more different layers ran at once, without messages
    steps_overlap      share of the wall time in which two or more different steps ran at once, without messages
    critical_path      the longest chain of tasks that had to wait for one another, by their measured times
    critical           (layer, phase) -> seconds of it on the critical path
    kernels            (layer, phase) -> seconds and calls, all lanes
    tasks              those that ran kernels or messages, all steps; barriers, which only wait, do not count
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
    tasks: int

    @property
    def kernel_share(self) -> float:
        """Share of all lanes' time in which kernels ran."""
        return sum(self.busy.values()) / len(self.busy)

    def __str__(self) -> str:
        """Return the summary as text, with means over the steps."""
        per_step = 1e3 / self.steps
        path = ", ".join(
            f"{layer}.{phase} {seconds / self.critical_path:.0%}"
            for (layer, phase), seconds in list(self.critical.items())[:3]
        )
        lines = [
            f"wall          {self.wall * per_step:9.2f} ms a step, {number_of(self.steps, 'step')}",
            *(f"{name:13} {share:9.1%} busy, {1 - share:.1%} idle" for name, share in self.busy.items()),
            f"overlap       {self.overlap:9.1%} of the time two or more layers at once, "
            f"{self.steps_overlap:.1%} two or more steps",
            f"critical path {self.critical_path * per_step:9.2f} ms a step, "
            f"{self.critical_path / self.wall:.0%} of the wall time: {path}",
            f"threads' time {self.kernel_share:9.1%} kernels, {self.inside_share:.1%} between the kernels of a task, "
            f"{self.scheduling_share:.1%} scheduling (a task was ready), {self.waiting_share:.1%} waiting (none was)",
            f"tasks         {self.tasks / self.steps:9,.0f} a step",
            "",
            _table(self),
        ]
        return "\n".join(lines)


def summarise(timeline: Timeline) -> Summary:
    """Return the summary of a timeline.

    Errors   ValueError if it has no events
    """
    events = timeline.events
    rule, advice = "a timeline must have events", "Record at least one step."
    require(bool(events), "summarise", rule, {"events": len(events)}, advice)
    wall = sum(window.end - window.start for window in timeline.windows)
    spans = _spans(events)
    path = longest_chain(_needs(timeline), {task: end - start for task, (start, end) in spans.items()})
    on_path, critical = set(path), defaultdict[tuple[str, str], float](float)
    kernels: dict[tuple[str, str], tuple[float, int]] = {}
    busy, messages = [0.0] * len(timeline.lanes), 0.0
    for event in events:
        kind = event.layer, event.phase
        seconds, calls = kernels.get(kind, (0.0, 0))
        kernels[kind] = seconds + event.seconds, calls + 1
        if is_message(event.layer):
            messages += event.seconds
        else:
            busy[event.lane] += event.seconds
        if event.task in on_path:
            critical[kind] += event.seconds
    all_time = wall * len(timeline.lanes)
    in_tasks = sum(end - start for start, end in spans.values())
    scheduling = _scheduling(timeline, spans)
    working = [event for event in events if not is_message(event.layer)]
    return Summary(
        steps=len(timeline.steps),
        wall=wall,
        busy={lane.name: seconds / wall for lane, seconds in zip(timeline.lanes, busy)},
        inside_share=max(in_tasks - sum(busy) - messages, 0.0) / all_time,
        scheduling_share=scheduling / all_time,
        waiting_share=max(all_time - in_tasks - scheduling + messages, 0.0) / all_time,
        # All updates count as one layer.
        overlap=seconds_at_once(((event.start, event.end, event.stage) for event in working), 2) / wall,
        steps_overlap=seconds_at_once(((event.start, event.end, event.step) for event in working), 2) / wall,
        critical_path=sum(spans[task][1] - spans[task][0] for task in path if task in spans),
        critical=dict(sorted(critical.items(), key=lambda item: -item[1])),
        kernels=kernels,
        tasks=len(spans),
    )


def _spans(events: Iterable[Event]) -> dict[Task, tuple[float, float]]:
    """Return the time from the first start to the last end of the events of each task."""
    spans: dict[Task, tuple[float, float]] = {}
    for event in events:
        start, end = spans.get(event.task, (event.start, event.end))
        spans[event.task] = min(start, event.start), max(end, event.end)
    return spans


def longest_chain(needs: Iterable[tuple[K, Mapping[K, float]]], seconds: Mapping[K, float]) -> list[K]:
    """Return the longest chain of tasks of which each needs the one before, in order; empty without tasks.

    needs    of each task: tasks that came before it -> seconds in between; any others do not count
    seconds  of the tasks; one without takes none
    """
    length, before = dict[K, float](), dict[K, K]()
    for task, delays in needs:
        starts = {need: length[need] + delay for need, delay in delays.items() if need in length}
        if starts:
            before[task] = max(starts, key=starts.__getitem__)
        length[task] = max(starts.values(), default=0.0) + seconds.get(task, 0.0)
    chain = [max(length, key=length.__getitem__)] if length else []
    while chain and chain[-1] in before:
        chain.append(before[chain[-1]])
    return chain[::-1]


def _needs(timeline: Timeline) -> Iterator[tuple[Task, dict[Task, float]]]:
    """Yield each task of each step with the tasks that it waits for, without delay; the latter come first.

    A task waits for the tasks whose results it reads, for barriers, for tasks of the step before (the update of a
    weight and its readers), and for the submission of its window, a task without a key: it waits for all tasks of the
    window before that had to be done.
    """
    tasks = timeline.tasks
    order = tuple(TopologicalSorter(tasks.needs).static_order())
    done: list[Task] = []
    for window in timeline.windows:
        submission: Task = window.steps[0], ()
        yield submission, dict.fromkeys(done, 0.0)
        for step, key in product(window.steps, order):
            needed = [(step, need) for need in tasks.needs[key]] + [(step - 1, k) for k in tasks.earlier.get(key, ())]
            yield (step, key), dict.fromkeys([submission, *needed], 0.0)
        done = [submission, *product(window.steps, tasks.awaited)]


def _scheduling(timeline: Timeline, spans: Mapping[Task, tuple[float, float]]) -> float:
    """Return the seconds, of all lanes, in which a lane had no task although one was ready.

    A task is ready when all tasks that it waits for are done. Barriers and tasks without kernels take no time.
    """
    done: dict[Task, float] = {(window.steps[0], ()): window.start for window in timeline.windows}
    changes: list[tuple[float, int, int]] = []  # time, and by how much the numbers of ready and running tasks change
    for task, needed in _needs(timeline):
        if task not in done:
            ready = max(done[need] for need in needed if need in done)
            start, end = spans.get(task, (ready, ready))
            done[task] = end
            changes += [(min(ready, start), 1, 0), (start, -1, 1), (end, 0, -1)]
    seconds, ready_tasks, running = 0.0, 0, 0
    changes.sort()
    for (time, more_ready, more_running), (following, _, _) in pairwise(changes):
        ready_tasks, running = ready_tasks + more_ready, running + more_running
        seconds += (following - time) * max(min(ready_tasks, len(timeline.lanes) - running), 0)
    return seconds


def _table(summary: Summary) -> str:
    """Return a table of milliseconds and calls per step, by layer and pass, of all lanes together."""
    layers = {layer for layer, _ in summary.kernels}
    of_layer = {layer: [summary.kernels.get((layer, phase), (0.0, 0)) for phase in PHASES] for layer in sorted(layers)}
    rows = sorted(of_layer.items(), key=lambda row: -sum(seconds for seconds, _ in row[1]))
    columns = zip(*of_layer.values())
    rows.append(
        ("all", [(sum(seconds for seconds, _ in cells), sum(calls for _, calls in cells)) for cells in columns])
    )
    table = [["ms a step", *PHASES, "all", "calls"]]
    for name, cells in rows:
        seconds, calls = map(sum, zip(*cells))
        shown = [f"{1e3 * passed / summary.steps:.3f}" if passed or name == "all" else "" for passed, _ in cells]
        table.append([name, *shown, f"{1e3 * seconds / summary.steps:.3f}", f"{calls / summary.steps:,.0f}"])
    return text_table(table)


def paths_of(path: str | Path) -> list[Path]:
    """Return FILE.json and FILE.html, whether FILE is given with one of these endings or without."""
    path, endings = Path(path), (".json", ".html")
    base = path.with_suffix("") if path.suffix in endings else path
    return [base.with_name(base.name + ending) for ending in endings]
