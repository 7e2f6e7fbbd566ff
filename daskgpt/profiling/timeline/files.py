"""The files of timelines: traces for Chrome and Perfetto, pages for any browser, and pictures."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daskgpt.config.files import replacing
from daskgpt.profiling.timeline.events import Event, Timeline
from daskgpt.profiling.timeline.summary import layers_at_once, live_bytes


def timeline_paths(path: str | Path) -> tuple[Path, Path]:
    """Return FILE.json and FILE.html, whether FILE is given with one of these endings or without."""
    path = Path(path)
    base = path.with_suffix("") if path.suffix in (".json", ".html") else path
    return base.with_name(base.name + ".json"), base.with_name(base.name + ".html")


def is_bare(path: str) -> bool:
    """Return whether a path is a name alone, without a folder: such a file goes into the folder of its run."""
    return path == Path(path).name and path != ".."


def check_timeline_path(path: str | Path) -> None:
    """Refuse a path where no timeline can be written before anything runs; a bare name is that of a file in the new
    folder of a run.

    Errors   ValueError where the path names a folder, a file stands where its folder should, or nothing can be written
    """
    folder = Path(path).absolute().parent
    if is_bare(str(path)):
        return
    if Path(path).is_dir() or not os.access(folder, os.W_OK | os.X_OK) or any(f.is_dir() for f in timeline_paths(path)):
        rule = "the path must be that of a file in a folder that exists and is writable"
        raise ValueError(f"timeline: {rule}; got timeline={path}. Make {folder} first, or give another.")


def write_timeline(timeline: Timeline, path: str | Path) -> tuple[Path, Path]:
    """Write FILE.json, for Chrome's about:tracing and Perfetto, and FILE.html, for any browser; return both paths."""
    from daskgpt.profiling.timeline.page import page_of  # Bokeh is loaded when it is needed

    trace, page = timeline_paths(path)
    trace.parent.mkdir(parents=True, exist_ok=True)
    return _write(trace, json.dumps(trace_of(timeline))), _write(page, page_of(timeline))


def write_side_by_side(timelines: Mapping[str, Timeline], page: Path, title: str) -> Path:
    """Write one page of several timelines, by name, on one time scale; return its path."""
    from daskgpt.profiling.timeline.page import page_of_several

    return _write(page, page_of_several(timelines, title))


def write_picture(timelines: Mapping[str, Timeline], path: Path) -> Path:
    """Write several timelines, by name, as one SVG, on one time scale; return its path."""
    from daskgpt.profiling.timeline.strips import svg_one_under_the_other

    return _write(path, svg_one_under_the_other(timelines))


def _write(path: Path, text: str) -> Path:
    with replacing(path, "timeline") as file:
        file.write(text.encode())
    return path


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Return complete events, one thread a lane, with counters of memory and of layers at once; times in microseconds.

    Source   the Trace Event Format: ph X is an event with a duration, C a counter, M a name
    """
    names = [("process_name", 0, timeline.title), *(("thread_name", *lane) for lane in enumerate(timeline.lanes))]
    curves = {
        ("memory of activations and gradients", "bytes"): live_bytes(timeline),
        ("layers at once", "layers"): layers_at_once(timeline),
    }
    entries: list[dict[str, Any]] = [{"ph": "M", "tid": t, "name": kind, "args": {"name": n}} for kind, t, n in names]
    entries += [_complete(event) for event in timeline.events]
    entries += [
        {"ph": "C", "name": name, "ts": _microseconds(at), "args": {unit: value}}
        for (name, unit), curve in curves.items()
        for at, value in curve
    ]
    return {"traceEvents": [{"pid": 0} | entry for entry in entries], "displayTimeUnit": "ms"}


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
        "tid": event.lane,
        "name": event.kind,
        "cat": f"{event.phase},step {event.step}",
        "ts": _microseconds(event.start),
        "dur": _microseconds(event.seconds),
        "args": arguments,
    }


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
