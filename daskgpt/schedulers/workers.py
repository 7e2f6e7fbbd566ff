"""What a worker process does besides running tasks: prepare itself, and record when asked."""

from __future__ import annotations

from time import perf_counter, time
from typing import Any

import numpy as np
from distributed import WorkerPlugin, get_worker
from threadpoolctl import threadpool_limits

from daskgpt.graph.spans import RECORDER, Recorder, Span
from daskgpt.kernels.compilation import compile_all
from daskgpt.schedulers.allocator import keep_memory


class PrepareWorker(WorkerPlugin):
    """One BLAS thread a task (only a nanny sets that by itself), and kernels compiled before tasks wait for them."""

    name = "daskgpt"

    def setup(self, worker: Any) -> None:
        self.limits = threadpool_limits(limits=1, user_api="blas")
        compile_all(np.float32, bfloat16=False)  # what bfloat16 needs is loaded at its first product
        keep_memory()

    def teardown(self, worker: Any) -> None:
        self.limits.restore_original_limits()


class RecordSpans(WorkerPlugin):
    """Records every kernel call of a worker, with the number of its run, from its setup on."""

    name = "daskgpt-spans"

    def setup(self, worker: Any) -> None:
        RECORDER.spans, RECORDER.run_of = [], run_of_task

    def teardown(self, worker: Any) -> None:
        RECORDER.spans, RECORDER.run_of = None, Recorder().run_of


def run_of_task(number: int) -> int:
    """The number of the run that the task of this thread belongs to, which ends the first part of its key."""
    key = get_worker().get_current_task()
    return int(str(key[0]).rpartition("-")[2])


def take_spans() -> tuple[float, list[Span]]:
    """A worker's clock offset, and the spans that it has recorded so far."""
    spans, RECORDER.spans = RECORDER.spans or [], []
    return clock_offset(), spans


def clock_offset() -> float:
    """What must be added to this process's perf_counter to get the time of day, in seconds."""
    return time() - perf_counter()
