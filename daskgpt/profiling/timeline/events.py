"""The events of a timeline: kernel calls in the words of the model, their colors, and the graph of their tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from graphlib import TopologicalSorter
from itertools import groupby
from textwrap import fill

from daskgpt.config.rich import html_text
from daskgpt.graph.calls import is_pick
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Graph, Key, is_leaf
from daskgpt.graph.program import Span, calls_of
from daskgpt.graph.recording import CompiledStep

Task = tuple[int, Key]

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


def is_message(layer: str) -> bool:
    """Return whether an event of this name sends to another worker, or waits for one."""
    return layer.partition(".")[0] in MESSAGES


def color_of(layer: str, backward: bool) -> str:
    """Return the color of a layer: bright forward, dark backward, red for messages."""
    if is_message(layer):
        return MESSAGES[layer.partition(".")[0]]
    color = COLORS.get(layer, OTHER_COLOR)
    parts = [int(color[at : at + 2], 16) * (DARKER if backward else 1) for at in (1, 3, 5)]
    return "#" + "".join(f"{int(part):02x}" for part in parts)


@dataclass(frozen=True)
class Event:
    """One kernel call.

    phase   forward, backward or update
    where   in the model: `h.0.attn.c_attn`; of a backward call with the argument whose gradient it is
    stage   its layer of the network and pass, by which different layers are told apart; all updates are one
    chunk   (b, t), None in it for an axis that is whole; None for what belongs to no chunk
    lane    number of the thread or worker
    start   and end, in seconds since the timeline began
    bytes   of the arrays that it returned; an update in place returns none
    task    step and key of the task that it was a part of
    task_name  what that task is called
    """

    step: int
    layer: str
    phase: str
    where: str
    stage: str
    block: int | None
    chunk: tuple[int | None, int | None] | None
    lane: int
    start: float
    end: float
    bytes: int
    task: Task
    task_name: str
    key: Key

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def kind(self) -> str:
        """Layer and pass, as keys begin."""
        return self.layer if self.phase == "update" else f"{self.layer}.{self.phase}"

    @property
    def color(self) -> str:
        return color_of(self.layer, self.phase == "backward")


@dataclass(frozen=True)
class Window:
    """Steps that were handed to the scheduler together, and when: seconds since the timeline began."""

    steps: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class TaskGraph:
    """The tasks of a step and what they wait for.

    order     every task after those that it needs
    needs     task -> tasks of the same step
    earlier   task -> tasks of the step before, where steps overlap
    awaited   the tasks of a window that must be done before the next one starts
    """

    order: tuple[Key, ...]
    needs: dict[Key, set[Key]]
    earlier: dict[Key, set[Key]]
    awaited: frozenset[Key]

    @classmethod
    def of(cls, runnable: CompiledStep) -> TaskGraph:
        """Return the tasks of a step; a cluster goes on with the updates while the next step starts."""
        tasks = {key for key, node in runnable.graph.items() if not is_leaf(node)}
        needs = {key: set(runnable.graph[key].dependencies) & tasks for key in tasks}
        order = tuple(TopologicalSorter(needs).static_order())
        awaited = tasks if runnable.recorded.in_place else runnable.output_keys
        return cls(order, needs, runnable.needs_of_last_run(), frozenset(awaited))


@dataclass(frozen=True, repr=False)
class Timeline:
    """Recorded steps: events by their start, lanes by name, and what waits for what.

    readers     of each kernel call's result, in the same step
    """

    title: str
    lanes: tuple[str, ...]
    events: tuple[Event, ...]
    windows: tuple[Window, ...]
    tasks: TaskGraph
    readers: dict[Key, list[Key]]

    @property
    def steps(self) -> list[int]:
        return [step for window in self.windows for step in window.steps]

    def __repr__(self) -> str:
        """Return its numbers, on one screen."""
        from daskgpt.profiling.timeline.summary import describe_summary, summarise  # which knows events

        text = describe_summary(summarise(self)) if self.events else "no events"
        lines = [f"Timeline of {self.title}", *text.splitlines()]
        return "\n".join(fill(line, 100, subsequent_indent="  ") if len(line) > 100 else line for line in lines)

    def _repr_html_(self) -> str:
        """Return the same for notebooks, under the lanes as strips of color."""
        from daskgpt.profiling.timeline.strips import svg_legend, svg_strips

        lanes = f"{svg_legend(self)}<br>{svg_strips(self)}" if self.events else ""
        return lanes + html_text(repr(self))


class EventMaker:
    """Turns spans into events.

    readers   of each kernel call's result; through a pick, which takes one of several results, who reads that
    """

    def __init__(self, runnable: CompiledStep) -> None:
        self.runnable, graph = runnable, runnable.recorded.unmerged
        self.home = {call.key: key for key, node in runnable.graph.items() for call in calls_of(node)}
        # A pick takes one of a kernel's results out of a tuple: no work of its own.
        picked = {key: next(iter(node.dependencies)) for key, node in graph.items() if is_pick(node)}
        self.chunks = {key: chunk_of(graph, key, whole=False) for key in self.home if key not in picked}
        self.readers = self._readers(graph, picked)

    @staticmethod
    def _readers(graph: Graph, picked: dict[Key, Key]) -> dict[Key, list[Key]]:
        readers: dict[Key, list[Key]] = {}
        for key, node in graph.items():
            if key not in picked and not is_leaf(node):
                for dependency in node.dependencies:
                    readers.setdefault(picked.get(dependency, dependency), []).append(key)
        return readers

    def events(self, spans: Iterable[tuple[int, Span]], start: float) -> list[Event]:
        """Return the events of the kernel calls among (step, span) of one process, whose lanes are numbers of its
        threads, from the first one that ran something; `start` is the timeline's, on the clock of the spans.
        """
        lanes: dict[int, int] = {}
        found = []
        for step, span in sorted(spans, key=lambda own: own[1].start):
            lane = lanes.setdefault(span.thread, len(lanes))
            if span.key not in self.chunks:
                continue
            origin, home = self.runnable.recorded.origin(span.key), self.home[span.key]
            found.append(
                Event(
                    step=step,
                    layer=origin.layer,
                    phase=origin.phase,
                    where=origin.place,
                    stage=origin.stage,
                    block=origin.block,
                    chunk=self.chunks[span.key],
                    lane=lane,
                    start=span.start - start,
                    end=span.end - start,
                    bytes=span.bytes,
                    task=(step, home),
                    task_name=self.runnable.title(home),
                    key=span.key,
                )
            )
        return found


def different_at_once(spans: Iterable[tuple[float, float, object]]) -> list[tuple[float, int]]:
    """Return how many different names run at once: (time, number from then on), by time, from (start, end, name)."""
    changes = [change for start, end, name in spans for change in ((start, 1, name), (end, -1, name))]
    running: Counter[object] = Counter()
    found = []
    for time, own in groupby(sorted(changes, key=lambda change: change[0]), key=lambda change: change[0]):
        for _, change, name in own:
            running[name] += change
        running = +running  # without names that have ended
        found.append((time, len(running)))
    return found
