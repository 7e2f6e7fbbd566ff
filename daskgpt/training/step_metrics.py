"""Metrics of steps: progress, speed and memory, kernel time by pass, and the time that is spent between steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from daskgpt.graph.calls import PHASES
from daskgpt.graph.program import Span
from daskgpt.graph.recording import StepGraph
from daskgpt.model.step_operations import step_operations
from daskgpt.schedulers.protocol import ProcessSpans
from daskgpt.schedulers.worker_metrics import Usage
from daskgpt.training.job import Job

STATM = Path("/proc/self/statm")
PARTS = ("validation", "logs", "samples", "checkpoints", "recovery points")
RECORD_EVERY = 10.0  # seconds between two recorded steps: recording a small step costs about 1 % of it


class Timers:
    """Seconds that steps have waited for other work, by the names of `PARTS`.

    Work beside steps, such as writing a checkpoint in the background, is not counted.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the duration of a `with` block to a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] += time.perf_counter() - start


class StepMetrics:
    """Compute the metrics of steps. The cost must be negligible: a step can take a few milliseconds.

    tokens          trained on so far, including the step
    seconds         of training so far, all processes of the run and validations included [s]
    tokens_per_s    of the step
    gflop_per_s     of its matrix products, without what is computed twice
    product_share   the same as a share of the float32 rate that this machine, or the cluster, reaches
    memory_bytes    of this process now; of all workers of a cluster together, where they are measured
    forward_s, backward_s, update_s, idle
                    kernel seconds of each pass in a recorded step, divided by the threads, and the share of the
                    threads' time in which no kernel ran; only under the schedulers of this process, now and then

    timers          seconds spent between steps
    """

    def __init__(self, job: Job, usage: Usage, seconds: Callable[[], float]) -> None:
        """seconds   returns how long the run has trained"""
        self.tokens = job.data.sequences * job.data.sequence_length
        self.operations = step_operations(job.config, *job.batch_shape)
        self.usage, self.scheduler, self.seconds = usage, usage.scheduler, seconds
        self.timers = Timers()
        self.recorded_at = -float("inf")
        self.processes: list[ProcessSpans] = []

    @contextmanager
    def record(self, recorded: StepGraph | None) -> Iterator[None]:
        """Record the kernel calls of the steps inside the `with` statement if a recording is due.

        recorded   the graph of a step; None where steps have none of their own, and nothing is recorded
        """
        self.processes = []
        due = time.perf_counter() - self.recorded_at >= RECORD_EVERY
        if recorded is None or not self.scheduler.in_place or not due:
            yield
            return
        self.recorded_at = time.perf_counter()
        with self.scheduler.record() as self.processes:
            yield

    def of_step(self, step: int, seconds: float) -> dict[str, Any]:
        """Return the metrics of a step that took so many seconds."""
        rate = self.operations / seconds
        found: dict[str, Any] = {
            "tokens": (step + 1) * self.tokens,
            "seconds": round(self.seconds(), 3),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "gflop_per_s": round(rate / 1e9, 3),
        }
        if self.usage.products:
            found["product_share"] = round(rate / self.usage.products, 4)
        if self.scheduler.in_place and (size := resident_bytes()):
            found["memory_bytes"] = size
        return found

    def of_passes(self, recorded: StepGraph | None, steps: int, seconds: float) -> dict[str, float]:
        """Return the metrics of the recorded steps by pass; empty where none was recorded.

        steps, seconds   how many steps were run together, and how long all of them took
        """
        if recorded is None or not self.processes:
            return {}
        threads = self.scheduler.threads
        busy = busy_by_pass(recorded, (span for process in self.processes for span in process.spans))
        shares = {f"{name}_s": round(total / threads / steps, 6) for name, total in busy.items()}
        return {**shares, "idle": round(max(0.0, 1 - sum(busy.values()) / (threads * seconds)), 4)}


def busy_by_pass(recorded: StepGraph, spans: Iterable[Span]) -> dict[str, float]:
    """Return the seconds that kernels of a recorded step ran, by pass."""
    busy = dict.fromkeys(PHASES, 0.0)
    for span in spans:
        origin = recorded.origin(span.key)
        if origin is not None:
            busy[origin.phase] += span.end - span.start
    return busy


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 where the system does not say."""
    try:
        with STATM.open("rb", buffering=0) as file:
            pages = int(file.read(100).split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGESIZE")
