"""Tests of timelines in formats of other programs, and of scheduling policies."""

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from command_lines import SMALL
from dask.diagnostics import Profiler, ResourceProfiler
from small_runs import FLAGS, fit, losses_of
from test_simulate import FREE, process, seconds
from test_timeline import hand_made
from wfformat import violations

import daskgpt
from daskgpt import train
from daskgpt.profiling.exchange import paraver
from daskgpt.profiling.policies import critical_path_first, depth_first, first_in_first_out
from daskgpt.profiling.simulate import Platform, Simulation
from daskgpt.profiling.timeline import Lane

PLACE = r"(\d+):1:(\d+):(\d+)"
STATE = re.compile(rf"1:{PLACE}:(\d+):(\d+):(\d+)")
EVENT = re.compile(rf"2:{PLACE}:(\d+)((?::\d+:\d+)+)")
MESSAGE = re.compile(rf"3:{PLACE}:(\d+):(\d+):{PLACE}:(\d+):(\d+):(\d+):(\d+)")
HEADER = re.compile(r"#Paraver \(\d\d/\d\d/\d\d at \d\d:\d\d\):(\d+)_ns:(\d+)\(([\d,]+)\):1:(\d+)\(([\d:,]+)\)")


def parsed(path):
    """Header, states, events and messages of a Paraver trace, after checks of what its description asks."""
    header, *records = path.read_text().splitlines()
    length, nodes, processors, tasks, threads = HEADER.fullmatch(header).groups()
    assert (nodes, processors.count(",") + 1) == (tasks, int(nodes))
    lanes = [int(number) for number in processors.split(",")]
    assert threads == ",".join(f"{count}:{node}" for node, count in enumerate(lanes, 1))
    parts = {kind: [kind.fullmatch(line) for line in records if line[0] == first] for first, kind in zip("123", KINDS)}
    assert sum(map(len, parts.values())) == len(records)
    found = {kind: [[int(n) if n.isdigit() else n for n in match.groups()] for match in parts[kind]] for kind in KINDS}
    places = [(sum(lanes[:task]) + n, task + 1, n) for task, count in enumerate(lanes) for n in range(1, count + 1)]
    for kind in KINDS:
        assert {tuple(record[:3]) for record in found[kind]} <= set(places)
        starts = [record[3] for record in found[kind]]
        assert starts == sorted(starts)
    by_lane = sorted(found[STATE], key=lambda state: (state[0], state[3]))
    assert all(one[4] <= other[3] for one, other in pairwise(by_lane) if one[0] == other[0])
    assert all(start <= end <= int(length) for _, _, _, start, end, _ in by_lane)
    names = re.findall(r"^(\d+) +(\S.*)$", path.with_suffix(".pcf").read_text().split("STATES_COLOR")[0], re.MULTILINE)
    assert {state[5] for state in by_lane} <= {int(number) for number, _ in names}
    colors = re.findall(r"^(\d+) +\{\d+,\d+,\d+\}$", path.with_suffix(".pcf").read_text(), re.MULTILINE)
    assert [number for number, _ in names] == colors
    rows = path.with_suffix(".row").read_text()
    for level, count in {"CPU": sum(lanes), "NODE": len(lanes), "THREAD": sum(lanes)}.items():
        (block,) = re.findall(rf"^LEVEL {level} SIZE {count}\n((?:.+\n)+)", rows, re.MULTILINE)
        assert block.count("\n") == count
    return lanes, dict(names), found


KINDS = (STATE, EVENT, MESSAGE)


@pytest.fixture(scope="module")
def traced(small_text, tmp_path_factory):
    """A run with two threads and its traces."""
    out = tmp_path_factory.mktemp("traced") / "run"
    flags = "--steps 6 --grain kernel --batch-chunk 2 --sequence-chunk 32 --scheduler threads --threads 2 --timeline t"
    files = ["--graph", "run.wfformat.json", "--paraver", "run.prv", "--sample-tokens", "0"]
    assert train.main(["--data", str(small_text), *SMALL, *flags.split(), *files, "--out", str(out)]) == 0
    return out


