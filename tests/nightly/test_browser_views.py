"""Tests of pages in a browser: a timeline, and the page "daskgpt" on Dask's dashboard of a real run."""

import urllib.request

import pytest
from chromium import PATH, visit
from distributed import Client
from machines import wait_until
from small_runs import MODEL, OPTIMIZER
from test_timeline import recorded

import daskgpt
from daskgpt.profiling.dashboard import Collected
from daskgpt.profiling.pages import write_timeline

READY = "!!(window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle)"
BARS = """Bokeh.documents[0].roots()[0].children.filter((child) => child.type === "Figure")
    .flatMap((plot) => plot.renderers.filter((r) => "about" in r.data_source.data))
    .map((r) => r.data_source.get_length()).reduce((a, b) => a + b, 0)"""
LONGEST = """["lane"].map((name) => Math.max(0, ...Bokeh.documents
    .flatMap((d) => [...d._all_models.values()]).filter((m) => m.type === "ColumnDataSource" && m.data[name])
    .map((m) => m.data[name].length)))"""
needs_browser = pytest.mark.skipif(PATH is None, reason="no Chromium on the PATH")


def seen(page, tmp_path, *questions):
    """What a browser answers of a file, which asks for nothing else."""
    shown = visit(page, tmp_path / "profile", READY, questions)
    assert [url for url in shown.requests if not url.startswith("data:")] == [page.as_uri()]
    assert shown.messages == []
    return shown.values


@needs_browser
def test_page_shows_a_timeline(tmp_path):
    _, timeline = recorded("none", [(10, 11)])
    _, page = write_timeline(timeline, tmp_path / "steps.html")
    assert seen(page, tmp_path, BARS) == [len(timeline.events)]


def test_dashboard_page_shows_a_run(small_text, tmp_path):
    data = daskgpt.DataConfig(data=str(small_text), batch_size=4, sequence_length=16)
    run = daskgpt.RunConfig(steps=12, validate_every=5, validation_batches=1)
    kinds = {"linear.forward", "linear.backward", "attention.forward", "crossentropy.forward"}
    with daskgpt.open_scheduler("local", 2) as scheduler, Client(scheduler.client.cluster) as client:
        collected = client.cluster.scheduler.plugins[Collected.name]
        link = client.dashboard_link.replace("/status", "/daskgpt")
        assert scheduler.description.endswith(f"dashboard {link}")

        def kernels():
            return {call.name.partition("-")[0] for calls in [*collected.calls.values()] for call in [*calls]}

        def look(step, metrics):
            if step == 8:
                assert urllib.request.urlopen(client.dashboard_link).status == 200
                assert urllib.request.urlopen(link).status == 200
                wait_until(lambda: len(collected.until) == 2 and kinds <= kernels(), "kernels")
                stream = client.cluster.scheduler.plugins["task-stream"].buffer
                assert kinds <= {str(own["key"]).partition("-")[0] for own in [*stream]}

        daskgpt.fit(MODEL, data, OPTIMIZER, run=run, client=client, on_step=look, quiet=True)
        assert collected.step["step"] == 11
        assert "validation_loss" in collected.step
        if PATH:
            shown = visit(link, tmp_path / "profile", "!!(window.Bokeh && Bokeh.documents.length)", (LONGEST,))
            assert shown.messages == []
            assert min(shown.values[0]) > 1
