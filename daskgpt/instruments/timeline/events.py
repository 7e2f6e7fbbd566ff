"""The events of a timeline: kernel calls in the words of the model, and the graph of the tasks that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from textwrap import fill

from daskgpt.config.rich import html_text
from daskgpt.graph.calls import Origin, is_pick
from daskgpt.graph.fuse import chunk_of
from daskgpt.graph.nodes import Graph, Key, is_leaf
from daskgpt.graph.program import Span, calls_of
from daskgpt.graph.recording import CompiledStep

Task = tuple[int, Key]


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
        """The tasks of a step; a cluster goes on with the updates while the next step starts."""
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
        """Its numbers, on one screen."""
        from daskgpt.instruments.timeline.summary import describe_summary, summarise  # which knows events

        told = describe_summary(summarise(self)) if self.events else "no events"
        lines = [f"Timeline of {self.title}", *told.splitlines()]
        return "\n".join(fill(line, 100, subsequent_indent="  ") if len(line) > 100 else line for line in lines)

    def _repr_html_(self) -> str:
        """The same for notebooks, under the lanes as strips of colour."""
        from daskgpt.instruments.timeline.strips import svg_legend, svg_strips

        lanes = f"{svg_legend(self)}<br>{svg_strips(self)}" if self.events else ""
        return lanes + html_text(repr(self))


class Words:
    """Turns spans into events."""

    def __init__(self, runnable: CompiledStep) -> None:
        self.runnable, graph = runnable, runnable.recorded.unmerged
        self.home = {call.key: key for key, node in runnable.graph.items() for call in calls_of(node)}
        # A pick takes one of a kernel's results out of a tuple: no work of its own.
        self.picked = {key: next(iter(node.dependencies)) for key, node in graph.items() if is_pick(node)}
        self.chunks = {key: chunk_of(graph, key, whole=False) for key in self.home if key not in self.picked}
        self.readers = _readers(graph, self.picked)

    def event(self, span: Span, step: int, lane: int, start: float) -> Event | None:
        """The event of a span, None for no kernel call of this step; `start` is the timeline's, on its clock."""
        key = span.key
        if key not in self.chunks:
            return None
        origin: Origin = self.runnable.recorded.origin(key)
        return Event(
            step=step,
            layer=origin.layer,
            phase=origin.phase,
            where=origin.place,
            stage=origin.stage,
            block=origin.block,
            chunk=self.chunks[key],
            lane=lane,
            start=span.start - start,
            end=span.end - start,
            bytes=span.bytes,
            task=(step, self.home[key]),
            task_name=self.runnable.title(self.home[key]),
            key=key,
        )


def _readers(graph: Graph, picked: dict[Key, Key]) -> dict[Key, list[Key]]:
    """Who reads the result of each kernel call; through a pick, who reads that."""
    readers: dict[Key, list[Key]] = {}
    for key, node in graph.items():
        if key not in picked and not is_leaf(node):
            for dependency in node.dependencies:
                readers.setdefault(picked.get(dependency, dependency), []).append(key)
    return readers


def different_at_once(events: Sequence[tuple[float, float, object]]) -> list[tuple[float, int]]:
    """How many different names run at once: (time, number from then on), by time, from (start, end, name)."""
    changes = sorted(
        change for number, (start, end, _) in enumerate(events) for change in ((start, 1, number), (end, -1, number))
    )
    running: dict[object, int] = {}
    found: list[tuple[float, int]] = []
    for time, change, number in changes:
        name = events[number][2]
        running[name] = running.get(name, 0) + change
        if not running[name]:
            del running[name]
        if found and found[-1][0] == time:
            found.pop()
        found.append((time, len(running)))
    return found