def test_workflow(traced):
    instance, trace = (json.loads((traced / name).read_text()) for name in ("run.wfformat.json", "t.json"))
    assert list(violations(instance)) == []
    tasks, runs = (instance["workflow"][part]["tasks"] for part in ("specification", "execution"))
    assert [task["id"] for task in tasks] == [run["id"] for run in runs]
    by_id = {task["id"]: task for task in tasks}
    assert len(by_id) == len(tasks)
    assert all(one in by_id[other]["children"] for one in by_id for other in by_id[one]["parents"])
    assert sum(len(task["children"]) for task in tasks) == sum(len(task["parents"]) for task in tasks) > len(tasks)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["args"]["step"] == 6]
    assert sum(run["runtimeInSeconds"] for run in runs) == pytest.approx(sum(e["dur"] for e in events) / 1e6, rel=0.1)
    kernels = [kind for run in runs for kind in run.get("command", {}).get("arguments", ())]
    assert Counter(kernels) == Counter(event["name"] for event in events)
    sizes = {file["id"]: file["sizeInBytes"] for file in instance["workflow"]["specification"]["files"]}
    (task,) = [task for task in tasks if task["name"] == "linear.forward-h.1.mlp.c_fc" and task["id"] in sizes][:1]
    assert sizes[task["id"]] == 2 * 32 * 4 * 32 * 4  # a chunk of the hidden activations
    assert all(set(task["inputFiles"]) <= set(task["parents"]) for task in tasks)
    machine = instance["workflow"]["execution"]["machines"]
    assert [entry["cpu"] for entry in machine] == [{"coreCount": 2}]


def test_paraver_of_threads(traced):
    lanes, names, found = parsed(traced / "run.prv")
    trace = json.loads((traced / "t.json").read_text())["traceEvents"]
    calls = [event for event in trace if event["ph"] == "X"]
    tasks = {(event["args"]["step"], event["args"]["task"], event["ts"]) for event in calls}
    assert lanes == [2]
    assert len(tasks) >= len(found[STATE]) == len(found[EVENT]) > 4 * 50
    assert found[MESSAGE] == []
    assert {"linear.forward", "attention.backward"} <= set(names.values())
    steps = {int(event[4].split(":")[2]) for event in found[EVENT]}
    assert steps == {event["args"]["step"] for event in calls} == {3, 4, 5, 6}


def test_paraver_of_workers(small_text, tmp_path, cluster):
    cluster.have(2)
    flags = [*FLAGS.split(), "--steps", "6", "--scheduler", cluster.address, "--out", str(tmp_path / "run")]
    place = tmp_path / "workers.prv"
    assert train.main(["--data", str(small_text), *flags, "--paraver", str(place)]) == 0
    lanes, _, found = parsed(place)
    assert len(lanes) == 2
    messages = found[MESSAGE]
    assert {(message[1], message[6]) for message in messages} == {(1, 2), (2, 1)}
    assert all(message[3] <= message[4] and message[8] <= message[9] for message in messages)
    assert len({message[11] for message in messages}) == len(messages)
    assert max(message[10] for message in messages) > 4 * 257 * 16 // 2  # rows of the table, or their gradient
    with pytest.raises(ValueError, match="--graph needs tasks that one scheduler knows; got engine=ranks"):
        train.main(["--data", str(small_text), *flags[:-1], str(tmp_path / "x"), "--graph", "g.json"])


