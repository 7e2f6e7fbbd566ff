"""What a worker process does besides running tasks: prepare itself, and record when asked."""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed import WorkerPlugin
from threadpoolctl import threadpool_limits

from daskgpt.graph.spans import RECORDER, Span
from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers.allocator import keep_memory
from daskgpt.schedulers.protocol import Receipt, clock_offset
from daskgpt.schedulers.usage import METRIC, Count


class PrepareWorker(WorkerPlugin):
    """One BLAS thread a task (only a nanny sets that by itself), and kernels compiled before tasks wait for them.

    From then on the worker's heartbeats say what it does: who says nothing of that is not ready for tasks.
    """

    name = "daskgpt"

    def setup(self, worker: Any) -> None:
        self.limits = threadpool_limits(limits=1, user_api="blas")
        compile_all(np.float32, bfloat16=False)  # what bfloat16 needs is loaded at its first product
        keep_memory()
        worker.metrics[METRIC] = Count(worker)

    def teardown(self, worker: Any) -> None:
        worker.metrics.pop(METRIC, None)
        self.limits.restore_original_limits()


class RecordSpans(WorkerPlugin):
    """Records every kernel call of a worker from its setup on."""

    name = "daskgpt-spans"

    def setup(self, worker: Any) -> None:
        RECORDER.spans = []

    def teardown(self, worker: Any) -> None:
        RECORDER.spans = None


def take_spans() -> tuple[float, list[Span]]:
    """A worker's clock offset, and the spans that it has recorded so far."""
    spans, RECORDER.spans = RECORDER.spans or [], []
    return clock_offset(), spans


def received(dask_worker: Any) -> list[Receipt]:
    """What a worker has got from others lately, from asking to having, with the senders' addresses.

    Dask notes the times by the scheduler's clock.
    """
    late = dask_worker.scheduler_delay
    return [
        Receipt(entry["start"] - late, entry["stop"] - late, entry["total"], entry["who"], len(entry["keys"]))
        for entry in dask_worker.transfer_incoming_log
    ]
