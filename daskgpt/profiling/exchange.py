"""Timelines in formats of other programs: WfCommons' workflows, for simulators of schedulers, and Paraver's traces.

Sources   WfFormat 1.5, https://github.com/wfcommons/WfFormat; Paraver: Tracefile Description, Barcelona Supercomputing
          Center
"""

from __future__ import annotations

import json
import platform
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from daskgpt import __version__
from daskgpt.config.files import replacing
from daskgpt.graph.nodes import Key
from daskgpt.profiling.timeline import Event, Timeline, color_of

SYSTEMS = {"Linux": "linux", "Darwin": "macos", "Windows": "windows"}
STEP, BLOCK = 90_000_001, 90_000_002  # types of Paraver's events, from a range that users may define
OPTIONS = """DEFAULT_OPTIONS

LEVEL               THREAD
UNITS               NANOSEC
LOOK_BACK           100
SPEED               1
FLAG_ICONS          ENABLED
NUM_OF_STATE_COLORS 1000
YMAX_SCALE          37

DEFAULT_SEMANTIC

THREAD_FUNC         State As Is
"""


def write_workflow(timeline: Timeline, sizes: Mapping[Key, int], began: float, path: Path) -> None:
    """Write `workflow` as JSON."""
    _write(path, json.dumps(workflow(timeline, sizes, began), indent=1))


def write_paraver(timeline: Timeline, began: float, path: Path) -> None:
    """Write FILE.prv, the trace, with FILE.pcf, the names and colors of its states, and FILE.row, those of lanes."""
    for suffix, text in zip((".prv", ".pcf", ".row"), paraver(timeline, began)):
        _write(path.with_suffix(suffix), text)


def _write(path: Path, text: str) -> None:
    with replacing(path, "timeline") as file:
        file.write(text.encode())


def _calls_of_tasks(timeline: Timeline) -> dict[tuple[int, Key], list[Event]]:
    """Return the events of each task, by step and key, in the order of their starts."""
    calls = defaultdict[tuple[int, Key], list[Event]](list)
    for event in timeline.events:
        calls[event.task].append(event)
    return calls


def workflow(timeline: Timeline, sizes: Mapping[Key, int], began: float) -> dict[str, Any]:
    """Return the last step of a timeline in WfCommons' format: tasks with their parents, measured times and the bytes
    that they hand on.

    A task that only waits, as a barrier does, takes no time. A worker, or this process, is a machine.

    sizes    bytes of the result of each task; results of none are no files
    began    time of day at which the timeline begins [s]
    """
    step, calls, needs = timeline.steps[-1], _calls_of_tasks(timeline), timeline.tasks.needs
    threads = _threads(timeline)
    spans = {key: calls[step, key] for key in needs if (step, key) in calls}
    names = {key: spans[key][0].task_name if key in spans else str(key[0]).partition("-")[0] for key in needs}
    ids = {key: f"{re.sub('[^0-9a-zA-Z_.-]', '_', names[key])}#{number}" for number, key in enumerate(needs)}
    children = defaultdict[Key, list[str]](list)
    for key, parents in needs.items():
        for parent in sorted(parents, key=ids.__getitem__):
            children[parent].append(ids[key])
    files = {key: sizes[key] for key in needs if sizes.get(key)}
    tasks, runs, machines = [], [], dict[str, dict[str, Any]]()
    for key, parents in needs.items():
        read = sorted((parent for parent in parents if parent in files), key=ids.__getitem__)
        lines = {"parents": sorted(map(ids.__getitem__, parents)), "children": children[key]}
        lines |= {"inputFiles": list(map(ids.__getitem__, read)), "outputFiles": [ids[key]] if key in files else []}
        tasks.append({"name": names[key], "id": ids[key], **lines})
        run: dict[str, Any] = {"id": ids[key], "runtimeInSeconds": 0.0}
        if key in spans:
            first, last = spans[key][0], max(event.end for event in spans[key])
            worker = timeline.lanes[first.lane].worker
            name = re.sub("[^0-9a-zA-Z.-]", "-", worker or platform.node() or "localhost")
            machines[name] = {"nodeName": name, "cpu": {"coreCount": threads[worker]}}
            run |= {"runtimeInSeconds": last - first.start, "executedAt": _date(began + first.start), "coreCount": 1}
            run |= {"command": {"program": names[key], "arguments": [event.kind for event in spans[key]]}}
            run |= {"readBytes": sum(map(files.__getitem__, read)), "writtenBytes": files.get(key, 0)}
            run |= {"machines": [name]}
        runs.append(run)
    of_step = [event for events in spans.values() for event in events]
    start, end = min(event.start for event in of_step), max(event.end for event in of_step)
    system = {"system": SYSTEMS.get(platform.system(), "linux"), "architecture": platform.machine() or "unknown"}
    return {
        "name": f"daskgpt-step-{step + 1}",
        "description": timeline.title,
        "createdAt": _date(began),
        "schemaVersion": "1.5",
        "runtimeSystem": {"name": "daskgpt", "version": __version__, "url": "https://dask.org"},
        "workflow": {
            "specification": {
                "tasks": tasks,
                "files": [{"id": ids[key], "sizeInBytes": size} for key, size in files.items()],
            },
            "execution": {
                "makespanInSeconds": end - start,
                "executedAt": _date(began + start),
                "tasks": runs,
                "machines": [{**system, **machine} for machine in machines.values()],
            },
        },
    }


