"""Tests that a thousand steps leave nothing behind: no tasks, no memory."""

import gc
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters
from long_run import FLAGS, long_run, table
from steps import run_window, state_of, step_of

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


def test_cluster_run_leaks_no_tasks(tmp_path):
    with (tmp_path / "log").open("w") as log:
        # Windows of steps end at each recovery point, so that there is something to look at on a fast machine too.
        entries = long_run(tmp_path, log, steps=3000, every=50, flags=f"{FLAGS} --snapshot-every 25")
    said = table(entries)
    assert entries[-1]["step"] > 2000, said
    tasks = [entry["tasks"] for entry in entries]
    half = len(tasks) // 2
    # Medians: one look may fall on a recovery point, or on two steps. Of a task in four steps they would grow by half.
    assert median(tasks[half:]) < 1.3 * median(tasks[:half]), said
    assert said.splitlines()[0].startswith(f"{entries[-1]['step']} steps ")
    assert [line.split()[0] for line in said.splitlines()[1:]] == ["tasks", "scheduler", "w0", "w1", "client"]
