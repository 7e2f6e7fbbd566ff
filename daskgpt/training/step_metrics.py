"""Metrics of steps: progress, speed and memory, kernel time by pass, and the time that is spent between steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from daskgpt.graph.calls import PHASES
from daskgpt.graph.recording import StepGraph
from daskgpt.model.parameters import step_operations
from daskgpt.schedulers.protocol import ProcessSpans
from daskgpt.schedulers.worker_metrics import Usage
from daskgpt.training.job import Job

PARTS = ("validation", "logs", "samples", "checkpoints", "recovery points")
RECORD_EVERY = 10.0  # seconds between two recorded steps: recording a small step costs about 1 % of it


class StepMetrics:
    """Computes the metrics of steps. The cost must be negligible: a step can take a few milliseconds.

    tokens          trained on so far, including the step
    seconds         of training so far, all processes of the run and validations included [s]
    tokens_per_s    of the step
    gflop_per_s     of its matrix products, without what is computed twice
    product_share   the same as a share of the float32 rate that this machine, or the cluster, reaches
    memory_bytes    of this process; the workers of a cluster report theirs
    forward_s, backward_s, update_s, idle
                    kernel seconds of each pass in a recorded step, divided by the threads, and the share of the
                    threads' time in which no kernel ran; only under the schedulers of this process, now and then

    timers          seconds that steps have waited for other work, by PARTS; work in the background does not count
    """

    def __init__(self, job: Job, usage: Usage, seconds: Callable[[], float]) -> None:
        """seconds   returns how long the run has trained"""
        self.tokens = job.data.sequences * job.data.sequence_length
        self.operations = step_operations(job.config, *job.batch_shape)
        self.usage, self.scheduler, self.seconds = usage, usage.scheduler, seconds
        self.timers = dict.fromkeys(PARTS, 0.0)
        self.process = psutil.Process()
        self.recorded_at = -float("inf")
        self.recordings: list[ProcessSpans] = []

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the duration of a `with` block to a timer."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.timers[part] += time.perf_counter() - start

    @contextmanager
    def record(self, recorded: StepGraph | None) -> Iterator[None]:
        """Record the kernel calls of the steps inside the `with` statement if a recording is due.

        recorded   the graph of a step; None if steps have none of their own, and nothing is recorded
        """
        self.recordings = []
        due = time.perf_counter() - self.recorded_at >= RECORD_EVERY
        if recorded is None or not self.scheduler.in_place or not due:
            yield
            return
        self.recorded_at = time.perf_counter()
        with self.scheduler.record() as self.recordings:
            yield

    def of_step(self, step: int, seconds: float) -> dict[str, Any]:
        """Return the metrics of a step of this duration."""
        rate = self.operations / seconds
        found: dict[str, Any] = {
            "tokens": (step + 1) * self.tokens,
            "seconds": round(self.seconds(), 3),
            "tokens_per_s": round(self.tokens / seconds, 1),
            "gflop_per_s": round(rate / 1e9, 3),
        }
        if self.usage.products:
            found["product_share"] = round(rate / self.usage.products, 4)
        if self.scheduler.in_place:
            found["memory_bytes"] = self.process.memory_info().rss
        return found

    def of_passes(self, recorded: StepGraph | None, steps: int, seconds: float) -> dict[str, float]:
        """Return the metrics of the recorded steps by pass; empty if none was recorded.

        steps, seconds   how many steps were run together, and how long all of them took
        """
        if recorded is None or not self.recordings:
            return {}
        busy, threads = dict.fromkeys(PHASES, 0.0), self.scheduler.threads
        for span in (span for process in self.recordings for span in process.spans):
            origin = recorded.origin(span.key)
            if origin is not None:
                busy[origin.phase] += span.end - span.start
        shares = {f"{name}_s": round(total / threads / steps, 6) for name, total in busy.items()}
        return {**shares, "idle": round(max(0.0, 1 - sum(busy.values()) / (threads * seconds)), 4)}
