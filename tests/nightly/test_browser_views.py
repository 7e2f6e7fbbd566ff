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
FLAGS = ["--headless=new", "--disable-gpu", "--no-first-run", "--window-size=1400,1150", "--enable-logging=stderr"]
FLAGS += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000"]
FLAGS += ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.mark.skipif(PATH is None, reason="no Chromium on the PATH")
def test_page_shows_a_timeline_without_a_network(tmp_path):
    kinds = {"a": ("linear", "forward"), "b": ("gelu", "forward"), "c": ("linear", "backward")}
    events = [replace(event, layer=kinds[event.layer][0], phase=kinds[event.layer][1]) for event in hand_made().events]
    _, page = write_timeline(replace(hand_made(), events=tuple(events)), tmp_path / "steps.html")
    picture = tmp_path / "page.png"
    command = [PATH, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}", page.as_uri()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stderr.splitlines()
    kept = [line for line in said if ":CONSOLE:" in line]
    assert kept, "Bokeh says that it has begun"
    assert all(":INFO:" in line for line in kept)
    shown, pixels = np.rint(imread(picture)[..., :3] * 255).astype(int), []
    for layer, phase in kinds.values():
        color = color_of(f"{layer}.{phase}")
        pixels.append((shown == [int(color[at : at + 2], 16) for at in (1, 3, 5)]).all(-1).sum())
    assert pixels[0] > 1000
    assert np.divide(pixels, pixels[0]) == pytest.approx([1, 2, 1], abs=0.1), "bars as long as their calls"


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
                assert kinds <= {str(task["key"]).partition("-")[0] for task in [*stream]}

        fit(small_text, client=client, on_step=look, validate_every=5)
        assert collected.step["step"] == 11
        assert "validation_loss" in collected.step
        session = pull_session(url=link)  # as a browser does

        def shown():
            session.force_roundtrip()
            return len(session.document.select_one({"type": ColumnDataSource}).data["lane"]) > 1

        wait_until(shown, "bars of kernels")
        session.close()
