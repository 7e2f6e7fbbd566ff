"""What the metrics say of a step besides its losses: how far the run is, how fast, and what it takes of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from daskgpt.model.parameters import step_operations
from daskgpt.schedulers.usage import Usage
from daskgpt.training.besides import Besides
from daskgpt.training.job import Job
from daskgpt.training.job_steps import JobSteps
from daskgpt.training.local_steps import LocalSteps
from daskgpt.training.phases import PhaseTimes

STATM = Path("/proc/self/statm")


class StepMetrics:
    """Tells what a step has taken. It must cost nothing that counts: a step can be some milliseconds.

    tokens          trained on so far, the step's included
    seconds         of training so far, of all processes of the run, validations included [s]
    tokens_per_s    of the step
    gflop_per_s     of its matrix products, nothing that is computed twice counted twice
    product_share   that as a share of what this machine, or the cluster, reaches in float32 matrix products
    memory_bytes    that this process takes now; of a cluster's workers together, where they are looked at
    forward_s, backward_s, update_s, idle
                    see `phases.PhaseTimes.news`: of a step now and then

    What the run takes besides its steps is added up in `besides`.
    """

    def __init__(self, job: Job, usage: Usage, steps: JobSteps | LocalSteps, seconds: Callable[[], float]) -> None:
        """seconds   how long the run has trained until now"""
        self.tokens = job.data.sequences * job.data.sequence_length
        self.operations = step_operations(job.config, *job.batch_shape)
        self.usage, self.steps, self.seconds = usage, steps, seconds
        self.phases = PhaseTimes(usage.scheduler)
        self.besides = Besides()

    def watch(self) -> AbstractContextManager[None]:
        """Around steps that are handed over together, and that nobody else records."""
        return self.phases.watch() if isinstance(self.steps, JobSteps) else nullcontext()

    def of(self, step: int, seconds: float) -> dict[str, Any]:
        """Metrics of a step that is just done and took so many seconds."""
        rate = self.operations / seconds
        found: dict[str, Any] = {
            "tokens": (step + 1) * self.tokens,
            "seconds": round(self.seconds(), 3),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "gflop_per_s": round(rate / 1e9, 3),
        }
        if self.usage.products:
            found["product_share"] = round(rate / self.usage.products, 4)
        if self.usage.scheduler.in_place and (size := resident_bytes()):
            found["memory_bytes"] = size
        return found

    def of_all(self, count: int, seconds: float) -> dict[str, float]:
        """What was recorded of so many steps, which took so long together: metrics of the last of them."""
        return self.phases.news(self.steps.step.recorded, count, seconds) if isinstance(self.steps, JobSteps) else {}


def resident_bytes() -> int:
    """Bytes of this process that are in memory; 0 where the system does not say."""
    try:
        with STATM.open("rb", buffering=0) as file:
            pages = int(file.read(100).split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGESIZE")
