"""The numbers of a timeline: busy and idle threads, overlap, critical path, times by layer, and curves over time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from daskgpt.graph.calls import PHASES
from daskgpt.profiling.timeline.events import Event, Task, Timeline, different_at_once

Curve = list[tuple[float, int]]  # times, and the value from then on


@dataclass(frozen=True)
class Summary:
    """Numbers of the recorded steps. Seconds are of all of them together, shares are of wall * lanes or of wall.

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
    phases             seconds of each phase, where no two of them ever ran at once; else empty
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
    """Return the numbers of a timeline.

    Errors   ValueError where it has no events
    """
    events = timeline.events
    if not events:
        raise ValueError("summarise: a timeline must have events; got events=0. Record at least one step.")
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
        inside_share=max(in_tasks - sum(busy), 0.0) / all_time,
        scheduling_share=scheduling / all_time,
        waiting_share=max(1 - (in_tasks + scheduling) / all_time, 0.0),
        overlap=_seconds_of_several(layers_at_once(timeline)) / wall,
        steps_overlap=_seconds_of_several(different_at_once((e.start, e.end, e.step) for e in events)) / wall,
        critical_path=sum(spans[task][1] - spans[task][0] for task in path if task in spans),
        critical=dict(sorted(critical.items(), key=lambda item: -item[1])),
        kernels=kernels,
        phases=_phases(timeline),
        tasks=len(spans),
    )


def task_spans(events: Iterable[Event]) -> dict[Task, tuple[float, float]]:
    """Return from the first kernel's start to the last one's end of each task."""
    spans: dict[Task, tuple[float, float]] = {}
    for event in events:
        start, end = spans.get(event.task, (event.start, event.end))
        spans[event.task] = min(start, event.start), max(end, event.end)
    return spans


def critical_path(timeline: Timeline, spans: dict[Task, tuple[float, float]]) -> list[Task]:
    """Return the longest chain of tasks, first one first, of which each had to wait for the one before.

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
    """Return when all was done that each task waits for; no later than the task began.

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
    """Return seconds, of all lanes, in which a lane had no task although one was ready."""
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


def live_bytes(timeline: Timeline) -> Curve:
    """Return bytes of activations and gradients that are still to be read.

    A kernel's result counts from its end to the end of its last reader in the same step. Parameters and moments, which
    are there all the time, do not count; nor what a kernel needs while it runs.
    """
    ends = {(event.step, event.key): event.end for event in timeline.events}
    changes: Counter[float] = Counter()
    for event in timeline.events:
        readers = timeline.readers.get(event.key, ()) if event.phase != "update" else ()
        last = max((ends.get((event.step, key), event.end) for key in readers), default=event.end)
        if last > event.end and event.bytes:
            changes[event.end] += event.bytes
            changes[last] -= event.bytes
    times = sorted(changes)
    return list(zip(times, accumulate(changes[time] for time in times)))


def layers_at_once(timeline: Timeline) -> Curve:
    """Return how many different layers (of the network, forward and backward apart, all updates as one) run at once."""
    return different_at_once((event.start, event.end, event.stage) for event in timeline.events)


def _seconds_of_several(counts: Curve) -> float:
    return sum(following - time for (time, count), (following, _) in pairwise(counts) if count > 1)


def _phases(timeline: Timeline) -> dict[str, float]:
    """Return seconds from the end of a phase (the first: from the window's start) to the end of the next."""
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
    """Return the numbers for a person to read, a step on average."""
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
    """Return milliseconds a step of all lanes together, and calls a step, by layer and pass."""
    of_layer: dict[str, list[tuple[float, int]]] = {
        layer: [found.kernels.get((layer, phase), (0.0, 0)) for phase in PHASES] for layer, _ in sorted(found.kernels)
    }
    lines = [f"{'ms a step':14}" + "".join(f"{phase:>11}" for phase in PHASES) + f"{'all':>11}{'calls':>8}"]
    rows = sorted(of_layer.items(), key=lambda row: -sum(seconds for seconds, _ in row[1]))
    whole = [
        (sum(own[n][0] for own in of_layer.values()), sum(own[n][1] for own in of_layer.values())) for n in range(3)
    ]
    for name, own in [*rows, ("all", whole)]:
        cells = [
            f"{seconds * 1e3 / found.steps:11.3f}" if calls or own is whole else f"{'':11}" for seconds, calls in own
        ]
        seconds, calls = (sum(values) for values in zip(*own))
        lines.append(f"{name:14}{''.join(cells)}{seconds * 1e3 / found.steps:11.3f}{calls / found.steps:8,.0f}")
    return "\n".join(lines)
