"""What a process has taken of its machine, and which machine that is."""

from __future__ import annotations

import os
import platform
import resource
import sys
import time
from importlib.metadata import version
from pathlib import Path

import psutil

import daskgpt

STATUS, CLEAR_REFS, CPU_INFO = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/cpuinfo")
BUSY = 0.2  # cores that other programs keep busy, from which on times are those of a share of the machine


def reset_peak_memory() -> bool:
    """Let `peak_memory` count from now on; False where the system keeps the peak since the process began."""
    try:
        CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True


def peak_memory() -> int:
    """Return the most bytes of this process that were in memory at one time, interpreter and libraries included."""
    found = _field(STATUS, "VmHWM")
    if found:
        return int(found.split()[0]) * 1024
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
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


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
    """Return the versions of Python, of daskgpt and of some packages."""
    return {"python": platform.python_version(), "daskgpt": daskgpt.__version__} | {
        name: version(name) for name in packages
    }
