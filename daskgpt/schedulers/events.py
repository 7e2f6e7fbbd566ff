"""What a run tells its cluster's scheduler of its steps, for whoever looks on there."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from distributed.diagnostics.task_stream import TaskStreamPlugin

from daskgpt.graph.program import Span
from daskgpt.schedulers.protocol import Scheduler

TOPIC = "daskgpt"  # of the events
EVERY = 0.25  # seconds: a step may be shorter than what telling takes
FIELDS = ("step", "loss", "validation_loss", "tokens_per_s", "lost_steps")  # that somebody looks at


class Telling:
    """Gathers records of steps and tells them together."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.records, self.at = scheduler, list[dict[str, Any]](), 0.0

    def note(self, record: Mapping[str, Any]) -> None:
        """A step's metrics."""
        if self.scheduler.in_place:
            return
        self.records.append({name: record[name] for name in FIELDS if name in record})
        if time.monotonic() - self.at > EVERY:
            self.flush()

    def flush(self) -> None:
        """What has not been told yet."""
        if self.records:
            self.scheduler.tell(TOPIC, self.records)
            self.records, self.at = [], time.monotonic()


CALLS = 300  # of a worker that are shown of a window, the last ones: Dask's page shows a thousand rectangles
TOGETHER = 1e-4  # seconds between calls of one kernel that are shown as one
RECEIVE = "receive."  # as the names of tasks begin that wait for a message


class ShownCall(NamedTuple):
    """One rectangle: a kernel and its place in the model, a thread, from when to when by the time of day."""

    name: str
    thread: int
    start: float
    end: float


def shown_calls(spans: Sequence[Span], offset: float) -> list[ShownCall]:
    """The last kernel calls of some spans, in order; calls of one kernel in one place that follow each other are one.

    offset   from the spans' clock to the time of day
    """
    found: list[ShownCall] = []
    latest: dict[int, int] = {}  # of a thread, its last call in the list
    for span in spans[-4 * CALLS :]:
        name, start, end = span.key[0].partition("_-")[0], span.start + offset, span.end + offset
        before = found[latest[span.thread]] if span.thread in latest else None
        if before and before.name == name and start - before.end < TOGETHER:
            found[latest[span.thread]] = before._replace(end=end)
        else:
            latest[span.thread] = len(found)
            found.append(ShownCall(name, span.thread, start, end))
    return found[-CALLS:]


async def show(calls: Mapping[str, Sequence[ShownCall]], dask_scheduler: Any) -> None:
    """Add calls to the task stream of a scheduler; run there.

    calls   by the worker's address
    """
    for plugin in dask_scheduler.plugins.values():
        if isinstance(plugin, TaskStreamPlugin):
            for worker, own in calls.items():
                for call in own:
                    action = "transfer" if call.name.startswith(RECEIVE) else "compute"
                    times = [{"action": action, "start": call.start, "stop": call.end}]
                    known = {"worker": worker, "thread": call.thread, "status": "OK", "startstops": times}
                    plugin.transition(call.name, "processing", "memory", nbytes=0, type=b"", typename="", **known)
