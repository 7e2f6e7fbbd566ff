"""Preparation of worker processes for tasks, and recording of their kernel calls."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, ClassVar

import numpy as np
from distributed import WorkerPlugin

from daskgpt.graph.program import RECORDER, Span, Spans
from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers.dask_internals import (
    add_metric,
    closes,
    event_loop,
    forget_messages,
    forget_metric,
    handle_messages,
    send_heartbeat,
)
from daskgpt.schedulers.latest_calls import ASKED, LatestCall, latest_calls
from daskgpt.schedulers.links import end_programs, forget_worker, is_not_reported, leave
from daskgpt.schedulers.local import keep_memory
from daskgpt.schedulers.membership import plugin_name
from daskgpt.schedulers.protocol import METRIC, clock_offset

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

        def latest(since: float, most: int) -> tuple[list[LatestCall], bool, float]:
            return latest_calls(worker, since, most)

        handle_messages(worker, ASKED, latest)
        add_metric(worker, METRIC, lambda worker: True)
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
        if not self.users[None] and not (closes(worker) and worker.nanny):  # its process ends with it
            logging.getLogger("distributed.worker").removeFilter(is_not_reported)

    def _forget(self, worker: Any) -> None:
        if not self.users[worker.id]:
            forget_worker(worker)


def begin_spans() -> None:
    """Record every kernel call of a worker from now on."""
    RECORDER.spans = Spans()


def take_spans() -> tuple[float, list[Span]]:
    """Stop recording; return a worker's clock offset and the spans that it has recorded."""
    spans, RECORDER.spans = RECORDER.spans or Spans(), None
    return clock_offset(), spans
