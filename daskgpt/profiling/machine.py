"""What a process has taken of its machine, and which one that is."""

from __future__ import annotations

import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path

import daskgpt

STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CPU_INFO, STAT = Path("/proc/cpuinfo"), Path("/proc/stat")
BUSY = 0.2  # cores that other programs keep busy, from which on times are those of a share of the machine


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
