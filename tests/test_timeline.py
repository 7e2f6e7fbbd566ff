"""Timelines: what is recorded, what is computed from it, and the files, opened in a browser where there is one."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import nullcontext
from html import unescape
from html.parser import HTMLParser
from itertools import combinations, pairwise

import command_lines
import numpy as np
import pytest
from chromium import PATH, visit
from conftest import SMALL, random_batch, random_parameters

from daskgpt.config.model import GPT2Config
from daskgpt.config.run import OptimizerConfig
from daskgpt.graph.program import calls_of
from daskgpt.graph.spans import RECORDER, bytes_of, recorded_spans
from daskgpt.instruments.timeline import (
    Event,
    StepRecorder,
    Timeline,
    TimelineConfig,
    Window,
    check_timeline_path,
    describe_summary,
    summarise,
    timeline_paths,
    write_side_by_side,
    write_timeline,
)
from daskgpt.instruments.timeline.curves import layers_at_once, live_bytes
from daskgpt.instruments.timeline.events import TaskGraph, different_at_once
from daskgpt.instruments.timeline.writing import is_bare
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.step import TrainingStep

LARGER = GPT2Config(blocks=2, heads=2, channels=128, vocabulary=257, positions=64)
SHAPE = (8, 64)


def recorded(barrier, windows, config=SMALL, shape=(4, 12), chunk=(2, 6), scheduler="threads", grain="kernel"):
    """A timeline of some windows of steps, after one window that is not recorded."""
    random = np.random.default_rng(5)
    with open_scheduler(scheduler, 2) as runs:
        step = TrainingStep(
            config, shape, chunk, OptimizerConfig(), grain=grain, barrier=barrier, in_place=runs.in_place
        )
        state = step.initial(random_parameters(config, random))
        recorder = StepRecorder(step, runs)
        for number, window in enumerate([windows[0], *windows]):
            batches = [random_batch(config, random, shape) for _ in window]
            with recorder.window(window) if number else nullcontext():
                _, state = run(step, runs, state, batches)
        state.parameters(runs)
        return step, recorder.finish()


def run(step, runs, state, batches):
    if len(batches) > 1:
        return step.window(runs, state, batches, 100)
    return step(runs, state, *batches[0], 100)


def test_every_kernel_call_of_the_recorded_steps_is_an_event_in_the_words_of_the_model():
    step, timeline = recorded("step", [(7,), (8,)], scheduler="sync")
    calls = [call.key for node in step.runnable.graph.values() for call in calls_of(node)]
    counts = Counter(event.key for event in timeline.events)
    assert set(counts.values()) == {2}
    missing = set(calls) - counts.keys()
    assert missing
    assert all(re.search(r"attention|crossentropy", key[0]) and key[0][-2] == "." for key in missing), "picks only"
    assert timeline.steps == [7, 8]
    assert {event.step for event in timeline.events} == {7, 8}
    found = {(event.layer, event.phase, event.where, event.block, event.chunk) for event in timeline.events}
    assert ("linear", "forward", "h.1.attn.c_attn", 1, (1, 0)) in found
    assert ("attention", "backward", "h.0.attn.qkv", 0, (1, None)) in found
    assert ("adamw", "update", "wte.weight", None, None) in found
    assert ("embedding", "forward", "wte+wpe", None, (0, 1)) in found
    size = {event.where: event.bytes for event in timeline.events if event.layer == "linear"}
    assert size["h.0.mlp.c_fc"] == 2 * 6 * 4 * 16 * 4  # float32 (b, t, 4C)
    assert {event.bytes for event in timeline.events if event.layer == "adamw"} == {0}
    assert timeline.lanes == ("thread 1",)
    assert all(event.end >= event.start >= 0 for event in timeline.events)
    assert all(first.end <= second.start for first, second in pairwise(timeline.events)), "one thread"


def test_nothing_is_recorded_unless_asked_for():
    assert RECORDER.spans is None
    with recorded_spans() as outer:
        with recorded_spans() as inner:
            assert RECORDER.spans is inner
        assert RECORDER.spans is outer
    assert RECORDER.spans is None
    assert bytes_of((np.zeros(3), (np.zeros(2, np.float32), None))) == 32


def seen(barrier, windows, holds):
    """The first of some timelines for which something holds: on a busy machine two threads may take turns."""
    for _ in range(20):
        _, timeline = recorded(barrier, windows, LARGER, SHAPE, (2, 64), grain="segment")
        if holds(timeline):
            return timeline
    raise AssertionError(f"never seen with barrier {barrier}")


def together(timeline, differ):
    """Pairs of events that overlap in time and differ in something."""
    return [
        (a, b)
        for a, b in combinations(timeline.events, 2)
        if differ(a) != differ(b) and a.start < b.end and b.start < a.end
    ]


def test_barrier_none_runs_two_steps_at_the_same_time():
    timeline = seen("none", [(0, 1, 2, 3)], lambda own: together(own, lambda event: event.step))
    assert timeline.steps == [0, 1, 2, 3]
    assert summarise(timeline).steps_overlap > 0
    for a, b in together(timeline, lambda event: event.step):
        assert a.lane != b.lane
        assert abs(a.step - b.step) == 1


def test_barrier_step_runs_layers_at_the_same_time_but_no_steps():
    timeline = seen("step", [(1,), (2,)], lambda own: together(own, lambda event: event.stage))
    assert summarise(timeline).overlap > 0
    assert max(count for _, count in layers_at_once(timeline)) == 2
    assert not together(timeline, lambda event: event.step)


def test_fork_join_runs_one_layer_at_a_time():
    _, timeline = recorded("layer", [(1,), (2,)], LARGER, SHAPE, (2, 64))
    found = summarise(timeline)
    assert found.overlap == 0
    assert found.steps_overlap == 0
    assert max(count for _, count in layers_at_once(timeline)) == 1
    assert not together(timeline, lambda event: event.stage)
    assert set(found.phases) == {"forward", "backward", "update"}
    assert sum(found.phases.values()) <= found.wall
    assert all(seconds > 0 for seconds in found.phases.values())


def test_a_cluster_records_in_its_workers_on_one_clock():
    step, timeline = recorded("step", [(3,), (4,)], scheduler="local", grain="segment")
    counts = Counter((event.step, event.key) for event in timeline.events)
    calls = {call.key for node in step.runnable.graph.values() for call in calls_of(node)}
    assert set(counts.values()) == {1}
    assert {step for step, _ in counts} == {3, 4}
    assert len({key for _, key in counts}) <= len(calls)
    assert timeline.lanes == ("worker 0", "worker 1")
    first, last = timeline.windows
    for event in timeline.events:
        assert first.start - 0.01 <= event.start <= event.end <= last.end + 0.01
        assert event.step == 3 or event.start >= last.start - 0.01
    starts = {(event.step, event.key): event.start for event in timeline.events}
    for event in timeline.events:
        for reader in timeline.readers.get(event.key, ()):
            assert starts.get((event.step, reader), event.end) >= event.end - 0.01, "one clock for both workers"
    found = summarise(timeline)
    assert found.critical_path <= found.wall
    assert {"adamw", "linear"} <= {layer for layer, _ in found.kernels}


def test_a_cluster_shows_what_its_workers_got_from_each_other(tmp_path):
    _, timeline = recorded("step", [(3,), (4,)], scheduler="local", grain="segment")
    assert timeline.transfers, "two workers share a step"
    for transfer in timeline.transfers:
        assert 0 <= transfer.start <= transfer.end <= timeline.windows[-1].end
        assert transfer.bytes > 0
        assert transfer.results > 0
        assert transfer.sender == f"worker {1 - transfer.lane}"
    trace, page = write_timeline(timeline, tmp_path / "run")
    events = json.loads(trace.read_text())["traceEvents"]
    written = [event for event in events if event.get("cat") == "transfer"]
    assert [event["args"]["bytes"] for event in written] == [transfer.bytes for transfer in timeline.transfers]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {names[event["tid"]] for event in written} <= {"worker 0, transfers", "worker 1, transfers"}
    if PATH:
        found = visit(page, tmp_path / "profile", READY, (LEGEND,))
        assert found.messages == []
        assert str(found.values[0]).endswith(" transfer")


def hand_made(windows, earlier, starts=(0.0, 10.0), awaited=("a", "b", "c")):
    """Steps of three tasks on two lanes: a 1 .. 3, then b 4 .. 8 and c 3 .. 5, which both need a."""
    keys = {name: (f"{name}.forward-{name}-token",) for name in "abc"}
    events = []
    for step, zero in enumerate(starts):
        for name, lane, start, end, size in (("a", 0, 1, 3, 100), ("c", 1, 3, 5, 10), ("b", 0, 4, 8, 1000)):
            key = keys[name]
            events.append(
                Event(
                    step=step,
                    layer=name,
                    phase="forward",
                    where=name,
                    stage=name,
                    block=None,
                    chunk=None,
                    lane=lane,
                    start=zero + start,
                    end=zero + end,
                    bytes=size,
                    task=(step, key),
                    task_name=f"{name}.forward-{name}",
                    key=key,
                )
            )
    a, b, c = keys.values()
    tasks = TaskGraph(
        order=(a, b, c),
        needs={a: set(), b: {a}, c: {a}},
        earlier={keys[key]: {keys[name] for name in names} for key, names in earlier.items()},
        awaited=frozenset(keys[name] for name in awaited),
    )
    return Timeline("by hand", ("thread 1", "thread 2"), tuple(events), windows, tasks, {a: [b, c]})


def test_a_summary_worked_out_by_hand():
    found = summarise(hand_made((Window((0,), 0.0, 10.0),), {}, starts=(0.0,)))
    assert found.wall == 10
    assert found.busy == {"thread 1": pytest.approx(0.6), "thread 2": pytest.approx(0.2)}
    assert found.kernel_share == pytest.approx(0.4)
    assert found.overlap == pytest.approx(0.1)  # b and c, from 4 to 5
    assert found.steps_overlap == 0
    assert found.critical_path == pytest.approx(6)  # a and b
    assert found.critical == {("b", "forward"): 4, ("a", "forward"): 2}
    assert found.inside == 0
    assert found.scheduling == pytest.approx(2 / 20)  # a from 0 to 1, b from 3 to 4
    assert found.waiting == pytest.approx(10 / 20)
    assert found.kernels["b", "forward"] == (4, 1)
    assert found.phases == {"forward": 8, "backward": 0, "update": 0}
    assert found.tasks == 3


@pytest.mark.parametrize(
    ("windows", "earlier", "awaited", "path"),
    [
        ([(0,), (1,)], {}, "abc", 12),  # everything of the first step, then the second
        ([(0,), (1,)], {}, "c", 4 + 6),  # on a cluster only what is awaited
        ([(0, 1)], {"a": "c"}, "abc", 4 + 6),  # steps that overlap wait for what they need
        ([(0, 1)], {"a": "b"}, "abc", 12),
        ([(0, 1)], {}, "abc", 6),
    ],
)
def test_the_critical_path_of_several_steps(windows, earlier, awaited, path):
    own = tuple(Window(steps, 10.0 * steps[0], 10.0 * steps[-1] + 10) for steps in windows)
    assert summarise(hand_made(own, earlier, awaited=awaited)).critical_path == pytest.approx(path)


def test_bytes_live_until_their_last_reader_is_done():
    timeline = hand_made((Window((0,), 0.0, 10.0),), {}, starts=(0.0,))
    assert live_bytes(timeline) == [(3.0, 100), (8.0, 0)]


def test_different_names_at_once():
    assert different_at_once([(0, 2, "x"), (1, 3, "x"), (2, 4, "y")]) == [(0, 1), (1, 1), (2, 2), (3, 1), (4, 0)]
    assert different_at_once([]) == []


def test_a_timeline_without_events_is_refused():
    empty = Timeline("", ("thread 1",), (), (), TaskGraph((), {}, {}, frozenset()), {})
    message = "summarise: a timeline must have events; got events=0. Record at least one step."
    with pytest.raises(ValueError, match=re.escape(message)):
        summarise(empty)


def test_the_summary_in_words():
    text = describe_summary(summarise(hand_made((Window((0,), 0.0, 10.0),), {}, starts=(0.0,))))
    for part in (
        "wall           10000.00 ms a step, 1 step\n",
        "thread 1          60.0% busy, 40.0% idle",
        "10.0% of the time two or more layers at once, 0.0% two or more steps",
        "6000.00 ms a step, 60% of the wall time: b.forward 67%, a.forward 33%",
        "40.0% kernels, 0.0% between the kernels of a task, 10.0% scheduling (a task was ready), 50.0% waiting",
    ):
        assert part in text, text
    assert [line.split()[0] for line in text.splitlines()[-4:]] == ["b", "a", "c", "all"]


@pytest.mark.parametrize(("given", "base"), [("x", "x"), ("x.json", "x"), ("x.html", "x"), ("v1.2", "v1.2")])
def test_names_of_the_files(tmp_path, given, base):
    assert timeline_paths(tmp_path / given) == (tmp_path / f"{base}.json", tmp_path / f"{base}.html")


def test_a_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "x"):
        message = f"timeline: the path must be that of a file in a folder; got timeline={path}. Give another."
        with pytest.raises(ValueError, match=re.escape(message)):
            check_timeline_path(path)
    check_timeline_path(tmp_path / "new" / "folder" / "x")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A timeline of overlapping steps, and its two files."""
    _, timeline = recorded("none", [(10, 11, 12)], chunk=(2, 12))
    return timeline, *write_timeline(timeline, tmp_path_factory.mktemp("timeline") / "deep" / "run")


