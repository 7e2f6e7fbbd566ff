"""Measure the cost of an open dashboard page "daskgpt": `python benchmarks/dashboard_cost.py --pairs 20`.

A run on a local cluster (`--scheduler local`) makes windows of some steps. In every second window a separate process
opens the page as a browser does (its HTML, then its WebSocket, by which the server sends changes), but draws nothing,
since a browser may run elsewhere. Each pair of windows, whose order alternates, gives two figures: the time of a step
with the page over that without, and the additional processor time of this process, which has the scheduler and the
page's server, as a share of all cores. The latter equals the former if nothing else runs here, and is far less noisy.

Flags of `daskgpt.train` may follow.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from distributed import Client
from records import Figure, add_record_flag, check_record, record
from tornado.httpclient import AsyncHTTPClient, HTTPRequest
from tornado.websocket import websocket_connect

import daskgpt
from daskgpt import train
from daskgpt.profiling.measure import Spread
from daskgpt.schedulers.machine import usable_cores

WARMUP = 10  # steps before the first window
MARGIN = 3  # between two windows, in which the page is opened or closed
TOKEN = re.compile(r'"token":"([^"]+)"')


async def look(link: str) -> None:
    """Have the page open from each line of stdin that says so to the next; say how many bytes came."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.readline():
        page = (await AsyncHTTPClient().fetch(link)).body.decode()
        (token,) = TOKEN.findall(page)[:1]
        request = HTTPRequest(link.replace("http", "ws", 1) + "/ws")
        socket = await websocket_connect(request, subprotocols=["bokeh", token], max_message_size=1 << 28)
        received = 0

        async def take(socket: Any = socket) -> None:
            nonlocal received
            while (message := await socket.read_message()) is not None:
                received += len(message)

        taking = asyncio.create_task(take())
        await reader.readline()
        taking.cancel()
        socket.close()
        print(received, flush=True)


class Browser:
    """The process that looks at the page."""

    def __init__(self, link: str) -> None:
        command = [sys.executable, __file__, "--look", link]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.received = 0

    def open(self) -> None:
        self._tell("open")

    def close(self) -> None:
        self._tell("close")
        assert self.process.stdout
        self.received += int(self.process.stdout.readline())

    def _tell(self, word: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.communicate()


class Windows:
    """What `on_step` of the run makes: windows with and without the page.

    found   of each pair: whether the page was open -> seconds a step, processor seconds a step of this process
    """

    def __init__(self, browser: Browser, pairs: int, steps: int) -> None:
        self.browser, self.pairs, self.steps = browser, pairs, steps
        self.found: list[dict[bool, tuple[float, float]]] = []
        self.begin = (0.0, 0.0)

    @property
    def all_steps(self) -> int:
        return WARMUP + 2 * self.pairs * (MARGIN + self.steps)

    def on_step(self, step: int, metrics: Any) -> None:
        number, place = divmod(step - WARMUP, MARGIN + self.steps)
        pair, second = divmod(number, 2)
        opened = bool(second) == bool(pair % 2 == 0)  # without, with, with, without, ...
        if step < WARMUP:
            return
        if place == 0 and opened:
            self.browser.open()
        if place == MARGIN - 1:
            self.begin = time.perf_counter(), time.process_time()
        if place == MARGIN + self.steps - 1:
            end = time.perf_counter(), time.process_time()
            seconds, processor = ((b - a) / self.steps for a, b in zip(self.begin, end))
            if not second:
                self.found.append({})
            self.found[pair][opened] = seconds, processor
            if opened:
                self.browser.close()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pairs", type=int, default=20, help="of windows")
    parser.add_argument("--window", type=int, default=30, help="steps of a window")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--look", help=argparse.SUPPRESS)
    add_record_flag(parser)
    values, flags = parser.parse_known_args(arguments)
    if values.look:
        asyncio.run(look(values.look))
        return
    check_record(values.record)
    with daskgpt.open_scheduler("local", values.workers) as scheduler, Client(scheduler.client.cluster) as client:
        browser = Browser(client.dashboard_link.replace("/status", "/daskgpt"))
        windows = Windows(browser, values.pairs, values.window)
        run = ["--steps", str(windows.all_steps), "--validate-every", "0", "--validation-batches", "1"]
        run += ["--snapshot-every", str(values.window)]  # there workers end what they make at a time
        given = train.parsed([*run, "--save-minutes", "0", *flags])
        job, _ = train.run_of(given)
        configurations = job.config, job.data, job.optimizer, job.dataflow, replace(job.run, out="")
        daskgpt.fit(*configurations, client=client, on_step=windows.on_step, quiet=True)
        browser.end()
    assert browser.received, "nothing came from the page"
    ratios = Spread.of(own[True][0] / own[False][0] for own in windows.found)
    shares = Spread.of(_share(own) for own in windows.found)
    step = Spread.of(own[False][0] for own in windows.found)
    received = browser.received / len(windows.found) / values.window / step.median
    pairs = f"{len(windows.found)} pairs of {values.window} steps"
    print(f"{pairs} of {step.median * 1e3:.0f} ms, {values.workers} workers")
    print(f"a step with the page / without: {ratios.text('', 3)}")
    print(f"more processor time, of {usable_cores()} cores: {shares.median:.2%} ({_ends(shares)})")
    print(f"the page sends {received / 1e3:,.0f} KB/s")
    figures = {"a step": Figure.of(step, "ms", 1e3), "a step with the page / without": Figure.of(ratios, "")}
    figures |= {"more processor time": Figure.of(shares, "%", 100)}
    what = 'What the page "daskgpt" costs while it is open'
    record(values.record, "benchmarks/dashboard_cost.py", arguments, figures, what)


def _share(own: dict[bool, tuple[float, float]]) -> float:
    """By how much more of all cores' time this process took with the page: processor time a second of each window."""
    busy = {opened: processor / seconds for opened, (seconds, processor) in own.items()}
    return (busy[True] - busy[False]) / usable_cores()


def _ends(spread: Spread) -> str:
    low, _, high = spread.quartiles
    return f"{low:.2%} .. {high:.2%}"


if __name__ == "__main__":
    main(sys.argv[1:])
