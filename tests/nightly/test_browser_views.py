"""Tests of pages in a browser (Chromium): a timeline, and the page "daskgpt" on Dask's dashboard of a real run."""

import os
import shutil
import subprocess
import urllib.request
from dataclasses import replace

import numpy as np
import pytest
from bokeh.client import pull_session
from bokeh.models import ColumnDataSource
from command_lines import PATIENCE
from distributed import Client
from machines import wait_until
from matplotlib.image import imread
from small_runs import fit
from test_timeline import hand_made

import daskgpt
from daskgpt.profiling.dashboard import Collected
from daskgpt.profiling.pages import write_timeline
from daskgpt.profiling.timeline import color_of

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(PATH is None, reason="no Chromium on the PATH")


def pixels_of(address, folder, names, *flags):
    """How many pixels of a page have the color of each layer and pass; the page must not complain on its console."""
    command = [PATH, "--headless=new", "--disable-gpu", "--no-first-run", "--window-size=1400,1150", *flags]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    command += [
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        f"--screenshot={folder / 'page.png'}",
    ]
    done = subprocess.run([*command, address], capture_output=True, text=True, timeout=PATIENCE)
    assert ":CONSOLE:" in done.stderr, "Bokeh says that it has begun"
    assert [line for line in done.stderr.splitlines() if ":CONSOLE:" in line and ":INFO:" not in line] == []
    shown = np.rint(imread(folder / "page.png")[..., :3] * 255).astype(int)
    colors = [[int(color_of(name)[at : at + 2], 16) for at in (1, 3, 5)] for name in names]
    return [int((shown == color).all(-1).sum()) for color in colors]


@needs_browser
def test_page_shows_a_timeline_without_a_network(tmp_path):
    kinds = {"a": ("linear", "forward"), "b": ("gelu", "forward"), "c": ("linear", "backward")}
    events = [replace(event, layer=kinds[event.layer][0], phase=kinds[event.layer][1]) for event in hand_made().events]
    _, page = write_timeline(replace(hand_made(), events=tuple(events)), tmp_path / "steps.html")
    flags = "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000"
    names = [".".join(kinds[name]) for name in "abc"]
    a, b, c = pixels_of(page.as_uri(), tmp_path, names, *flags)
    assert a > 1000, "bars as long as their calls: 2, 4 and 2 seconds"
    assert (b / a, c / a) == (pytest.approx(2, abs=0.1), pytest.approx(1, abs=0.1))


def test_dashboard_page_shows_a_run(small_text, tmp_path):
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

        fit(small_text, client=client, on_step=look, validate_every=5)
        assert collected.step["step"] == 11
        assert "validation_loss" in collected.step
        session = pull_session(url=link)  # as a browser does

        def shown():
            session.force_roundtrip()
            return len(session.document.select_one({"type": ColumnDataSource}).data["lane"]) > 1

        wait_until(shown, "bars of kernels")
        session.close()