def test_the_trace_is_one_that_chrome_and_perfetto_read(files):
    timeline, trace, _ = files
    found = json.loads(trace.read_text())
    events = found["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(timeline.events)
    assert {event["args"]["step"] for event in complete} == {10, 11, 12}
    for event in complete:
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert set(event["args"]) == {"layer", "pass", "where", "block", "chunk", "step", "bytes", "task"}
    for lane in range(2):
        own = sorted((event["ts"], event["ts"] + event["dur"]) for event in complete if event["tid"] == lane)
        assert all(end <= start + 0.002 for (_, end), (start, _) in pairwise(own)), "rounded to nanoseconds"
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["thread 1", "thread 2"]
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"memory of activations and gradients", "layers at once"}


class Loads(HTMLParser):
    """The addresses that a page would load."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in ("src", "href", "data", "action", "srcset")]


def test_the_page_loads_nothing(files):
    timeline, _, page = files
    text = page.read_text()
    parser = Loads()
    parser.feed(text)
    assert [value for value in parser.found if value and re.match(r"\s*(https?:)?//", value)] == []
    assert not re.search(r"@import|url\(\s*['\"]?(https?:)?//", text)
    assert unescape(re.search(r"<title>(.*?)</title>", text)[1]) == timeline.title
    assert timeline.title.startswith("Steps 10 to 12: barrier none, grain kernel, 4 x 12 tokens in chunks of 2 x 12, ")


READY = "!!(window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle)"
BARS = """(() => {
    const lanes = Bokeh.documents[0].roots()[0].children[1]
    const bars = lanes.renderers.filter((r) => "task" in r.data_source.data)
    return bars.map((r) => r.data_source.get_length()).reduce((a, b) => a + b, 0)
})()"""
SHARED_AXIS = """(() => {
    const [, lanes, memory, layers] = Bokeh.documents[0].roots()[0].children
    return lanes.x_range === memory.x_range && memory.x_range === layers.x_range
})()"""
LEGEND = """(() => {
    const lanes = Bokeh.documents[0].roots()[0].children[1]
    const legend = lanes.above.find((panel) => panel.type === "Legend")
    return legend.click_policy + " " + legend.items.map((item) => item.label.value).join(" ")
})()"""


@pytest.mark.skipif(PATH is None, reason="no Chromium on the PATH")
def test_the_page_opens_in_a_browser_without_a_request_or_an_error(files, tmp_path):
    timeline, _, page = files
    found = visit(page, tmp_path / "profile", READY, (BARS, SHARED_AXIS, LEGEND))
    assert [url for url in found.requests if not url.startswith("data:")] == [page.as_uri()]
    assert found.messages == []
    bars, shared_axis, legend = found.values
    assert bars == len(timeline.events)
    assert shared_axis
    assert legend == "hide embedding layernorm linear gelu add attention crossentropy mean adamw"
    assert len(found.picture) > 20_000


LANES = 'Bokeh.documents[0].roots()[0].children.filter((child) => child.type === "Figure")'
END = f"Math.max(...{LANES}.map((plot) => plot.x_range.end))"
ONE_AXIS = f"{LANES}.every((plot) => plot.x_range === {LANES}[0].x_range)"
COUNTS = f"""{LANES}.map((plot) => plot.renderers.filter((r) => "task" in r.data_source.data)
    .map((r) => r.data_source.get_length()).reduce((a, b) => a + b, 0)).join(" ")"""
HIDE = f"""{LANES}[0].above.find((panel) => panel.type === "Legend").items[2].renderers
    .forEach((renderer) => {{ renderer.visible = false }})"""
HIDDEN = f"""{LANES}.map((plot) => plot.renderers.filter((r) => !r.visible).map((r) => r.name).join(" ")).join(", ")"""
WIDTH = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.mark.skipif(PATH is None, reason="no Chromium on the PATH")
@pytest.mark.parametrize("width", [1400, 600])
def test_several_timelines_share_one_page_one_time_scale_and_one_legend(files, tmp_path, width):
    overlapping, *_ = files
    _, fork_join = recorded("layer", [(10,), (11,), (12,)], chunk=(2, 12))
    timelines = {"barrier layer": fork_join, "barrier none": overlapping}
    page = write_side_by_side(timelines, tmp_path / "barriers.html", "two barriers")
    found = visit(page, tmp_path / "profile", READY, (END, ONE_AXIS, COUNTS, HIDE, HIDDEN, WIDTH), size=(width, 1150))
    assert [url for url in found.requests if not url.startswith("data:")] == [page.as_uri()]
    assert found.messages == []
    end, one_axis, counts, _, hidden, beyond = found.values
    assert end == pytest.approx(1e3 * max(own.windows[-1].end for own in timelines.values()))
    assert one_axis
    assert counts == f"{len(fork_join.events)} {len(overlapping.events)}"
    assert hidden == "linear linear, linear linear", "forward and backward, in both"
    assert beyond <= 0, "nothing lies beyond the right edge"


MODEL = "--blocks 1 --heads 2 --channels 32 --batch-size 4 --sequence-length 16"
RUN = "--validate-every 0 --validation-batches 1 --sample-tokens 0"


def train(text, *arguments):
    return command_lines.run("train", *MODEL.split(), *RUN.split(), "--data", text, *arguments)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {number}: the quick brown fox\n" for number in range(2000)))
    return path


def test_training_writes_the_timeline_of_its_last_steps(text, tmp_path):
    arguments = ("--steps", 10, "--barrier", "none", "--timeline", tmp_path / "t" / "last", "--timeline-steps", 3)
    result = train(text, *arguments, "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    trace = json.loads((tmp_path / "t" / "last.json").read_text())
    assert {e["args"]["step"] for e in trace["traceEvents"] if e["ph"] == "X"} == {7, 8, 9}
    assert (tmp_path / "t" / "last.html").stat().st_size > 100_000
    for part in (
        "critical path",
        "overlap",
        "busy",
        "adamw",
        f"timeline written to {tmp_path / 't' / 'last.html'} and",
    ):
        assert part in result.stdout
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    again = train(text, "--steps", 10, "--out", tmp_path / "plain")
    assert again.returncode == 0, again.stderr
    plain = [json.loads(line)["loss"] for line in (tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()]
    assert losses == plain


def test_a_timeline_with_a_name_alone_goes_into_the_folder_of_the_run(text, tmp_path):
    out, here = tmp_path / "run", tmp_path / "here"
    (here / "first").mkdir(parents=True)  # what is called so where the command starts does not matter
    arguments = ("--data", text, *MODEL.split(), *RUN.split(), "--steps", 3, "--timeline", "first", "--out", out)
    result = command_lines.run("train", *arguments, cwd=here)
    assert result.returncode == 0, result.stderr
    line = f"timeline written to {out / 'first.html'} and {out / 'first.json'}"
    assert line in result.stdout.splitlines()
    assert (out / "first.html").exists()
    assert (out / "first.json").exists()
    assert [path.name for path in here.rglob("*")] == ["first"]
    for bare, path in ((True, "first"), (True, "first.html"), (False, "./first"), (False, ".."), (False, "t/first")):
        assert is_bare(path) == bare


def test_a_timeline_that_cannot_be_written_stops_a_run_before_it_starts(text, tmp_path):
    result = train(text, "--steps", 2, "--timeline", tmp_path, "--out", tmp_path / "run")
    assert result.returncode == 2
    lines = [line for line in result.stderr.splitlines() if line]
    assert lines == [f"timeline: the path must be that of a file in a folder; got timeline={tmp_path}. Give another."]
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_step_to_record_says_so(text, tmp_path):
    result = train(text, "--steps", 1, "--timeline", tmp_path / "t", "--out", tmp_path / "run")
    assert result.returncode == 0, result.stderr
    assert "timeline   no step was recorded: the run ended before" in result.stdout
    assert not (tmp_path / "t.html").exists()


def test_a_timeline_shows_at_least_one_step():
    message = "TimelineConfig: timeline_steps must be at least 1; got timeline_steps=0. Give 1 or more."
    with pytest.raises(ValueError, match=re.escape(message)):
        TimelineConfig(timeline_steps=0)
