"""Tests of timelines: what is recorded, what is computed from it, and the files."""

import json
import pickle
import re
from collections import Counter
from dataclasses import replace
from html import unescape
from itertools import pairwise

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from dask.diagnostics import Profiler, ResourceProfiler
from small_runs import FLAGS, fit
from steps import run_step, state_of, step_of

from daskgpt import train
from daskgpt.config.model import ModelConfig
from daskgpt.config.run import DataflowConfig, OptimizerConfig
from daskgpt.graph.program import RECORDER, bytes_of, calls_of
from daskgpt.model import layers
from daskgpt.model.optimizer import OPTIMIZERS
from daskgpt.profiling.measure import BenchConfig, TimedEngine, job_of
from daskgpt.profiling.pages import bars_of, write_timeline
from daskgpt.profiling.recorder import TimelineCallback, TimelineConfig
from daskgpt.profiling.timeline import Event, Lane, TaskGraph, Timeline, Window, color_of, paths_of, seconds_at_once
from daskgpt.schedulers.opening import open_scheduler

LARGER = ModelConfig(blocks=2, heads=2, channels=128, vocabulary=257, positions=64)
SHAPE = (8, 64)


def recorded(barrier, count, config=SMALL, shape=(4, 12), chunk=(2, 6), scheduler="threads", grain="kernel"):
    """A compiled step, and the timeline of so many steps after some that are not recorded."""
    dials = {"barrier": barrier, "grain": grain, "batch_chunk": chunk[0], "sequence_chunk": chunk[1], "window": count}
    dataflow = DataflowConfig(scheduler=scheduler, threads=2, engine="tasks", **dials)
    job = job_of(config, BenchConfig(batch_size=shape[0], sequence_length=shape[1]), dataflow)
    with open_scheduler(scheduler, 2) as opened:
        steps = TimedEngine(job, opened, seed=0)
        steps.run(1)
        return steps.engine.step, steps.timeline(count)


def test_every_kernel_call_is_an_event():
    step, timeline = recorded("step", 2, scheduler="sync")
    calls = [call.key for node in step.graph.values() for call in calls_of(node)]
    counts = Counter(event.key for event in timeline.events)
    assert set(counts.values()) == {2}
    missing = set(calls) - counts.keys()
    assert missing
    assert all(re.search(r"attention|crossentropy", key[0]) and key[0][-2] == "." for key in missing), "picks only"
    assert timeline.steps == [1, 2]
    assert {event.step for event in timeline.events} == {1, 2}
    events = {(event.layer, event.phase, event.place, event.block, event.chunk) for event in timeline.events}
    assert ("linear", "forward", "h.1.attn.c_attn", 1, (1, 0)) in events
    assert ("attention", "backward", "h.0.attn.qkv", 0, (1, None)) in events
    assert ("adamw", "update", "wte.weight", None, None) in events
    assert ("embedding", "forward", "wte+wpe", None, (0, 1)) in events
    size = {event.place: event.bytes for event in timeline.events if event.layer == "linear"}
    assert size["h.0.mlp.c_fc"] == 2 * 6 * 4 * 16 * 4  # float32 (b, t, 4C)
    assert {event.bytes for event in timeline.events if event.layer == "adamw"} == {0}
    assert timeline.lanes == (Lane("", 1),)
    assert all(first.end <= second.start for first, second in pairwise(timeline.events)), "one thread"


