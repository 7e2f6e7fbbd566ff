"""Tests of memory: thousands of steps leave nothing behind, and a local worker has one heap."""

import ctypes
import gc
import platform
import tempfile
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from steps import run_window, state_of, step_of

import daskgpt
from daskgpt.config.run import OptimizerConfig
from daskgpt.schedulers.opening import open_scheduler

STATUS = Path("/proc/self/statm")
PAGE = 4096


def resident() -> int:
    gc.collect()
    return int(STATUS.read_text().split()[1]) * PAGE


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_overlapping_steps_leak_no_tasks_or_memory():
    window, random = 4, np.random.default_rng(5)
    step = step_of(SMALL, (4, 12), (2, 12), OptimizerConfig(), grain="chunk", barrier="none", in_place=True)
    state = state_of(step, random_parameters(SMALL, random))
    batches = [random_batch(SMALL, random) for _ in range(window)]
    sizes = []
    with open_scheduler("threads", 2) as scheduler:
        for number in range(4000 // window):
            _, state = run_window(scheduler, step, state, batches, 4000)
            if number % 50 == 49:
                sizes.append((len(step.graph), len(step.window(window)), resident()))
    assert state.step == 4000
    early = len(sizes) // 2
    assert len({size[:2] for size in sizes}) == 1
    # The heap may still take some megabytes; a single leaked activation a step would be 7 MB.
    assert sizes[-1][2] - sizes[early][2] < 5_000_000


def heaps():
    """How many heaps this process has, as its C library says."""
    library = ctypes.CDLL(None)
    library.fopen.restype = ctypes.c_void_p
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "heaps.xml"
        file = ctypes.c_void_p(library.fopen(str(path).encode(), b"w"))
        library.malloc_info(0, file)
        library.fclose(file)
        return path.read_text().count("<heap ")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has other heaps")
def test_local_worker_has_one_heap():
    with daskgpt.open_scheduler("local", 2) as scheduler:
        assert scheduler.everywhere(heaps) == [1, 1]
