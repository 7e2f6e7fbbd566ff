"""The events of a timeline: kernel calls in the words of the model, and the graph of the tasks that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from daskgpt.graph.calls import Pick
from daskgpt.graph.grain import chunk_of
from daskgpt.graph.nodes import Graph, Key, is_leaf
from daskgpt.graph.program import calls_of
from daskgpt.graph.recording import Recording
from daskgpt.graph.spans import Span
from daskgpt.training.grouping import layer_of, phase_of, stage_of, where_of

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
    key: Key

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def kind(self) -> str:
        """Layer and pass, as keys begin."""
        return self.layer if self.phase == "update" else f"{self.layer}.{self.phase}"

    @property
    def task_name(self) -> str:
        """What the task is called, without what tells it from others of its name."""
        return "-".join(str(self.task[1][0]).split("-")[:2]).rstrip("_")


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
    def of(cls, recording: Recording, in_place: bool) -> TaskGraph:
        """The tasks of a recording; a cluster goes on with the updates while the next step starts."""
        tasks = {key for key, node in recording.graph.items() if not is_leaf(node)}
        needs = {key: set(recording.graph[key].dependencies) & tasks for key in tasks}
        results = {place.key for places in recording.places.values() for place in places}
        order = tuple(TopologicalSorter(needs).static_order())
        return cls(order, needs, recording.needs_of_last_run(), frozenset(tasks if in_place else results))


@dataclass(frozen=True)
class Timeline:
    """Recorded steps: events by their start, lanes by name, and what waits for what.

    readers   of each kernel call's result, in the same step
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


class Words:
    """Turns spans into events."""

    def __init__(self, recording: Recording) -> None:
        graph = recording.unmerged
        self.home = {call.key: key for key, node in recording.graph.items() for call in calls_of(node)}
        # A pick takes one of a kernel's results out of a tuple: no work of its own.
        self.picked = {key: next(iter(node.dependencies)) for key, node in graph.items() if is_pick(graph, key)}
        self.chunks = {key: chunk_of(graph, key, whole=False) for key in self.home if key not in self.picked}
        self.readers = _readers(graph, self.picked)

    def event(self, span: Span, step: int, lane: int, start: float) -> Event | None:
        """The event of a span, None for no kernel call of this recording; `start` is the timeline's, on its clock."""
        key = span.key
        if key not in self.chunks:
            return None
        where = where_of(key)
        parts = where.split(".")
        return Event(
            step=step,
            layer=layer_of(key).partition(".")[0],
            phase=phase_of(key),
            where=where,
            stage=stage_of(key),
            block=int(parts[1]) if parts[0] == "h" else None,
            chunk=self.chunks[key],
            lane=lane,
            start=span.start - start,
            end=span.end - start,
            bytes=span.bytes,
            task=(step, self.home[key]),
            key=key,
        )


def is_pick(graph: Graph, key: Key) -> bool:
    """Whether a task takes one result of several out of a tuple."""
    return isinstance(getattr(graph[key], "func", None), Pick)


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
