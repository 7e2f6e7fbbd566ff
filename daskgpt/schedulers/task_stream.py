"""Kernel calls of ranks in the task stream of Dask's dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from daskgpt.graph.program import Span
from daskgpt.schedulers.dask_internals import add_to_task_stream

CALLS = 300  # of a worker's window that are shown, the last ones: Dask's page shows a thousand rectangles
TOGETHER = 1e-4  # seconds between calls of one kernel that are drawn as one
RECEIVE = "receive."  # prefix of the names of tasks that wait for a message


class ShownCall(NamedTuple):
    """One rectangle of the task stream: a kernel and its place in the model, a thread, begin and end by the clock."""

    name: str
    thread: int
    start: float
    end: float


def shown_calls(spans: Sequence[Span], offset: float) -> list[ShownCall]:
    """Return the last kernel calls of some spans; calls of one kernel in one place that follow each other are joined.

    offset   from the spans' clock to the time of day
    """
    found: list[ShownCall] = []
    latest: dict[int, int] = {}  # thread -> its last call in the list
    for span in spans[-4 * CALLS :]:
        name, start, end = span.key[0].partition("_-")[0], span.start + offset, span.end + offset
        before = found[latest[span.thread]] if span.thread in latest else None
        if before and before.name == name and start - before.end < TOGETHER:
            found[latest[span.thread]] = before._replace(end=end)
        else:
            latest[span.thread] = len(found)
            found.append(ShownCall(name, span.thread, start, end))
    return found[-CALLS:]


async def show_calls(calls: Mapping[str, Sequence[ShownCall]], dask_scheduler: Any) -> None:
    """Draw kernel calls on the task stream of a scheduler, in whose process this runs.

    calls   by the worker's address
    """
    for worker, own in calls.items():
        for call in own:
            action = "transfer" if call.name.startswith(RECEIVE) else "compute"
            span = {"action": action, "start": call.start, "stop": call.end}
            add_to_task_stream(dask_scheduler, worker, call.thread, call.name, span)
