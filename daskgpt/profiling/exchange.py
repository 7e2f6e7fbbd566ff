"""Timelines in formats of other programs: WfCommons' workflows, for simulators of schedulers, and Paraver's traces.

Sources   WfFormat 1.5, https://github.com/wfcommons/WfFormat; Paraver: Tracefile Description, Barcelona Supercomputing
          Center
"""

from __future__ import annotations

import platform
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from daskgpt import __version__
from daskgpt.graph.nodes import Key
from daskgpt.profiling.timeline import Event, Timeline, color_of

STEP, BLOCK = 90_000_001, 90_000_002  # types of Paraver's events, from a range that users may define


def _tasks(timeline: Timeline) -> dict[tuple[int, Key], list[Event]]:
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
    step, calls, needs = timeline.steps[-1], _tasks(timeline), timeline.tasks.needs
    threads = Counter(lane.worker for lane in timeline.lanes)
    spans = {key: calls[step, key] for key in needs if (step, key) in calls}
    names = {key: spans[key][0].task_name if key in spans else str(key[0]).partition("-")[0] for key in needs}
    ids = {key: f"{re.sub('[^0-9a-zA-Z_.-]', '_', names[key])}#{number}" for number, key in enumerate(needs)}
    children = defaultdict[Key, list[str]](list)
    for key, parents in needs.items():
        for parent in parents:
            children[parent].append(ids[key])
    files = {key: ids[key] for key in needs if sizes.get(key)}
    tasks, runs, machines = [], [], dict[str, int]()
    for key, parents in needs.items():
        edges = {"parents": sorted(map(ids.__getitem__, parents)), "children": sorted(children[key])}
        edges |= {"inputFiles": sorted(files[parent] for parent in parents if parent in files)}
        tasks.append({"name": names[key], "id": ids[key], **edges, "outputFiles": [ids[key]] * (key in files)})
        runs.append({"id": ids[key], "runtimeInSeconds": 0.0})
        if key in spans:
            first, worker = spans[key][0], timeline.lanes[spans[key][0].lane].worker
            machine = re.sub("[^0-9a-zA-Z.-]", "-", worker or platform.node() or "localhost")
            machines[machine] = threads[worker]
            runs[-1] |= {
                "runtimeInSeconds": max(event.end for event in spans[key]) - first.start,
                "executedAt": _date(began + first.start),
                "command": {"program": names[key], "arguments": [event.kind for event in spans[key]]},
                "coreCount": 1,
                "machines": [machine],
            }
    start = min(events[0].start for events in spans.values())
    end = max(event.end for events in spans.values() for event in events)
    specification = {"tasks": tasks, "files": [{"id": ids[key], "sizeInBytes": sizes[key]} for key in files]}
    execution = {"makespanInSeconds": end - start, "executedAt": _date(began + start), "tasks": runs}
    execution["machines"] = [{"nodeName": name, "cpu": {"coreCount": count}} for name, count in machines.items()]
    return {
        "name": f"daskgpt-step-{step + 1}",
        "description": timeline.title,
        "createdAt": _date(began),
        "schemaVersion": "1.5",
        "runtimeSystem": {"name": "daskgpt", "version": __version__},
        "workflow": {"specification": specification, "execution": execution},
    }


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def paraver(timeline: Timeline, began: float) -> dict[str, str]:
    """Return the text of Paraver's files of a timeline, by their endings: .prv, the trace, .pcf, the names and colors
    of its states, and .row, those of lanes.

    A worker is a task of Paraver, on a node of its own, and its threads are threads. Each of our tasks is a state,
    named by its kind; at its start are events with the numbers of its step and block, from 1. Messages between workers
    are communications: logical send and receive are where the calls begin, physical ones where they end, both of the
    send at the latest where the receive ends.

    began    time of day at which the timeline begins [s]
    """
    threads, lanes = Counter(lane.worker for lane in timeline.lanes), timeline.lanes
    ranks = {worker: number for number, worker in enumerate(threads, 1)}
    places = [f"{number}:1:{ranks[lane.worker]}:{lane.thread}" for number, lane in enumerate(lanes, 1)]
    kinds = dict[str, int]()
    records = list[tuple[int, str]]()  # time and record, whose first number orders those of one time
    for events in _tasks(timeline).values():
        first, end = events[0], _ns(max(event.end for event in events))
        state = kinds.setdefault(first.task_name.partition("-")[0], len(kinds) + 1)
        start, place, block = _ns(first.start), places[first.lane], 0 if first.block is None else first.block + 1
        records.append((start, f"1:{place}:{start}:{end}:{state}"))
        records.append((start, f"2:{place}:{start}:{STEP}:{first.step + 1}:{BLOCK}:{block}"))
    for tag, (sent, received) in enumerate(messages(timeline), 1):
        arrival = _ns(received.end)  # a sender may return later, and clocks of workers differ a little
        began_at, ended_at = (min(_ns(time), arrival) for time in (sent.start, sent.end))
        sender = f"{places[sent.lane]}:{began_at}:{ended_at}"
        receiver = f"{places[received.lane]}:{_ns(received.start)}:{arrival}"
        records.append((began_at, f"3:{sender}:{receiver}:{sent.bytes}:{tag}"))
    date = datetime.fromtimestamp(began).strftime("%d/%m/%y at %H:%M")
    last = max((_ns(event.end) for event in timeline.events), default=0)
    nodes, tasks = ",".join(map(str, threads.values())), ",".join(f"{threads[name]}:{n}" for name, n in ranks.items())
    header = f"#Paraver ({date}):{last}_ns:{len(ranks)}({nodes}):1:{len(ranks)}({tasks})"
    colors = [f"{{{','.join(map(str, bytes.fromhex(color_of(kind)[1:])))}}}" for kind in kinds]
    legend = ["STATES", *(f"{number}    {kind}" for number, kind in enumerate(["idle", *kinds])), ""]
    legend += ["STATES_COLOR", *(f"{number}    {rgb}" for number, rgb in enumerate(["{255,255,255}", *colors])), ""]
    legend += ["EVENT_TYPE", f"0    {STEP}    step", "", "EVENT_TYPE", f"0    {BLOCK}    block (0 = none)", ""]
    names = [lane.name for lane in lanes]
    levels = {"CPU": names, "NODE": [worker or platform.node() for worker in ranks], "THREAD": names}
    rows = ["\n".join([f"LEVEL {level} SIZE {len(lines)}", *lines, ""]) for level, lines in levels.items()]
    trace = [header, *(record for _, record in sorted(records)), ""]
    return {".prv": "\n".join(trace), ".pcf": "\n".join(legend), ".row": "\n".join(rows)}


def messages(timeline: Timeline) -> list[tuple[Event, Event]]:
    """Return the calls that send and receive each message between ranks, in pairs."""
    workers = list(dict.fromkeys(lane.worker for lane in timeline.lanes))  # in the order of their ranks
    ends: dict[str, dict[tuple[Any, ...], Event]] = {"send": {}, "receive": {}}
    for event in timeline.events:
        way, _, kind = event.layer.partition(".")
        if way in ends:
            ranks = [workers.index(timeline.lanes[event.lane].worker), event.key[1]]
            sender, receiver = ranks if way == "send" else ranks[::-1]
            ends[way][event.step, kind, event.where, sender, receiver] = event
    return [(event, ends["receive"][name]) for name, event in ends["send"].items() if name in ends["receive"]]


def _ns(seconds: float) -> int:
    return round(max(seconds, 0.0) * 1e9)
