"""Tests of the page "daskgpt" on Dask's dashboard: what it collects and shows, on a real scheduler in this process."""

import time
import urllib.request
from types import SimpleNamespace
from urllib.error import HTTPError

import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.diagnostics import task_stream
from machines import wait_until

from daskgpt.graph.program import Span, Spans
from daskgpt.profiling.dashboard import NOTHING, WAITING, Collected, Page, Part, begin, dask_setup, end, overlap_share
from daskgpt.schedulers.links import ranks_of
from daskgpt.schedulers.protocol import METRIC, TOPIC, clock_offset
from daskgpt.schedulers.workers import ASKED, KEPT, LatestCall, PrepareWorker, latest_calls

CALLS = {
    "a": [
        LatestCall("linear.forward-h.0.mlp", 0, 0.0, 2.0),
        LatestCall("receive.linear.backward-wte", 0, 2.0, 3.5),
        LatestCall("linear.backward-wte", 0, 3.5, 4.0),
    ],
    "b": [LatestCall("linear.forward-h.1.mlp", 0, 1.0, 3.0), LatestCall("gelu.forward-h.0.mlp", 0, 3.0, 4.0)],
}


@pytest.fixture(scope="module")
def cluster():
    options = {"n_workers": 2, "threads_per_worker": 2, "processes": False, "dashboard_address": "127.0.0.1:0"}
    with LocalCluster(**options) as cluster, Client(cluster) as client:
        yield cluster, client


@pytest.fixture
def collected(cluster):
    """What the page collects from a run."""
    local, client = cluster
    assert client.run_on_scheduler(lambda dask_scheduler: begin(dask_scheduler, "run"))
    yield local.scheduler.plugins[Collected.name]
    client.run_on_scheduler(lambda dask_scheduler: end(dask_scheduler, "run"))


def status(client):
    """What the dashboard answers to a browser that opens the page."""
    try:
        port = client.cluster.scheduler.http_server.port
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/daskgpt").status
    except HTTPError as error:
        return error.code


def test_scheduler_without_dashboard_has_no_page():
    with LocalCluster(n_workers=0, processes=False, dashboard_address=None) as local, Client(local) as client:
        assert not client.run_on_scheduler(lambda dask_scheduler: begin(dask_scheduler, "run"))
        assert Collected.name in local.scheduler.plugins
        client.run_on_scheduler(lambda dask_scheduler: end(dask_scheduler, "run"))
        assert Collected.name not in local.scheduler.plugins


def test_page_shows_collected_events(cluster, collected):
    scheduler = cluster[0].scheduler
    addresses = dict(zip("ab", sorted(scheduler.workers)))
    cluster[0].loop.add_callback(collected.timer.stop)  # nobody asks
    page = Page(scheduler)
    assert page.update()
    assert (page.numbers.text, page.threads.factors) == (WAITING, [NOTHING])
    for name, calls in CALLS.items():
        new = [("old", 7, -9.0, -1.5), *((name, 7, *when) for name, _, *when in calls)]
        collected.take(addresses[name], new, cut=False, now=4.0)
    part = collected.latest()
    assert (part.start, part.end) == (-1.0, 4.0), "five seconds"
    assert [call for _, call in part.calls] == [*CALLS["a"], *CALLS["b"]]
    steps = [{"step": number, "loss": 3.0 - number, "tokens_per_s": 10.0} for number in range(3)]
    steps[1] |= {"validation_loss": 1.5, "lost_steps": 1}
    scheduler.log_event("another topic", steps[0])
    for step in steps[:2]:
        scheduler.log_event(TOPIC, step)
    page.update()
    scheduler.log_event(TOPIC, steps[2])
    page.update()
    assert (collected.recoveries, collected.step["validation_loss"]) == (1, 1.5)
    calls = [*CALLS["a"], *CALLS["b"]]
    assert page.calls.data["right"].tolist() == pytest.approx(np.array([call.end - 4 for call in calls]))
    assert set(page.calls.data["lane"]) == {f"worker {n}, thread 1" for n in (0, 1)}
    assert len(page.threads.factors) == 4, "idle threads have lanes"
    assert "5 s" in page.lanes.title.text
    # Of 20 seconds of four threads: kernels 5.5, waits for messages, which are idle, 1.5.
    for words in ("step <b>3<", "<b>1.000<", "<b>1.500<", "<b>72%<", "layers <b>12%<", "recoveries <b>1<"):
        assert words in page.numbers.text
    scheduler.log_event(TOPIC, steps[0])  # another run begins
    page.update()
    assert collected.step == steps[0]
    for name in "ab":
        collected.take(addresses[name], [("gelu.forward-h.0.mlp", 1, 5.0, 5.5)] * (name == "a"), name == "a", now=6.0)
    part = collected.latest()
    assert (part.start, part.end, len(part.calls)) == (5.0, 6.0, 1), "nothing is shown before calls that were left out"
    assert part.workers == [*addresses.values()]
    assert overlap_share(Part([], 0.0, 0.0, [])) == 0
    collected.take(addresses["a"], [], cut=False, now=20.0)
    assert collected.latest().workers == [addresses["a"]], "a worker that is silent"


