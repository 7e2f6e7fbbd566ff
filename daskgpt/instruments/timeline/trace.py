"""A timeline as a Chrome trace: what about:tracing and Perfetto read."""

from __future__ import annotations

from typing import Any

from daskgpt.instruments.timeline.curves import layers_at_once, live_bytes
from daskgpt.instruments.timeline.events import Event, Timeline


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Complete events, one thread a lane, with counters of memory and of layers at once; times in microseconds.

    Source   the Trace Event Format: ph X is an event with a duration, C a counter, M a name
    """
    process = {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": timeline.title}}
    names = [
        {"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}}
        for lane, name in enumerate(timeline.lanes)
    ]
    events = [_complete(event) for event in timeline.events]
    counters = [
        {"ph": "C", "pid": 0, "name": name, "ts": _microseconds(time), "args": {unit: value}}
        for name, unit, curve in (
            ("memory of activations and gradients", "bytes", live_bytes(timeline)),
            ("layers at once", "layers", layers_at_once(timeline)),
        )
        for time, value in curve
    ]
    return {"traceEvents": [process, *names, *events, *counters], "displayTimeUnit": "ms"}


def _complete(event: Event) -> dict[str, Any]:
    arguments = {
        "layer": event.layer,
        "pass": event.phase,
        "where": event.where,
        "block": event.block,
        "chunk": event.chunk,
        "step": event.step,
        "bytes": event.bytes,
        "task": event.task_name,
    }
    return {
        "ph": "X",
        "pid": 0,
        "tid": event.lane,
        "name": event.kind,
        "cat": f"{event.phase},step {event.step}",
        "ts": _microseconds(event.start),
        "dur": _microseconds(event.seconds),
        "args": arguments,
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
