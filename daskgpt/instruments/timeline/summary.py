"""What a timeline says in numbers: busy and idle threads, overlap, critical path, and where the time went."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from daskgpt.config.errors import refusal
from daskgpt.graph.calls import PHASES
from daskgpt.instruments.timeline.events import Event, Task, Timeline, different_at_once


@dataclass(frozen=True)
class Summary:
    """Numbers of the recorded steps. Seconds are of all of them together, shares are of wall * lanes or of wall.

    wall            from a window's start to its end, over all windows
    busy            share of the wall time in which each lane ran kernels
    inside          share of all lanes' time between the kernels of a task
    scheduling      share of all lanes' time in which a task was ready and a lane had none
    waiting         share of all lanes' time in which a lane had none, and no task was ready for it
    overlap         share of the wall time in which two or more different layers ran at once
    steps_overlap   share of the wall time in which two or more different steps ran at once
    critical_path   the longest chain of tasks that had to wait for one another, by their measured times
    critical        (layer, phase) -> seconds of it on the critical path
    kernels         (layer, phase) -> seconds and calls, all lanes
    phases          seconds of each phase, where no two of them ever ran at once; else empty
    """

    steps: int
    wall: float
    busy: dict[str, float]
    inside: float
    scheduling: float
    waiting: float
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

    def kernel_seconds(self, phase: str) -> float:
        """Of all lanes."""
        return sum(seconds for (_, own), (seconds, _) in self.kernels.items() if own == phase)


def summarise(timeline: Timeline) -> Summary:
    """The numbers of a timeline.

    Errors   ValueError where it has no events
    """
    events = timeline.events
    if not events:
        raise refusal(ValueError, "summarise", "a timeline must have events", "events=0", "Record at least one step.")
    wall = sum(window.end - window.start for window in timeline.windows)
    kernels: dict[tuple[str, str], tuple[float, int]] = {}
    busy = [0.0] * len(timeline.lanes)
    for event in events:
        seconds, calls = kernels.get((event.layer, event.phase), (0.0, 0))
        kernels[event.layer, event.phase] = seconds + event.seconds, calls + 1
        busy[event.lane] += event.seconds
    spans = task_spans(events)
    all_time = wall * len(timeline.lanes)
    in_tasks = sum(end - start for start, end in spans.values())
    scheduling = _scheduling(timeline, spans)
    path = critical_path(timeline, spans)
    on_path, critical = set(path), defaultdict[tuple[str, str], float](float)
    for event in events:
        if event.task in on_path:
            critical[event.layer, event.phase] += event.seconds
    return Summary(
        steps=len(timeline.steps),
        wall=wall,
        busy=dict(zip(timeline.lanes, (seconds / wall for seconds in busy))),
        inside=max(in_tasks - sum(busy), 0.0) / all_time,
        scheduling=scheduling / all_time,
        waiting=max(1 - (in_tasks + scheduling) / all_time, 0.0),
        overlap=_seconds_of_several((e.start, e.end, e.stage) for e in events) / wall,
        steps_overlap=_seconds_of_several((e.start, e.end, e.step) for e in events) / wall,
        critical_path=sum(spans[task][1] - spans[task][0] for task in path if task in spans),
        critical=dict(sorted(critical.items(), key=lambda item: -item[1])),
        kernels=kernels,
        phases=_phases(timeline),
        tasks=len(spans),
    )


def task_spans(events: Iterable[Event]) -> dict[Task, tuple[float, float]]:
    """From the first kernel's start to the last one's end of each task."""
    spans: dict[Task, tuple[float, float]] = {}
    for event in events:
        start, end = spans.get(event.task, (event.start, event.end))
        spans[event.task] = min(start, event.start), max(end, event.end)
    return spans


def critical_path(timeline: Timeline, spans: dict[Task, tuple[float, float]]) -> list[Task]:
    """The longest chain of tasks, first one first, of which each had to wait for the one before.

    A task waits for what it reads, for barriers, for tasks of the step before (a weight's update and its readers), and
    for what had to be done before its window was handed to the scheduler.
    """
    tasks, length, before = timeline.tasks, dict[Task, float](), dict[Task, Task | None]()
    gate: Task | None = None
    for window in timeline.windows:
        for step in window.steps:
            for key in tasks.order:
                needed = [(step, other) for other in tasks.needs[key]]
                needed += [(step - 1, other) for other in tasks.earlier.get(key, ()) if (step - 1, other) in length]
                if gate is not None:
                    needed.append(gate)
                own, longest = (step, key), max(needed, key=length.__getitem__, default=None)
                start, end = spans.get(own, (0.0, 0.0))
                length[own] = end - start + (0.0 if longest is None else length[longest])
                before[own] = longest
        done = [(step, key) for step in window.steps for key in tasks.awaited]
        gate = max(done, key=length.__getitem__, default=gate)
    path, at = list[Task](), max(length, key=length.__getitem__, default=None)
    while at is not None:
        path.append(at)
        at = before[at]
    return path[::-1]


def ready_times(timeline: Timeline, spans: dict[Task, tuple[float, float]]) -> dict[Task, float]:
    """When all was done that each task waits for; no later than the task began.

    A barrier and a task without a kernel are ready as soon as what they wait for is done, and take no time.
    """
    tasks, done, found = timeline.tasks, dict[Task, float](), dict[Task, float]()
    for window in timeline.windows:
        for step in window.steps:
            for key in tasks.order:
                needed = [(step, other) for other in tasks.needs[key]]
                needed += [(step - 1, other) for other in tasks.earlier.get(key, ())]
                ready = max((done[task] for task in needed if task in done), default=window.start)
                ready = max(ready, window.start)
                if (step, key) not in spans:
                    done[step, key] = ready
                    continue
                start, done[step, key] = spans[step, key]
                found[step, key] = min(ready, start)
    return found


def _scheduling(timeline: Timeline, spans: dict[Task, tuple[float, float]]) -> float:
    """Seconds, of all lanes, in which a lane had no task although one was ready."""
    changes: list[tuple[float, int, int]] = []  # time, and by how much the numbers of ready and running tasks change
    for task, ready in ready_times(timeline, spans).items():
        start, end = spans[task]
        changes += [(ready, 1, 0), (start, -1, 1), (end, 0, -1)]
    seconds, ready_tasks, running = 0.0, 0, 0
    changes.sort()
    for (time, more_ready, more_running), (following, _, _) in pairwise(changes):
        ready_tasks, running = ready_tasks + more_ready, running + more_running
        seconds += (following - time) * max(min(ready_tasks, len(timeline.lanes) - running), 0)
    return seconds


def _seconds_of_several(intervals: Iterable[tuple[float, float, object]]) -> float:
    """Seconds in which two or more different names run."""
    counts = different_at_once(list(intervals))
    return sum(following - time for (time, count), (following, _) in pairwise(counts) if count > 1)


def _phases(timeline: Timeline) -> dict[str, float]:
    """Seconds from the end of a phase (the first: from the window's start) to the end of the next."""
    times: dict[int, dict[str, list[float]]] = defaultdict(dict)
    for event in timeline.events:
        span = times[event.step].setdefault(event.phase, [event.start, event.end])
        span[:] = min(span[0], event.start), max(span[1], event.end)
    found = dict.fromkeys(PHASES, 0.0)
    for window in timeline.windows:
        last = window.start
        for step in window.steps:
            for phase in PHASES:
                start, end = times[step].get(phase, (last, last))
                if start < last:
                    return {}
                found[phase] += end - last
                last = end
    return found


def describe_summary(found: Summary) -> str:
    """The numbers for a person to read, a step on average."""
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
        f"threads' time {found.kernel_share:9.1%} kernels, {found.inside:.1%} between the kernels of a task, "
        f"{found.scheduling:.1%} scheduling (a task was ready), {found.waiting:.1%} waiting (none was)",
        f"tasks         {found.tasks / found.steps:9,.0f} a step",
        "",
        _table(found),
    ]
    return "\n".join(lines)


def _table(found: Summary) -> str:
    """Milliseconds a step of all lanes together, and calls a step, by layer and pass."""
    per_step = 1e3 / found.steps
    layers = sorted({layer for layer, _ in found.kernels}, key=lambda layer: (-_layer_seconds(found, layer), layer))
    lines = [f"{'ms a step':14}" + "".join(f"{phase:>11}" for phase in PHASES) + f"{'all':>11}{'calls':>8}"]
    for layer in layers:
        own = [found.kernels.get((layer, phase), (0.0, 0)) for phase in PHASES]
        cells = "".join(f"{seconds * per_step:11.3f}" if calls else f"{'':11}" for seconds, calls in own)
        calls = sum(count for _, count in own) / found.steps
        lines.append(f"{layer:14}{cells}{_layer_seconds(found, layer) * per_step:11.3f}{calls:8,.0f}")
    totals = [found.kernel_seconds(phase) for phase in PHASES]
    calls = sum(count for _, count in found.kernels.values()) / found.steps
    cells = "".join(f"{seconds * per_step:11.3f}" for seconds in [*totals, sum(totals)])
    return "\n".join([*lines, f"{'all':14}{cells}{calls:8,.0f}"])


def _layer_seconds(found: Summary, layer: str) -> float:
    return sum(seconds for (own, _), (seconds, _) in found.kernels.items() if own == layer)