def test_recordings_belong_to_a_scheduler_and_nest(random):
    """Another run in the process has none of its calls; programs that are sent have the recorder of their process."""
    step = step_of(SMALL, (4, 12), (4, 12), OptimizerConfig(), grain="chunk", in_place=True)
    state, batch = state_of(step, random_parameters(SMALL, random)), random_batch(SMALL, random)
    with open_scheduler("sync") as one, open_scheduler("sync") as other:
        with one.record() as outer:
            run_step(other, step, state, batch, 9)
            with one.record() as inner:
                run_step(one, step, state, batch, 9)
            run_step(one, step, state, batch, 9)
        run_step(one, step, state, batch, 9)
    spans = [part.spans for part in (*outer, *inner)]
    assert [{span.run for span in spans_of_one} for spans_of_one in spans] == [{1}, {0}]
    program = next(node.func for node in step.graph.values() if calls_of(node))
    assert program.recorder is step.kernels.recorder
    assert pickle.loads(pickle.dumps(program.recorder)) is RECORDER
    assert RECORDER.spans is None
    assert bytes_of((np.zeros(3), (np.zeros(2, np.float32), None))) == 32


@pytest.mark.parametrize(("barrier", "steps", "layers"), [("none", 2, 2), ("step", 1, 2), ("layer", 1, 1)])
def test_what_runs_at_the_same_time(barrier, steps, layers):
    grain, count = "kernel" if barrier == "layer" else "segment", 4 if barrier == "none" else 2
    for _ in range(20):  # on a busy machine two threads may take turns
        _, timeline = recorded(barrier, count, LARGER, SHAPE, (2, 64), grain=grain)
        summary = timeline.summary
        if (summary.steps_overlap > 0, summary.overlap > 0) == (steps > 1, layers > 1):
            break
    assert (summary.steps_overlap > 0, summary.overlap > 0) == (steps > 1, layers > 1)
    stages, numbers = ([(e.start, e.end, getattr(e, name)) for e in timeline.events] for name in ("stage", "step"))
    assert seconds_at_once(stages, layers) > 0 == seconds_at_once(stages, layers + 1)
    assert seconds_at_once(numbers, steps) > 0 == seconds_at_once(numbers, steps + 1)


def test_a_cluster_records_kernels_of_its_workers_on_one_clock(cluster):
    cluster.have(2)
    step, timeline = recorded("step", 2, scheduler=cluster.address, grain="segment")
    counts = Counter((event.step, event.key) for event in timeline.events)
    assert set(counts.values()) == {1}
    assert [*Counter(step for step, _ in counts).values()] == [len(counts) / 2] * 2, "the last step, too, to its end"
    assert {key for _, key in counts} <= {call.key for node in step.graph.values() for call in calls_of(node)}
    assert timeline.lanes == tuple(Lane(f"worker {name}", 1) for name in sorted(cluster.alive()))
    first, last = timeline.windows
    ends = {event.task: event.end for event in timeline.events}
    for event in timeline.events:
        assert first.start - 0.01 <= event.start <= event.end <= last.end + 0.01
        assert event.step == 1 or event.start >= last.start - 0.01
        for need in timeline.tasks.needs[event.task[1]]:
            assert ends.get((event.step, need), 0.0) <= event.start + 0.01, "one clock for both workers"
    summary = timeline.summary
    assert summary.critical_path <= summary.wall
    assert {"adamw", "linear"} <= {layer for layer, _ in summary.kernels}


@pytest.mark.parametrize("groups", [2, 1])
def test_ranks_record_kernels_and_messages_on_one_clock(groups, cluster, small_text):
    cluster.have(2)
    watcher = TimelineCallback(TimelineConfig(timeline_steps=2))
    fit(small_text, groups=groups, dataflow={"scheduler": cluster.address}, steps=6, callbacks=iter([watcher]))
    timeline = watcher.timeline
    assert [len(timeline.lanes), sum(share > 0 for share in timeline.summary.busy.values())] == [2, groups]
    assert f"shared by {groups} worker" in timeline.title
    assert {event.step for event in timeline.events} == {4, 5}
    start = {(event.step, event.lane, event.layer): event.start for event in timeline.events}
    for event in timeline.events:
        if event.layer.startswith("receive"):
            sent = start[event.step, 1 - event.lane, event.layer.replace("receive", "send")]  # its end may come later
            assert sent <= event.end + 0.01, "one clock for both workers"
    messages = {"receive.totals", "receive.weights"} if groups > 1 else set()
    assert messages | {"linear", "adamw"} <= {event.layer for event in timeline.events}