def test_tasks_of_a_run_and_workers_that_leave(collected):
    spans = [{"action": name, "start": 1.0, "stop": 2.0} for name in ("transfer", "compute")]
    for key, states in [("linear.forward-1", ("processing", "memory")), ("rank.window-1", ("processing", "memory"))]:
        collected.transition(key, *states, startstops=spans, worker="a", thread=3)
    collected.transition("linear.forward-2", "waiting", "memory", startstops=spans, worker="a", thread=3)
    ((worker, calls),) = collected.calls.items()
    assert (worker, [*calls]) == ("a", [LatestCall("linear.forward", 0, 1.0, 2.0)])
    calls = [("gelu.forward-x", 4, 1.5, 3.0), ("gelu.forward-x", 5, 2.5, 3.5), ("add.forward-x", 4, 4, 5)]
    collected.take("a", calls, cut=False, now=5)
    assert [call.thread for call in collected.calls["a"]] == [0, 1, 2, 1], "a thread keeps its lane"
    collected.remove_worker(None, "a")
    assert collected.calls == collected.lanes == collected.until == {}


def spans_of(*calls):
    return Spans(Span((f"{name}_-token", 0), thread, start, stop) for name, thread, start, stop in calls)


def test_worker_returns_its_latest_calls(cluster):
    worker = min(cluster[0].workers.values(), key=lambda worker: worker.address)
    assert latest_calls(worker, 0.0, 9)[:2] == ([], False)
    before = spans_of(("add.forward-x", 1, 0.0, 1.0))
    now = spans_of(("add.forward-x", 1, 1.00001, 2.0), ("add.forward-y", 2, 2.0, 3.0), ("add.forward-x", 1, 2.5, 3.5))
    ranks_of(worker).programs["run"] = SimpleNamespace(recent=[before, now])
    try:
        offset, before_asked = clock_offset(), time.time()
        calls, cut, now_there = latest_calls(worker, 0.0, 9)
        assert not cut
        assert before_asked <= now_there <= time.time()
        assert [(call.name[-1], call.thread) for call in calls] == [("x", 1), ("y", 2), ("x", 1)]
        assert calls[0].start == pytest.approx(offset, abs=0.01)
        assert calls[0].end == pytest.approx(offset + 2, abs=0.01), "two calls that follow each other are one"
        assert latest_calls(worker, 0.0, 2)[1], "a call was left out"
        assert len(latest_calls(worker, offset + 2.8, 9)[0]) == 2, "those that have ended since then"
        assert latest_calls(worker, offset + 2.8, 2)[1] is False
        now.running |= {1: 2.9}
        calls, _, until = latest_calls(worker, 0.0, 9)
        assert len(calls) == 1, "calls that ended while the task began that runs now wait for those of this task"
        assert until == pytest.approx(offset + 2.9, abs=0.01)
        now += spans_of(("gelu.forward-x", 1, 2.9, 3.0))
        del now.running[1]
        names = [call.name for call in latest_calls(worker, until, 9)[0]]
        assert names == ["add.forward-y", "add.forward-x", "gelu.forward-x"], "which come when it has ended"
        now += spans_of(*[("add.forward-x", 1, 4.0, 4.0)] * KEPT)
        assert latest_calls(worker, 0.0, 9)[1], "a look takes bounded time"
    finally:
        del ranks_of(worker).programs["run"]


