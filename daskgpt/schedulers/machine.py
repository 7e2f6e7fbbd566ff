"""This machine: its name, cores and memory that processes may use, and the measured rate of copies."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
import timeit
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import numpy as np
import psutil
from dask.system import cpu_count

import daskgpt

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Files of a control group with a limit of memory, and those with what it holds, in both versions.
MEMORY_FILES = {"memory.max": "memory.current", "memory.high": "memory.current"}
MEMORY_FILES |= {"memory.limit_in_bytes": "memory.usage_in_bytes"}
STATUS, CLEAR_REFS, CPU_INFO = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/cpuinfo")
CPUS = Path("/sys/devices/system/cpu")
BUSY = 0.2  # cores that other programs keep busy, from which on times are those of a share of the machine


def usable_cores() -> int:
    """Return the number of cores that this process may keep busy, as Dask counts them: those of its affinity or, if
    that is less, the quota of its control group, rounded up.
    """
    return int(cpu_count())


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Keep this process, and those that it starts meanwhile, on so many processors, of different cores as far as there
    are so many: two hardware threads of a core share what computes. Where the system cannot, all are used.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _different_cores_first(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _different_cores_first(processors: Iterable[int]) -> list[int]:
    """Return the first hardware thread of each core, then the others; in order where the system does not say."""
    before = Counter[tuple[str, ...]]()

    def turn(processor: int) -> int:
        core = tuple(_lines(CPUS / f"cpu{processor}" / "topology" / "thread_siblings_list"))
        before[core] += bool(core)
        return before[core]

    return sorted(sorted(processors), key=turn)


def memory_limit() -> tuple[int, str]:
    """Return the bytes that this process and its children can use, and the origin of that limit: the machine or a
    container (the least of the control groups that this process is in).
    """
    physical = psutil.virtual_memory().total
    least = min((limit for limit, _held in _memory_limits()), default=physical)
    return (least, "this container") if least < physical else (physical, "this machine")


def available_memory() -> int:
    """Return the bytes that are available without swapping.

    This is the lesser of the system's own estimate and the rest of a control group: its limit less its use.
    """
    free: int = psutil.virtual_memory().available
    return max(0, min([free, *(limit - held for limit, held in _memory_limits())]))


def _memory_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and held bytes of the control groups of this process that limit its memory."""
    for group in _memory_groups():
        for limit, usage in MEMORY_FILES.items():
            with suppress(OSError, ValueError):  # no such file, or "max"
                yield int((group / limit).read_text()), _held(group, usage)


def _memory_groups() -> Iterator[Path]:
    """Yield folders of this process's control groups for memory, of both versions, and of the groups above, which limit
    it as well; not every folder exists.
    """
    for line in _lines(OWN_CGROUPS):
        _number, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            group = root / path.removeprefix("/")
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _held(group: Path, usage: str) -> int:
    """Return the bytes that a control group holds, less cached files that it could drop; 0 if unknown."""
    stat = dict(line.split() for line in _lines(group / "memory.stat"))
    cached = int(stat.get("total_inactive_file", stat.get("inactive_file", "0")))
    with suppress(OSError, ValueError):
        return max(0, int((group / usage).read_text()) - cached)
    return 0


def reset_peak_memory() -> None:
    """Let `peak_memory` count from now on, unless the system keeps the peak since the process began."""
    with suppress(OSError):
        CLEAR_REFS.write_text("5")


def peak_memory() -> int:
    """Return the most bytes of this process that were in memory at one time, interpreter and libraries included."""
    value = _field(STATUS, "VmHWM")
    if value:
        return int(value.split()[0]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def resident_memory() -> int:
    """Return the bytes of this process that are in memory now."""
    return int(psutil.Process().memory_info().rss)


def processor_time() -> dict[tuple[str, int], float]:
    """Return seconds of processor time of this process, by machine and process, so that a sum counts none twice."""
    return {(platform.node(), os.getpid()): time.process_time()}


def processor() -> str:
    """Return the processor's name."""
    return _field(CPU_INFO, "model name") or platform.processor() or platform.machine()


def _field(path: Path, name: str) -> str:
    """Return what a line `name: value` of a file says first; "" where there is none."""
    return next((line.partition(":")[2].strip() for line in _lines(path) if line.startswith(name)), "")


def _lines(path: Path) -> list[str]:
    """Return the lines of a file of the system; none where there is no such file."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def busy_cores(seconds: float = 0.5) -> float:
    """Return how many cores other programs keep busy while this one sleeps."""
    before = busy_seconds()
    time.sleep(seconds)
    return round((busy_seconds() - before) / seconds, 2)


def busy_seconds() -> float:
    """Return the processor time of all programs and the system since the machine began."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq")))


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python, such as 3.14.7 or 3.14.7t without the interpreter's lock, of daskgpt and of some
    packages.
    """
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()
    python = platform.python_version() + ("" if locked else "t")
    return {"python": python, "daskgpt": daskgpt.__version__} | {name: version(name) for name in packages}


COPIED, COPY_ROUNDS = 1 << 27, 5  # bytes: more than the caches of most machines


def copy_rate() -> float:
    """Return the bytes per second that a thread reads and writes where it copies an array larger than caches: the best
    of some rounds.
    """
    source, target = (np.ones(COPIED, np.uint8) for _ in range(2))
    return 2 * COPIED / min(timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=COPY_ROUNDS))