# Timelines by hand.


ONE_STEP = (Window((0,), 0.0, 10.0),)
TWO_LANES = (Lane("", 1), Lane("", 2))


def hand_made(windows=ONE_STEP, earlier=(), starts=(0.0,), awaited="abc", lanes=TWO_LANES):
    """Steps of three tasks on two lanes: a 1 .. 3, then b 4 .. 8 and c 3 .. 5, which both need a."""
    a, b, c = keys = tuple((f"{name}.forward-{name}-token",) for name in "abc")
    calls = [("a", a, 0, 1, 3, 100), ("c", c, 1, 3, 5, 10), ("b", b, 0, 4, 8, 1000)]
    events = []
    for step, zero in enumerate(starts):
        for name, key, lane, start, end, size in calls:
            when = {"step": step, "lane": lane, "start": zero + start, "end": zero + end}
            events.append(Event(name, "forward", name, **when, bytes=size, task=(step, key), task_name=name, key=key))
    named = dict(zip("abc", keys))
    before = {named[key]: {named[need] for need in needs} for key, needs in dict(earlier).items()}
    done = frozenset(named[name] for name in awaited)
    tasks = TaskGraph({a: set(), b: {a}, c: {a}}, before, done)
    return Timeline("by <hand>", lanes, tuple(events), tuple(windows), tasks)


def test_a_summary_worked_out_by_hand():
    summary = hand_made().summary
    assert (summary.wall, summary.tasks, summary.inside_share, summary.steps_overlap) == (10, 3, 0, 0)
    assert summary.busy == {"thread 1": pytest.approx(0.6), "thread 2": pytest.approx(0.2)}
    assert summary.kernel_share == pytest.approx(0.4)
    assert summary.overlap == pytest.approx(0.1)  # b and c, from 4 to 5
    assert summary.critical_path == pytest.approx(6)  # a and b
    assert summary.critical == {("b", "forward"): 4, ("a", "forward"): 2}
    assert summary.scheduling_share == pytest.approx(2 / 20)  # a from 0 to 1, b from 3 to 4
    assert summary.waiting_share == pytest.approx(10 / 20)
    assert summary.kernels["b", "forward"] == (4, 1)
    text = str(summary)
    for part in ("10000.00 ms a step, 1 step\n", "60.0% busy, 40.0% idle", "60% of the wall time: b.forward 67%, a."):
        assert part in text
    rows = ["b 4000.000 4000.000 1", "a 2000.000 2000.000 1", "c 2000.000 2000.000 1"]
    rows.append("all 8000.000 0.000 0.000 8000.000 3")
    assert [" ".join(line.split()) for line in text.splitlines()[-4:]] == rows
    lines = repr(hand_made()).splitlines()
    assert (len(lines) <= 40, max(map(len, lines)) <= 120) == (True, True), "it fits on a screen"
    assert repr(replace(hand_made(), events=())).endswith("no events")


def test_waits_for_other_workers_are_idle():
    """As on the dashboard's page: c, from 3 to 5, is a message of the next step."""
    timeline = hand_made()
    events = [replace(event, layer="receive.c", step=1) if event.layer == "c" else event for event in timeline.events]
    summary = replace(timeline, events=tuple(events)).summary
    assert summary.busy == {"thread 1": pytest.approx(0.6), "thread 2": 0}
    assert (summary.overlap, summary.steps_overlap, summary.inside_share) == (0, 0, 0)
    assert summary.waiting_share == pytest.approx(12 / 20)


PATHS = [
    ([(0,), (1,)], {}, "abc", 12),  # everything of the first step, then the second
    ([(0,), (1,)], {}, "c", 4 + 6),  # on a cluster only what is awaited
    ([(0, 1)], {"a": "c"}, "abc", 4 + 6),  # steps that overlap wait for what they need
    ([(0, 1)], {"a": "b"}, "abc", 12),
    ([(0, 1)], {}, "abc", 6),
]