async def collected_asks(dask_scheduler):
    dask_scheduler.plugins[Collected.name].ask()


def test_scheduler_asks_only_while_somebody_looks(cluster, collected):
    local, client = cluster
    prepare = PrepareWorker("run")
    client.register_plugin(prepare)
    worker = min(local.workers.values(), key=lambda worker: worker.address)
    wait_until(lambda: all(METRIC in state.metrics for state in local.scheduler.workers.values()))
    program = SimpleNamespace(recent=[spans_of(("gelu.forward-h.0", 1, 1.0, 2.0))], link=SimpleNamespace(close=list))
    ranks_of(worker).programs["run"] = program
    client.run_on_scheduler(collected_asks)
    assert collected.asking == collected.calls == {}, "nobody looks"
    Page(local.scheduler).update()
    wait_until(lambda: worker.address in collected.calls, "an answer")
    assert [call.name for call in collected.calls[worker.address]] == ["gelu.forward-h.0"]
    stream = task_stream.TaskStreamPlugin(local.scheduler)
    local.scheduler.add_plugin(stream)
    soon = time.perf_counter() + 5
    program.recent.append(spans_of(("receive.gelu.forward-h.0", 1, soon, soon)))
    wait_until(lambda: stream.buffer, "a call in the task stream")
    drawn = stream.buffer[-1]
    assert (drawn["worker"], drawn["startstops"][0]["action"]) == (worker.address, "transfer")
    local.scheduler.remove_plugin(stream.name)
    client.unregister_worker_plugin(prepare.name)
    wait_until(lambda: ASKED not in worker.handlers, "the handler is removed")


def test_page_is_there_while_runs_are(cluster):
    local, client = cluster
    assert status(client) == 404
    plugins = client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.plugins])
    for run in ("one", "two"):
        client.run_on_scheduler(lambda dask_scheduler, run=run: begin(dask_scheduler, run))
        assert status(client) == 200
    client.run_on_scheduler(lambda dask_scheduler: end(dask_scheduler, "one"))
    page = Page(local.scheduler)
    assert page.update()
    assert status(client) == 200
    client.run_on_scheduler(lambda dask_scheduler: end(dask_scheduler, "two"))
    client.run_on_scheduler(lambda dask_scheduler: end(dask_scheduler, "two"))
    assert status(client) == 404
    assert not page.update()
    assert "has ended" in page.numbers.text
    assert client.run_on_scheduler(lambda dask_scheduler: [*dask_scheduler.plugins]) == plugins
    client.run_on_scheduler(lambda dask_scheduler: dask_setup(dask_scheduler))
    client.run_on_scheduler(lambda dask_scheduler: (begin(dask_scheduler, "run"), end(dask_scheduler, "run")))
    assert status(client) == 200, "a preload stays"
    local.scheduler.log_event(TOPIC, {"step": 2, "validation_loss": 1.5, "lost_steps": 1})
    client.run_on_scheduler(lambda dask_scheduler: begin(dask_scheduler, "next"))
    collected = local.scheduler.plugins[Collected.name]
    assert (collected.step, collected.recoveries) == ({}, 0), "the next run has numbers of its own"
    client.run_on_scheduler(lambda dask_scheduler: (end(dask_scheduler, "next"), end(dask_scheduler, "")))
