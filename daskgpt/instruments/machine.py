"""What a process has taken of its machine, and what the machine can do: processor, matrix products."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

import daskgpt

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CPU_INFO, STAT = Path("/proc/cpuinfo"), Path("/proc/stat")
BUSY = 0.2  # cores that other programs keep busy, from which on times are those of a share of the machine
PRODUCT_SIZE, PRODUCTS, ROUNDS = 1024, 8, 5  # 17 GFLOP a thread and round


def reset_peak_memory() -> bool:
    """Let `peak_memory` count from now on; False where the system keeps the peak since the process began."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """Most bytes of this process that were in memory at one time, the interpreter and its libraries included."""
    found = _status("VmHWM")
    if found is not None:
        return found
    import resource  # is not on every system

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def processor_time() -> dict[tuple[str, int], float]:
    """Seconds of processor time of this process, by machine and process: whoever adds several counts none twice."""
    return {(platform.node(), os.getpid()): time.process_time()}


def resident_memory() -> int:
    """Bytes of this process that are in memory now; 0 where the system does not say."""
    return _status("VmRSS") or 0


def _status(name: str) -> int | None:
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)


def processor() -> str:
    """The processor's name."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def busy_cores(seconds: float = 0.5) -> float | None:
    """How many cores other programs keep busy while this one sleeps; None where the system does not say."""
    before = busy_seconds()
    time.sleep(seconds)
    after = busy_seconds()
    return None if before is None or after is None else round((after - before) / seconds, 2)


def busy_seconds() -> float | None:
    """Processor time of all programs and the system since the machine began; None where the system does not say."""
    try:
        words = STAT.read_text().split("\n")[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _wait, irq, softirq = map(int, words[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python, of daskgpt and of some packages."""
    return {"python": platform.python_version(), "daskgpt": daskgpt.__version__} | {
        name: version(name) for name in packages
    }


def matmul_rate(threads: int) -> float:
    """Float32 operations a second that NumPy's BLAS reaches, through the kernels' way to it, on some threads at once.

    Every thread multiplies large square matrices of its own; the rate is that of all, the median of some rounds.
    """
    from threadpoolctl import threadpool_limits  # a process that asks for its memory alone needs none of these

    from daskgpt.kernels.float32.blas import matmul

    size = PRODUCT_SIZE
    random = np.random.default_rng(0)
    matrices = [random.standard_normal((2, size, size), np.float32) for _ in range(threads)]
    results = [np.empty((size, size), np.float32) for _ in range(threads)]

    def products(number: int, count: int) -> None:
        for _ in range(count):
            matmul(matrices[number][0], matrices[number][1], results[number])

    with threadpool_limits(limits=1, user_api="blas"):
        _seconds_of_all(products, threads, 1)
        seconds = median(_seconds_of_all(products, threads, PRODUCTS) for _ in range(ROUNDS))
    return threads * PRODUCTS * 2 * size**3 / seconds


def _seconds_of_all(work: Callable[[int, int], None], threads: int, count: int) -> float:
    """Seconds until the last of some threads is done."""
    workers = [threading.Thread(target=work, args=(number, count)) for number in range(threads)]
    start = perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return perf_counter() - start