@pytest.mark.parametrize(("windows", "earlier", "awaited", "path"), PATHS)
def test_the_critical_path_of_several_steps(windows, earlier, awaited, path):
    timed_windows = [Window(steps, 10.0 * steps[0], 10.0 * steps[-1] + 10) for steps in windows]
    assert hand_made(timed_windows, earlier, (0.0, 10.0), awaited).summary.critical_path == pytest.approx(path)


def test_colors_of_layers_and_passes():
    assert color_of("linear") == color_of("linear.forward-h.0.mlp") != color_of("linear.backward")
    assert color_of("receive.linear.backward-wte") == color_of("receive") != color_of("send.totals")
    tables = [layer.name for layer in vars(layers).values() if isinstance(layer, layers.Layer)] + [*OPTIMIZERS]
    assert all(color_of(name, other="") for name in tables), "layers and optimizers that are built in"
    assert color_of("mine.backward", other="") == ""


def test_bars_of_a_page():
    bars = bars_of(hand_made(lanes=(Lane("worker <0>", 1), Lane("worker 1", 1))))
    assert [(bar["left"], bar["right"]) for bar in bars] == [(1000, 3000), (3000, 5000), (4000, 8000)]
    assert [bar["ms"] for bar in bars] == [2000, 2000, 4000]
    assert [bar["lane"] for bar in bars] == [f"worker {name}, thread 1" for name in ("<0>", "1", "<0>")]
    for words in ("a, step 1, chunk all<br>", "from 1,000.000 to 3,000.000 ms, returned 100B", "worker &lt;0&gt;"):
        assert words in bars[0]["about"]


# Files.


def test_names_of_the_files_and_what_is_refused(tmp_path):
    for given, base in {"x": "x", "x.json": "x", "x.html": "x", "v1.2": "v1.2"}.items():
        assert paths_of(tmp_path / given) == [tmp_path / f"{base}.json", tmp_path / f"{base}.html"]
    with pytest.raises(ValueError, match="events=0"):
        str(Timeline("", (Lane("", 1),), (), (), TaskGraph({}, {}, frozenset())).summary)
    with pytest.raises(ValueError, match="timeline_steps=0"):
        TimelineConfig(timeline_steps=0)
    assert TimelineConfig(timeline="first.html").timeline == "first.html"
    for path in ("./first", "..", "t/first", "/first", "first/", "~/first"):
        with pytest.raises(ValueError, match="must have a name without a folder; got timeline="):
            TimelineConfig(timeline=path)
    for name in ("state", "state.json"):  # with such a file, a run's folder would count as a checkpoint
        with pytest.raises(ValueError, match="must not have the name of a checkpoint's file"):
            TimelineConfig(timeline=name)


def test_a_run_has_one_timeline_and_a_refused_one_leaves_no_run(small_text, tmp_path):
    with pytest.raises(ValueError, match="one timeline at most"):
        fit(small_text, tmp_path / "run", callbacks=[TimelineCallback(), TimelineCallback()])
    assert not (tmp_path / "run").exists()


def require_valid(trace):
    """Check the rules of the Trace Event Format, by which Chrome and Perfetto read files."""
    names, calls = ([event for event in trace["traceEvents"] if event["ph"] == kind] for kind in "MX")
    assert len(names) + len(calls) == len(trace["traceEvents"])
    assert min(event["pid"] for event in names) > 0, "0 is the idle process"
    processes, threads = (
        {(event["pid"], event["tid"]) for event in names if event["name"] == f"{kind}_name"}
        for kind in ("process", "thread")
    )
    assert {pid for pid, _ in processes} == {pid for pid, _ in threads}
    assert {(call["pid"], call["tid"]) for call in calls} <= threads
    assert all(call["name"] and min(call["ts"], call["dur"]) >= 0 for call in calls)
    for thread in threads:  # calls of a thread may be nested, but not overlap
        ordered = sorted((call["ts"], call["dur"]) for call in calls if (call["pid"], call["tid"]) == thread)
        assert all(start + length <= after + 1e-3 for (start, length), (after, _) in pairwise(ordered))


