"""Dask's schedulers of this process, and the limits of this machine: memory, and rates of products and copies."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import dask.local
import dask.threaded
import numpy as np
from threadpoolctl import threadpool_limits

from daskgpt.graph.nodes import Graph, Key, task, with_leaves
from daskgpt.graph.program import counting_from, recorded_spans
from daskgpt.graph.recording import GraphRun
from daskgpt.kernels.float32.blas import matmul
from daskgpt.schedulers.protocol import ProcessSpans, clock_offset

# From <malloc.h>
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8

# The same for a new process.
ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0"}


def keep_memory() -> bool:
    """Let glibc serve every allocation of this process from one heap that only grows; return whether it does.

    By default glibc returns each piece of 32 MiB or more to the system when it is freed, and the next array of that
    size costs a page fault every 4 KiB: more than the kernel that fills it, for layers that are bound by memory. There
    must be one heap, since those of other threads hold no piece above 64 MiB. The setting cannot be undone, and comes
    too late for threads that have a heap of their own: workers that this package starts have it in their environment.
    (Without it some runs of gpt2 on two workers took 15 s a step instead of 11.7.)
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return all((mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, -1)))


PLACES = 512  # items in one graph, see `Scheduler.each`


class LocalScheduler:
    """Dask's synchronous or threaded scheduler: results are arrays of this process."""

    in_place = True  # no worker can be lost, so no task runs twice

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

    def addresses(self) -> set[str]:
        return {""}

    def admit(self, packed: bool, silence: float = 0.0) -> None:
        pass

    def everywhere(self, function: Callable[..., Any], *arguments: Any, here: bool = False) -> list[Any]:
        return [function(*arguments)]

    def worker_metrics(self, name: str) -> dict[str, Any]:
        return {}

    def publish(self, topic: str, message: Any) -> None:
        pass

    def each(
        self, name: str, function: Callable[[Any], Any], items: Iterator[Any], take: Callable[[Any], None]
    ) -> None:
        """Item n is read after item n - 1 and once item n - ahead is taken; any free thread takes a result."""
        ended, nothing = False, object()

        def read(*_: Any) -> Any:
            nonlocal ended
            item = next(items, nothing)
            ended = ended or item is nothing
            return item

        def call(item: Any) -> Any:
            return item if item is nothing else function(item)

        def taken(result: Any, *_: Any) -> None:
            if result is not nothing:
                take(result)

        ahead = ahead_of(self.threads)
        while not ended:
            graph: Graph = {}
            for n in range(PLACES):
                before: list[Key] = [(f"{name}.read", n - 1)] * (n > 0) + [(f"{name}.write", n - ahead)] * (n >= ahead)
                graph[(f"{name}.read", n)] = task((f"{name}.read", n), read, before)
                graph[(name, n)] = task((name, n), call, [(f"{name}.read", n)])
                results: list[Key] = [(name, n)] + [(f"{name}.write", n - 1)] * (n > 0)
                graph[(f"{name}.write", n)] = task((f"{name}.write", n), taken, results)
            self.get(graph, [(f"{name}.write", PLACES - 1)])

    @contextmanager
    def record(self) -> Iterator[list[ProcessSpans]]:
        found: list[ProcessSpans] = []
        with recorded_spans() as spans:
            yield found
        found.append(ProcessSpans("", self.threads, clock_offset(), spans))


def ahead_of(threads: int) -> int:
    """Return how many items may be in progress before the result of the first one is taken, see `Scheduler.each`."""
    return 2 * threads + 2


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_scheduler(name: str, threads: int) -> LocalScheduler:
    if name == "sync":
        return LocalScheduler(dask.local.get_sync, "Dask's synchronous scheduler")
    get = partial(dask.threaded.get, num_workers=threads)
    return LocalScheduler(get, f"Dask's threaded scheduler, {threads} threads", threads)


def at_once(functions: Sequence[Callable[[], Any]]) -> None:
    """Call functions concurrently in threads of Dask's threaded scheduler; a single one in this thread."""
    if len(functions) == 1:
        functions[0]()
        return
    graph = {("at-once", number): (function,) for number, function in enumerate(functions)}
    dask.threaded.get(graph, list(graph), num_workers=len(functions))


CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# A group's files with its limit and with what it holds, in the two versions of control groups.
VERSION_1, VERSION_2 = ("memory.limit_in_bytes", "memory.usage_in_bytes"), ("memory.max", "memory.current")
MEMORY_INFO = Path("/proc/meminfo")


def memory_limit() -> tuple[int, str]:
    """Return the bytes that this process and its children can use, and the origin of that limit: the machine or a
    container (the least of the control groups that this process is in). 0 if unknown.
    """
    known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else 0
    least = min((limit for limit, _held in _groups()), default=physical)
    return (least, "this container") if least < physical else (physical, "this machine")


def available_memory() -> int | None:
    """Return the bytes that are available without swapping; None if unknown.

    This is the lesser of the system's own estimate and the rest of a control group: its limit less its use.
    """
    try:
        lines = MEMORY_INFO.read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    return None if free is None else max(0, min([free, *(limit - held for limit, held in _groups())]))


def _groups() -> Iterator[tuple[int, int]]:
    """Yield limit and held bytes of this process's control groups with limits and of those above, of versions 1 and 2.

    Inside a container the group's path may be that of the host, which does not exist: its own group is then the root.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, limit, usage = (CGROUPS / "memory", *VERSION_1) if controllers else (CGROUPS, *VERSION_2)
        for group in (own := Path(path.lstrip("/")), *own.parents):
            with suppress(OSError, ValueError):  # no such group, or "max"
                yield int((root / group / limit).read_text()), _held(root / group, usage)


def _held(group: Path, usage: str) -> int:
    """Return the bytes that a control group holds, less cached files that it could drop; 0 if unknown."""
    with suppress(OSError, ValueError):
        cached = 0
        with suppress(OSError):
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
        return max(0, int((group / usage).read_text()) - cached)
    return 0


SIZE, PRODUCTS, ROUNDS = 1024, 8, 5  # 17 GFLOP a thread and round
IN_BRIEF = (2, 3)  # products and rounds: some tenth of a second in all


def product_rate(threads: int, products: int = PRODUCTS, rounds: int = ROUNDS) -> float:
    """Measure the float32 operations per second of NumPy's BLAS, called as kernels call it, on some threads at once.

    Every thread multiplies large square matrices of its own; the rate is that of all, the median of some rounds.
    """
    random = np.random.default_rng(0)
    matrices = [random.standard_normal((2, SIZE, SIZE), np.float32) for _ in range(threads)]
    results = [np.empty((SIZE, SIZE), np.float32) for _ in range(threads)]

    def multiply(number: int, count: int) -> None:
        for _ in range(count):
            matmul(matrices[number][0], matrices[number][1], results[number])

    with threadpool_limits(limits=1, user_api="blas"):
        seconds_of_all(multiply, threads, 1)
        seconds = median(seconds_of_all(multiply, threads, products) for _ in range(rounds))
    return threads * products * 2 * SIZE**3 / seconds


def seconds_of_all(work: Callable[[int, int], None], threads: int, count: int) -> float:
    """Return the seconds until the last of some threads is done."""
    workers = [threading.Thread(target=work, args=(number, count)) for number in range(threads)]
    start = perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return perf_counter() - start


COPIED, COPY_ROUNDS = 1 << 27, 5  # bytes: more than the caches of most machines


def copy_rate(threads: int) -> float:
    """Measure the bytes per second that copies of arrays larger than caches read and write, on some threads.

    The result is the best of some rounds, as a base for shares.
    """
    size = COPIED // threads
    arrays = [(np.ones(size, np.uint8), np.ones(size, np.uint8)) for _ in range(threads)]

    def copies(number: int, count: int) -> None:
        for _ in range(count):
            np.copyto(*arrays[number])

    return 2 * size * threads / min(seconds_of_all(copies, threads, 1) for _ in range(COPY_ROUNDS))
