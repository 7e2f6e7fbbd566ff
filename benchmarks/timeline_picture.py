"""The picture of fork-join beside barrier-free in README, from the kernel calls that were recorded.

`python -m daskgpt.study --timelines --out timelines` records traces. The data for the picture are stored by

    python benchmarks/timeline_picture.py timelines/layer.json timelines/none.json --date 2026-11-21

in `docs/measurements/fork_join_timelines.json`, and `python benchmarks/measurements.py --write` draws it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from daskgpt.profiling.study import BARRIERS
from daskgpt.profiling.timeline import (
    COLUMNS,
    GAP,
    LANE,
    LETTERS,
    Event,
    Lane,
    TaskGraph,
    Timeline,
    Window,
    color_of,
    layers_of,
    svg_strips,
)

DOCS = Path(__file__).parent.parent / "docs"
KEPT, PICTURE = DOCS / "measurements" / "fork_join_timelines.json", DOCS / "fork_join.svg"
LINE = 24  # pixels
NOTHING = TaskGraph({}, {}, frozenset())


def kept(trace: Path) -> dict[str, Any]:
    """Of a trace: title, lanes, and of each kernel call step, lane, layer, pass, and microseconds of start and end."""
    entries = json.loads(trace.read_text())["traceEvents"]
    names = {entry["tid"]: entry["args"]["name"] for entry in entries if entry["name"] == "thread_name"}
    (title,) = [entry["args"]["name"] for entry in entries if entry["name"] == "process_name"]
    calls = [
        [own["step"], entry["tid"], own["layer"], own["pass"], round(entry["ts"]), round(entry["ts"] + entry["dur"])]
        for entry in entries
        if entry["ph"] == "X" and "layer" in (own := entry["args"])
    ]
    return {"title": title, "lanes": [names[lane] for lane in sorted(names)], "calls": calls}


def timeline(found: dict[str, Any]) -> Timeline:
    """What was kept, as far as a picture shows it: one window from the beginning to the end of the last call."""
    events = tuple(
        Event(layer, phase, "", step=step, lane=lane, start=start / 1e6, end=end / 1e6)
        for step, lane, layer, phase, start, end in found["calls"]
    )
    steps = tuple(sorted({event.step for event in events}))
    window = Window(steps, 0.0, max(event.end for event in events))
    return Timeline(
        found["title"], tuple(Lane("", 1 + n) for n in range(len(found["lanes"]))), events, (window,), NOTHING
    )


def svg_one_under_the_other(timelines: Mapping[str, Timeline]) -> str:
    """Several timelines by name as one picture on one time scale, with a legend: what is longer looks longer."""
    end = max(window.end for timeline in timelines.values() for window in timeline.windows)
    parts, top = ['<rect width="100%" height="100%" fill="white"/>'], LINE
    for name, timeline in timelines.items():
        seconds = sum(window.end - window.start for window in timeline.windows) / len(timeline.steps)
        text = escape(f"{name}: {seconds * 1e3:,.1f} ms a step")
        parts.append(f'<text x="0" y="{top}" font-size="14" font-weight="bold">{text}</text>')
        parts.append(f'<g transform="translate(0, {top + 2 * GAP})">{svg_strips(timeline, end=end)}</g>')
        top += len(timeline.lanes) * (LANE + GAP) + 3 * GAP + LINE
    x = 0
    for layer in layers_of(*timelines.values()):
        parts.append(f'<rect x="{x}" y="{top - 10}" width="11" height="11" fill="{color_of(layer)}"/>')
        parts.append(f'<text x="{x + 15}" y="{top}" font-size="12">{escape(layer)}</text>')
        x += 30 + 7 * len(layer)
    parts.append(f'<text x="{x}" y="{top}" font-size="12">dark: backward</text>')
    width, height = LETTERS + COLUMNS, top + 2 * GAP
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">{"".join(parts)}</svg>'


def picture() -> str:
    """The SVG."""
    found = json.loads(KEPT.read_text())["timelines"]
    return svg_one_under_the_other({f"barrier {BARRIERS[name]}": timeline(own) for name, own in found.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("traces", type=Path, nargs="+", help="named by their barrier, of `daskgpt.study --timelines`")
    parser.add_argument("--date", required=True, help="when they were recorded")
    values = parser.parse_args()
    found = {"command": "python -m daskgpt.study --timelines --out timelines", "date": values.date}
    found["timelines"] = {trace.stem: kept(trace) for trace in values.traces}
    KEPT.write_text(json.dumps(found, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
