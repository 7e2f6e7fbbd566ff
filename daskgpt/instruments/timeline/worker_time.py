"""Where the time of a cluster's workers went: kernels, transfers, Dask itself, and waiting for one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from daskgpt.instruments.timeline.events import Timeline
from daskgpt.instruments.timeline.summary import ready_times, task_spans

# What counts of a moment in which a thread runs no task: the first of these that holds.
KINDS = ("tasks", "transfer", "scheduler")


@dataclass(frozen=True)
class WorkerTime:
    """Shares of the time of all workers' threads, which are 1 together.

    kernels    in kernels
    tasks      in a task, between its kernels
    transfer   without a task while the worker got results from another one
    scheduler  else while one of its tasks could have run: all that it needs was made (client, scheduler, worker)
    idle       else: what the worker's tasks need was not made
    """

    kernels: float
    tasks: float
    transfer: float
    scheduler: float
    idle: float

    def text(self) -> str:
        return (
            f"{self.kernels:.1%} kernels, {self.tasks:.1%} beside them in tasks, {self.transfer:.1%} transfers, "
            f"{self.scheduler:.1%} client and scheduler, {self.idle:.1%} idle"
        )


def worker_time(timeline: Timeline) -> WorkerTime:
    """The shares of recorded steps. What one worker needs of another is made when its last kernel has ended."""
    spans = task_spans(timeline.events)
    ready = ready_times(timeline, spans)
    lane_of = {event.task: event.lane for event in timeline.events}
    workers = [name.partition(", thread")[0] for name in timeline.lanes]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {name: defaultdict(list) for name in workers}
    for task, (start, end) in spans.items():
        own = found[workers[lane_of[task]]]
        own["tasks"].append((start, end))
        own["scheduler"].append((ready[task], start))
    for transfer in timeline.transfers:
        found[workers[transfer.lane]]["transfer"].append((transfer.start, transfer.end))
    windows = [(window.start, window.end) for window in timeline.windows]
    seconds = dict.fromkeys((*KINDS, "idle"), 0.0)
    for name, intervals in found.items():
        for kind, own_seconds in _shared_out(intervals, windows, workers.count(name)):
            seconds[kind] += own_seconds
    whole = sum(seconds.values())
    kernels = min(sum(event.seconds for event in timeline.events), seconds["tasks"])
    shares = {kind: value / whole for kind, value in seconds.items()}
    return WorkerTime(kernels / whole, **shares | {"tasks": shares["tasks"] - kernels / whole})


def _shared_out(
    intervals: dict[str, list[tuple[float, float]]], windows: Iterable[tuple[float, float]], threads: int
) -> Iterator[tuple[str, float]]:
    """Seconds of each kind, a piece at a time, of a worker's threads: as many as tasks run are in tasks."""
    changes = [(start, "window", 1) for start, _ in windows] + [(end, "window", -1) for _, end in windows]
    for kind, own in intervals.items():
        changes += [change for start, end in own for change in ((start, kind, 1), (end, kind, -1))]
    running = dict.fromkeys((*KINDS, "window"), 0)
    for (time, kind, change), (following, *_) in pairwise(sorted(changes)):
        running[kind] += change
        if running["window"] and following > time:
            in_tasks = min(running["tasks"], threads)
            yield "tasks", (following - time) * in_tasks
            other = next((kind for kind in KINDS[1:] if running[kind]), "idle")
            yield other, (following - time) * (threads - in_tasks)
