"""The picture of fork-join beside barrier-free in README, from the kernel calls that were recorded.

`python -m daskgpt.study --timelines --out timelines` records traces. The data for the picture are stored by

    python benchmarks/timeline_picture.py timelines/layer.json timelines/none.json --date 2026-11-21

in `docs/measurements/fork_join_timelines.json`, and `python benchmarks/measurements.py --write` draws it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from daskgpt.profiling.study import BARRIERS
from daskgpt.profiling.timeline import Event, TaskGraph, Timeline, Window, svg_one_under_the_other

DOCS = Path(__file__).parent.parent / "docs"
KEPT, PICTURE = DOCS / "measurements" / "fork_join_timelines.json", DOCS / "fork_join.svg"
NOTHING = TaskGraph((), {}, {}, frozenset(), {})


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
        Event(step, layer, phase, "", "", None, None, lane, start / 1e6, end / 1e6, 0, (step, ""), "", "")
        for step, lane, layer, phase, start, end in found["calls"]
    )
    steps = tuple(sorted({event.step for event in events}))
    window = Window(steps, 0.0, max(event.end for event in events))
    return Timeline(found["title"], tuple(found["lanes"]), events, (window,), NOTHING)


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
