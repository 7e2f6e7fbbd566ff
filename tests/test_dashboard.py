"""Tests of the page "daskgpt" on Dask's dashboard: what it collects and shows, by a scheduler made by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from daskgpt.profiling.dashboard import WAITING, Call, Collected, Page, column, idle_share, overlap_share
from daskgpt.schedulers.dask_internals import KERNEL
from daskgpt.schedulers.worker_metrics import METRIC, TOPIC

CALLS = [
    Call("a", "linear.forward", 0.0, 2.0),
    Call("b", "linear.forward", 1.0, 3.0),
    Call("b", "gelu.forward", 3.0, 4.0),
    Call("a", "linear.backward", 3.5, 4.0),
]


def test_busy_and_overlap_shares():
    assert idle_share(CALLS, 2) == 1 - 5.5 / 8
    assert overlap_share(CALLS) == 0.5 / 4, "two of one name are no overlap of layers"
    assert overlap_share([]) == idle_share([], 2) == idle_share(CALLS, 0) == 0


def test_page_shows_collected_events():
    workers = {name: SimpleNamespace(name=f"worker {name}", metrics={METRIC: {"received": 100.0}}) for name in "ab"}
    kernel = ("execute", "prefix", f"{KERNEL}linear.forward", "seconds")
    scheduler = SimpleNamespace(workers=workers, total_nthreads=2, plugins={})
    scheduler.cumulative_worker_metrics = {kernel: 2.0, (*kernel[:1], "other", *kernel[2:]): 1.0, "else": 9.0}
    found, page, other = Collected(scheduler), Page(scheduler), Page(scheduler)
    other.update()
    assert "--preload" in other.numbers.text
    scheduler.plugins = {Collected.name: found}
    page.update()
    assert page.numbers.text == WAITING
    for call in [Call("a", "old", -9.0, -1.5), *CALLS]:
        startstops = [{"action": name, "start": call.start, "stop": call.end} for name in ("compute", "transfer")]
        found.transition(f"{call.name}-1", "processing", "memory", startstops=startstops, worker=call.worker)
        found.transition(f"{call.name}-1", "waiting", "memory", startstops=startstops, worker=call.worker)
    assert list(found.calls)[1:] == found.latest == CALLS
    assert found.kernel_seconds() == {"linear.forward": 3.0}
    steps = [{"step": number, "loss": 3.0 - number, "tokens_per_s": 10.0} for number in range(3)]
    steps[1] |= {"validation_loss": 1.5, "lost_steps": 1}
    found.log_event("another topic", steps[0])
    for step in steps[:2]:
        found.log_event(TOPIC, step)
    page.update()
    workers["a"].metrics[METRIC]["received"] = 500.0
    found.log_event(TOPIC, steps[2])
    page.update()
    assert (found.runs, found.recoveries, found.bytes_a_step()) == (1, 1, 200)
    assert column(found.steps, "validation_loss") == ([2], [1.5])
    assert [page.loss.data[axis].tolist() for axis in "xy"] == [[1, 2, 3], [3, 2, 1]]
    assert page.validation.data["y"].tolist() == [1.5]
    assert page.calls.data["right"].tolist() == pytest.approx(np.array([call.end - 4 for call in CALLS]))
    assert (page.calls.data["worker"][0], page.kernels.data["seconds"]) == ("worker a", [3.0])
    for words in ("step <b>3<", "<b>1.000<", "<b>1.500<", "<b>31%<", "layers <b>12%<", "<b>200<", "recoveries <b>1<"):
        assert words in page.numbers.text.replace("200B", "200<")
    found.log_event(TOPIC, steps[0])  # another run begins
    page.update()
    assert (found.runs, page.loss.data["x"].tolist(), found.bytes_a_step()) == (2, [1], 0)
