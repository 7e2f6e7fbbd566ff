"""Tests of pages in a browser (Chromium): a timeline, and the page "daskgpt" on Dask's dashboard of a real run."""

import asyncio
import json
import os
import shutil
import subprocess
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_lines import PATIENCE
from distributed import Client
from machines import wait_until
from small_runs import fit
from test_timeline import recorded
from tornado.httpclient import AsyncHTTPClient
from tornado.websocket import websocket_connect

import daskgpt
from daskgpt.profiling.dashboard import Collected
from daskgpt.profiling.pages import write_timeline

PATH = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = ("--headless=new", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run", "--window-size=1400,1150")
READY = "!!(window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle)"
BARS = """Bokeh.documents[0].roots()[0].children.filter((child) => child.type === "Figure")
    .flatMap((plot) => plot.renderers.filter((r) => "about" in r.data_source.data))
    .map((r) => r.data_source.get_length()).reduce((a, b) => a + b, 0)"""
LONGEST = """Math.max(0, ...Bokeh.documents.flatMap((d) => [...d._all_models.values()])
    .filter((m) => m.type === "ColumnDataSource" && m.data.lane).map((m) => m.data.lane.length))"""
needs_browser = pytest.mark.skipif(PATH is None, reason="no Chromium on the PATH")


@dataclass
class Visit:
    """What a page did.

    requests   URLs of everything that was asked for, the page itself first
    messages   of the console and of exceptions, warnings and errors only
    values     of the expressions that were evaluated in the page
    """

    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    values: list[object] = field(default_factory=list)


def visit(page: Path | str, folder: Path, ready: str, expressions: tuple[str, ...] = ()):
    """Open a page, wait until `ready` is true in it, and evaluate expressions.

    page   a file, or an address
    """
    flags = [*FLAGS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with (folder.parent / "chromium.log").open("w") as log:
        process = subprocess.Popen([PATH, *flags, "about:blank"], stdout=log, stderr=log)
    try:
        return asyncio.run(_visit(page, folder, ready, expressions))
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


async def _visit(page, folder, ready, expressions):
    socket = await websocket_connect(await _address(folder), max_message_size=1 << 28)
    seen, number = Visit(), 0

    async def call(method, **parameters):
        nonlocal number
        number += 1
        await socket.write_message(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(await asyncio.wait_for(socket.read_message(), PATIENCE))
            if message.get("id") == number:
                return message.get("result", message)
            note(message.get("method"), message.get("params", {}))

    def note(method, parameters):
        if method == "Network.requestWillBeSent":
            seen.requests.append(parameters["request"]["url"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            seen.messages.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Runtime.exceptionThrown":
            seen.messages.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            seen.messages.append(parameters["entry"]["text"])

    async def value(expression):
        result = await call("Runtime.evaluate", expression=expression, returnByValue=True)
        return result["result"].get("value")

    for domain in ("Page", "Network", "Runtime", "Log"):
        await call(f"{domain}.enable")
    await call("Page.navigate", url=page if isinstance(page, str) else page.absolute().as_uri())
    end = time.monotonic() + PATIENCE
    while not await value(ready):
        assert time.monotonic() < end, f"the page never became ready; {seen}"
        await asyncio.sleep(0.1)
    seen.values = [await value(expression) for expression in expressions]
    await asyncio.sleep(0.5)
    socket.close()
    return seen


async def _address(folder: Path) -> str:
    """Where the browser's only page listens: Chromium writes the port into its folder."""
    port, end = folder / "DevToolsActivePort", time.monotonic() + PATIENCE
    while not (port.exists() and port.read_text().strip()):
        assert time.monotonic() < end, "Chromium did not start"
        await asyncio.sleep(0.1)
    address = f"http://127.0.0.1:{port.read_text().splitlines()[0]}/json"
    pages = json.loads((await AsyncHTTPClient().fetch(address)).body)
    return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")


@needs_browser
def test_page_shows_a_timeline(tmp_path):
    _, timeline = recorded("none", [(10, 11)])
    _, page = write_timeline(timeline, tmp_path / "steps.html")
    shown = visit(page, tmp_path / "profile", READY, (BARS,))
    assert [url for url in shown.requests if not url.startswith("data:")] == [page.as_uri()], "it asks for nothing else"
    assert (shown.messages, shown.values) == ([], [len(timeline.events)])


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
        if PATH:
            shown = visit(link, tmp_path / "profile", "!!(window.Bokeh && Bokeh.documents.length)", (LONGEST,))
            assert shown.messages == []
            assert shown.values[0] > 1