def test_a_message_is_sent_before_it_is_received():
    """Whatever the clocks of the workers say, and however late a sender returns."""
    timeline = hand_made(lanes=(Lane("one", 1), Lane("two", 1)))
    for start, end, expected in ((2, 3, "2:3"), (2, 9, "2:5"), (7, 9, "5:5")):
        events = (
            replace(timeline.events[0], layer="send.x", key=("x", 1), where="x", start=start, end=end),
            replace(timeline.events[1], layer="receive.x", key=("x", 0), where="x"),
        )
        (message,) = re.findall("^3:.*$", paraver(replace(timeline, events=events), 0)[".prv"], re.MULTILINE)
        assert message.replace("0" * 9, "") == f"3:1:1:1:1:{expected}:2:1:2:1:3:5:100:1"


# Policies


def order_of(policy, needs):
    """The order in which one thread runs tasks of a second each in the simulation."""
    ran = []

    def noting(ready):
        ran.append(policy(ready)[0].key)
        return policy(ready)

    with daskgpt.scheduling(noting):
        Simulation([process(needs, dict.fromkeys(needs, seconds(1.0)))], FREE, Platform(1))
    return [key[0] for key in ran]


def test_policies_in_the_simulation():
    chains = {"a1": "", "a2": ["a1"], "a3": ["a2"], "b1": "", "b2": ["b1"]}
    assert order_of(critical_path_first, chains) == ["a1", "b1", "a2", "b2", "a3"]
    broad, deep = order_of(first_in_first_out, chains), order_of(depth_first, chains)
    assert set(broad[:2]) == {"a1", "b1"}
    assert deep in (["a1", "a2", "a3", "b1", "b2"], ["b1", "b2", "a1", "a2", "a3"])
    two = {"a1": "", "a2": ["a1"], "a3": ["a2"], "b": "", "c": ""}
    costs = {name: seconds(1.0) for name in two}
    times = {}
    for policy in (critical_path_first, lambda ready: critical_path_first(ready)[::-1]):
        with daskgpt.scheduling(policy):
            times[policy] = Simulation([process(two, costs, 2)], FREE, Platform(2)).seconds
    assert list(times.values()) == [pytest.approx(3), pytest.approx(4)]


@pytest.mark.parametrize("policy", [first_in_first_out, depth_first, critical_path_first, lambda ready: ready[::-1]])
def test_policies_change_no_bit(policy, small_text, traced, tmp_path):
    seen = []

    def noting(ready):
        seen.append(ready)
        return policy(ready)

    flags = "--steps 6 --grain kernel --batch-chunk 2 --sequence-chunk 32 --scheduler threads --threads 2"
    with daskgpt.scheduling(noting):
        arguments = ["--data", str(small_text), *SMALL, *flags.split(), "--sample-tokens", "0"]
        assert train.main([*arguments, "--out", str(tmp_path / "run")]) == 0
    assert losses_of(tmp_path / "run") == losses_of(traced)
    assert max(map(len, seen)) > 2
    kinds = {task.kind for ready in seen for task in ready}
    assert {"linear.forward", "adamw"} <= kinds
    last = seen[-1][0]
    assert 0 < last.seconds <= last.path < 60


@pytest.mark.parametrize("wrong", [lambda ready: None, lambda ready: [], lambda ready: ["a"]])
def test_policies_that_return_no_ready_task_are_refused(wrong):
    with pytest.raises(TypeError, match="a policy must return the ready tasks"), daskgpt.scheduling(wrong):
        Simulation([process({"a": "", "b": ""}, dict.fromkeys("ab", seconds(1.0)))], FREE, Platform(1))


def test_dask_diagnostics_observe_a_run(small_text):
    steps, cut = 3, {"scheduler": "threads", "threads": 2, "grain": "block", "batch_chunk": 2, "sequence_chunk": 16}
    with Profiler() as tasks, ResourceProfiler(dt=0.01) as resources:
        fit(small_text, steps=steps, dataflow=cut, validate_every=0)
    times = Counter(task.key for task in tasks.results)  # beside the steps, a validation
    assert sum(count == steps for count in times.values()) > 5
    assert all(task.start_time <= task.end_time for task in tasks.results)
    assert {task.worker_id for task in tasks.results} != {None}
    assert resources.results
