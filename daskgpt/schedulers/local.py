"""Tell glibc to keep the memory it is given back.

By default it returns each piece of 32 MiB or more to the kernel when it is freed, and the next array of that size costs
a page fault every 4 KiB: more than the kernel that fills it, for layers that are bound by memory.

A process that runs already can only be told in part: a thread that has asked for memory before keeps its own heap, of
which glibc gives back whole pieces of 64 MiB, and with many such threads the limit on heaps is not looked at any more.
So workers that we start have it in their environment. (gpt2 on two workers: 15 instead of 11.7 s a step, 3 of them in
the system, and in some runs only.)
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import dask.local
import dask.threaded

from daskgpt.graph.nodes import with_leaves
from daskgpt.graph.program import counting_from, recorded_spans
from daskgpt.graph.recording import GraphRun
from daskgpt.schedulers.bounded_map import each_local
from daskgpt.schedulers.protocol import ProcessSpans, clock_offset

# From <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8


# The same for a process that begins.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}


def keep_memory() -> bool:
    """Serve every allocation of this process from one heap that only grows; whether the C library does so.

    One heap, because glibc's heaps of other threads hold no piece above 64 MiB. It cannot be undone.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all((mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)))


class LocalScheduler:
    """Dask's synchronous or threaded scheduler: results are arrays of this process."""

    in_place = True  # no worker is lost here, so no task is computed twice

    def __init__(self, get: Callable[..., Any], description: str, threads: int = 1) -> None:
        self.get, self.description, self.threads = get, description, threads
        self.runs = 0

    def run(self, submission: GraphRun) -> list[Any]:
        number, self.runs = self.runs, self.runs + submission.runs
        with counting_from(number):
            return list(self.get(with_leaves(submission.graph, submission.leaves), submission.keys))

    def fetch(self, handles: list[Any]) -> list[Any]:
        return handles

    def settle(self, handles: list[Any]) -> None:
        pass

    def settled(self, handles: list[Any]) -> bool:
        return True

    def present(self, handles: list[Any]) -> list[bool]:
        return [True] * len(handles)

    def copies(self, handles: list[Any]) -> list[list[Any]]:
        return []  # this process is all there is

    def addresses(self) -> set[str]:
        return {""}

    def admit(self, packed: bool) -> None:
        pass

    def leave_silent(self, seconds: float) -> None:
        pass

    def silent(self) -> set[str]:
        return set()

    def everywhere(self, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
        return [function(*arguments)]

    def told(self, name: str) -> dict[str, Any]:
        return {}

    def tell(self, topic: str, message: Any) -> None:
        pass

    def each(
        self, name: str, function: Callable[[Any], Any], items: Iterator[Any], take: Callable[[Any], None]
    ) -> None:
        each_local(self.get, self.threads, name, function, items, take)

    @contextmanager
    def record(self) -> Iterator[list[ProcessSpans]]:
        found: list[ProcessSpans] = []
        with recorded_spans() as spans:
            yield found
        found.append(ProcessSpans("", self.threads, clock_offset(), spans))


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_scheduler(name: str, threads: int) -> LocalScheduler:
    if name == "sync":
        return LocalScheduler(dask.local.get_sync, "Dask's synchronous scheduler")
    get = partial(dask.threaded.get, num_workers=threads)
    return LocalScheduler(get, f"Dask's threaded scheduler, {threads} threads", threads)


def at_once(functions: Sequence[Callable[[], Any]]) -> None:
    """Call functions at the same time, each in a thread of Dask's threaded scheduler; a single one in this thread."""
    if len(functions) == 1:
        functions[0]()
        return
    graph = {("at-once", number): (function,) for number, function in enumerate(functions)}
    dask.threaded.get(graph, list(graph), num_workers=len(functions))
