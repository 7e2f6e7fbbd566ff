"""Dask's schedulers of this process: synchronous or threaded; and the memory allocator that they need."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import dask.local
import dask.threaded
from dask.callbacks import Callback

from daskgpt.graph.compiled import Submission
from daskgpt.graph.nodes import Key, with_leaves
from daskgpt.graph.program import Spans
from daskgpt.schedulers.machine import usable_cores
from daskgpt.schedulers.protocol import ProcessSpans, Scheduler, clock_offset

# From <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8

# The same for a new process.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}


def keep_memory() -> None:
    """Let glibc serve every allocation of this process from one heap that only grows.

    By default glibc returns each piece of 32 MiB or more to the system when it is freed, and the next array of that
    size costs a page fault every 4 KiB: more than the kernel that fills it, for layers that are bound by memory. There
    must be one heap, since those of other threads hold no piece above 64 MiB. The setting cannot be undone, and comes
    too late for threads that have a heap of their own: workers that this package starts have it in their environment.
    (Without it some runs of gpt2 on two workers took 15 s a step instead of 11.7.)
    """
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        for option, value in ((M_ARENA_MAX, 1), (M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1)):
            library.mallopt(option, value)


def return_memory() -> None:
    """Return what glibc holds of freed memory to the system, which `keep_memory` lets it keep."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


class Pool(ThreadPoolExecutor):
    """Threads, each of which waits for work on a processor of its own where there are as many as processors.

    To Linux, an idle processor of a virtual machine may seem to be taken. Two threads that wake up are then put on one
    processor, until the system looks for a better place 4 to 8 ms later: that was every tenth step of the default
    model. So a thread that waits may run on its own processor alone; one that works may run wherever the process may,
    since other programs may have come meanwhile.
    """

    def __init__(self, threads: int) -> None:
        places = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
        self.left = sorted(places) if len(places) == threads else []  # processors on which no thread waits
        self.waiting = threading.local()
        super().__init__(threads, initializer=self._begin)

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> Future[Any]:
        return super().submit(self._run, function, *arguments, **options)

    def _begin(self) -> None:
        self.waiting.on = {self.left.pop()} if self.left else None

    def _run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if not self.waiting.on:
            return function(*arguments, **options)
        _stay_on(os.sched_getaffinity(os.getpid()))  # of the first thread, as `taskset` may have changed it
        try:
            return function(*arguments, **options)
        finally:
            _stay_on(self.waiting.on)


def _stay_on(processors: Collection[int]) -> None:
    """Keep this thread on some processors."""
    with suppress(OSError):  # the system may have taken them away
        os.sched_setaffinity(0, processors)


class LocalScheduler(Scheduler):
    """Dask's synchronous or threaded scheduler: results are arrays of this process.

    spans   of its kernel calls while they are recorded, else None
    """

    in_place = True  # no worker can be lost, so no task runs twice

    def __init__(self, get: Callable[..., Any], description: str, threads: int = 1) -> None:
        self.get, self.description, self.threads = get, description, threads
        self.spans: Spans | None = None

    def run(self, submission: Submission) -> list[Any]:
        number, self.runs = self.runs, self.runs + submission.runs
        if recorder := submission.recorder:
            recorder.spans, recorder.first_run = self.spans, number
        return list(self.get(with_leaves(submission.graph, submission.leaves), submission.keys))

    def fetch(self, handles: list[Any]) -> list[Any]:
        return handles

    def compute(self, bag: Any, take: Callable[[Any], object]) -> None:
        keys = set(bag.__dask_keys__())

        def ended(key: Key, result: Any, *_: Any) -> None:
            if key in keys:
                take(result)

        with Callback(posttask=ended):
            bag.compute(scheduler=self.get)

    @contextmanager
    def record(self) -> Iterator[list[ProcessSpans]]:
        recordings: list[ProcessSpans] = []
        before, spans = self.spans, Spans()
        self.spans = spans
        try:
            yield recordings
        finally:
            self.spans = before
            spans.running.clear()  # of tasks that failed
        recordings.append(ProcessSpans("", self.threads, clock_offset(), spans))


def in_task() -> bool:
    """Return whether this thread runs a task of a Dask worker."""
    if "distributed.worker" not in sys.modules:  # it takes half a second to import
        return False
    from distributed import get_worker

    try:
        get_worker()
    except ValueError:
        return False
    return True


def own_threads() -> int:
    """Return how many threads this one may use in all: one a core; one in a task of a worker, whose other threads run
    other tasks.
    """
    return 1 if in_task() else usable_cores()


def local_scheduler(name: str, threads: int) -> LocalScheduler:
    """Return a scheduler of this process. With one thread, tasks run in the thread that calls it: to hand them to
    another one would take two switches of threads a task.
    """
    share = " (in a task of a Dask worker)" if in_task() else ""
    if name == "sync" or threads == 1:
        return LocalScheduler(dask.local.get_sync, f"Dask's synchronous scheduler{share}")
    get = partial(dask.threaded.get, pool=Pool(threads))
    return LocalScheduler(get, f"Dask's threaded scheduler, {threads} threads{share}", threads)
