"""The page "daskgpt" on Dask's dashboard: what it collects from a real run, and what a browser shows of it."""

from __future__ import annotations

import time
import urllib.request

import pytest
from chromium import PATH, visit
from command_lines import write_text
from distributed import Client
from machines import wait_until
from small_runs import MODEL, OPTIMIZER

import daskgpt
from daskgpt.instruments.dashboard.collected import Call, Collected, column, idle_share, overlap_share
from daskgpt.schedulers.usage import METRIC

STEPS = 12
CALLS = [
    Call("a", "linear.forward", 0.0, 2.0),
    Call("b", "linear.forward", 1.0, 3.0),
    Call("b", "gelu.forward", 3.0, 4.0),
    Call("a", "linear.backward", 3.5, 4.0),
]


def test_shares_of_the_time_in_which_tasks_run():
    assert idle_share(CALLS, 2) == 1 - 5.5 / 8
    assert overlap_share(CALLS) == 0.5 / 4, "two of one name are no overlap of layers"
    assert overlap_share([]) == idle_share([], 2) == 0


@pytest.fixture(scope="module")
def client():
    """Of a cluster as --scheduler local starts it."""
    with daskgpt.open_scheduler("local", 2) as scheduler, Client(scheduler.client.cluster) as client:
        yield client


@pytest.fixture(scope="module")
def collected(client):
    """What Dask's scheduler, which is in this process, collects."""
    return client.cluster.scheduler.plugins[Collected.name]


@pytest.fixture(scope="module")
def seconds(client, collected, tmp_path_factory):
    """Busy seconds that workers have told after a run, and those of kernels by layer and pass."""
    data = daskgpt.DataConfig(data=str(write_text(tmp_path_factory.mktemp("text"))), batch_size=4, sequence_length=16)
    run = daskgpt.RunConfig(steps=STEPS, validate_every=5, validation_batches=1)
    daskgpt.fit(MODEL, data, OPTIMIZER, run=run, client=client, quiet=True)
    time.sleep(2)  # several heartbeats, after the last task
    kernels = wait_until(collected.kernel_seconds, "heartbeats")
    return sum(worker.metrics[METRIC]["busy"] for worker in client.cluster.scheduler.workers.values()), kernels


def test_a_run_tells_of_its_steps_and_the_scheduler_of_its_tasks(collected, seconds):
    assert [record["step"] for record in collected.steps] == list(range(STEPS))
    assert column(collected.steps, "validation_loss")[0] == [5, 10, 12]
    assert {"linear.backward", "update", "tokens.backward"} & {call.name for call in collected.calls}
    assert collected.recoveries == 0
    assert collected.bytes_a_step() >= 0


def test_kernels_are_told_by_layer_and_pass_and_still_count_as_busy_time(seconds):
    busy, kernels = seconds
    assert {"linear.forward", "linear.backward", "attention.forward", "crossentropy.forward"} <= kernels.keys()
    assert 0 < sum(kernels.values()) <= busy


NAMES = '[...document.querySelectorAll("a")].map((link) => link.textContent.trim()).join(" ")'
SHOWN = """(() => {
    const models = Bokeh.documents.flatMap((d) => [...d._all_models.values()])
    const sources = models.filter((m) => m.type === "ColumnDataSource")
    const longest = (name) => Math.max(0, ...sources.filter((s) => s.data[name]).map((s) => s.data[name].length))
    return [longest("y"), longest("worker"), longest("seconds")]
})()"""


def test_a_browser_shows_it_and_the_menu_leads_to_it(client, seconds, tmp_path):
    link = client.dashboard_link.replace("/status", "/daskgpt")
    assert urllib.request.urlopen(link).status == 200
    if PATH:
        found = visit(link, tmp_path / "profile", "!!(window.Bokeh && Bokeh.documents.length)", (NAMES, SHOWN))
        assert found.messages == []
        names, (steps, calls, kernels) = found.values
        assert "Daskgpt" in names
        assert steps == STEPS
        assert min(calls, kernels) > 0
        assert len(found.picture) > 20_000
