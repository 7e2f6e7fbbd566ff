"""A thousand steps leave nothing behind: no tasks, no memory."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, random_batch, random_parameters

from daskgpt.config.run import OptimizerConfig
from daskgpt.schedulers.addresses import open_scheduler
from daskgpt.training.step import TrainingStep

STATUS = Path("/proc/self/statm")
PAGE = 4096


def resident() -> int:
    gc.collect()
    return int(STATUS.read_text().split()[1]) * PAGE


@pytest.mark.skipif(not STATUS.exists(), reason="resident memory is read from /proc")
def test_a_thousand_overlapping_steps_keep_tasks_and_memory_flat():
    window = 4
    random = np.random.default_rng(5)
    step = TrainingStep(SMALL, (4, 12), (2, 12), OptimizerConfig(), grain="chunk", barrier="none", in_place=True)
    state = step.initial(random_parameters(SMALL, random))
    batches = [random_batch(SMALL, random) for _ in range(window)]
    found = []
    with open_scheduler("threads", 2) as scheduler:
        for _ in range(1000 // window):
            _, state = step.window(scheduler, state, batches, 1000)
            found.append((len(step.runnable.graph), len(step.runnable.window(window)), resident()))
    assert state.step == 1000
    settled = len(found) // 5
    assert {tasks for tasks, _, _ in found} == {found[0][0]}
    assert {tasks for _, tasks, _ in found} == {found[0][1]}
    # The heap may still take a few pages; a single leaked activation a step would be 3 MB.
    assert found[-1][2] - found[settled][2] < 2_000_000
