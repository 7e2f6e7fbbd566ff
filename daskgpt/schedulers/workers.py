"""Preparation of worker processes for tasks, counts of what they do, and recording of kernel calls."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from distributed import WorkerPlugin

from daskgpt.graph.program import METER, RECORDER, Span
from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers.dask_internals import (
    Received,
    add_metric,
    closes,
    digest_kernel,
    event_loop,
    executed,
    forget_messages,
    forget_metric,
    handle_messages,
    send_heartbeat,
    thread_count,
)
from daskgpt.schedulers.latest_calls import ASKED, LatestCall, latest_calls
from daskgpt.schedulers.links import end_programs, forget_worker, is_not_reported, leave, ranks_of
from daskgpt.schedulers.local import keep_memory
from daskgpt.schedulers.machine import IN_BRIEF, product_rate, resident_memory
from daskgpt.schedulers.membership import plugin_name
from daskgpt.schedulers.protocol import clock_offset
from daskgpt.schedulers.worker_metrics import METRIC

LATE_SECONDS = 1.0  # after which no message of a run that has ended comes any more


class PrepareWorker(WorkerPlugin):
    """Compiles kernels before tasks need them, and keeps memory.

    From then on the worker's heartbeats contain `METRIC`: without it a worker is not ready for tasks. All of this is
    undone when the last run that uses the worker has ended.
    """

    users: ClassVar[Counter[Any]] = Counter()  # runs by worker; None = of this process

    def __init__(self, run: str) -> None:
        self.name, self.run = plugin_name(run, "prepare"), run

    async def setup(self, worker: Any) -> None:
        if not self.users[None]:
            logging.getLogger("distributed.worker").addFilter(is_not_reported)
        self.users.update((None, worker.id))
        compile_all(np.float32, bfloat16=False)  # what bfloat16 needs is loaded at its first product
        keep_memory()
        METER.measure = meter_kernels

        def latest(since: float, most: int) -> tuple[list[LatestCall], bool, float]:
            return latest_calls(worker, since, most)

        handle_messages(worker, ASKED, latest)
        add_metric(worker, METRIC, Count(worker))
        await send_heartbeat(worker)

    async def teardown(self, worker: Any) -> None:
        if closes(worker):
            await leave(self.run, worker)
        end_programs(self.run, worker)
        self.users.subtract((None, worker.id))
        if not self.users[worker.id]:
            forget_metric(worker, METRIC)
            forget_messages(worker, ASKED)
            del self.users[worker.id]
            # Messages that are under way may still come.
            event_loop(worker).call_later(LATE_SECONDS, self._forget, worker)
        if not self.users[None]:
            logging.getLogger("distributed.worker").removeFilter(is_not_reported)
            METER.measure = None

    def _forget(self, worker: Any) -> None:
        if not self.users[worker.id]:
            forget_worker(worker)


def meter_kernels(seconds: Mapping[str, float]) -> None:
    """Add the kernel times of a merged task to Dask's fine performance metrics, which know tasks only."""
    for kind, duration in seconds.items():
        digest_kernel(kind, duration)


class Count:
    """Counts a worker's use from here on; called by the worker with each heartbeat."""

    def __init__(self, worker: Any) -> None:
        self.products = product_rate(thread_count(worker), *IN_BRIEF)
        self.began, self.received = time.time(), Received(worker)
        self.before = self._sums(worker)

    def __call__(self, worker: Any) -> dict[str, float]:
        tasks, busy, received, sent = (now - before for now, before in zip(self._sums(worker), self.before))
        work = {"tasks": tasks, "busy": busy, "received": received, "sent": sent}
        facts = {"began": self.began, "seconds": time.time() - self.began, "threads": thread_count(worker)}
        return facts | work | {"memory": resident_memory(), "products": self.products}

    def _sums(self, worker: Any) -> tuple[float, float, float, float]:
        """Return tasks, busy seconds, received and sent bytes, as counted by Dask and by ranks."""
        tasks, busy, sent = executed(worker)
        done = ranks_of(worker).done
        return tasks + done["tasks"], busy + done["busy"], self.received.count() + done["received"], sent + done["sent"]


def begin_spans() -> None:
    """Record every kernel call of a worker from now on."""
    RECORDER.spans = []


def take_spans() -> tuple[float, list[Span]]:
    """Stop recording; return a worker's clock offset and the spans that it has recorded."""
    spans, RECORDER.spans = RECORDER.spans or [], None
    return clock_offset(), spans
