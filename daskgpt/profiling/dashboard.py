"""A page "daskgpt" on the dashboard of Dask's scheduler while runs use it, and their kernels in its task streams.

The page shows the kernel calls of each thread in the last seconds and the numbers of the last step. A run adds the page
and removes it. With `dask scheduler --preload daskgpt.profiling.dashboard` it stays between runs.

While somebody looks at a page, the scheduler asks the workers for their latest kernel calls. A worker that does not
answer is not asked again, and of too many calls only the last ones are sent: nothing queues.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from bokeh.layouts import column
from bokeh.models import ColumnDataSource, Div, FactorRange
from dask.utils import key_split
from distributed import SchedulerPlugin
from tornado.ioloop import PeriodicCallback

from daskgpt.profiling.pages import lanes_plot
from daskgpt.profiling.timeline import color_of, is_message, seconds_at_once
from daskgpt.schedulers import dask_internals as internals
from daskgpt.schedulers.protocol import METRIC, TOPIC
from daskgpt.schedulers.workers import ASKED, RECEIVE, LatestCall

PAGE = TOPIC  # the path of the page behind the dashboard's address
CALLS = 4000  # the latest of a worker that are kept
WINDOW = 5.0  # seconds of lanes
EVERY = 1000  # milliseconds between two updates
ASKING = 500  # milliseconds between two questions to a worker, of up to 16 workers; of more, longer
ANSWER = 1200  # calls that all workers together answer: Dask's task stream shows a thousand
PATIENCE = 5.0  # seconds in which a worker answers, and a page that is open asks again
NOTHING = "no kernel yet"
WAITING = "No run has sent a step yet: <code>python -m daskgpt.train --scheduler ...</code>"


def dask_setup(scheduler: Any) -> None:
    """Add the page for good; called by Dask when a scheduler with this preload starts."""
    begin(scheduler, "")


def begin(scheduler: Any, run: str) -> bool:
    """Add the page for a run, or for good if its name is empty; return whether the scheduler has a dashboard."""
    prefix = internals.dashboard_prefix(scheduler)
    if Collected.name not in scheduler.plugins:
        scheduler.add_plugin(Collected(scheduler, prefix))
    collected = scheduler.plugins[Collected.name]
    if not any(collected.users):  # a page that stays has the numbers of an earlier run
        collected.step, collected.recoveries = {}, 0
    collected.users.add(run)
    return prefix is not None


def end(scheduler: Any, run: str) -> None:
    """Remove the page after its last run."""
    if (collected := scheduler.plugins.get(Collected.name)) is not None:
        collected.users.discard(run)
        if not collected.users:
            scheduler.remove_plugin(Collected.name)
            collected.stop()


class Part(NamedTuple):
    """A part of the time.

    calls    in it, clipped to it, each with its worker
    workers  all whose calls are known
    """

    calls: list[tuple[str, LatestCall]]
    start: float
    end: float
    workers: Sequence[str]


class Collected(SchedulerPlugin):
    """The latest kernel calls and steps, and the page that shows them.

    users     names of the runs that the page is there for
    calls     of each worker, by its address, with the numbers of lanes as threads
    lanes     of each worker: thread -> number of its lane, the thread of the latest call last
    until     until when the calls of each worker are known, from the first of them on
    step      record of the latest step, see `training.metrics.SHOWN`, with the loss of the latest validation
    recoveries  number of recoveries from a loss
    looked    when a page last showed something
    """

    name = "daskgpt-dashboard"

    def __init__(self, scheduler: Any, prefix: str | None = "") -> None:
        """prefix   of all paths of the dashboard; None without one"""
        self.scheduler, self.users = scheduler, set[str]()
        self.calls: dict[str, deque[LatestCall]] = {}
        self.lanes: dict[str, dict[int, int]] = {}
        self.until: dict[str, float] = {}
        self.step: dict[str, Any] = {}
        self.recoveries = 0
        self.looked = self.asked = -PATIENCE
        self.asking: dict[str, asyncio.Task[None]] = {}
        self.remove_page = internals.add_page(scheduler, prefix, PAGE, show, "daskgpt") if prefix is not None else None
        self.timer = PeriodicCallback(self.ask, ASKING)
        self.timer.start()

    def stop(self) -> None:
        """Remove the page."""
        self.timer.stop()
        for asking in self.asking.values():
            asking.cancel()
        if self.remove_page:
            self.remove_page()

    async def close(self) -> None:
        """Remove the page, since the scheduler ends."""
        self.stop()

    def ask(self) -> None:
        """Ask the workers for their latest calls, if a run is there and somebody looks."""
        now, workers = time.monotonic(), self.scheduler.workers.items()
        prepared = [address for address, worker in workers if METRIC in worker.metrics]
        looked = now - self.looked < PATIENCE or internals.task_stream_is_shown(self.scheduler)
        if looked and any(self.users) and now - self.asked > ASKING / 1000 * (len(prepared) / 16 - 0.5):
            self.asked = now
            for address in set(prepared) - self.asking.keys():
                self.asking[address] = asyncio.create_task(self._ask(address, ANSWER // len(prepared) + 1))

    async def _ask(self, worker: str, most: int) -> None:
        try:
            with suppress(OSError, asyncio.TimeoutError):  # it has left, or hangs
                asked = internals.ask_worker(
                    self.scheduler, worker, ASKED, since=self.until.get(worker, 0.0), most=most
                )
                self.take(worker, *await asyncio.wait_for(asked, PATIENCE))
        finally:
            del self.asking[worker]

    def take(self, worker: str, answer: Iterable[Sequence[Any]], cut: bool, now: float) -> None:
        """Keep calls of a worker, and show them in Dask's task streams.

        cut   whether there were more before them: the calls from before that are forgotten
        now   the time of the answer
        """
        new = [
            self._in_lane(worker, call) for call in sorted(map(LatestCall._make, answer), key=lambda call: call.start)
        ]
        kept = self.calls.setdefault(worker, deque(maxlen=CALLS))
        if cut:
            kept.clear()
        kept.extend(new)
        self.until[worker] = now
        for call in new:
            action = "transfer" if call.name.startswith(RECEIVE) else "compute"
            span = {"action": action, "start": call.start, "stop": call.end}
            internals.add_to_task_stream(self.scheduler, worker, call.thread, call.name, span)

    def _in_lane(self, worker: str, call: LatestCall) -> LatestCall:
        """Return a call with the number of a lane of its worker as its thread: windows have different threads.

        A new thread takes the lane whose thread has been silent for the longest time.
        """
        lanes, member = self.lanes.setdefault(worker, {}), self.scheduler.workers.get(worker)
        number = lanes.pop(call.thread, len(lanes))
        if member is not None and number >= member.nthreads:
            number = lanes.pop(next(iter(lanes)))
        lanes[call.thread] = number
        return call._replace(thread=number)

    def remove_worker(self, scheduler: Any, worker: str, **_: Any) -> None:
        self.calls.pop(worker, None)
        self.lanes.pop(worker, None)
        self.until.pop(worker, None)

    def transition(
        self,
        key: Any,
        start: str,
        finish: str,
        *_: Any,
        startstops: Sequence[Any] = (),
        worker: str = "",
        thread: int = 0,
        **__: Any,
    ) -> None:
        """Keep the tasks of a run that Dask itself schedules (`--engine tasks`)."""
        if start == "processing" and finish == "memory" and color_of(name := key_split(key), other=""):
            ran = [span for span in startstops or () if span["action"] == "compute"]
            kept = self.calls.setdefault(worker, deque(maxlen=CALLS))
            kept.extend(self._in_lane(worker, LatestCall(name, thread, span["start"], span["stop"])) for span in ran)

    def log_event(self, topic: str, msg: Any) -> None:
        if topic == TOPIC:
            same_run = msg["step"] > self.step.get("step", -1)
            self.step = (self.step if same_run else {}) | msg
            self.recoveries += "lost_steps" in msg

    def latest(self) -> Part:
        """Return the calls of the last seconds of which all workers have sent theirs."""
        newest = max(self.until.values(), default=0.0)
        there = sorted(worker for worker, end in self.until.items() if end > newest - WINDOW)
        end = min((self.until[worker] for worker in there), default=0.0)
        start = max([end - WINDOW, *(self.calls[worker][0].start for worker in there if self.calls[worker])])
        calls = [
            (worker, call._replace(start=max(call.start, start), end=min(call.end, end)))
            for worker in there
            for call in self.calls[worker]
            if call.end > start and call.start < end
        ]
        return Part(calls, start, end, there)


def idle_share(part: Part, threads: int) -> float:
    """Return the share of the threads' time in which no kernel ran: they had no task, or waited for a message."""
    busy = sum(call.end - call.start for _, call in part.calls if not is_message(call.name))
    return max(0.0, 1 - busy / (threads * (part.end - part.start)))


