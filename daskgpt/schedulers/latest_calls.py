"""The latest kernel calls of a worker's ranks, which the dashboard asks for while somebody looks at it."""

from __future__ import annotations

from itertools import chain
from time import time
from typing import Any, NamedTuple

from daskgpt.graph.program import Spans
from daskgpt.schedulers.links import ranks_of
from daskgpt.schedulers.protocol import clock_offset

ASKED = "daskgpt-calls"  # the handler of a worker
KEPT = 4000  # calls of a window that are kept when it has ended
TOGETHER = 1e-4  # seconds between calls of one kernel that are drawn as one
RECEIVE = "receive."  # prefix of the names of tasks that wait for a message


class LatestCall(NamedTuple):
    """One rectangle of a lane: a kernel and its place in the model, a thread, begin and end by the clock."""

    name: str
    thread: int
    start: float
    end: float


def latest_calls(worker: Any, since: float, most: int) -> tuple[list[LatestCall], bool, float]:
    """Return the last kernel calls of a worker, whether earlier ones were left out, and until when they are all.

    That is the time of day at which the tasks began that run now: their calls are known when they have ended. Calls of
    one kernel in one place that follow each other are joined.

    since   the calls have ended after this time of day, until which all were returned before
    most    how many are returned
    """
    now, offset, calls = time(), clock_offset(), list[LatestCall]()
    until = min([now, *(start + offset for spans in _newest(worker) for start in list(spans.running.values()))])
    latest: dict[int, int] = {}  # thread -> its earliest call in the list
    for count, span in enumerate(chain.from_iterable(map(reversed, _newest(worker)))):
        name, start, end = span.key[0].partition("_-")[0], span.start + offset, span.end + offset
        if count == KEPT:
            return calls[::-1], end > since, until
        if not since < end <= until:  # calls of a long task come after later ones of short tasks
            continue
        if len(calls) == most:
            return calls[::-1], True, until
        after = calls[latest[span.thread]] if span.thread in latest else None
        if after and after.name == name and after.start - end < TOGETHER:
            calls[latest[span.thread]] = after._replace(start=start)
        else:
            latest[span.thread] = len(calls)
            calls.append(LatestCall(name, span.thread, start, end))
    return calls[::-1], False, until


def _newest(worker: Any) -> list[Spans]:
    """Return the calls of the last windows, those of the last one of a run first."""
    programs = list(ranks_of(worker).programs.values())
    return [spans for program in programs for spans in reversed(list(program.recent))]