def _threads(timeline: Timeline) -> dict[str, int]:
    """Return the number of lanes of each worker, in the order of the lanes."""
    threads = defaultdict[str, int](int)
    for lane in timeline.lanes:
        threads[lane.worker] += 1
    return threads


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def paraver(timeline: Timeline, began: float) -> tuple[str, str, str]:
    """Return a timeline as the text of Paraver's files .prv, .pcf and .row.

    A worker is a task of Paraver, on a node of its own, and its threads are threads. Each of our tasks is a state,
    named by its kind; at its start are events with the numbers of its step and block, from 1. Messages between workers
    are communications: logical send and receive are where the calls begin, physical ones where they end.

    began    time of day at which the timeline begins [s]
    """
    threads = _threads(timeline)
    workers = list(threads)
    places = [f"{n}:1:{workers.index(lane.worker) + 1}:{lane.thread}" for n, lane in enumerate(timeline.lanes, 1)]
    kinds = dict[str, int]()
    records = list[tuple[int, int, str]]()  # time, order of types at one time, record
    for events in _calls_of_tasks(timeline).values():
        first, end = events[0], _ns(max(event.end for event in events))
        state = kinds.setdefault(first.task_name.partition("-")[0], len(kinds) + 1)
        start, place = _ns(first.start), places[first.lane]
        records.append((start, 1, f"1:{place}:{start}:{end}:{state}"))
        block = 0 if first.block is None else first.block + 1
        records.append((start, 2, f"2:{place}:{start}:{STEP}:{first.step + 1}:{BLOCK}:{block}"))
    for tag, (sent, received) in enumerate(messages(timeline, workers), 1):
        start, *others = (_ns(time) for event in (sent, received) for time in (event.start, event.end))
        ends = f"{places[sent.lane]}:{start}:{others[0]}:{places[received.lane]}:{others[1]}:{others[2]}"
        records.append((start, 3, f"3:{ends}:{sent.bytes}:{tag}"))
    date = datetime.fromtimestamp(began).strftime("%d/%m/%y at %H:%M")
    last = max((_ns(event.end) for event in timeline.events), default=0)
    nodes = f"{len(workers)}({','.join(str(threads[worker]) for worker in workers)})"
    tasks = f"{len(workers)}({','.join(f'{threads[worker]}:{n}' for n, worker in enumerate(workers, 1))})"
    header = f"#Paraver ({date}):{last}_ns:{nodes}:1:{tasks}"
    return (
        "\n".join([header, *(record for *_, record in sorted(records)), ""]),
        _legend(kinds),
        _rows(timeline, workers),
    )


def messages(timeline: Timeline, workers: Sequence[str]) -> list[tuple[Event, Event]]:
    """Return the calls that send and receive each message, in pairs.

    workers   in the order of their ranks
    """
    sent, pairs = dict[tuple[Any, ...], Event](), list[tuple[Event, Event]]()
    both = defaultdict[str, list[Event]](list)
    for event in timeline.events:
        both[event.layer.partition(".")[0]].append(event)
    for event in both["send"]:
        kind, rank = event.layer.removeprefix("send."), workers.index(timeline.lanes[event.lane].worker)
        sent[event.step, kind, event.where, rank, event.key[1]] = event
    for event in both["receive"]:
        kind, rank = event.layer.removeprefix("receive."), workers.index(timeline.lanes[event.lane].worker)
        if start := sent.get((event.step, kind, event.where, event.key[1], rank)):
            pairs.append((start, event))
    return pairs


def _ns(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e9)


def _legend(kinds: Mapping[str, int]) -> str:
    colors = {number: color_of(kind).removeprefix("#") for kind, number in kinds.items()}
    rgb = {number: tuple(int(color[at : at + 2], 16) for at in (0, 2, 4)) for number, color in colors.items()}
    states = ["STATES", "0    idle", *(f"{number}    {kind}" for kind, number in kinds.items())]
    shown = ["STATES_COLOR", "0    {255,255,255}", *(f"{n}    {{{r},{g},{b}}}" for n, (r, g, b) in rgb.items())]
    types = ["EVENT_TYPE", f"0    {STEP}    step", "", "EVENT_TYPE", f"0    {BLOCK}    block (0 = none)"]
    return "\n".join([OPTIONS, *states, "", *shown, "", *types, ""])


def _rows(timeline: Timeline, workers: Sequence[str]) -> str:
    lanes = [lane.name for lane in timeline.lanes]
    levels = {"CPU": lanes, "NODE": [worker or platform.node() for worker in workers], "THREAD": lanes}
    return "\n".join("\n".join([f"LEVEL {name} SIZE {len(rows)}", *rows, ""]) for name, rows in levels.items())