def overlap_share(part: Part) -> float:
    """Return the share of the time in which kernels run, in which kernels of different layers or passes do."""
    ran = [(call.start, call.end, call.name.partition("-")[0]) for _, call in part.calls if not is_message(call.name)]
    busy, overlapping = (seconds_at_once(ran, least) for least in (1, 2))
    return overlapping / busy if busy else 0.0


def show(scheduler: Any, doc: Any) -> None:
    """Fill a Bokeh document; called by Dask for each browser that opens the page."""
    page = Page(scheduler)
    page.update()
    doc.title = "daskgpt"
    doc.add_root(page.root)

    def update() -> None:
        if not page.update():
            doc.remove_periodic_callback(updating)

    updating = doc.add_periodic_callback(update, EVERY)


class Page:
    """The page in one browser."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.numbers = Div(text=WAITING, sizing_mode="stretch_width")
        nothing = {"name": NOTHING, "color": "#00000000", "lane": NOTHING, "left": -1.0, "right": 0.0, "ms": 0.0}
        self.calls = ColumnDataSource({name: [value] for name, value in nothing.items()})  # else Bokeh warns
        self.threads = FactorRange(factors=[NOTHING])
        self.lanes = lanes_plot(self.calls, self.threads, NOTHING)
        self.lanes.xaxis.axis_label, self.lanes.x_range.range_padding = "s", 0
        self.root = column(self.numbers, self.lanes, sizing_mode="stretch_width", name="daskgpt")

    def update(self) -> bool:
        """Show the latest calls and steps; return whether the page goes on."""
        collected = self.scheduler.plugins.get(Collected.name)
        if collected is None:
            self.numbers.text += "<p>The run has ended. Open this page again in the next one.</p>"
            return False
        collected.looked = time.monotonic()
        part = collected.latest()
        if part.calls:
            self._show_calls(part)
        self.numbers.text = self._described(collected, part) if collected.step else WAITING
        return True

    def _show_calls(self, part: Part) -> None:
        lanes = [self._lane(worker, call.thread) for worker, call in part.calls]
        calls = [call for _, call in part.calls]
        seconds = part.end - part.start
        self.lanes.title.text = f"Kernels of each thread, the last {seconds:.2g} s; red: waits for another worker"
        threads = {self._lane(name, n) for name in part.workers for n in range(self.scheduler.workers[name].nthreads)}
        self.threads.factors = sorted({*threads, *lanes}, reverse=True)
        self.calls.data = {
            "left": np.array([call.start - part.end for call in calls], np.float32),
            "right": np.array([call.end - part.end for call in calls], np.float32),
            "lane": lanes,
            "name": [call.name for call in calls],
            "color": [color_of(call.name) for call in calls],
            "ms": np.array([(call.end - call.start) * 1e3 for call in calls], np.float32),
        }

    def _lane(self, address: str, number: int) -> str:
        worker = self.scheduler.workers[address]
        name = f"worker {worker.name}" if str(worker.name).isdigit() else str(worker.name)
        return f"{name}, thread {number + 1}" if worker.nthreads > 1 else name

    def _described(self, collected: Collected, part: Part) -> str:
        step, threads = collected.step, sum(self.scheduler.workers[worker].nthreads for worker in part.workers)
        parts = [
            f"step <b>{step['step'] + 1:,}</b>",
            f"loss <b>{step['loss']:.3f}</b>",
            *([f"validation <b>{step['validation_loss']:.3f}</b>"] if "validation_loss" in step else []),
            f"<b>{step['tokens_per_s']:,.0f}</b> tokens/s",
            *([f"idle <b>{idle_share(part, threads):.0%}</b>"] if part.calls else []),
            *([f"overlap of layers <b>{overlap_share(part):.0%}</b>"] if part.calls else []),
            f"recoveries <b>{collected.recoveries}</b>",
        ]
        return f"<div style='font-size: 15px'>{' &nbsp; '.join(parts)}</div>"