def test_traces_follow_the_rules_of_their_format(cluster, tmp_path):
    cluster.have(2)
    _, here = recorded("none", 2)
    _, there = recorded("step", 1, scheduler=cluster.address, grain="segment")
    early = replace(here, events=(replace(here.events[0], start=-1e-5), *here.events[1:]))
    for number, timeline in enumerate((here, there, early, hand_made())):
        path, _ = write_timeline(timeline, tmp_path / str(number))
        trace = json.loads(path.read_text(), parse_constant=lambda constant: pytest.fail(constant))
        require_valid(trace)
        assert sum(entry["ph"] == "X" for entry in trace["traceEvents"]) == len(timeline.events)
    names = Counter(entry["name"] for entry in there.trace()["traceEvents"] if entry["ph"] == "M")
    assert names == {"process_name": 2, "thread_name": 2}, "a process per worker"


def test_a_trace_has_the_calls_and_the_page_loads_nothing(tmp_path):
    timeline = hand_made()
    path, page = write_timeline(timeline, tmp_path / "deep" / "run")
    trace = json.loads(path.read_text())
    calls = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    times = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in calls]
    assert times == [(1, "a.forward", 1e6, 2e6), (2, "c.forward", 3e6, 2e6), (1, "b.forward", 4e6, 4e6)]
    told = {"layer": "a", "pass": "forward", "where": "a", "block": None}
    assert calls[0]["args"] == told | {"chunk": None, "step": 1, "bytes": 100, "task": "a"}
    names = [(event["name"], event["args"]["name"]) for event in trace["traceEvents"] if event["ph"] == "M"]
    assert names == [("process_name", "by <hand>"), ("thread_name", "thread 1"), ("thread_name", "thread 2")]
    assert trace["otherData"] == {"title": "by <hand>", "summary": str(timeline.summary)}
    text = page.read_text()
    assert unescape(re.search(r"<title>(.*?)</title>", text)[1]) == "by <hand>"
    assert "10000.00 ms a step, 1 step" in text
    assert not re.search(r"\b(src|href)\s*=", re.sub(r"(?s)(<script[^>]*>).*?</script>", r"\1", text))


def test_training_writes_the_timeline_of_its_last_steps(small_text, tmp_path, capsys):
    def trained(flags, name):
        common = [*FLAGS.split(), "--data", str(small_text), "--out", str(tmp_path / name)]
        assert train.main([*common, *flags.split()]) == 0
        return tmp_path / name

    run = trained("--steps 6 --barrier none --timeline last.html --timeline-steps 3", "run")
    trace = json.loads((run / "last.json").read_text())
    assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"} == {4, 5, 6}
    assert "<title>Steps 4 to 6: barrier none, grain " in (run / "last.html").read_text()
    out = capsys.readouterr().out
    assert "critical path" in out
    assert f"timeline written to {run / 'last.html'} and {run / 'last.json'}" in out
    trained("--steps 1 --timeline x", "short")
    assert "no step was recorded" in capsys.readouterr().out


def test_dask_diagnostics_observe_a_run(small_text):
    steps, cut = 3, {"scheduler": "threads", "threads": 2, "grain": "block", "batch_chunk": 2, "sequence_chunk": 16}
    with Profiler() as tasks, ResourceProfiler(dt=0.01) as resources:
        fit(small_text, steps=steps, dataflow=cut, validate_every=0)
    times = Counter(task.key for task in tasks.results)  # beside the steps, a validation
    assert sum(count == steps for count in times.values()) > 5
    assert all(task.start_time <= task.end_time for task in tasks.results)
    assert {task.worker_id for task in tasks.results} != {None}
    assert resources.results
